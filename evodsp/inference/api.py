"""`evodsp.predict`: prediction from Python, with the options of the command `evodsp predict`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from evodsp.errors import UserError, nearest
from evodsp.inference.config import PredictConfig
from evodsp.inference.predict import predict as predict_targets
from evodsp.inference.prediction import Prediction

_PATHS = ("templates", "obsolete", "weights_folder")
_Paths = str | Path | Sequence[str | Path]


def predict(
    inputs: _Paths | Mapping[str, str],
    alignments: str | Path | Mapping[str, str] | None = None,
    checkpoint: _Paths | None = None,
    output: str | Path | None = None,
    report: Callable[[str], None] = print,
    **options: Any,
) -> list[Prediction]:
    """Predict the structure of every record, in this process.

    inputs: sequences by name, or files: one or several FASTA or A3M files, or folders of them, as the command's inputs.
    alignments: texts of A3M files by name, or a folder of alignments, as the command's option. Records that have none are
        predicted from their sequence alone.
    checkpoint: one or several checkpoints or parameter files; None where the option `weights` names AlphaFold2's parameters.
    output: folder for the files of `evodsp predict`. None: they are in a temporary folder as long as the results are in use.
    report: receives one line of progress per stage; `lambda line: None` for silence.
    options: any other option of `evodsp predict`, under its name: seeds, recycles, templates, format, weights, device, …;
        see `evodsp.inference.config.PredictConfig`.

    Returns one result per record, in the order of the inputs, with arrays, structures as text, and pictures
    (`evodsp.inference.prediction.Prediction`). Raises UserError if an input or an option is wrong.

        [one] = evodsp.predict({"one": "MKTAYIAKQR"}, weights="model_1_ptm")
        print(one.plddt.mean(), one.positions.shape)
        one.save("one.cif")
    """
    names = [option.name for option in fields(PredictConfig) if option.name not in ("inputs", "fasta")]
    if unknown := [name for name in options if name not in names]:
        raise UserError(f"evodsp.predict: no option '{unknown[0]}'.{nearest(unknown[0], names)} See PredictConfig")
    for name in _PATHS:
        if options.get(name) is not None:
            options[name] = Path(options[name])
    temporary = tempfile.TemporaryDirectory(prefix="evodsp_")
    given = Path(temporary.name)
    config = PredictConfig(
        inputs=(_written(inputs, given),) if isinstance(inputs, Mapping) else tuple(_paths(inputs)),
        alignments=_alignments(alignments, given),
        checkpoint=None if checkpoint is None else _paths(checkpoint),
        output=given / "predictions" if output is None else Path(output),
        **options,
    )
    if config.parallel.sequence > 1:
        raise UserError(
            f"evodsp.predict: parallel.sequence is {config.parallel.sequence}, but a function call runs in one process; "
            "use the command evodsp predict --parallel.sequence, which starts the ranks"
        )
    results = predict_targets(config, report)
    return [Prediction(**vars(result), kept_alive=temporary if output is None else None) for result in results]


def _paths(given: _Paths) -> list[Path]:
    return [Path(path) for path in ([given] if isinstance(given, str | Path) else given)]


def _written(sequences: Mapping[str, str], folder: Path) -> Path:
    """A FASTA file of sequences. Raises UserError for a name or a sequence that it cannot hold."""
    for name, letters in sequences.items():
        if not name.strip() or name.split() != [name] or ">" in name + letters:
            raise UserError(
                f"evodsp.predict: the record '{name}' needs a name of one word and letters without '>'; change it"
            )
    path = folder / "sequences.fasta"
    path.write_text("".join(f">{name}\n{letters}\n" for name, letters in sequences.items()), encoding="utf-8")
    return path


def _alignments(given: str | Path | Mapping[str, str] | None, folder: Path) -> Path | None:
    """The folder of alignments; texts are written into one."""
    if given is None or isinstance(given, str | Path):
        return None if given is None else Path(given)
    (place := folder / "alignments").mkdir()
    for name, text in given.items():
        if not text.lstrip().startswith((">", "#")):
            raise UserError(
                f"evodsp.predict: the alignment of '{name}' is no A3M text, which begins with '>'; give a folder"
            )
        if Path(name).name != name:
            raise UserError(f"evodsp.predict: '{name}' is no name of a record; take '/' out of it")
        (place / f"{name}.a3m").write_text(text, encoding="utf-8")
    return place
