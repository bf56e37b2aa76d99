"""The end of a training run: requests to stop it, Ctrl-C, and the validation of the weights that it ends with.

A request to stop is SIGTERM, SIGUSR1, Ctrl-C or a time limit. It reaches one rank, or several at different places. Each rank's
answer travels with the losses of the step, in a collective that exists anyway, so all ranks save and stop after the same step,
or after the same batch of a validation. A run that was stopped in a validation repeats it when it resumes.

Every run validates the weights that it ends with, wherever its last step lies between two validations.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.trainer.states import TrainerFn

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class RunStopped(Exception):
    """Ends a run between two steps, or between two batches of a validation, on all ranks."""


@runtime_checkable
class Request(Protocol):
    """A request that one rank may make of all ranks: the ranks' answers travel with the losses of each step."""

    @property
    def asked(self) -> bool:
        """Whether this rank asks."""

    def agree(self) -> None:
        """Called on all ranks alike, in a step in which one of them has asked."""


class StopRequest(Callback):
    """Notes requests to stop, and raises RunStopped after the step, or the batch of a validation, in which the ranks agreed.

    `deadline`: seconds since the epoch at which this rank asks by itself.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self.reason: str | None = None
        """Why this rank wants to stop, or has stopped."""
        self.interrupted = False
        """Whether it was Ctrl-C."""
        self._agreed = self._in_validation = self._training = False
        self._former: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        if self.reason is None and time.time() >= self.deadline:
            self.reason = "the time limit"
        return self.reason is not None

    def agree(self) -> None:
        self.reason = self.reason or "another rank's request"
        self._agreed = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Lightning installs handlers after this, and takes them back at its end: then these hold again, until the process has
        ended with the code that says that the run has saved. A signal that came later would else end it with another one."""
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning's handlers, installed by now, communicate; that hangs if ranks get a signal at different places."""
        if threading.current_thread() is threading.main_thread():
            self._training = True
            self._former.setdefault(signal.SIGINT, signal.getsignal(signal.SIGINT))
            for number in SIGNALS:
                signal.signal(number, self._note)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        finished = 0 <= trainer.max_steps <= trainer.global_step
        if self._agreed and not finished:
            raise RunStopped(self.reason)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the batch that was begun before a resume: later checkpoints would still ask for it, though it was repeated."""
        trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.reset_on_restart()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A validation may take longer than the batch system waits. The ranks agree after each of its batches."""
        if trainer.sanity_checking:
            return
        asked = torch.tensor(float(self.asked), device=pl_module.device)
        if trainer.strategy.reduce(asked, reduce_op="mean") > 0:
            self.agree()
            self._in_validation = True
            raise RunStopped(self.reason)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._in_validation:
            repeat_validation(checkpoint)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, RunStopped):  # then a checkpoint is about to be written: leave it in peace
            self._restore()

    def _note(self, number: int, frame: Any) -> None:
        """A second Ctrl-C ends the process at once. SIGTERM may come several times: from a batch system, and from torchrun."""
        if not self._training:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self._agreed:  # else the run is about to end for the reason that it names
            self.reason, self.interrupted = signal.Signals(number).name, number == signal.SIGINT
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)

    def _restore(self) -> None:
        self._training = False
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former = {}


def repeat_validation(checkpoint: dict[str, Any]) -> None:
    """Let a run that resumes from this checkpoint validate before its next step. In place.

    Lightning goes back to a validation whose progress says that a batch was begun and not ended. It would go on with the
    batches that are left, but the scores of the others are lost, so the progress says that it was the first batch.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts.update(ready=1, started=1, processed=0, completed=0)
    progress["is_last_batch"] = False


def deadline(
    max_time_s: float | None, begun: float, margin_s: float | None, environment: Mapping[str, str] = os.environ
) -> float:
    """Time at which a run has to stop, in seconds since the epoch: `max_time_s` after it has `begun`, or `margin_s` before its
    SLURM job ends (SLURM_JOB_END_TIME), whichever is earlier; infinite without both.
    """
    limits = [math.inf if max_time_s is None else begun + max_time_s]
    end = environment.get("SLURM_JOB_END_TIME", "")
    if margin_s is not None and end.isdecimal():
        limits.append(int(end) - margin_s)
    return min(limits)


class Interruption(Callback):
    """Records that the user pressed Ctrl-C, because Lightning then exits with its own code."""

    def __init__(self) -> None:
        self.happened = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.happened = self.happened or isinstance(exception, KeyboardInterrupt)


class EarlyStop(EarlyStopping):
    """Ends a run whose validations do not get better (`early_stop`)."""

    def __init__(self, patience: int) -> None:
        super().__init__(
            "val/lddt_ca", patience=patience, mode="max", check_finite=False, check_on_train_epoch_end=False
        )

    @property
    def state_key(self) -> str:
        return "EarlyStop"  # a user may have another one with the same settings

    @property
    def has_stopped(self) -> bool:
        """Whether this has ended the run."""
        return self.wait_count >= self.patience

    @property
    def line(self) -> str:
        """For the log of a run that this has ended."""
        return (
            f"ended early: val/lddt_ca has not risen above {float(self.best_score):.4f} in {self.patience} validations "
            "(early_stop)"
        )


class LastValidation(Callback):
    """Has Lightning validate after the last step as after any other validation's step: with the moving average, with a row of
    the curve, before the checkpoint of the step. Where a validation follows anyway there is no second one.

    Lightning validates at intervals only. And a run that was stopped in its last validation would not repeat it when it
    resumes, because Lightning finds no step left to train.
    """

    def __init__(self) -> None:
        self.max_steps: int | None = None
        """The limit of a run that has nothing left but its last validation."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let a run begin its loop whose steps are done and whose validation is not. Lightning would leave it at once."""
        validation = checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["total"]
        is_unfinished = validation["started"] > validation["completed"]
        if (
            trainer.state.fn == TrainerFn.FITTING
            and trainer.enable_validation
            and is_unfinished
            and 0 <= trainer.max_steps <= checkpoint["global_step"]
        ):
            self.max_steps = trainer.max_steps
            trainer.fit_loop.epoch_loop.max_steps = checkpoint["global_step"] + 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.max_steps is not None:
            _validate_after_this_batch(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps = self.max_steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Lightning's own count, by which it logs validations, lacks a step in a run that resumes from a checkpoint of a
        validation outside its intervals."""
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Comes before the checkpoints' turn, which ask whether a validation follows."""
        is_last_step = 0 <= trainer.max_steps <= trainer.global_step
        epochs = trainer.max_epochs
        is_last_epoch = epochs is not None and 0 <= epochs <= trainer.current_epoch + 1
        if is_last_step or (is_last_epoch and trainer.is_last_batch):
            _validate_after_this_batch(trainer)


def last_step(trainer: Trainer) -> int | None:
    """The number of steps with which a run ends; None without a limit. Where only its last validation is left, Lightning is
    told of one more, so that it begins at all."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LastValidation) and callback.max_steps is not None:
            return callback.max_steps
    steps = trainer.estimated_stepping_batches
    return None if steps == float("inf") else int(steps)


def _validate_after_this_batch(trainer: Trainer) -> None:
    """The intervals do not count any more: no batch comes after this one."""
    trainer.check_val_every_n_epoch, trainer.val_check_batch = None, 1
    trainer._val_check_time_interval = None  # type: ignore[attr-defined]
