"""Every run validates the weights that it ends with, wherever its last step lies between two validations."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn


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
