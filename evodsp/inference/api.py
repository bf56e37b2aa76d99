"""`evodsp.predict`: prediction from Python, with the options of the command `evodsp predict`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, overload

from evodsp.errors import UserError, nearest
from evodsp.inference.config import PredictConfig
from evodsp.inference.given import Alignments, Checkpoints, Inputs, as_given_files, is_sequence
from evodsp.inference.predict import predict as predict_targets
from evodsp.inference.prediction import Prediction
from evodsp.printing import show

_PATHS = ("templates", "obsolete", "weights_folder")
_OWN = ("inputs", "fasta", "alignments", "checkpoint", "output")


@overload
def predict(
    inputs: Mapping[str, str],
    alignments: Alignments = None,
    checkpoint: Checkpoints | None = None,
    output: str | Path | None = None,
    report: Callable[[str], None] = show,
    **options: Any,
) -> dict[str, Prediction]: ...


@overload
def predict(
    inputs: str | Path | Sequence[str | Path] = (),
    alignments: Alignments = None,
    checkpoint: Checkpoints | None = None,
    output: str | Path | None = None,
    report: Callable[[str], None] = show,
    fasta: str | Path | Sequence[str | Path] = (),
    **options: Any,
) -> Any: ...


def predict(
    inputs: Inputs = (),
    alignments: Alignments = None,
    checkpoint: Checkpoints | None = None,
    output: str | Path | None = None,
    report: Callable[[str], None] = show,
    fasta: str | Path | Sequence[str | Path] = (),
    **options: Any,
) -> Prediction | dict[str, Prediction] | list[Prediction]:
    """Predict structures in this process.

    inputs: a sequence in upper-case letters, {name: sequence}, or FASTA or A3M files or folders of them, as the command's
        inputs (a path, or a list of paths and sequences). Text that begins with '>' is that of a FASTA file.
    alignments: None, to predict from the sequence alone; for a single sequence the text of an A3M file, or the path of an A3M
        or Stockholm file or of a folder of them; for several, {name: text or path}, or the folder of the command's option.
    checkpoint: what `evodsp.load_model` returns, or a path; or several of them, which are ranked together. A model in memory is
        copied and stays as it is. None where the option `weights` names AlphaFold2's parameters.
    output: folder for the files of `evodsp predict`; what it holds already is kept. None: they are in a temporary folder
        until the result is no longer used; `Prediction.save` keeps them.
    report: receives one line of progress per stage; `lambda line: None` for silence.
    fasta: `inputs`, under the name of earlier versions.
    options: any other option of `evodsp predict`, under its name: seeds, recycles, templates, format, preset, device, ….

    Returns a `Prediction` for a sequence; a dictionary for {name: sequence}; and a list, in the order of the records, for all
    else. Records that fail are reported and left out. Raises UserError if an input or an option is wrong, or nothing could be
    predicted.

        model = evodsp.load_model("params_model_1_ptm.npz")
        prediction = evodsp.predict("MKTAYIAKQR", checkpoint=model, seeds=3)
        prediction.plddt, prediction.positions, prediction.save("x.cif")
    """
    if fasta:
        if inputs:
            raise UserError("evodsp.predict: fasta is given beside inputs; give all inputs without fasta")
        inputs = fasta
    if checkpoint is None and not options.get("weights"):
        raise UserError(
            "evodsp.predict: no model is given; add checkpoint=, a model or a path, or weights='model_1_ptm'"
        )
    names = [field.name for field in fields(PredictConfig) if field.name not in _OWN]
    if unknown := [name for name in options if name not in names]:
        raise UserError(f"evodsp.predict: no option '{unknown[0]}'.{nearest(unknown[0], names)} See PredictConfig")
    for name in _PATHS:
        if options.get(name) is not None:
            options[name] = Path(options[name])
    # Settings are checked before a model is copied.
    holder = tempfile.TemporaryDirectory(prefix="evodsp_") if output is None else None
    folder = Path(holder.name) / "results" if holder is not None else Path(str(output))
    placeholder = PredictConfig(inputs=(folder,), checkpoint=folder, output=folder, **options)
    if placeholder.parallel.sequence > 1:
        raise UserError(
            f"evodsp.predict: parallel.sequence is {placeholder.parallel.sequence}, but a function call runs in one process; "
            "use the command evodsp predict --parallel.sequence, which starts the ranks"
        )
    with tempfile.TemporaryDirectory(prefix="evodsp_") as made:

        def named(text: str) -> str:
            """A message without the names of temporary folders."""
            text = text.replace(f"{made}/", "")
            return text if holder is None else text.replace(holder.name, "<temporary folder>")

        try:
            given = as_given_files(inputs, alignments, checkpoint, Path(made))
            config = PredictConfig(
                inputs=given.inputs,
                alignments=given.alignments,
                checkpoint=given.checkpoint,
                output=folder,
                **options,
            )
            results = predict_targets(config, lambda line: report(named(line)))
        except UserError as error:
            raise UserError(named(str(error))) from error
    predictions = [Prediction.of(result, holder) for result in results]
    if isinstance(inputs, Mapping):
        return {one.name: one for one in predictions}
    return predictions[0] if is_sequence(inputs) else predictions
