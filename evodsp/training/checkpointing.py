"""Checkpoints of a run: when they are written, how a file is always whole, and where a resumed run picks up.

Lightning counts batches of one rank. The same global batch is twice as many batches on half the data ranks, so a checkpoint's
counts are rewritten when a run resumes on another mesh (`recount_batches`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from evodsp.files import whole_file

_COUNTS = ("ready", "started", "processed", "completed")


class WholeFileIO(TorchCheckpointIO):
    """Writes beside the file and renames.

    Lightning's own writes to the folder of temporary files and moves from there. Where that is another file system, as on most
    clusters, moving is copying: a run killed then leaves half a checkpoint in the place of the one it had.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        with whole_file(path) as partial, partial.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())  # or a machine that goes down may keep the new name and not what is in it


def remove_partial(folder: Path) -> None:
    """Delete what a run that was killed had begun to write in its output folder. Nobody else may be writing there."""
    for path in [*folder.glob(".*.partial"), *(folder / "checkpoints").glob(".*.partial")]:
        path.unlink(missing_ok=True)


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


def recount_batches(checkpoint: dict[str, Any], batches_per_step: int) -> None:
    """Rewrite the training loop's place in a checkpoint, in place, for `batches_per_step` batches to an optimizer step.

    The place is that of the last whole step; nothing is kept of one that was interrupted.
    """
    former = checkpoint.get("batches_per_step", batches_per_step)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        ready = counts["ready"]
        steps, begun = divmod(ready, former)
        # A checkpoint may be written after a batch was processed, before it counts as completed: that difference stays.
        counts.update(
            {
                name: steps * batches_per_step + (0 if begun else counts[name] - ready)
                for name in _COUNTS
                if name in counts
            }
        )
