"""`evodsp weights`: convert parameter files to checkpoints and back, fetch them, and make random parameters of a model,
to time it without the real ones.

Every parameter is random, because AF2's initialisation sets residual branches to zero, and is scaled so that activations
stay finite through all blocks. Predictions with these parameters mean nothing; their time and memory are a real model's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.printing import show, tell
from evodsp.weights.by_name import PUBLISHED, fetch_weights, models_of
from evodsp.weights.checkpoint import (
    is_parameter_file,
    load_features,
    load_model,
    load_parameters,
    load_published,
    model_config,
    read_checkpoint,
    save_model,
)
from evodsp.weights.config import (
    ExportConfig,
    ImportConfig,
    RandomConfig,
    WeightsFetchConfig,
    check_new_file,
    preset_of,
    published_features,
)
from evodsp.weights.deepmind import export_deepmind, write_npz
from evodsp.weights.openfold import export_openfold, write_openfold
from evodsp.weights.parameter_file import check_new_folder, container, is_pretrained, located
from evodsp.weights.pretrained import write_folder


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw weights of variance 1 / inputs (LeCun), biases of about 0.1 and norm scales of about 1, determined by `seed`."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(generator=generator)
        parameter.mul_(parameter.shape[1] ** -0.5 if parameter.ndim > 1 else 0.1)
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.add_(1)


def run_random(settings: RandomConfig, words: list[str]) -> int:
    """Write the parameters and return the exit code. `words`: the command line (not needed here)."""
    check_new_file(settings.output, settings.overwrite)
    with torch.device("meta"):
        model = AlphaFold(ModelConfig.preset(settings.preset))
    model.to_empty(device="cpu")
    randomise(model, settings.seed)
    write_npz(settings.output, export_deepmind(model))
    count = sum(parameter.numel() for parameter in model.parameters())
    tell(f"{settings.output}: {count:,} random parameters of {settings.preset}")
    return 0


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
    model = load_model(path, settings.raw, settings.preset, settings.layers)
    if kind == "safetensors":
        count = write_folder(model, settings.output, path, settings.raw, settings.judgement)
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
    for path in fetch_weights(
        models_of(settings.names), settings.output, settings.url or PUBLISHED, hours=settings.hours
    ):
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
