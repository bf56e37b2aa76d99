"""`evodsp.predict`: prediction from Python, with the options of the command `evodsp predict`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evodsp.argument_parser import checks_names
from evodsp.config import KernelsConfig, LayerPrecision, MatmulPrecision
from evodsp.data.sources.layout import ALIGNMENTS, BESIDE
from evodsp.errors import UserError, nearest
from evodsp.inference.config import Pairing, PredictConfig
from evodsp.inference.predict import predict_records
from evodsp.inference.prediction import Prediction
from evodsp.inference.results import none_usable
from evodsp.inference.targets import InputRecord, clean_name, exists, is_sequence, read_inputs
from evodsp.model.alphafold import AlphaFold
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import SequenceConfig
from evodsp.printing import tell
from evodsp.search.config import ServerLimits, ServerPairing
from evodsp.weights.checkpoint import save_model

_PATHS = ("templates", "obsolete", "template_chains", "weights_folder")
OWN = ("inputs", "example", "fasta", "alignments", "checkpoint", "output")
"""Fields of `PredictConfig` that are no options of `predict`, or have other types there."""
_SEQUENCE = "a sequence is in upper-case letters, such as 'MKTAYIAK'"
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


@checks_names(PredictConfig.OTHER_NAMES)
def predict(
    inputs: Inputs = (),
    alignments: Alignments = None,
    checkpoint: Checkpoints | None = None,
    output: str | Path | None = None,
    report: Callable[[str], None] | None = None,
    fasta: str | Path | Sequence[str | Path] = (),
    *,
    weights: str | list[str] | None = None,
    weights_folder: str | Path | None = None,
    weights_url: str | None = None,
    weights_hours: float = 6.0,
    seeds: int = 1,
    first_seed: int = 0,
    recycles: int | None = None,
    stop_tolerance: float | None = None,
    ensembles: int = 1,
    dropout: bool = False,
    msa_clusters: int | None = None,
    extra_msa: int | None = None,
    templates: str | Path | None = None,
    max_template_date: str | None = None,
    obsolete: str | Path | None = None,
    template_chains: str | Path | None = None,
    complex: bool = False,
    pairing: Pairing = "species",
    msa_server: str | None = None,
    msa_server_limits: ServerLimits = ServerLimits(),
    msa_server_pairing: ServerPairing = "greedy",
    msa_server_templates: bool = False,
    retry: bool = False,
    format: Literal["cif", "pdb"] = "cif",
    pae_in_cif: bool = False,
    relax: Literal["none", "best", "all"] = "none",
    plots: bool = False,
    save: str | None = None,
    save_format: Literal["npz", "safetensors"] = "npz",
    save_dtype: Literal["float32", "float16", "bfloat16"] = "float32",
    save_passes: Literal["last", "all"] = "last",
    preset: str | None = None,
    layers: Sequence[str] = (),
    raw: bool = False,
    device: str = "auto",
    precision: LayerPrecision = "fp32",
    matmul_precision: MatmulPrecision = "highest",
    working_memory: str = "auto",
    try_anyway: bool = False,
    overwrite: bool = False,
    parallel: SequenceConfig = SequenceConfig(),
    plan: CommunicationPlan = CommunicationPlan(),
    kernels: KernelsConfig = KernelsConfig(),
    cuda_graphs: bool = True,
) -> Any:
    """Predict structures in this process.

    inputs: a sequence in upper-case letters, {name: sequence}, or FASTA, A3M or CSV files or folders, as the command's inputs
        (a path, or a list of paths and sequences). Text that begins with '>' is that of a FASTA file. The chains of a complex
        are one sequence with ':' between them.
    alignments: None, to predict from the sequence alone; for a single sequence the text of an A3M file, or the path of an A3M
        or Stockholm file or of a folder of them; for several, {name: text or path}, or the folder of the command's option. The
        chains of a complex have names of their own: those of the sequence 'x' are 'x_A', 'x_B', ….
    checkpoint: what `evodsp.load_model` returns, or a path; or several of them, which are ranked together. A model in memory is
        copied and stays as it is. None where the option `weights` names AlphaFold2's parameters.
    output: folder for the files of `evodsp predict`; what it holds already is kept. None: they are in a temporary folder
        until the result is no longer used; `Prediction.save` keeps them.
    report: receives one line of progress per stage, such as `print`. None: nothing is printed but records that fail.
    fasta: `inputs`, under the name of earlier versions.
    The others are the options of `evodsp predict`, described in `PredictConfig`; a path may be text.

    Returns a `Prediction` for a sequence; a dictionary for {name: sequence}; and a list, in the order of the records, for all
    else. Records that fail are told and left out. Raises UserError if an input or an option is wrong, or nothing could be
    predicted.

        model = evodsp.load_model("params_model_1_ptm.npz")
        prediction = evodsp.predict("MKTAYIAKQR", checkpoint=model, seeds=3)
        prediction.plddt, prediction.positions, prediction.save("x.cif")
    """
    options = {name: value for name, value in locals().items() if name in PredictConfig.__annotations__.keys() - OWN}
    if fasta:
        if inputs:
            raise UserError("evodsp.predict: fasta is given beside inputs; give all inputs without fasta")
        inputs = fasta
    if checkpoint is None and not weights:
        raise UserError(
            "evodsp.predict: no model is given; add checkpoint=, a model or a path, or weights='model_1_ptm'"
        )
    for name in _PATHS:
        if options[name] is not None:
            options[name] = Path(options[name])
    options["layers"] = list(layers)
    # Settings are checked before a model is copied.
    holder = tempfile.TemporaryDirectory(prefix="evodsp_") if output is None else None
    folder = Path(holder.name) / "results" if holder is not None else Path(str(output))
    PredictConfig(inputs=(folder,), checkpoint=folder, output=folder, **options)
    if parallel.sequence > 1:
        raise UserError(
            f"evodsp.predict: parallel.sequence is {parallel.sequence}, but a function call runs in one process; "
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
            outcome = predict_records(config, lambda line: None if report is None else report(named(line)))
            if not outcome.results:
                raise none_usable(outcome.failures)
        except UserError as error:
            raise UserError(named(str(error))) from error
    if report is None:
        for failure in outcome.failures:
            tell(f"evodsp: {failure.name}: {named(failure.reason)}")
    predictions = [Prediction.of(result, holder) for result in outcome.results]
    if isinstance(inputs, Mapping):
        given_names = {clean_name(name): name for name in inputs}
        return {given_names[one.name]: one for one in predictions}
    return predictions[0] if is_sequence(inputs) else predictions


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
            if not is_sequence(letters):
                raise UserError(f"evodsp.predict: '{name}' is {_short(letters)}, but {_SEQUENCE}")
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
            if not exists(str(one)) and str(one) != "-":
                raise UserError(f"evodsp.predict: {_short(one)} is no file or folder, and no sequence; {_SEQUENCE}")
            paths.append(Path(one))
        else:
            raise UserError(f"evodsp.predict: {_short(one)} is no sequence and no path; give a string or a Path")
    return tuple(paths)


def _fasta(folder: Path, records: Iterable[tuple[str, str]], name: str = "inputs.fasta") -> Path:
    entries = (f">{called}\n{''.join(letters.split())}\n" for called, letters in records)
    (path := folder / name).write_text("".join(entries), encoding="utf-8")
    return path


def _alignment_folder(given: Alignments, inputs: Sequence[Path], folder: Path) -> Path | None:
    """The folder of alignments, as the command's option `--alignments` takes it."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        records = read_inputs(inputs)[0]
        known = [one.name for record in records for one in (record.query, *record.chains)]
        given = {clean_name(name): one for name, one in given.items()}
        for name in given:
            if name not in known:
                raise UserError(f"evodsp.predict: an alignment for '{name}', which is no record.{nearest(name, known)}")
        for record in records:
            own = given.get(record.query.name)
            if record.chains and own is not None and (_is_text(own) or not Path(own).is_dir()):
                raise _one_for_chains(record)
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
    if records and records[0].chains:
        raise _one_for_chains(records[0])
    _put_alignment(folder / "alignments", "alignment", given)
    return folder / "alignments"


