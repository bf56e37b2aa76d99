"""Weights for the start of a training run from a file: evodsp's checkpoint or folder, DeepMind's `.npz` or OpenFold's `.pt`.

Unlike loading a model, the file and the model may each have parts that the other lacks, such as the head of the aligned error.
What both have must have the same sizes. A model of complexes may start from a checkpoint of single chains (`of_complexes`).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from evodsp.config import ModelConfig, child_name, layer_names
from evodsp.errors import UserError
from evodsp.model.adapters import is_adapter
from evodsp.model.alphafold import AlphaFold
from evodsp.printing import counted
from evodsp.weights import by_name, deepmind, openfold
from evodsp.weights.checkpoint import is_parameter_file, model_config, own_weights, read_checkpoint, sizes_by_name
from evodsp.weights.names import is_fused, parameter_names
from evodsp.weights.parameter_file import check_sum, container, is_pretrained, located, parameter_file
from evodsp.weights.untrusted import check_finite, on_meta

_BLOCK = re.compile(r"\bblocks\.\d+\.")
_OF_BLOCK = re.compile(r"(?P<stack>evoformer|extra_msa_stack)\.blocks\.(?P<number>\d+)\.(?P<part>.*)")
_MOVED = ("msa_stack.outer_product_mean.", "pair_stack.")
_BLOCKS = ("evoformer.blocks", "extra_msa.blocks")
_PARTS = {
    "templates.": "templates.enabled",
    "heads.pae_": "heads.predicted_aligned_error",
    "heads.experimentally_resolved": "heads.experimentally_resolved",
}
"""Parts that a model may have or not: the beginning of their sizes' names, and the switch."""
OF_COMPLEXES = {
    "heads.masked_msa.logits.weight": 0,
    "heads.masked_msa.logits.bias": 0,
    "input_embedder.left.weight": 1,  # the first column stands for breaks of a chain
    "input_embedder.right.weight": 1,
    "input_embedder.target_to_msa.weight": 1,
    "input_embedder.relative_position.weight": 0,
}
"""Weights that have another shape in a model of complexes: the first column that it takes from one of single chains. Rows and
columns after the last that it has, such as that of the mask token, are left out; where it has more, they begin with zeros."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Initialised:
    """The outcome of `initialise`."""

    taken: int
    """Numbers (weights) of the model that were taken from the file."""
    of: int
    """Numbers that the model has."""
    new: tuple[str, ...]
    """Parameters of the model that the file lacks. They keep their initial values."""
    left_out: tuple[str, ...]
    """Arrays of the file that the model lacks, by the file's names."""
    zeros: tuple[str, ...] = ()
    """For each array that is wider than the file's: how many of its columns begin with zeros."""

    def lines(self, source: str) -> list[str]:
        """The account for the user: one line, and one each for what is new and what is left out."""
        told = [f"starts from {source}: {self.taken:,} of {self.of:,} weights, optimizer and step anew"]
        if self.new:
            told.append(f"new, at their initial values: {_grouped(self.new)}")
        if self.zeros:
            told.append(f"new, at zero: {', '.join(self.zeros)}")
        if self.left_out:
            told.append(f"left out, in the file but not in the model: {_grouped(self.left_out)}")
        return told


