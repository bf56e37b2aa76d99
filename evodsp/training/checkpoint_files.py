"""How checkpoints reach the disk: whole files only, their earlier versions kept, and written beside the training steps.

Lightning's `AsyncCheckpointIO` writes in a thread too, but copies the state on the device, where it may not fit a second time,
holds as many copies as there are saves to come, deletes a file before the one that replaces it exists, and tells of an error
only at the save after the next.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from evodsp.files import whole_file


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
        """After the write that may replace it."""
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
    """A copy of `state` in the host's memory, which no later step changes. Needs no memory of the device."""
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