def _one_for_chains(record: InputRecord) -> UserError:
    """The error for an alignment of a complex that does not say of which chain it is."""
    names = ", ".join(f"'{chain.name}': alignment" for chain in record.chains[:2])
    return UserError(
        f"evodsp.predict: one alignment for the {len(record.chains)} chains of '{record.query.name}'; give {{{names}}}, or "
        "ColabFold's A3M file of all chains as the input"
    )


def _put_alignment(folder: Path, name: str, given: str | Path) -> None:
    """A text becomes `<folder>/<name>.a3m`, a path a link of this name."""
    folder.mkdir(exist_ok=True)
    if _is_text(given):
        (folder / f"{name}.a3m").write_text(str(given).lstrip(), encoding="utf-8")
        return
    path = Path(given)
    if not exists(str(given)):
        raise UserError(f"evodsp.predict: alignments: {_short(given)} is no file or folder, and no A3M text (>NAME …)")
    suffix = "" if path.is_dir() else next((suffix for suffix in BESIDE if path.name.endswith(suffix)), None)
    if suffix is None:
        raise UserError(f"evodsp.predict: alignments: '{path.name}' is no {ALIGNMENTS}, gzipped or not; rename it")
    (folder / f"{name}{suffix}").symlink_to(path.resolve())


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