def check_initial(path: str | Path, config: ModelConfig) -> None:
    """Raise UserError if `path` is no file of weights, or an evodsp checkpoint of other sizes than `config`.

    Reads little of the file. The arrays of other programs' files are checked when they are read.
    """
    path = _located(path)
    if not Path(path).exists():
        raise UserError(
            f"--init_from {path}: no such file; give a checkpoint, a folder of `weights export --format safetensors`, "
            "DeepMind's .npz or OpenFold's .pt, or the name of published parameters, such as model_1_ptm"
        )
    if Path(path).is_file() and container(Path(path)) is None:
        raise UserError(
            f"--init_from {path}: neither a checkpoint nor a parameter file (or cut short); give a .ckpt file written by "
            "`evodsp fit`, DeepMind's .npz or OpenFold's .pt"
        )
    if is_parameter_file(path):
        return
    saved, wanted = sizes_by_name(model_config(path)), sizes_by_name(config)
    starts_complexes = saved["arrangement"] == "monomer" and wanted["arrangement"] == "multimer"
    for key, value in wanted.items():
        if starts_complexes and key.startswith(("arrangement", "templates.")):
            continue
        if starts_complexes and key in _BLOCKS and value == saved[key] + 1:  # see `one_block_on`
            continue
        switch = next((switch for part, switch in _PARTS.items() if key.startswith(part)), None)
        absent = switch is not None and not (saved[switch] and wanted[switch])
        free = (
            absent
            or key in _PARTS.values()
            or key == "templates.torsions"
            or key.endswith(("dropout", "checkpoint", "layers"))
        )
        if saved[key] != value and not free:
            raise UserError(
                f"--init_from {path}: trained with model.{key} {saved[key]}, but the config says {value}; set model.{key} "
                f"to {saved[key]}"
            )


@torch.no_grad()
def initialise(model: AlphaFold, path: str | Path, raw: bool = False) -> Initialised:
    """Copy into `model` the weights of a file, as far as it has them.

    raw: take the raw weights of a checkpoint of evodsp or of OpenFold; by default, their moving average if there is one.

    Raises UserError if the file cannot be read, holds none of the model's parameters, an array of another shape or a number
    that is not finite; the model is then unchanged.
    """
    path = _located(path)
    check_initial(path, model.config)
    found, left_out, zeros = (_others if is_parameter_file(path) else _own)(model, path, raw)
    parameters = dict(model.named_parameters())
    if not found:
        raise UserError(f"--init_from {path}: holds none of the model's parameters; give a file of an AlphaFold2 model")
    check_finite(found, f"--init_from {path}")
    for name, value in found.items():
        parameters[name].copy_(value)
    taken = sum(parameters[name].numel() for name in found)
    taken -= sum(parameters[name][..., :columns].numel() for name, columns in zeros.items())
    new = tuple(name for name in parameters if name not in found)
    wider = tuple(f"{columns} of {parameters[name].shape[-1]} columns of {name}" for name, columns in zeros.items())
    return Initialised(taken, sum(value.numel() for value in parameters.values()), new, tuple(left_out), wider)


def _located(source: str | Path) -> Path:
    """The file or folder of `init_from`. Published parameters that it names are fetched if they are not there."""
    is_name = str(source) in by_name.NAMES and not Path(source).exists()
    return by_name.fetch_weights([str(source)])[0] if is_name else located(source)


Found = tuple[dict[str, Tensor], list[str], Mapping[str, int]]
"""Values of the model's parameters, by our names; the names of the arrays that the model lacks; and for the parameters that are
wider than the file's arrays the number of columns that the file lacks, which are zeros."""


def _own(model: AlphaFold, path: str | Path, raw: bool) -> Found:
    saved = own_weights(path, read_checkpoint(path), raw)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    zeros: dict[str, int] = {}
    other = _of_another_class(model_config(path), model.config)
    usable = arrays = {name: value for name, value in saved.items() if not name.startswith(other)}
    if model.config.arrangement == "multimer" and model_config(path).arrangement == "monomer":
        usable, zeros = of_complexes(usable, shapes), columns_lacking(usable, shapes)
        arrays = one_block_on(usable, shapes)
    _check_shapes(path, {key: value.shape for key, value in arrays.items()}, _our_shapes, model.config)
    if is_pretrained(path):
        check_sum(path)
    found = {name: value for name, value in arrays.items() if name in shapes}
    left_out = [*(name for name in saved if name not in usable), *(name for name in arrays if name not in found)]
    return found, left_out, zeros


