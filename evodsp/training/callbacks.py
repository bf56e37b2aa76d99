"""Checkpoints and interruptions of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint


class LastCheckpoint(Checkpoint):
    """Keeps one file, `last.ckpt`, fresh: every `every` steps, after every validation and at the end.

    It is written under a temporary name and renamed (`WholeFileIO`), so there is always a whole one.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.path, self.every = folder / "last.ckpt", every
        self.saved_step: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0  # gradients under way would be lost
        if stepped and trainer.global_step % self.every == 0:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self.saved_step != trainer.global_step:
            trainer.save_checkpoint(self.path)
            self.saved_step = trainer.global_step


def best_checkpoint(folder: Path) -> ModelCheckpoint:
    """Keeps `best.ckpt`, that of the highest lDDT-CA in validation."""
    return ModelCheckpoint(
        folder,
        "best",
        monitor="val/lddt_ca",
        mode="max",
        save_top_k=1,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )


class Interruption(Callback):
    """Remembers that the user pressed Ctrl-C, because Lightning ends the process with its own exit code."""

    def __init__(self) -> None:
        self.happened = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.happened = self.happened or isinstance(exception, KeyboardInterrupt)
