"""`evodsp weights import` and `export`: convert parameter files to checkpoints and back."""

from __future__ import annotations

from pathlib import Path

from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.printing import show, tell
from evodsp.weights.by_name import PUBLISHED, check_name, fetch_weights
from evodsp.weights.checkpoint import load_features, load_model, model_config, read_checkpoint, save_model
from evodsp.weights.config import (
    ExportConfig,
    ImportConfig,
    WeightsFetchConfig,
    check_new_file,
    preset_of,
    published_features,
)
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.hub import located
from evodsp.weights.openfold import export_openfold, write_openfold
from evodsp.weights.parameter_file import container
from evodsp.weights.pretrained import write_folder
from evodsp.weights.pretrained_folder import check_new_folder, is_pretrained
from evodsp.weights.published import is_parameter_file, load_parameters, load_published


def run_import(settings: ImportConfig, words: list[str]) -> int:
    """`evodsp weights import`: the exit code. `words`: the command line (not needed here).

    Raises UserError if the output exists, or the parameters are not exactly the model's.
    """
    check_new_file(settings.output, settings.overwrite)
    path = settings.checkpoint
    _refuse_checkpoint(path)
    if settings.like is not None:
        like = located(settings.like)
        sizes, config = str(settings.like), model_config(like)
        features = load_features(like)
        model, arrays = load_parameters(path, config, settings.raw)
    else:
        sizes = settings.preset or preset_of(path)
        features = published_features(sizes)
        model, arrays = load_published(path, sizes, settings.raw)
    save_model(settings.output, model, features=features)
    tell(f"{settings.output}: sizes of {sizes}, {_count(model):,} parameters from {arrays} arrays")
    return 0


def run_export(settings: ExportConfig, words: list[str]) -> int:
    """`evodsp weights export`: the exit code. `words`: the command line (not needed here).

    Raises UserError if the output exists, or the checkpoint cannot be read.
    """
    kind = settings.output_format
    (check_new_folder if kind == "safetensors" else check_new_file)(settings.output, settings.overwrite)
    path = located(settings.checkpoint)
    model = load_model(path, settings.raw, settings.preset)
    if kind == "safetensors":
        count = write_folder(model, settings.output, path, settings.raw)
    elif kind == "deepmind":
        arrays = export_deepmind(model, settings.fused)
        write_npz(settings.output, arrays)
        count = len(arrays)
    else:
        tensors = export_openfold(model, kind == "openfold-legacy", settings.fused)
        write_openfold(settings.output, tensors)
        count = len(tensors)
    tell(f"{settings.output}: {kind}, {_count(model):,} parameters in {count} arrays")
    return 0


def run_fetch(settings: WeightsFetchConfig, words: list[str]) -> int:
    """`evodsp weights fetch`: the exit code. `words`: the command line (not needed here)."""
    for name in settings.names:
        check_name(name)
    for path in fetch_weights(settings.names, settings.output, settings.url or PUBLISHED, hours=settings.hours):
        show(str(path))
    return 0


def _refuse_checkpoint(path: Path) -> None:
    """Raise UserError if `path` is already an evodsp checkpoint, or a folder of one."""
    if is_pretrained(path):
        raise UserError(f"{path}: is already a model of evodsp; use it as it is")
    if container(path) != "torch" or is_parameter_file(path):
        return
    try:
        read_checkpoint(path)
    except UserError:
        return  # not evodsp's: the other readers say what is wrong with it
    raise UserError(f"{path}: is already an evodsp checkpoint; use it as it is")


def _count(model: AlphaFold) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
