"""The declaration of a model's stages and the axes along which they compute. It is checked before any rank communicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from evodsp.errors import UserError, nearest

MIXING = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.modules.conv._ConvNd,
    nn.GroupNorm,
    nn.RNNBase,
    nn.MultiheadAttention,
)
"""torch modules that mix positions."""


@dataclass(frozen=True)
class Stage:
    """The axes along which a submodule computes, and its sharded arguments. A layout names a tensor's axes, in order."""

    along: str = ""
    """Axes along which the stage mixes positions, separated by spaces. They are whole while it runs. If that leaves no axis to
    shard, the tensor is gathered for the stage. Empty: the stage treats positions one by one, and is listed for its `whole`
    arguments."""
    residual: Literal["outside", "inside"] = "outside"
    """`outside`: the result takes the state of the input again, because the caller adds it to that input (x + stage(x)).
    `inside`: the stage holds its residual connection, as a whole transformer block does; the result stays in the state in
    which it was computed, which saves a switch if the next stage needs that state."""
    sharded: Mapping[str, str] | None = None
    """Arguments that arrive sharded, with their layouts: {"x": "batch time space channel"}. None: the first argument,
    in the model's layout."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Arguments that every rank holds whole but of which the stage needs its shard, such as masks and positions, with their
    layouts."""
    returns: Mapping[int, str] | None = None
    """Sharded items of a returned tuple, by number, with their layouts. None: the only or first item, in the layout of the
    first sharded argument."""


def axes_of(layout: str) -> list[str]:
    """The names in a layout. Raises UserError if one occurs twice."""
    names = layout.split()
    if len(set(names)) < len(names):
        raise UserError(f"the layout '{layout}' names an axis twice; give every axis another name")
    return names


def find_stages(model: nn.Module, stages: Mapping[str, str | Stage], layout: Sequence[str]) -> dict[str, Stage]:
    """The stage of every matching submodule, by path, in the model's order."""
    paths = [path for path, _ in model.named_modules()]
    found: dict[str, Stage] = {}
    for pattern, given in stages.items():
        stage = Stage(given) if isinstance(given, str) else given
        for axis in stage.along.split():
            if axis not in layout:
                close = nearest(axis, layout)
                raise UserError(
                    f"stage {pattern} computes along '{axis}', but the layout has the axes {', '.join(layout)}.{close}"
                )
        matching = [path for path in paths if _matches(path, pattern)]
        if not matching:
            raise UserError(f"no submodule is called {pattern}.{nearest(pattern, paths)}")
        for path in matching:
            if path in found:
                raise UserError(f"submodule {path} matches two patterns, one of them {pattern}; name it once")
            found[path] = stage
    return {path: found[path] for path in paths if path in found}


def axes_to_shard(names: Sequence[str], stages: Mapping[str, Stage], shard: str | None) -> list[str]:
    """The axes that may be sharded: those along which some stage computes, and `shard`.

    Raises UserError if no stage leaves one of them, and `shard` is not given.
    """
    if shard is not None and shard not in names:
        raise UserError(f"shard is '{shard}', but the layout has the axes {', '.join(names)}.{nearest(shard, names)}")
    uses = [stage.along.split() for stage in stages.values()]
    found = [name for name in names if name == shard or any(name in axes for axes in uses)]
    if shard is None and not any(axes and set(found) - set(axes) for axes in uses):
        along = f"{', '.join(found)}, and each of them needs the tensor whole" if found else "no axis"
        raise UserError(f"stages compute along {along}; name the axis to shard with shard=, one of {', '.join(names)}")
    return found


def check_layouts(path: str, stage: Stage, candidates: Sequence[str]) -> None:
    """Raise UserError if a sharded argument or result lacks an axis along which tensors may be sharded."""
    given = [(f"argument {name}", "list it under `whole`", layout) for name, layout in (stage.sharded or {}).items()]
    given += [(f"result {n}", "leave it out of `returns`", layout) for n, layout in (stage.returns or {}).items()]
    for name, remedy, layout in given:
        lacking = [axis for axis in candidates if axis not in layout.split()]
        if lacking:
            raise UserError(
                f"stage {path}: the layout '{layout}' of {name} lacks the axis {lacking[0]}, along which tensors are sharded; "
                f"if every rank holds it whole, {remedy}"
            )


def check_unlisted(model: nn.Module, region: str, stages: Mapping[str, Stage]) -> None:
    """Raise UserError for a torch module in the region that mixes positions but is in no stage: it would silently see this
    rank's positions only."""
    for path, module in model.get_submodule(region).named_modules(prefix=region):
        mixes = isinstance(module, MIXING) and set(getattr(module, "kernel_size", (0,))) != {1}
        if mixes and not any(f"{path}.".startswith(f"{stage}." if stage else "") for stage in stages):
            raise UserError(
                f"{path or 'the model'} is a {type(module).__name__}, which mixes positions, but no stage holds it; name it in "
                "the stages, with the axes along which it computes ('' if it gets positions one by one)"
            )


def ends(model: nn.Module, regions: Sequence[str]) -> tuple[nn.Module, nn.Module]:
    """The modules where the region begins and ends: the first member of the first path, and the last member of the last."""
    if not regions:
        raise UserError(
            "region is empty; name at least one submodule, or leave it out, which stands for the whole model"
        )
    members = [_members(model, path) for path in regions]
    return members[0][0], members[-1][-1]


def _members(model: nn.Module, path: str) -> list[nn.Module]:
    """The modules that a path of a region names: the module itself, or the members of a container, which is never called
    itself.
    """
    try:
        module = model.get_submodule(path)
    except AttributeError:
        paths = [name for name, _ in model.named_modules()]
        raise UserError(f"region: no submodule is called {path}.{nearest(path, paths)}") from None
    members: list[nn.Module] = []
    if isinstance(module, nn.ModuleDict):
        members = list(module.values())
    elif isinstance(module, nn.ModuleList | nn.Sequential):
        members = list(module)
    return members or [module]


def _matches(path: str, pattern: str) -> bool:
    """Whether a path fits a pattern; a `*` does not cross a dot."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))
