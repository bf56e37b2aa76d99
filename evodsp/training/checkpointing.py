"""Checkpoints of a run: when they are written (how: `checkpoint_files.py`), and where a resumed run continues.

Lightning counts the batches of one rank. On half the data ranks the same global batch takes twice as many batches, so the
counts in a checkpoint are rewritten when a run resumes on another mesh (`recount_batches`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from evodsp.data.quarantine import QuarantineFull
from evodsp.training.bad_samples import NotFiniteWeightsError, TooManyBadSamplesError
from evodsp.training.checkpoint_files import BesideTheSteps
from evodsp.training.progress import report
from evodsp.training.run_folder import numbered
from evodsp.training.stopping import RunStopped

_COUNTS = ("ready", "started", "processed", "completed")
_FORMER_BEST = (
    "ModelCheckpoint{'monitor': 'val/lddt_ca', 'mode': 'max', 'every_n_train_steps': 0, 'every_n_epochs': 1, "
    "'train_time_interval': None}"
)
"""The name of `BestCheckpoint`'s scores in files up to version 0.2.0, when it was Lightning's class."""


class LastCheckpoint(ModelCheckpoint):
    """Writes one file, `last.ckpt`: at the intervals below, after each validation, at the end of training, and when it stops
    on request, or because too many chains or samples were bad.

    Lightning's class takes one kind of interval only, and asks rank 0 for the time in each batch.
    """

    def __init__(self, path: Path, steps: Sequence[int] = (), seconds: float | None = None) -> None:
        """`steps`: numbers of steps; the file is written when the steps done are a multiple of one of them. `seconds`: the
        longest time between two writes; all ranks write when one finds that it is over."""
        super().__init__(path.parent, path.stem, every_n_train_steps=0, enable_version_counter=False)
        self.path, self._steps, self._seconds = path, steps, seconds
        self._saved_at = time.monotonic()
        self._agreed = False

    @property
    def state_key(self) -> str:
        return "LastCheckpoint"  # intervals may change from one start to the next

    @property
    def saved_step(self) -> int | None:
        """Step of the last write; None before the first."""
        return self._last_global_step_saved or None

    @property
    def asked(self) -> bool:
        """Whether this rank finds that the time is over. See `evodsp.training.stopping.Request`."""
        return self._seconds is not None and time.monotonic() - self._saved_at >= self._seconds

    def agree(self) -> None:
        self._agreed = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        io = trainer.strategy.checkpoint_io
        if isinstance(io, BesideTheSteps):
            io.check()
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return  # within a step, accumulated gradients would be lost
        if _validates_next(trainer, batch_idx):
            return  # the file of this step is written after that: a run resumed before it would not validate again
        if self._agreed or any(trainer.global_step % steps == 0 for steps in self._steps):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
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
        if not self._should_skip_saving_checkpoint(trainer):  # this step's is written, or the run only scores
            self.last_model_path = self.best_model_path = self.format_checkpoint_name({})
            self._save_checkpoint(trainer, self.last_model_path)
            self._saved_at, self._agreed = time.monotonic(), False


def _validates_next(trainer: Trainer, batch_idx: int) -> bool:
    """Whether a validation follows this batch."""
    if not (trainer.enable_validation and any(trainer.num_val_batches)):
        return False
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if every is not None and (trainer.current_epoch + 1) % every:
        return False
    done = (trainer.fit_loop.total_batch_idx if every is None else batch_idx) + 1
    return interval is not None and done % interval == 0  # None: it depends on the time


class BestCheckpoint(ModelCheckpoint):
    """Keeps the checkpoints with the highest validation lDDT-CA: `best.ckpt`, then `best-1.ckpt`, …

    Lightning's class numbers files by age. Here the name is the place, as with `last.ckpt`: the file of a place and those
    after it are shifted when a new one is written (`RunFolder.former`).
    """

    def __init__(self, folder: Path, keep: int = 1) -> None:
        super().__init__(
            folder,
            "best",
            monitor="val/lddt_ca",
            mode="max",
            save_top_k=keep,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    @property
    def state_key(self) -> str:
        return "BestCheckpoint"  # a user may have another callback that monitors the same

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        first = Path(self.format_checkpoint_name({}))
        names = [str(path) for path in (first, *numbered(first, self.save_top_k))]
        current = current.nan_to_num(nan=-torch.inf)
        scores = [self.best_k_models[name] for name in names if name in self.best_k_models]
        place = sum(bool(score >= current) for score in scores)
        if place >= self.save_top_k:  # a run that resumes with a smaller number
            return
        scores = [*scores[:place], current, *scores[place:]][: self.save_top_k]
        self.best_k_models = dict(zip(names, scores, strict=False))
        self.current_score, self.best_model_score, self.kth_value = current, scores[0], scores[-1]
        self.best_model_path, self.kth_best_model_path = names[0], names[len(scores) - 1]
        self._save_checkpoint(trainer, names[place])


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


def rename_callbacks(checkpoint: dict[str, Any]) -> None:
    """Give the scores of the best checkpoints the name that they have now, in place, so that a resumed run still knows them."""
    states = checkpoint.get("callbacks", {})
    if _FORMER_BEST in states and "BestCheckpoint" not in states:
        states["BestCheckpoint"] = states.pop(_FORMER_BEST)
