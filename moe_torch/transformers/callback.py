"""A callback of transformers' Trainer that writes what its MoE layers do."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from moe_torch.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """`Trainer(callbacks=[MonitorCallback(SummaryWriter("runs/moe"))])`: a `moe_torch.monitor.Monitor` of the model.

    The main process writes. Norms are of gradients as the optimizer takes them, which Trainer has clipped. With fp16
    they are scaled unless it clips.

    Args:
        writer, options: as for Monitor.
    """

    def __init__(self, writer: Any, **options: Any) -> None:
        self.writer, self.options = writer, options
        self.monitor: Monitor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        self.monitor = Monitor(model, self.writer if state.is_world_process_zero else None, **self.options)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        assert self.monitor is not None
        self.monitor.step(state.global_step + 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
