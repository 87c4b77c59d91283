"""A callback of Lightning that writes what MoE layers do."""
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.monitor import Monitor

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"moe_torch.lightning needs Lightning, and {error.name} is not installed; pip install lightning"
        ) from error


__all__ = ["MonitorCallback"]


class MonitorCallback(Callback):
    """`Trainer(callbacks=[MonitorCallback()])`: a `moe_torch.monitor.Monitor` of the LightningModule.

    Norms are of gradients before Lightning clips them. writer None: the trainer's logger. Raises InvalidInput without
    either, and Unsupported for several optimizers.
    """

    def __init__(self, writer: Any = None, **options: Any) -> None:
        self.writer, self.options = writer, options
        self.monitor: Monitor | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise Unsupported(
                f"MonitorCallback needs one optimizer, got {len(trainer.optimizers)}, each with steps of its own; call "
                "moe_torch.monitor.Monitor.step in training_step"
            )
        writer = self.writer
        if writer is None:
            # TensorBoard's also draws histograms.
            experiment = getattr(trainer.logger, "experiment", None)
            writer = experiment if hasattr(experiment, "add_scalar") else trainer.logger
        if writer is None:
            raise InvalidInput(
                "writer must be given for a Trainer without a logger, got None; pass one, or logger=True"
            )
        self.monitor = Monitor(pl_module, writer if trainer.is_global_zero else None, **self.options)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.monitor is not None
        self.monitor.step(trainer.global_step + 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            self.monitor.close()
