"""Parameters in and out of OpenFold's checkpoints (`.pt`), by the table of names.

Both of OpenFold's namings are read, the present one and that of its releases before version 2, in which its published
checkpoints are; a file may mix them, as those of the time between do. So are three forms on disk: the arrays alone (published);
Lightning's checkpoint (`state_dict`, and `ema` with the averaged `params`); DeepSpeed's (`module`). Nothing is skipped or
guessed, as in `evodsp.weights.deepmind`, and values are copied, never computed with: float32 makes the round trip bit for bit.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.model.alphafold import AlphaFold
from evodsp.weights.accounting import check_arrays
from evodsp.weights.container import container
from evodsp.weights.names import Name, older, parameter_names

FUSED_MARK = ".linear_ab_p.weight"  # only newer models with fused projections have this array
MARKS = ("structure_module.ipa.head_weights", "evoformer.linear.weight")  # all of OpenFold's models have these
TRANSITION_LAYERS = 3
_WRAPPERS = re.compile(r"^(?:module\.)?(?:model\.)?")
_STACKS = {
    "extra_msa": re.compile(r"^extra_msa_stack\.blocks\.(\d+)\."),
    "evoformer": re.compile(r"^evoformer\.blocks\.(\d+)\."),
    "templates": re.compile(r"^(?:template_embedder\.)?template_pair_stack\.blocks\.(\d+)\."),
}


def read_openfold(path: str | Path, raw: bool = False) -> dict[str, Tensor]:
    """The arrays of an OpenFold checkpoint under the names it has for them, on the CPU, memory-mapped.

    They are the moving average where the file has one, or the weights of the last step where `raw` is set. Raises UserError if
    the file is no such checkpoint.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(
            f"{path}: is a folder; join a DeepSpeed checkpoint into one file with the zero_to_fp32.py in it"
        )
    if not path.is_file():
        raise UserError(f"{path}: no such parameter file; give OpenFold's .pt checkpoint")
    if container(path) is None:
        raise UserError(f"{path}: not a .pt file of PyTorch's (or cut short); give OpenFold's checkpoint")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file's pickle raises whatever its reader stumbles over
        raise UserError(
            f"{path}: not a readable checkpoint: damaged, or with more than tensors in it; "
            "save its dictionary of parameters alone, with torch.save"
        ) from error
    return openfold_arrays(content, str(path), raw)


def openfold_arrays(content: Any, source: str, raw: bool = False) -> dict[str, Tensor]:
    """The arrays in what `torch.load` gave of an OpenFold checkpoint. Raises UserError if it holds none."""
    forms = [form for form in _forms(content) if _is_openfold(form)]
    if not forms:
        raise UserError(f"{source}: not an OpenFold checkpoint, it lacks '{MARKS[0]}'; give one of a monomer model")
    arrays = {_WRAPPERS.sub("", str(key)): value for key, value in forms[-1 if raw else 0].items()}
    for key, value in arrays.items():
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            raise UserError(f"{source}: '{key}' is no array of floats; give OpenFold's checkpoint of a monomer model")
    return arrays


def is_openfold(content: Any) -> bool:
    """Whether what `torch.load` gave is of an OpenFold checkpoint, in any of its forms."""
    return any(_is_openfold(form) for form in _forms(content))


def write_openfold(path: str | Path, arrays: Mapping[str, Tensor]) -> None:
    """Write a checkpoint as OpenFold publishes them: the arrays alone. It appears whole or not at all."""
    with whole_file(path) as partial:
        torch.save(dict(arrays), partial)


def load_openfold(path: str | Path, model: AlphaFold, raw: bool = False) -> None:
    """Set every parameter of `model` from OpenFold's file. Raises UserError unless the file is exactly this model's."""
    set_parameters(model, read_openfold(path, raw), str(path))


