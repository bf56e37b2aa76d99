"""Checkpoints of a run: when they are written, and how they reach the disk.

A file is complete or absent, its earlier versions are kept, and it is written beside the training steps. Lightning's
`AsyncCheckpointIO` writes in a thread too, but copies the state on the device, where it may not fit a second time, holds as
many copies as there are saves to come, deletes a file before the one that replaces it exists, and tells of an error only at
the save after the next.

The exponential moving average of the weights (supplement 1.11.7) is used for validation and saved in checkpoints.
"""

from __future__ import annotations

import copy
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.parallel.dtensor import local, shard_like
from evodsp.training.bad_samples import NotFiniteWeightsError, TooManyBadSamplesError
from evodsp.training.loader import QuarantineFull
from evodsp.training.run_end import RunStopped
from evodsp.training.run_folder import numbered
from evodsp.training.trainer import tell_first


class LastCheckpoint(ModelCheckpoint):
    """Writes one file, `last.ckpt`: at the intervals below, after each validation, at the end of training, and when it stops
    on request, or because too many chains or samples were bad.

    Lightning's class takes one kind of interval only, and asks rank 0 for the time in each batch.
    """

    state_key = "LastCheckpoint"  # intervals may change from one start to the next

    def __init__(self, path: Path, steps: Sequence[int] = (), seconds: float | None = None) -> None:
        """`steps`: numbers of steps; the file is written when the steps done are a multiple of one of them. `seconds`: the
        longest time between two writes; when it has passed on any rank, all ranks write."""
        super().__init__(path.parent, path.stem, every_n_train_steps=0, enable_version_counter=False)
        self.path, self._steps, self._seconds = path, steps, seconds
        self._saved_at = time.monotonic()
        self._agreed = False

    @property
    def saved_step(self) -> int | None:
        """Step of the last write; None before the first."""
        return self._last_global_step_saved or None

    @property
    def asked(self) -> bool:
        """Whether this rank finds that the time is over. See `evodsp.training.run_end.Request`."""
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
                tell_first(f"evodsp: warning: {error}")

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

    state_key = "BestCheckpoint"  # a user may have another callback that monitors the same

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


class BesideTheSteps(CheckpointIO):
    """Copies the state to the host's memory, and lets a thread write the copy through `io`. One write at a time.

    An error of the thread is raised where the training thread next asks: by `check`, the next save, or at the run's end.
    """

    def __init__(self, io: CheckpointIO) -> None:
        self.io = io
        self._thread = ThreadPoolExecutor(1, "evodsp checkpoint")
        self._write: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Returns when the copy is made. Waits for the former write first, so that there is one copy at most."""
        self.wait()
        self._write = self._thread.submit(self.io.save_checkpoint, on_host(checkpoint), path, storage_options)

    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        self.wait()
        return self.io.load_checkpoint(*args, **options)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove the file after the write that may replace it."""
        self.wait()
        self.io.remove_checkpoint(path)

    def check(self) -> None:
        """Raise the error of the last write, if it has failed. Does not wait."""
        if self._write is not None and self._write.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises the error of the last write, once."""
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def teardown(self) -> None:
        """Lightning calls this at the end of a run, also of one that fails."""
        self.wait()
        self.io.teardown()


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of `state` in the host's memory, which no later step changes. Copying needs no memory of the device."""
    copies: dict[int, Any] = {}  # what `deepcopy` is to take for an object

    def add(tensor: Tensor) -> None:
        copies[id(tensor)] = tensor.detach().to("cpu", copy=True)

    apply_to_collection(state, Tensor, add)
    return copy.deepcopy(state, copies)


def use_checkpoint_io(trainer: Trainer, former: Callable[[Path], Sequence[Path]], beside: bool) -> None:
    """Let `trainer` write whole files, `beside` its steps or within them.

    A CheckpointIO that the user has given is kept. One that only wraps another, as Lightning's AsyncCheckpointIO, gets ours.
    """
    # Private names: Lightning's property `checkpoint_io` puts its own where the user gave none, and so hides which it is.
    given, whole = trainer.strategy._checkpoint_io, WholeFileIO(former)
    if given is None:
        trainer.strategy.checkpoint_io = BesideTheSteps(whole) if beside else whole
    elif isinstance(given, _WrappingCheckpointIO) and not given._base_checkpoint_io_configured:
        given.checkpoint_io = whole


def decay_at(update: int, decay: float) -> float:
    """Decay of update number `update` (from 1). It starts low, so that the average is close to a plain mean of the weights.

    With AF2's constant decay the random initial weights would dominate the average for the first thousand steps, which may be
    a whole run. From about 9 / (1 - decay) updates on, this is AF2's decay. Weights that a run took from a file are not random:
    their average has AF2's decay from the first update on.
    """
    return min(decay, (1 + update) / (10 + update))


class ExponentialMovingAverage(Callback):
    """Keeps the average of every parameter, swaps it in for validation, and writes it to checkpoints as `ema_state_dict`.

    The average of a parameter is on the same device and sharded in the same way; a frozen one has none of its own. AF2
    and OpenFold have one decay for all updates and parameters; here it rises first (`decay_at`), except for parameters that
    `begin_trained`.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"model.ema_decay is {decay}, but must be at least 0 and below 1 (or null for no average)")
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._trained: frozenset[str] = frozenset()
        self._rising: list[tuple[Tensor, Tensor]] = []
        """Each average and its parameter, where the decay rises."""
        self._steady: list[tuple[Tensor, Tensor]] = []
        """Each other average and its parameter."""
        self._loaded: Mapping[str, Tensor] | None = None
        self._updates = 0
        self._in_model = False

    def begin_trained(self, names: Iterable[str]) -> None:
        """Tell which parameters begin with trained weights: their average has the full decay from the first update on."""
        self._trained = frozenset(names)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("ema_state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates, self._trained = state_dict["updates"], frozenset(state_dict.get("trained", ()))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "trained": sorted(self._trained)}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in `setup`: the weights are restored and on their device only now.
        source = self._loaded or {}
        with torch.no_grad():
            weights = {name: weight for name, weight in pl_module.named_parameters() if weight.requires_grad}
            self._average = {
                name: parameter.detach().clone().copy_(shard_like(source[name], parameter))
                if name in source
                else parameter.detach().clone()
                for name, parameter in weights.items()
            }
            # Listed once: walking through the modules takes longer than the update of a small model.
            pairs = {name: (self._average[name], weight) for name, weight in weights.items()}
            self._steady = [pair for name, pair in pairs.items() if name in self._trained]
            self._rising = [pair for name, pair in pairs.items() if name not in self._trained]
        self._loaded = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > self._updates:  # only after an optimizer step, not after each accumulated batch
            self._updates = trainer.global_step
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """average <- decay * average + (1 - decay) * weights."""
        for pairs, decay in ((self._rising, decay_at(self._updates, self.decay)), (self._steady, self.decay)):
            if pairs:
                averages, weights = ([local(pair[part]) for pair in pairs] for part in (0, 1))
                torch._foreach_lerp_(averages, weights, 1 - decay)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        other = {**weights, **{name: average.detach() for name, average in self._average.items()}}
        raw, averaged = (other, weights) if self._in_model else (weights, other)
        checkpoint["state_dict"], checkpoint["ema_state_dict"] = raw, averaged

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the weights with their average, in place."""
        for average, parameter in (*self._rising, *self._steady):
            held = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(held)
        self._in_model = not self._in_model
