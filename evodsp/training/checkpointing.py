"""Checkpoints of a run: when they are written, how a kill never leaves half a file, and where a resumed run continues.

Lightning counts the batches of one rank. On half the data ranks the same global batch takes twice as many batches, so the
counts in a checkpoint are rewritten when a run resumes on another mesh (`recount_batches`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from evodsp.data.quarantine import QuarantineFull
from evodsp.files import whole_file
from evodsp.training.bad_samples import NotFiniteWeightsError, TooManyBadSamplesError
from evodsp.training.progress import report
from evodsp.training.stopping import RunStopped

_COUNTS = ("ready", "started", "processed", "completed")


class WholeFileIO(TorchCheckpointIO):
    """Writes a temporary file in the same folder and renames it.

    Lightning's version writes to the system's temporary folder and moves the file. If that is another file system, as on most
    clusters, moving means copying, and a run killed meanwhile has lost its only checkpoint.
    """

    def __init__(self, former: Callable[[Path], Sequence[Path]] = lambda path: ()) -> None:
        """`former`: the names under which earlier versions of a file are kept, newest first."""
        self._former = former

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        with whole_file(path) as partial:
            try:
                with partial.open("wb") as file:
                    torch.save(checkpoint, file)
                    file.flush()
                    os.fsync(file.fileno())  # or the new name may survive a power failure without its content
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch's writer cannot end a file after a full disk
                    raise error.__context__ from None
                raise
            keep_former(Path(path), self._former(Path(path)))


def keep_former(path: Path, names: Sequence[Path]) -> None:
    """Shift the file `path` and its earlier versions `names` (newest first) by one place; `path` itself stays as well."""
    for newer, older in reversed(list(zip([path, *names], names, strict=False))):
        if newer.is_file() and newer != path:
            newer.replace(older)
        elif newer.is_file():
            older.unlink(missing_ok=True)
            try:
                os.link(newer, older)
            except OSError:  # a file system without hard links
                shutil.copyfile(newer, older)


class LastCheckpoint(Checkpoint):
    """Writes one file, `last.ckpt`: every `every` steps, after each validation, at the end of training, and when it stops
    on request, or because too many chains or samples were bad."""

    def __init__(self, path: Path, every: int) -> None:
        self.path, self.every = path, every
        self.saved_step: int | None = None
        """Step of the last write; None before the first."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stepped = (
            batch_idx + 1
        ) % trainer.accumulate_grad_batches == 0  # within a step, accumulated gradients would be lost
        if stepped and trainer.global_step % self.every == 0:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """A run that was asked to stop, or has too many bad chains or samples: all ranks stop between two steps, with the
        weights of the last one."""
        if isinstance(exception, RunStopped | QuarantineFull | TooManyBadSamplesError) and trainer.global_step:
            try:
                self._save(trainer)
            except NotFiniteWeightsError as error:  # `exception` is the one to report
                report(f"evodsp: warning: {error}")

    def _save(self, trainer: Trainer) -> None:
        if self.saved_step != trainer.global_step:
            trainer.save_checkpoint(self.path)
            self.saved_step = trainer.global_step


def best_checkpoint(folder: Path) -> ModelCheckpoint:
    """Keeps `best.ckpt`, the checkpoint with the highest validation lDDT-CA."""
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
    """Records that the user pressed Ctrl-C, because Lightning then exits with its own code."""

    def __init__(self) -> None:
        self.happened = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.happened = self.happened or isinstance(exception, KeyboardInterrupt)


def recount_batches(checkpoint: dict[str, Any], batches_per_step: int) -> None:
    """Rewrite the training loop's position in a checkpoint, in place, for `batches_per_step` batches per optimizer step.

    The position is rounded down to a whole step; the gradients of an interrupted step are not saved.
    """
    former = checkpoint.get("batches_per_step", batches_per_step)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        ready = counts["ready"]
        steps, within_step = divmod(ready, former)
        for name in _COUNTS:
            if name in counts:
                # A checkpoint may be written after a batch was processed and before it counts as completed: keep that lag.
                lag = 0 if within_step else counts[name] - ready
                counts[name] = steps * batches_per_step + lag