def _of_another_class(saved: ModelConfig, config: ModelConfig) -> tuple[str, ...]:
    """Prefixes of the names of parameters whose sub-layer has the same name in both models, but another class."""
    found = []
    for stack, module in (("evoformer", "evoformer"), ("extra_msa", "extra_msa_stack")):
        there, here = (
            {own.name: own.path for own in layer_names(of.in_order(getattr(of, stack)).layers or ())}
            for of in (saved, config)
        )
        differing = [child_name(name) for name in there.keys() & here if there[name] != here[name]]
        found += [
            f"{module}.blocks.{number}.{part}.{path}."
            for number in range(getattr(config, stack).blocks)
            for part in ("msa_stack", "pair_stack")
            for path in differing
        ]
    return tuple(found)


def columns_lacking(arrays: Mapping[str, Tensor], shapes: Shapes) -> dict[str, int]:
    """The number of columns of a model of complexes that weights of single chains lack, for each of `OF_COMPLEXES` that lacks
    some."""
    both = OF_COMPLEXES.keys() & arrays.keys() & shapes.keys()
    lacking = {name: shapes[name][-1] - (arrays[name].shape[-1] - OF_COMPLEXES[name]) for name in sorted(both)}
    return {name: columns for name, columns in lacking.items() if columns > 0}


