"""A model folder: `model.safetensors`, `config.json` and `README.md`, as on the Hugging Face hub.

- `model.safetensors`: the weights by the model's own names. It holds arrays only, so nothing in it can run.
- `config.json`: the entries of a checkpoint besides its weights (`evodsp.weights.checkpoint`), the version of evodsp that wrote
  them, and the SHA-256 of `model.safetensors`, which tells a damaged copy, and the weights of one model beside the sizes of
  another.
- `README.md`: what the model is, for people (`evodsp.weights.model_card`).

`config.json` is written last: a folder that a killed process leaves is no model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from evodsp.errors import UserError, nearest
from evodsp.files import digest_of_file, whole_file, write_text
from evodsp.reading.quoting import quoted, shown
from evodsp.reading.text_files import read_json
from evodsp.version import __version__
from evodsp.weights.safetensors_file import map_tensors
from evodsp.weights.sizes import check_finite
from evodsp.weights.versions import FORMAT_VERSION

WEIGHTS, CONFIG, CARD = FILES = ("model.safetensors", "config.json", "README.md")
_KIND, _TYPE = "model_type", "evodsp"
_WRITER, _SUM = "evodsp_version", "sha256"
_OF_CHECKPOINTS = ("format_version", "model_config", "features")
_COPY = "copy it again, or write it with `evodsp weights export --format safetensors`"


def is_pretrained(path: str | Path) -> bool:
    """Whether `path` is such a folder, or what is left of one."""
    return any((Path(path) / name).is_file() for name in (WEIGHTS, CONFIG))


def read_pretrained(folder: str | Path, prefix: str) -> dict[str, Any]:
    """The dictionary of a checkpoint, from a folder: its arrays are mapped into memory, under names that begin with `prefix`.

    Raises UserError for the config of another program's model or of a later evodsp, an unknown key, and a file that is missing,
    damaged or no array of floats. The sum is not compared (`check_sum`).
    """
    config = _config(Path(folder))
    weights = map_tensors(_file(Path(folder), WEIGHTS), _COPY)
    state = {f"{prefix}{name}": value for name, value in weights.items()}
    return {name: config[name] for name in _OF_CHECKPOINTS if name in config} | {"state_dict": state}


def check_sum(folder: str | Path) -> None:
    """Raise UserError if the weights have another SHA-256 than `config.json` says. One without a sum is not compared."""
    folder = Path(folder)
    expected = _config(folder).get(_SUM)
    if expected is not None and (found := digest_of_file(folder / WEIGHTS, "sha256")) != expected:
        raise UserError(
            f"{folder / WEIGHTS}: damaged, or not the weights of {CONFIG} beside it: its SHA-256 is {found[:12]}…, but there "
            f"{_SUM} is {quoted(expected, 12)}; copy both again (if you changed the weights yourself, remove {_SUM} there)"
        )


def write_pretrained(folder: str | Path, entries: Mapping[str, Any], weights: Mapping[str, Tensor], card: str) -> None:
    """Write the three files. `entries`: those of a checkpoint besides its weights. `weights`: by the model's own names.

    What else lies in the folder stays. Raises UserError for a number that is not finite; then nothing is written.
    """
    folder = Path(folder)
    check_finite(weights, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    write_text(folder / CARD, card)
    with whole_file(folder / WEIGHTS) as partial:
        # The library refuses arrays that share their memory, and writes a file that only its owner can read.
        arrays = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
        save_file(arrays, partial, metadata={"format": "pt"})
        shutil.copymode(folder / CARD, partial)
    config = {_KIND: _TYPE, _WRITER: __version__, **entries, _SUM: digest_of_file(folder / WEIGHTS, "sha256")}
    write_text(folder / CONFIG, json.dumps(config, indent=1) + "\n")


def check_new_folder(folder: Path, overwrite: bool) -> None:
    """Raise UserError if `folder` is a file, or holds a model that may not be replaced."""
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder}: is a file, but a model of safetensors is a folder of {', '.join(FILES)}; name a folder"
        )
    if not overwrite and (there := [name for name in FILES if (folder / name).exists()]):
        raise UserError(f"{folder / there[0]}: exists already; name another folder, or overwrite it (--overwrite)")


def _config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. Raises UserError unless it is that of a model which this evodsp can read."""
    path = _file(folder, CONFIG)
    config = read_json(path, _COPY)
    if not isinstance(config, dict) or config.get(_KIND) != _TYPE:
        kind = config.get(_KIND) if isinstance(config, dict) else None
        raise UserError(
            f"{path}: {_KIND} is {shown(kind)}, but must be '{_TYPE}': this is another program's model; give a folder that "
            "evodsp wrote"
        )
    version = config.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise UserError(
            f"{path}: written by evodsp {shown(config.get(_WRITER))} in format version {shown(version)}, but this evodsp "
            f"({__version__}) reads {FORMAT_VERSION}; update evodsp"
        )
    known = (_KIND, _WRITER, _SUM, *_OF_CHECKPOINTS)
    if unknown := [name for name in config if name not in known]:
        raise UserError(
            f"{path}: unknown key '{unknown[0][:60]}'.{nearest(unknown[0][:60], known)} Valid keys: {', '.join(known)}"
        )
    return config


def _file(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        there = [other for other in FILES if (folder / other).is_file()]
        raise UserError(f"{folder}: has {' and '.join(there)}, but no file {name}; copy the folder again, whole")
    return path
