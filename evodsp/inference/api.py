"""`evodsp.predict`: prediction from Python, with the options of the command `evodsp predict`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from evodsp.errors import UserError, nearest
from evodsp.inference.config import PredictConfig
from evodsp.inference.predict import predict as predict_targets
from evodsp.inference.results import PredictionResult

_PATHS = ("templates", "obsolete")


def predict(
    fasta: str | Path | Sequence[str | Path],
    alignments: str | Path | None,
    checkpoint: str | Path | Sequence[str | Path] | None,
    output: str | Path,
    report: Callable[[str], None] = print,
    **options: Any,
) -> list[PredictionResult]:
    """Predict the structure of every record, in this process, and write the files of `evodsp predict`.

    fasta: one or several FASTA or A3M files, or folders of them, as the command's inputs.
    alignments, checkpoint, output: as the command's options; see `evodsp.inference.config.PredictConfig`. `checkpoint` is None
    where the option `weights` names the model.
    report: receives one line of progress per stage; `lambda line: None` for silence.
    options: any other option of `evodsp predict`, under its name: seeds, recycles, templates, format, preset, device, ….

    Returns one result per record, in the order of the inputs: `result.structure()` is the path of the best structure,
    `result.mean_plddt` the mean pLDDT of each seed (with several checkpoints of each '<model>_seed_<k>'). Raises UserError if
    an input or an option is wrong.

        for result in evodsp.predict("x.fasta", "alignments", "params_model_1_ptm.npz", "out", seeds=3):
            print(result.name, result.structure(), result.mean_plddt[result.best])
    """
    if isinstance(checkpoint, str | Path):
        checkpoint = [checkpoint]
    names = [field.name for field in fields(PredictConfig) if field.name not in ("inputs", "fasta")]
    if unknown := [name for name in options if name not in names]:
        raise UserError(f"evodsp.predict: no option '{unknown[0]}'.{nearest(unknown[0], names)} See PredictConfig")
    for name in _PATHS:
        if options.get(name) is not None:
            options[name] = Path(options[name])
    config = PredictConfig(
        inputs=tuple(Path(path) for path in ([fasta] if isinstance(fasta, str | Path) else fasta)),
        alignments=None if alignments is None else Path(alignments),
        checkpoint=None if checkpoint is None else [Path(path) for path in checkpoint],
        output=Path(output),
        **options,
    )
    if config.parallel.sequence > 1:
        raise UserError(
            f"evodsp.predict: parallel.sequence is {config.parallel.sequence}, but a function call runs in one process; "
            "use the command evodsp predict --parallel.sequence, which starts the ranks"
        )
    return predict_targets(config, report)
