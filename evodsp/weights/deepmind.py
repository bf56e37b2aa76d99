"""Read and write DeepMind's parameter files (`params_model_*.npz`), by the table in `names.py`.

The file must have exactly the model's arrays, each in the right shape. Values are copied, so the round trip of float32, the
dtype of the published files, is bitwise identical; other floats are converted to float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.model.alphafold import AlphaFold
from evodsp.printing import quoted
from evodsp.reading.array_files import read_archive
from evodsp.weights.names import Name, block_probes, check_readable, is_fused, parameter_names, with_blocks
from evodsp.weights.parameter_file import container
from evodsp.weights.untrusted import check_arrangement, check_arrays, check_finite

MULTIMER_MARK = "/~_relative_encoding/"  # a scope that monomer models do not have


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of a parameter file. Raises UserError if it is not an .npz file of finite floats."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such parameter file; give DeepMind's params_model_<n>.npz")
    if container(path) is None:
        raise UserError(f"{path}: not an .npz file (or cut short); give DeepMind's params_model_<n>.npz")
    arrays = read_archive(path, "download it again")
    for key, array in arrays.items():
        if array.dtype.kind != "f":
            raise UserError(f"{path}: '{quoted(key)}' is not an array of floats; give DeepMind's params_model_<n>.npz")
    check_finite(arrays, path)
    return arrays


def write_npz(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a parameter file. It appears whole or not at all."""
    with whole_file(path) as partial, partial.open("wb") as file:
        np.savez(file, **dict(arrays))  # type: ignore[arg-type]  # a key may not be 'allow_pickle'; none is


def load_deepmind(path: str | Path, model: AlphaFold) -> None:
    """Set every parameter of `model` from DeepMind's parameter file `path`.

    Raises UserError that names the first array which is missing, unknown or of another shape; the model is then unchanged.
    """
    set_parameters(model, read_npz(path), str(path))


def set_parameters(model: AlphaFold, arrays: Mapping[str, np.ndarray], source: str = "parameter file") -> None:
    """Set every parameter of `model` from DeepMind's arrays, in either layout of triangle multiplication.

    `source`: the file, for error messages. Raises UserError that names the first array which is missing, unknown or of another
    shape; the model is then unchanged.
    """
    load_arrays(model, fitting(model, arrays, source), arrays)


def fitting(model: AlphaFold, arrays: Mapping[str, np.ndarray], source: str) -> list[Name]:
    """The names of the parameters of `model`, which may be on the meta device. Raises UserError as `set_parameters` does."""
    check_arrangement(model.config, any(MULTIMER_MARK in key for key in arrays), source)
    names = parameter_names(model.config, fused=is_fused(arrays))
    check_arrays(arrays, expected_shapes(model, names), source)
    return names


def export_deepmind(model: AlphaFold, fused: bool = False) -> dict[str, np.ndarray]:
    """The parameters of `model` as DeepMind's arrays, float32, with full keys.

    `fused`: keep both sides of triangle multiplication in one array, as newer files do.
    Raises UserError if DeepMind's model does not have the sub-layers.
    """
    check_readable(model.config)
    parameters = dict(model.named_parameters())
    single: dict[str, np.ndarray] = {}
    stacked: dict[str, list[np.ndarray]] = defaultdict(list)
    for name in parameter_names(model.config, fused):
        for key, array in zip(name.keys, their_arrays(name, parameters[name.ours]), strict=True):
            if name.block is None:
                single[key] = array
            else:
                stacked[key].append(array)
    return single | {key: np.stack(blocks) for key, blocks in stacked.items()}


def with_blocks_of(config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> ModelConfig:
    """`config` with as many blocks in each stack as the arrays have along their leading axis."""
    probes = block_probes(config.arrangement)
    return with_blocks(
        config, {stack: len(arrays[key]) for stack, key in probes.items() if key in arrays and arrays[key].ndim}
    )


def expected_shapes(module: nn.Module, names: Iterable[Name]) -> dict[str, tuple[int, ...]]:
    """The shape of each of DeepMind's arrays; the arrays of a stack have a leading axis of blocks."""
    parameters = dict(module.named_parameters())
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        own = name.array_shapes(tuple(parameters[name.ours].shape))
        for key, shape in zip(name.keys, own, strict=True):
            # Names come in order of blocks: the last block's number plus one is the length.
            shapes[key] = shape if name.block is None else (name.block + 1, *shape)
    return shapes


def our_array(name: Name, arrays: Mapping[str, np.ndarray]) -> Tensor:
    """The value of one of our parameters from DeepMind's arrays."""
    parts = []
    for key in name.keys:
        array = arrays[key] if name.block is None else arrays[key][name.block]
        if name.layout == "vector":
            parts.append(array.reshape(-1))
        elif name.layout == "no_input":
            parts.append(array.reshape(-1, 1))
        elif name.layout == "input_first":
            parts.append(array.reshape(array.shape[0], -1).T)
        else:
            parts.append(array.reshape(-1, array.shape[-1]).T)
    return torch.from_numpy(np.ascontiguousarray(name.in_our_order(np.concatenate(parts))))


def their_arrays(name: Name, parameter: Tensor) -> list[np.ndarray]:
    """The inverse of `our_array`: the arrays that make up `parameter`, in the order of `name.keys`, one block of each."""
    shapes = name.array_shapes(tuple(parameter.shape))
    rows = name.in_their_order(parameter.detach().float().cpu().numpy())
    parts = np.split(rows, np.cumsum(name.sizes(len(rows)))[:-1])
    return [np.array(part.T, order="C").reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


@torch.no_grad()
def load_arrays(module: nn.Module, names: Iterable[Name], arrays: Mapping[str, np.ndarray]) -> None:
    """Set every parameter of `module` that `names` lists, from arrays that fit (`fitting`)."""
    parameters = dict(module.named_parameters())
    for name in names:
        parameters[name.ours].copy_(our_array(name, arrays))
