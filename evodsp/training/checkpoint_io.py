"""Checkpoint files that are whole or not there, whenever the run is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from evodsp.weights.files import whole_file


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
