"""Watch the routers of a small language model while it trains, with and without a load-balancing loss.

    python examples/watch_router.py --tensorboard runs    # then: tensorboard --logdir runs
    python examples/watch_router.py --steps 300 --experts 16 --layers 2 --output watched.json

The monitor writes every few steps. Any writer works: TensorBoard's, wandb, or as here a function that keeps the values.
Model and text: language_model.py and train_torch.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import language_model
import torch
import train_torch
from language_model import Settings

from moe_torch.monitor import Monitor

RUNS = {"no balancing loss": 0.0, "load-balancing loss": 0.05}


class Model(train_torch.LanguageModel):
    """The language model, with another factor of its load-balancing loss."""

    def __init__(self, settings: Settings, balance: float) -> None:
        super().__init__(settings)
        language_model.BALANCE = balance


def writer_for(folder: pathlib.Path | None, name: str) -> Any:
    """TensorBoard's writer of a run, or None without a folder."""
    if folder is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder / name.replace(" ", "-"))


def train(settings: Settings, name: str, every: int, folder: pathlib.Path | None) -> list[dict[str, Any]]:
    """Train, and return what the monitor wrote: one dict for each time, with the step."""
    device, kept, board = train_torch.device(), [], writer_for(folder, name)
    model = Model(settings, RUNS[name]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), settings.learning_rate, language_model.DECAYS)
    monitor = Monitor(model, board, every=every)
    for inputs, targets in language_model.batches(settings):
        loss = model(train_torch.on_device(inputs), train_torch.on_device(targets))
        loss.backward()
        optimizer.step()
        values = monitor.step()
        optimizer.zero_grad()
        if values is not None:
            kept.append({"step": monitor.steps, "loss": loss.item()} | values)
            shown = {
                name: values[f"moe/{name}"] for name in ("load_entropy", "load_imbalance", "dead_experts", "z_loss")
            }
            print(f"step {monitor.steps:4}: " + ", ".join(f"{name} {value:.2f}" for name, value in shown.items()))
    return kept


def main() -> None:
    """Train both; the load-balancing loss must even the load out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    language_model.add_options(parser)
    parser.add_argument("--every", type=int, default=3, help="steps between two writings; default: %(default)s")
    parser.add_argument("--tensorboard", type=pathlib.Path, metavar="FOLDER", help="write event files for TensorBoard")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE", help="write all values as JSON")
    options = parser.parse_args()
    settings, runs = language_model.settings_from(options), {}
    for name in RUNS:
        print(name)
        runs[name] = train(settings, name, options.every, options.tensorboard)
    last = [runs[name][-1]["moe/load_imbalance"] for name in RUNS]
    assert last[1] < last[0], f"the load-balancing loss evens the load out, got {last}"
    if options.output is not None:
        record = {"device": str(train_torch.device()), "versions": {"torch": torch.__version__}, "runs": runs}
        options.output.write_text(json.dumps(record, default=lambda array: array.round(4).tolist()) + "\n")


if __name__ == "__main__":
    main()