def of_complexes(arrays: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    """The weights of single chains that a model of complexes takes, in its shapes. Templates are embedded in another way there.

    So the first pair representation of a complex of one chain is that of the chain. What tells chains from each other begins
    with zeros.
    """
    taken = {name: value for name, value in arrays.items() if not name.startswith("template_")}
    for name in OF_COMPLEXES.keys() & taken.keys() & shapes.keys():
        part = taken[name][..., OF_COMPLEXES[name] :][tuple(map(slice, shapes[name]))]
        taken[name] = F.pad(part, (0, shapes[name][-1] - part.shape[-1]))
    return taken


def one_block_on(arrays: Mapping[str, Tensor], shapes: Shapes) -> dict[str, Tensor]:
    """The weights of stacks that have a block more in a model of complexes: outer product and pair stack of block k are those
    of block k + 1 there.

    A block of complexes begins with the outer product of the m that it is given, a block of single chains ends with that of
    the m that it has made. So each outer product still has the m, and each pair stack the z, that it was trained with. Only
    the pair bias of attention within the MSA is that of z before its pair stack. What the first and the last block have no
    weights for begins as the identity.
    """
    moved = {}
    for name, value in arrays.items():
        if found := _OF_BLOCK.match(name):
            stack, number, part = found["stack"], int(found["number"]), found["part"]
            if _count(stack, shapes) == _count(stack, arrays) + 1 and part.startswith(_MOVED):
                name = f"{stack}.blocks.{number + 1}.{part}"
        moved[name] = value
    return moved


def _count(stack: str, names: Iterable[str]) -> int:
    """The number of blocks of a stack."""
    return len({found["number"] for name in names if (found := _OF_BLOCK.match(name)) and found["stack"] == stack})


def _others(model: AlphaFold, path: str | Path, raw: bool) -> Found:
    """Parameters of the model that DeepMind's or OpenFold's have."""
    is_deepmind = container(parameter_file(path)) == "npz"
    program = deepmind if is_deepmind else openfold
    arrays: Mapping[str, np.ndarray | Tensor]
    arrays = deepmind.read_npz(path) if is_deepmind else openfold.read_openfold(path, raw)
    fused = is_fused(arrays)
    _check_blocks(path, model.config, program.with_blocks_of(model.config, arrays))
    names = parameter_names(model.config, fused)
    keys = {name: name.keys if is_deepmind else name.openfold for name in names}
    known = {key for own in keys.values() for key in own}
    if not is_deepmind:
        file_names = openfold.present_names(arrays, known, str(path))
        arrays = {present: arrays[key] for present, key in file_names.items()}

    def shapes(config: ModelConfig) -> Shapes:
        found: Shapes = program.expected_shapes(on_meta(config, "--init_from"), parameter_names(config, fused))
        return found

    _check_shapes(path, {key: tuple(value.shape) for key, value in arrays.items()}, shapes, model.config)
    found = {name.ours: program.our_array(name, arrays) for name, own in keys.items() if _has(path, arrays, own)}
    return found, [key for key in arrays if key not in known], {}


def _has(path: str | Path, arrays: Mapping[str, np.ndarray | Tensor], keys: Iterable[str]) -> bool:
    """Whether the file has all arrays of a parameter. Raises UserError if it has some of them only."""
    present = {key: key in arrays for key in keys}
    if any(present.values()) and not all(present.values()):
        lacking = next(key for key, there in present.items() if not there)
        raise UserError(f"--init_from {path}: no array '{lacking}', which belongs to others in it; is it damaged?")
    return all(present.values())


def _check_blocks(path: str | Path, config: ModelConfig, found: ModelConfig) -> None:
    stacks = ("evoformer", "extra_msa", *(["templates"] if config.templates.enabled else []))
    for stack in stacks:
        there, here = getattr(found, stack).blocks, getattr(config, stack).blocks
        if there != here:
            raise UserError(
                f"--init_from {path}: has {there} blocks in this stack, but model.{stack}.blocks is {here}; set it to "
                f"{there}"
            )


def _check_shapes(
    path: str | Path, arrays: Shapes, shapes: Callable[[ModelConfig], Shapes], config: ModelConfig
) -> None:
    """Raise UserError that names the first array of another shape, both shapes, and the settings that it depends on."""
    for key, expected in shapes(config).items():
        found = tuple(arrays.get(key, expected))
        if found != tuple(expected):
            settings = _settings_behind(key, shapes, config, found, expected)
            fix = f"change {' or '.join(settings)}" if settings else "is it another model's file?"
            raise UserError(
                f"--init_from {path}: array '{key}' has the shape {found}, but the model needs {tuple(expected)}; {fix}"
            )


def _settings_behind(
    key: str,
    shapes: Callable[[ModelConfig], Shapes],
    config: ModelConfig,
    found: tuple[int, ...],
    expected: tuple[int, ...],
) -> list[str]:
    """The settings that change an array's shape on the axes where it differs: each one is doubled, with one block a stack."""
    wrong = [axis for axis, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b]
    small = _with(config, {"extra_msa.blocks": 1, "evoformer.blocks": 1, "templates.blocks": 1})
    first = _BLOCK.sub("blocks.0.", key)
    before = shapes(small)[first]
    behind = []
    for name, value in sizes_by_name(small).items():
        if type(value) is not int or value == 0 or name.endswith("blocks"):
            continue
        after = shapes(_with(small, {name: 2 * value})).get(first, before)
        if any(after[axis] != before[axis] for axis in wrong):
            behind.append(f"model.{name}")
    return behind


def _with(config: ModelConfig, sizes: Mapping[str, int]) -> ModelConfig:
    """`config` with these settings, by dotted names of two parts."""
    for name, value in sizes.items():
        part, field = name.split(".")
        config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **{field: value})})
    return config


def _our_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in on_meta(config, "--init_from").named_parameters()}


def _grouped(names: Iterable[str]) -> str:
    """'heads.distogram (2 arrays), …': names by the part of the model that they belong to."""
    counts: Counter[str] = Counter(_part(name) for name in names)
    return ", ".join(f"{part} ({counted(count, 'array')})" for part, count in counts.items())


def _part(name: str) -> str:
    """'heads.distogram' of 'heads.distogram.linear.weight'; DeepMind's names have slashes and a common beginning."""
    if is_adapter(name):
        return f"adapters of {name.partition('.')[0]}"
    if "/" in name:
        return "/".join(name.split("/")[2:4]) or name
    first, *rest = name.split(".")
    return ".".join([first, *rest[:1]]) if "heads" in first else first
