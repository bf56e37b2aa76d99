"""Read and write OpenFold's checkpoints (`.pt`, `.ckpt`, DeepSpeed folders), by the table in `names.py`.

OpenFold renamed its layers in version 2; its published checkpoints use the older names. Both namings are read,
also mixed in one file, as releases between the two wrote them. Three forms are read:

- published checkpoints: the arrays alone;
- Lightning's training checkpoints: `state_dict`, and the moving average under `ema: {params: ...}`;
- DeepSpeed's training checkpoints, a folder: `module` instead of `state_dict` (`deepspeed.py`).

Training checkpoints also hold objects of classes that evodsp does not have; they are skipped safely (`untrusted.py`). The file
must have exactly the model's arrays. Values are copied, so the round trip of float32 is bitwise identical.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.names import Name, check_readable, is_fused, older, parameter_names, with_blocks
from evodsp.weights.parameter_file import container, parameter_file
from evodsp.weights.untrusted import (
    check_arrangement,
    check_arrays,
    check_bytes,
    check_finite,
    is_array,
    load_untrusted,
    model_name,
    unwrapped,
)

MARKS = ("structure_module.ipa.head_weights", "evoformer.linear.weight")  # all of OpenFold's models have these
MULTIMER_MARK = "structure_module.ipa.linear_k.weight"  # monomer models keep keys and values in one array, linear_kv
TRANSITION_LAYERS = 3
_STACKS = {
    "extra_msa": re.compile(r"^extra_msa_stack\.blocks\.(\d+)\."),
    "evoformer": re.compile(r"^evoformer\.blocks\.(\d+)\."),
    "templates": re.compile(r"^(?:template_embedder\.)?template_pair_stack\.blocks\.(\d+)\."),
}


def read_openfold(path: str | Path, raw: bool = False) -> dict[str, Tensor]:
    """The arrays of an OpenFold checkpoint, named as in the file, on the CPU, memory-mapped.

    `path`: a file, or a DeepSpeed folder. The result is the moving average if the file has one and `raw` is not set, otherwise
    the weights of the last step. Raises UserError if `path` is not an OpenFold checkpoint, or a number is not finite.
    """
    file = parameter_file(path)
    if not file.is_file():
        raise UserError(f"{file}: no such parameter file; give OpenFold's .pt checkpoint")
    if container(file) is None:
        raise UserError(f"{file}: not a PyTorch .pt file (or cut short); give OpenFold's checkpoint")
    forms = [form for form in _forms(load_untrusted(file)) if _is_openfold(form)]
    if not forms:
        raise UserError(f"{file}: not an OpenFold checkpoint, it lacks '{MARKS[0]}'; give one")
    arrays = unwrapped(forms[-1 if raw else 0], str(file))
    for key, value in arrays.items():
        if not is_array(value):
            raise UserError(f"{file}: '{key}' is not an array of floats; give OpenFold's checkpoint")
    check_bytes(arrays, file)
    check_finite(arrays, file)
    return arrays


def is_openfold(content: Any) -> bool:
    """Whether a file's loaded `content` is an OpenFold checkpoint, in any of its forms."""
    return any(_is_openfold(form) for form in _forms(content))


def write_openfold(path: str | Path, arrays: Mapping[str, Tensor]) -> None:
    """Write a checkpoint in the form that OpenFold publishes: the arrays alone. It appears whole or not at all."""
    with whole_file(path) as partial:
        torch.save(dict(arrays), partial)


def load_openfold(path: str | Path, model: AlphaFold, raw: bool = False) -> None:
    """Set every parameter of `model` from OpenFold's checkpoint `path`, a file or a DeepSpeed folder.

    `raw`: use the weights of the last step instead of the moving average. Raises UserError that names the first array which is
    missing, unknown or of another shape; the model is then unchanged.
    """
    set_parameters(model, read_openfold(path, raw), str(path))


@torch.no_grad()
def set_parameters(model: AlphaFold, arrays: Mapping[str, Tensor], source: str = "parameter file") -> None:
    """Set every parameter of `model` from OpenFold's arrays, in either naming and layout of triangle multiplication.

    `source`: the file, for error messages. Raises UserError that names the first array which is missing, unknown or of another
    shape; the model is then unchanged.
    """
    names, known_arrays = fitting(model, arrays, source)
    parameters = dict(model.named_parameters())
    for name in names:
        parameters[name.ours].copy_(our_array(name, known_arrays))


