"""What a Python caller gives, as the files that a prediction reads: sequences, alignments as text, models in memory.

So the function and the command share all code below, with the same checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evodsp.errors import UserError, nearest
from evodsp.inference.inputs import check_single_chain, exists, is_sequence, read_inputs
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.checkpoint import save_model

ALONE = "sequence"
"""The name of a sequence that is given without one; several of them are sequence_1, sequence_2, …"""

Inputs = str | Path | Sequence[str | Path] | Mapping[str, str]
Alignments = str | Path | Mapping[str, str | Path] | None
Checkpoints = str | Path | AlphaFold | Sequence[str | Path | AlphaFold]


@dataclass(frozen=True)
class GivenFiles:
    """The paths of a `PredictConfig`."""

    inputs: tuple[Path, ...]
    alignments: Path | None
    checkpoint: Path | list[Path] | None


def as_given_files(inputs: Inputs, alignments: Alignments, checkpoint: Checkpoints | None, folder: Path) -> GivenFiles:
    """Write what is no file yet into the existing empty folder `folder`. Raises UserError if something cannot be meant."""
    paths = _input_files(inputs, folder)
    models = None if checkpoint is None else _checkpoint_files(checkpoint, folder)
    return GivenFiles(paths, _alignment_folder(alignments, paths, folder), models)


def _is_text(given: str | Path) -> bool:
    """Whether a value is the text of a FASTA or A3M file, and not a path."""
    return isinstance(given, str) and given.lstrip().startswith(">")


def _input_files(inputs: Inputs, folder: Path) -> tuple[Path, ...]:
    if isinstance(inputs, Mapping):
        if not inputs:
            raise UserError("evodsp.predict: nothing to predict; give {name: sequence}")
        for name, letters in inputs.items():
            if not isinstance(name, str) or name.split() != [name]:
                raise UserError(
                    f"evodsp.predict: the name {name!r} is empty or has blanks; use letters, digits, '_', '-'"
                )
            check_single_chain(letters)
            if not is_sequence(letters):
                raise UserError(f"evodsp.predict: '{name}' is {_short(letters)}, but must be a sequence in upper case")
        return (_fasta(folder, inputs.items()),)
    given = (
        [inputs]
        if isinstance(inputs, str | Path)
        else _several(inputs, "no sequence and no path; give a string or a Path")
    )
    if not given or any(one == "" for one in given):
        raise UserError("evodsp.predict: nothing to predict; give a sequence, {name: sequence}, or FASTA or A3M files")
    paths: list[Path] = []
    for number, one in enumerate(given, start=1):
        if isinstance(one, str) and _is_text(one):
            paths.append(folder / f"inputs_{number}.fasta")
            paths[-1].write_text(one, encoding="utf-8")
        elif isinstance(one, str) and is_sequence(one):
            name = ALONE if len(given) == 1 else f"{ALONE}_{number}"
            paths.append(_fasta(folder, [(name, one)], f"{name}.fasta"))
        elif isinstance(one, str | Path):
            check_single_chain(one)
            if not exists(str(one)) and str(one) != "-":
                raise UserError(
                    f"evodsp.predict: {_short(one)} is no file or folder, and no sequence; "
                    "a sequence is in upper-case letters, such as 'MKTAYIAK'"
                )
            paths.append(Path(one))
        else:
            raise UserError(f"evodsp.predict: {_short(one)} is no sequence and no path; give a string or a Path")
    return tuple(paths)


def _fasta(folder: Path, records: Iterable[tuple[str, str]], name: str = "inputs.fasta") -> Path:
    path = folder / name
    path.write_text(
        "".join(f">{called}\n{''.join(letters.split())}\n" for called, letters in records), encoding="utf-8"
    )
    return path


def _alignment_folder(given: Alignments, inputs: Sequence[Path], folder: Path) -> Path | None:
    """The folder of alignments, as the command's option `--alignments` takes it."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        known = [record.query.name for record in read_inputs(inputs)[0]]
        for name in given:
            if name not in known:
                raise UserError(f"evodsp.predict: an alignment for '{name}', which is no record.{nearest(name, known)}")
        for name, one in given.items():
            _put_alignment(folder / "alignments", name, one)
        return folder / "alignments"
    if not isinstance(given, str | Path):
        raise UserError(
            f"evodsp.predict: alignments: {_short(given)} is no path and no A3M text; give a string or a Path"
        )
    if not _is_text(given) and not Path(given).is_file():
        return Path(given)
    records, failures = read_inputs(inputs)
    if len(records) + len(failures) != 1:
        raise UserError(
            f"evodsp.predict: one alignment for {len(records) + len(failures)} sequences; give a folder of alignments, "
            "or {name: alignment}"
        )
    _put_alignment(folder / "alignments", "alignment", given)
    return folder / "alignments"


def _put_alignment(folder: Path, name: str, given: str | Path) -> None:
    """A text becomes <folder>/<name>.a3m, a path a link of this name."""
    folder.mkdir(exist_ok=True)
    if _is_text(given):
        (folder / f"{name}.a3m").write_text(str(given).lstrip(), encoding="utf-8")
        return
    path = Path(given)
    if not exists(str(given)):
        raise UserError(
            f"evodsp.predict: alignments: {_short(given)} is no file or folder, and no A3M text, which begins with '>'"
        )
    (folder / (name if path.is_dir() else name + "".join(path.suffixes[-2:]))).symlink_to(path.resolve())


def _checkpoint_files(given: Checkpoints, folder: Path) -> Path | list[Path]:
    fix = "no model and no path; use evodsp.load_model(path)"
    models = [given] if isinstance(given, str | Path | AlphaFold) else _several(given, fix)
    if not models:
        raise UserError("evodsp.predict: no checkpoint; give a model, or the path of a checkpoint")
    paths: list[Path] = []
    for number, one in enumerate(models, start=1):
        if isinstance(one, AlphaFold):
            paths.append(folder / ("model.ckpt" if len(models) == 1 else f"model_{number}.ckpt"))
            save_model(paths[-1], one, features=one.trained_features)
        elif isinstance(one, str | Path):
            paths.append(Path(one))
        else:
            raise UserError(f"evodsp.predict: {_short(one)} is {fix}")
    return paths[0] if isinstance(given, str | Path | AlphaFold) else paths


def _several(given: object, fix: str) -> list[Any]:
    """The values of a list or the like. Raises UserError for a value that is none: it is `fix`."""
    if not isinstance(given, Iterable):
        raise UserError(f"evodsp.predict: {_short(given)} is {fix}")
    return list(given)


def _short(value: object) -> str:
    text = repr(str(value) if isinstance(value, Path) else value)
    return text if len(text) <= 60 else f"{text[:57]}…"
