"""Which file holds a model's parameters, and of what kind it is: NumPy's or PyTorch's, by its content.

A checkpoint of DeepSpeed is a folder:

    12-3000.ckpt/latest                                      the name of the folder below, "checkpoint" in Lightning's runs
    12-3000.ckpt/checkpoint/mp_rank_00_model_states.pt       `module`: weights; `ema`: OpenFold's moving average
    12-3000.ckpt/checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt    Adam's moments and weights in 32 bits; not read

Where DeepSpeed trains in 16 bits, `module` holds 16-bit weights; OpenFold's moving average stays in 32 bits.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

from evodsp.errors import UserError
from evodsp.weights.pretrained_folder import WEIGHTS, is_pretrained

Container = Literal["npz", "torch"]
_STATES = "mp_rank_*_model_states.pt"
_FIX = "join it into one file with the zero_to_fp32.py that DeepSpeed wrote beside it, and give that file"


def container(path: Path) -> Container | None:
    """The kind of file by its content, not its name: NumPy's .npz, PyTorch's, or None if neither (or cut short)."""
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as file:
            members = file.namelist()
    # A damaged directory of the archive raises ValueError or NotImplementedError.
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None
    if any(name.endswith(".npy") for name in members):
        return "npz"
    return "torch" if any(name.endswith("data.pkl") for name in members) else None


def archive_damage(path: Path) -> str | None:
    """What is wrong with a file of PyTorch, by the checksums that it contains; None if nothing is."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (entry := archive.testzip()) is not None:
                return f"{entry} has another checksum"
            # The archive's directory has no checksum. PyTorch would read nothing from an entry marked as a folder.
            if marked := [entry.filename for entry in archive.infolist() if entry.external_attr]:
                return f"{marked[0]} is no file"
    except Exception as error:  # a damaged directory can raise any exception
        return first_sentence(error)
    return None


def first_sentence(error: Exception) -> str:
    """What an error about a damaged file says, without PyTorch's advice."""
    return str(error).partition(". ")[0] or "cut short"


def parameter_file(path: str | Path) -> Path:
    """The file that holds a checkpoint's arrays: `path`; of evodsp's or DeepSpeed's folder, the file of the arrays in it.

    The folder may be the whole checkpoint or the inner folder with the model states. Raises UserError if `path` is a folder
    of another kind, or its arrays are spread over several files.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    if is_pretrained(path):
        return path / WEIGHTS
    folder = _inner_folder(path)
    files = sorted(folder.glob(_STATES))
    if len(files) == 1:
        return files[0]
    if files:
        raise UserError(f"{folder}: {len(files)} files {_STATES} of a model split over GPUs; {_FIX}")
    if any(folder.glob(f"zero_pp_rank_*_{_STATES}")):
        raise UserError(f"{folder}: DeepSpeed's ZeRO stage 3 split every array over the ranks; {_FIX}")
    raise UserError(
        f"{path}: a folder, but not a DeepSpeed checkpoint: no file mp_rank_00_model_states.pt in {folder}; "
        "give a checkpoint file, or the folder that DeepSpeed wrote"
    )


def _inner_folder(path: Path) -> Path:
    """The folder of the model states: the one that `latest` names; without `latest`, Lightning's "checkpoint" or `path`."""
    latest, usual = path / "latest", path / "checkpoint"
    if not latest.is_file():
        return usual if usual.is_dir() else path
    try:
        tag = latest.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        tag = ""
    if not tag or Path(tag).name != tag or not (path / tag).is_dir():
        raise UserError(f"{latest}: names no folder in {path}; give the folder with mp_rank_00_model_states.pt itself")
    return path / tag
