"""Whether a file's arrays are those of a model, found out before the model takes any memory: files may claim any size.

Other programs wrap a model, or parts of it, before they save it: the names of its arrays then have further parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.errors import UserError, nearest
from evodsp.model.alphafold import AlphaFold
from evodsp.reading.quoting import quoted, shown

_MOST_REPEATS = 512
"""Most blocks of one kind. AlphaFold2 has 48."""
_WRAPPERS = frozenset(
    ("module", "_orig_mod", "_fsdp_wrapped_module", "_forward_module", "_checkpoint_wrapped_module", "_fpw_module")
)
"""Parts of names that DataParallel, DeepSpeed, torch.compile, FSDP, Fabric and recomputation add, and that no model has."""


def on_meta(config: ModelConfig, source: str) -> AlphaFold:
    """The model without storage: its parameters' names and shapes. `source`: whose sizes they are, for messages.

    Raises UserError for sizes that no model can have.
    """
    structure = config.structure_module
    repeats = {
        "evoformer.blocks": config.evoformer.blocks,
        "extra_msa.blocks": config.extra_msa.blocks,
        "templates.blocks": config.templates.blocks,
        "structure_module.angle_blocks": structure.angle_blocks,
        "structure_module.transition_layers": structure.transition_layers,
        "structure_module.iterations": structure.iterations,
    }
    for name, count in repeats.items():
        if count > _MOST_REPEATS:
            raise UserError(f"{source}: {name} is {shown(count)}, but no model has more than {_MOST_REPEATS}")
    try:
        with torch.device("meta"):
            return AlphaFold(config)
    except Exception as error:  # torch's own, of sizes beyond its numbers
        raise UserError(f"{source}: unreadable model sizes: {quoted(error)}") from error


def check_weights(model: AlphaFold, weights: Mapping[str, Tensor], source: str) -> None:
    """Raise UserError unless `weights` are the parameters of a model, which may be `on_meta`, by name and shape."""
    check_arrays(weights, {name: tuple(value.shape) for name, value in model.state_dict().items()}, source)


def unwrapped(arrays: Mapping[Any, Any], source: str) -> dict[str, Any]:
    """The entries of a file by the names that they have in the model alone. Raises UserError if two have the same."""
    found: dict[str, str] = {}
    for key in map(str, arrays):
        name = model_name(key)
        if name in found:
            raise UserError(f"{source}: holds '{found[name]}' and '{key}', two names of one array; remove one")
        found[name] = key
    return dict(zip(found, arrays.values(), strict=True))


def model_name(key: str) -> str:
    """The name of an array without what wrappers add, and without the `model` that Lightning's modules have around a model."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["model"] else parts)


def check_finite(arrays: Mapping[str, np.ndarray | Tensor], source: str | Path) -> None:
    """Raise UserError that names the first array which holds a number that is not finite, as float32."""
    for name, value in arrays.items():
        if not (value.float().isfinite() if isinstance(value, Tensor) else _finite(value)).all():
            raise UserError(
                f"{source}: '{quoted(name)}' holds numbers that are not finite; give another file of weights"
            )


def _finite(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.isfinite(array.astype(np.float32, copy=False))


def is_array(value: Any) -> bool:
    """Whether a value of a file is a plain array of floats with numbers of its own."""
    plain = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    return plain and value.is_floating_point()


def check_bytes(arrays: Mapping[str, Tensor], path: str | Path) -> None:
    """Raise UserError if the arrays of a file of `torch.save` are larger than the file: some repeat the same few numbers."""
    if sum(value.numel() * value.element_size() for value in arrays.values()) > Path(path).stat().st_size:
        raise UserError(
            f"{path}: not a readable checkpoint: its arrays claim to be larger than the file; do not trust it"
        )


def check_arrays(
    arrays: Mapping[str, np.ndarray | Tensor],
    expected: Mapping[str, tuple[int, ...]],
    source: str,
    shown: Callable[[str], str] = str,
) -> None:
    """Raise UserError that names the first array which is missing, unknown or of another shape, and both shapes.

    `expected`: shape of each array of the model. `source`: the file, for the message. `shown`: translates a name of `expected`
    into the name that the file uses.
    """
    if missing := sorted(expected.keys() - arrays.keys()):
        key = missing[0]
        others = [shown(name) for name in arrays.keys() - expected.keys()]
        raise UserError(
            f"{source}: no array '{shown(key)}' of shape {expected[key]}{_and_more(missing)}."
            f"{nearest(shown(key), others)} Is it another model's file?"
        )
    if unknown := sorted(arrays.keys() - expected.keys()):
        key = unknown[0]
        raise UserError(
            f"{source}: the model has no parameter for array '{shown(key)}' of shape {tuple(arrays[key].shape)}"
            f"{_and_more(unknown)}; is it another model's file?"
        )
    if misshapen := [key for key, shape in expected.items() if tuple(arrays[key].shape) != shape]:
        key = misshapen[0]
        raise UserError(
            f"{source}: array '{shown(key)}' has the shape {tuple(arrays[key].shape)}, but the model needs "
            f"{expected[key]}{_and_more(misshapen)}; is it another model's file?"
        )


def check_arrangement(config: ModelConfig, chains: bool, source: str) -> None:
    """Raise UserError unless the model is one of chains where a file's is. `chains`: whether the file's is a multimer's."""
    found = "multimer" if chains else "monomer"
    if found != config.arrangement:
        wanted = "model_1_multimer_v3" if chains else "model_1_ptm"
        raise UserError(
            f"{source}: holds a {found} model, but the model's arrangement is {config.arrangement}; give another file, or "
            f"the preset of a {found} model, such as {wanted}"
        )


def _and_more(keys: list[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