def fitting(model: AlphaFold, arrays: Mapping[str, Tensor], source: str) -> tuple[list[Name], dict[str, Tensor]]:
    """The names of the parameters of `model`, which may be on the meta device, and the arrays by their present names.

    Raises UserError as `set_parameters` does.
    """
    check_arrangement(model.config, MULTIMER_MARK in arrays, source)
    names = parameter_names(model.config, fused=is_fused(arrays))
    shapes = expected_shapes(model, names)
    renamed = present_names(arrays, shapes, source)
    is_older = any(known != key for known, key in renamed.items())
    known_arrays = {known: arrays[key] for known, key in renamed.items()}
    check_arrays(known_arrays, shapes, source, shown=lambda key: renamed.get(key, older(key) if is_older else key))
    return names, known_arrays


def present_names(arrays: Iterable[str], known: Collection[str], source: str) -> dict[str, str]:
    """The file's keys by OpenFold's present names, as far as these are `known`; other keys by themselves.

    Raises UserError if the file has two names of one array.
    """
    present = {older(key): key for key in known}
    renamed: dict[str, str] = {}
    for key in arrays:
        name = key if key in known else present.get(key, key)
        if name in renamed:
            raise UserError(f"{source}: holds '{renamed[name]}' and '{key}', two names of one array; remove one")
        renamed[name] = key
    return renamed


def our_array(name: Name, arrays: Mapping[str, Tensor]) -> Tensor:
    """The value of one of our parameters, float32, from OpenFold's arrays by their present names."""
    return name.in_our_order(_in_order(torch.cat([arrays[key].float() for key in name.openfold]), name))


def export_openfold(model: AlphaFold, legacy: bool = False, fused: bool = False) -> dict[str, Tensor]:
    """The parameters of `model` as OpenFold's arrays, float32, on the CPU.

    `legacy`: use the names of OpenFold's releases before version 2. `fused`: keep both sides of triangle multiplication in one
    array, as OpenFold's models with fused projections do. Raises UserError if OpenFold's model has no place for a layer.
    """
    check_readable(model.config)
    layers = model.config.structure_module.transition_layers
    if layers != TRANSITION_LAYERS:
        raise UserError(
            f"the model has structure_module.transition_layers {layers}, but OpenFold's models always have "
            f"{TRANSITION_LAYERS}; export with --format deepmind instead"
        )
    if legacy and model.config.arrangement == "multimer":
        raise UserError("OpenFold's releases before version 2 have no multimer models; export with --format openfold")
    parameters = dict(model.named_parameters())
    arrays: dict[str, Tensor] = {}
    for name in parameter_names(model.config, fused):
        value = _in_order(name.in_their_order(parameters[name.ours].detach().float().cpu()), name)
        for key, part in zip(name.openfold, value.split(name.sizes(len(value))), strict=True):
            arrays[older(key) if legacy else key] = part.clone()  # torch.save writes all of a view's storage
    return arrays


def with_blocks_of(config: ModelConfig, arrays: Iterable[str]) -> ModelConfig:
    """`config` with as many blocks in each stack as there are block numbers in these keys."""
    keys = list(arrays)
    numbers = {stack: {found[1] for key in keys if (found := own.match(key))} for stack, own in _STACKS.items()}
    return with_blocks(config, {stack: len(blocks) for stack, blocks in numbers.items() if blocks})


def expected_shapes(module: nn.Module, names: Iterable[Name]) -> dict[str, tuple[int, ...]]:
    """The shape of each of OpenFold's arrays."""
    parameters = dict(module.named_parameters())
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        outputs, *inputs = parameters[name.ours].shape
        shapes |= {key: (size, *inputs) for key, size in zip(name.openfold, name.sizes(outputs), strict=True)}
    return shapes


def _in_order(value: Tensor, name: Name) -> Tensor:
    """Our parameter with its rows in OpenFold's order, or OpenFold's array in ours: the same swap of two halves."""
    return torch.cat(value.chunk(2)[::-1]) if name.halves_swapped else value


def _forms(content: Any) -> list[Mapping[Any, Any]]:
    """The dictionaries that may hold the arrays, the moving average first."""
    if not isinstance(content, Mapping):
        return []
    averaged = content.get("ema")
    inner = averaged.get("params") if isinstance(averaged, Mapping) else None
    forms = [inner, content.get("state_dict"), content.get("module"), content]
    return [form for form in forms if isinstance(form, Mapping)]


def _is_openfold(form: Mapping[Any, Any]) -> bool:
    return bool({model_name(str(key)) for key in form} & set(MARKS))
