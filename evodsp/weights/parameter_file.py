"""Places of a model's parameters: in a file of NumPy or of PyTorch, told apart by its content; in a folder of DeepSpeed;
in a model folder as on the Hugging Face hub; or on the hub itself, `hf:organisation/name` or
`hf:organisation/name@revision`.

A checkpoint of DeepSpeed is a folder:

    12-3000.ckpt/latest                                      the name of the folder below, "checkpoint" in Lightning's runs
    12-3000.ckpt/checkpoint/mp_rank_00_model_states.pt       `module`: weights; `ema`: OpenFold's moving average
    12-3000.ckpt/checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt    Adam's moments and weights in 32 bits; not read

Where DeepSpeed trains in 16 bits, `module` holds 16-bit weights; OpenFold's moving average stays in 32 bits.

A model folder has three files:

- `model.safetensors`: the weights by the model's own names. It holds arrays only, so nothing in it can run.
- `config.json`: the entries of a checkpoint besides its weights (`evodsp.weights.checkpoint`), the version of evodsp that wrote
  them, and the SHA-256 of `model.safetensors`, which tells a damaged copy, and the weights of one model beside the sizes of
  another.
- `README.md`: what the model is, for people (`evodsp.weights.pretrained`).

`config.json` is written last: a folder that a killed process leaves is no model.

huggingface_hub keeps them in its cache of this machine. It is needed only here, so it is an extra. Its mixin
(PyTorchModelHubMixin) is not used: it would make it a requirement of every model, build the model before it looks at the
file, and accept missing and unknown weights. The files have the names that the mixin gives them.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from evodsp.errors import UserError, nearest
from evodsp.files import digest_of_file, whole_file, write_text
from evodsp.printing import quoted, shown
from evodsp.reading.text_files import read_json
from evodsp.version import __version__
from evodsp.weights.untrusted import check_finite, map_tensors

FORMAT_VERSION = 2
"""Version of the checkpoints that are written. Every earlier one can be read."""

# `ensembles` was a feature size in version 1 and is an option of prediction now.
_RETIRED_FEATURES = ("ensembles",)
# Version 1 had the sub-layers of the MSA stack directly in the block.
_MSA_LAYER = re.compile(
    r"(?<=\.)(blocks\.\d+\.)(row_attention|column_attention|msa_transition|outer_product_mean)(?=\.)"
)
# Version 1 had a module for each head, called `<name>_head`.
_HEAD = re.compile(r"(?<![\w.])(model\.)?(distogram|masked_msa|plddt|resolved|pae)_head(?=\.)")
_HEADS = {"resolved": "experimentally_resolved", "pae": "predicted_aligned_error"}
_WEIGHTS = ("state_dict", "ema_state_dict")


def upgrade(checkpoint: dict[str, Any]) -> None:
    """Change a checkpoint of an earlier version into one of `FORMAT_VERSION`, in place. Others are left as they are."""
    if checkpoint.get("format_version") != 1:
        return
    for key in _WEIGHTS:
        if isinstance(weights := checkpoint.get(key), dict):
            checkpoint[key] = {_renamed(name): value for name, value in weights.items()}
    if isinstance(features := checkpoint.get("features"), dict):
        checkpoint["features"] = {name: size for name, size in features.items() if name not in _RETIRED_FEATURES}
    checkpoint["format_version"] = FORMAT_VERSION


def _renamed(name: str) -> str:
    """'…blocks.0.msa_transition.norm.weight' -> '…blocks.0.msa_stack.transition.norm.weight'; 'pae_head.…' -> 'heads.…'."""
    name = _HEAD.sub(lambda found: f"{found[1] or ''}heads.{_HEADS.get(found[2], found[2])}", name)
    return _MSA_LAYER.sub(lambda found: f"{found[1]}msa_stack.{found[2].removeprefix('msa_')}", name)


WEIGHTS, CONFIG, CARD = FILES = ("model.safetensors", "config.json", "README.md")
_KIND, _TYPE = "model_type", "evodsp"
_WRITER, _SUM = "evodsp_version", "sha256"
_OF_CHECKPOINTS = ("format_version", "model_config", "features")
_LARGEST_CONFIG = 1 << 20
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
    if path.stat().st_size > _LARGEST_CONFIG:  # the hub may have sent it
        raise UserError(f"{path}: larger than {_LARGEST_CONFIG >> 20} MiB, so no model's config.json; {_COPY}")
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


_PREFIX = "hf:"
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)


def located(path: str | Path) -> Path:
    """`path`, or where it is the name of a model on the hub (`hf:organisation/name`), its folder on this machine.

    Raises UserError as `fetched` does, and for a name that cannot be one.
    """
    text = str(path)
    if not text.startswith(_PREFIX) or Path(path).exists():
        return Path(path)
    name = text.removeprefix(_PREFIX).lstrip("/")  # hf://organisation/name is common, too
    if (found := _NAME.fullmatch(name)) is None:
        raise UserError(
            f"{text}: not the name of a model on the hub; write {_PREFIX}organisation/name, or "
            f"{_PREFIX}organisation/name@revision"
        )
    return fetched(found["name"], found["revision"])


def is_name(text: str) -> bool:
    """Whether a text can be the name of a model on the hub, organisation/name, without a revision."""
    return bool((found := _NAME.fullmatch(text)) and found["revision"] is None)


def fetched(name: str, revision: str | None = None) -> Path:
    """The folder of a model of the hub; its files are fetched if they are not on this machine yet, and no others.

    `revision`: a branch, a tag or a commit; None: the newest. Raises UserError if huggingface_hub is not installed, or the
    model cannot be had.
    """
    source = f"{_PREFIX}{name}{'' if revision is None else f'@{revision}'}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise UserError(
            f"{source}: models of the hub are fetched with huggingface_hub, which is not installed; "
            "pip install 'evodsp[hub]', or give a folder"
        ) from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(FILES)))
    except Exception as error:  # of the network, the disk or the server's answer
        raise UserError(
            f"{source}: cannot be had from the hub ({quoted(error)}); check the name, the revision and the network (a private "
            "model needs `hf auth login`)"
        ) from error


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
    """Damage of a file of PyTorch, by the checksums that it contains; None if there is none."""
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
    """Text of an error about a damaged file, without PyTorch's advice."""
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