@torch.no_grad()
def set_parameters(model: AlphaFold, arrays: Mapping[str, Tensor], source: str = "parameter file") -> None:
    """Set every parameter of `model` from OpenFold's arrays, in either naming and layout of triangle multiplication.

    `source`: the file, for messages. Raises UserError that names the first array which is missing, unknown or misshapen, and
    both shapes; the model is then unchanged.
    """
    names = parameter_names(model.config, fused=is_fused(arrays))
    parameters = dict(model.named_parameters())
    shapes = expected_shapes(names, {name: tuple(value.shape) for name, value in parameters.items()})
    present = {older(key): key for key in shapes}
    renamed: dict[str, str] = {}  # of the file, by its present name
    for key in arrays:
        known = key if key in shapes else present.get(key, key)
        if known in renamed:
            raise UserError(f"{source}: holds '{renamed[known]}' and '{key}', two names of one array; take one out")
        renamed[known] = key
    is_older = any(key not in shapes and key in present for key in arrays)
    check_arrays(
        {known: arrays[key] for known, key in renamed.items()},
        shapes,
        source,
        shown=lambda key: renamed.get(key, older(key) if is_older else key),
    )
    for name in names:
        parts = [arrays[renamed[key]] for key in name.openfold]
        parameters[name.ours].copy_(_in_order(torch.cat([part.float() for part in parts]), name))


def export_openfold(model: AlphaFold, legacy: bool = False, fused: bool = False) -> dict[str, Tensor]:
    """OpenFold's arrays of `model`, float32, on the CPU.

    `legacy`: the names of OpenFold's releases before version 2. `fused`: the projections of triangle multiplication side by
    side, as in its models with fused projections. Raises UserError if OpenFold's model has no place for a layer.
    """
    layers = model.config.structure_module.transition_layers
    if layers != TRANSITION_LAYERS:
        raise UserError(
            f"the model has structure_module.transition_layers {layers}, but OpenFold's always {TRANSITION_LAYERS}; "
            "write DeepMind's names instead"
        )
    parameters = dict(model.named_parameters())
    arrays: dict[str, Tensor] = {}
    for name in parameter_names(model.config, fused):
        value = _in_order(parameters[name.ours].detach().float().cpu(), name)
        for key, part in zip(name.openfold, value.chunk(len(name.openfold)), strict=True):
            arrays[older(key) if legacy else key] = part.clone()  # a view would be saved with all of its matrix
    return arrays


def is_fused(arrays: Iterable[str]) -> bool:
    """Whether these keys are of the layout that keeps a and b of triangle multiplication in one array."""
    return any(key.endswith(FUSED_MARK) for key in arrays)


def with_blocks_of(config: ModelConfig, arrays: Iterable[str]) -> ModelConfig:
    """`config` with as many blocks in each stack as these keys number."""
    keys = list(arrays)
    for stack, pattern in _STACKS.items():
        if blocks := len({found[1] for key in keys if (found := pattern.match(key))}):
            sizes = dataclasses.replace(getattr(config, stack), blocks=blocks)
            config = dataclasses.replace(config, **{stack: sizes})
    return config


def expected_shapes(names: Iterable[Name], parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shape of each of OpenFold's arrays, from the shapes of our parameters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        outputs, *inputs = parameters[name.ours]
        shapes |= {key: (outputs // len(name.openfold), *inputs) for key in name.openfold}
    return shapes


def _in_order(value: Tensor, name: Name) -> Tensor:
    """Our parameter in OpenFold's order of its rows, or the other way round."""
    return torch.cat(value.chunk(2)[::-1]) if name.halves_swapped else value


def _forms(content: Any) -> list[Mapping[Any, Any]]:
    """Where the arrays may lie, the moving average first."""
    if not isinstance(content, Mapping):
        return []
    averaged = content.get("ema")
    inner = averaged.get("params") if isinstance(averaged, Mapping) else None
    forms = [inner, content.get("state_dict"), content.get("module"), content]
    return [form for form in forms if isinstance(form, Mapping)]


def _is_openfold(form: Mapping[Any, Any]) -> bool:
    return bool({_WRAPPERS.sub("", str(key)) for key in form} & set(MARKS))
