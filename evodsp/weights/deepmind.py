"""Read DeepMind's parameter arrays into a model, by the table of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from evodsp.errors import UserError, nearest
from evodsp.weights.names import Name


def our_array(name: Name, arrays: Mapping[str, np.ndarray]) -> Tensor:
    """The value of one of our parameters from DeepMind's arrays. Raises UserError if an array is missing."""
    parts = []
    for key in name.keys:
        if key not in arrays:
            raise UserError(f"parameter file: no array '{key}' (for {name.ours}).{nearest(key, arrays)}")
        array = arrays[key] if name.block is None else arrays[key][name.block]
        if name.layout == "vector":
            parts.append(array.reshape(-1))
        elif name.layout == "input_first":
            parts.append(array.reshape(array.shape[0], -1).T)
        else:
            parts.append(array.reshape(-1, array.shape[-1]).T)
    return torch.from_numpy(np.ascontiguousarray(np.concatenate(parts)))


@torch.no_grad()
def load_arrays(module: nn.Module, names: Iterable[Name], arrays: Mapping[str, np.ndarray]) -> None:
    """Set every parameter of `module` that `names` lists. Raises UserError on a missing or misshapen array."""
    parameters = dict(module.named_parameters())
    for name in names:
        value, parameter = our_array(name, arrays), parameters[name.ours]
        if value.shape != parameter.shape:
            raise UserError(
                f"parameter file: {' and '.join(name.keys)} give {tuple(value.shape)} for {name.ours}, "
                f"which has {tuple(parameter.shape)}; is this another model's file?"
            )
        parameter.copy_(value)
