r"""Parallelizes a model written for one device, given the axis along which each of its stages computes.

    mesh = init_mesh(sequence=4)
    parallelize(model, mesh, "batch time space channel",
                {"blocks.*.spatial": "space", "blocks.*.temporal": "time"}, region="blocks")

The tensor is split where it enters the region, and gathered where it leaves the region. A stage is a submodule that mixes
positions along some axes. If the tensor is sharded along one of them, it is switched to another axis before the stage. All
other modules treat positions one by one, run on shards, and need not be mentioned. Modules are not changed; hooks are added
to them.

A tensor is in one of several STATES: whole, or sharded along one axis (table 2 of the arXiv paper).

    from \ to     whole      axis i
    whole          -          split (no communication)
    axis i         gather     -
    axis j         gather     switch (all-to-all)

The declaration of the stages is checked before any rank communicates.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from evodsp.errors import UserError, nearest
from evodsp.parallel.collectives import shard_sizes
from evodsp.parallel.functional import gather, split, switch
from evodsp.parallel.group import Group, Ranks, group_of

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


Model = TypeVar("Model", bound=nn.Module)
State = str | None
"""Name of the sharded axis; None: whole."""


def parallelize(
    model: Model,
    mesh: Ranks,
    layout: str,
    stages: Mapping[str, str | Stage],
    region: str | Sequence[str] = "",
    shard: str | None = None,
    argument: str = "",
    result: int = 0,
) -> Model:
    """Spread each forward and backward pass of `model` over the ranks of `mesh`. Returns `model`.

    `layout`: names of the axes of the tensor that is sharded, in order, such as "batch time space channel". `stages`:
    by path of a submodule (`*` stands for any one name), the axes along which it computes, or a `Stage`.

    `region`: path of the submodule whose first argument is split and whose result is gathered; "" is the model. A ModuleList,
    ModuleDict or Sequential stands for its first and last member. Several paths, in the order in which they run, stand for
    modules that take turns: the tensor is split where it enters the first one, and gathered where it leaves the last one.
    `argument` and `result`: name of the region's argument that is split, if it is not the first, and number of the item that
    is gathered, if the region returns a tuple.

    `shard`: the axis along which to split; None: the axis that a stage needs whole last.

    All ranks must call the model with the same arguments. After `backward`, the mean over ranks of each parameter's
    gradient is its gradient: DDP and FSDP over all ranks compute it, otherwise `average_gradients`. Each rank draws its own
    random numbers, unless they are drawn with `dropout` of this package. Axes of one position are never sharded.
    Activations may be recomputed (torch.utils.checkpoint); with use_reentrant=True, run the backward pass of one input
    before the forward pass of another size.

    A model is parallelized once for each tensor that has axes of its own, an MSA and a pair representation, for instance.

    Raises UserError for a path that names no module, an axis that is not in the layout, a module named twice, stages that
    leave no axis to shard, a region that is parallelized with the same stages already, and a module of torch that mixes
    positions (a convolution, GroupNorm) outside of all stages.
    """
    names = axes_of(layout)
    found = find_stages(model, stages, names)
    candidates = axes_to_shard(names, found, shard)
    for path, stage in found.items():
        check_layouts(path, stage, candidates)
    regions = [region] if isinstance(region, str) else list(region)
    first, last = ends(model, regions)
    for path in regions:
        check_unlisted(model, path, found)
    uses = [stage.along.split() for stage in found.values()]
    router = _Router(group_of(mesh), names, candidates, uses, shard, ", ".join(regions), argument, result)
    if any(
        isinstance(before := getattr(hook, "__self__", None), _Router)
        and (before.layout, before.argument, before.uses) == (names, argument, uses)
        for hook in first._forward_pre_hooks.values()
    ):
        raise UserError(
            f"region '{region}' is parallelized already, with these stages; make the model anew to parallelize it again"
        )
    if router.group.size > 1:
        # Hooks run in the order of registration, so the region is entered before its first stage and left after its last one.
        model.register_forward_pre_hook(router.begin)
        first.register_forward_pre_hook(router.enter, with_kwargs=True)
        for position, (path, stage) in enumerate(found.items()):
            hooks = _StageHooks(router, path, stage, position)
            module = model.get_submodule(path)
            module.register_forward_pre_hook(hooks.before, with_kwargs=True)
            module.register_forward_hook(hooks.after)
        last.register_forward_hook(router.leave)
        model.register_forward_hook(router.end)
    return model


@dataclass(eq=False)
class _Pass:
    """A forward pass through the region."""

    sizes: dict[str, int]
    """Whole size of each axis that may be sharded."""
    left: bool = False
    """Whether the result was gathered."""


@dataclass(eq=False)
class _Router:
    """Moves one tensor of a model between states."""

    group: Group
    layout: Sequence[str]
    candidates: Sequence[str]
    """Axes that may be sharded."""
    uses: Sequence[Sequence[str]]
    """Axes that each stage needs whole, in the order of the stages."""
    shard: str | None
    region: str
    """The region's path or paths, for messages."""
    argument: str
    result: int
    _pass: _Pass | None = None
    """The forward pass that is running, or that a backward pass is recomputing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Router:
        """A router for a copy of the model, with the same ranks, because a process group cannot be copied."""
        return copy.copy(self)

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hook before the model's forward: no pass through the region has begun."""
        self._pass = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Split the region's argument."""
        place = f"region '{self.region}'"
        where = _Argument.named(module, self.argument, args, kwargs, place)
        x = _with_layout(where.get(args, kwargs), self.layout, f"argument {self.argument or 1} of {place}")
        sizes = dict(zip(self.layout, x.shape, strict=True))
        self._pass = _Pass({name: sizes[name] for name in self.candidates if sizes[name] > 1})
        home = self.shard if self.shard in self._pass.sizes else self.free_axis((), 0)
        return where.put(self.move(x, self.layout, None, home), args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Gather the region's result."""

        def whole(x: Any) -> Tensor:
            return self.move(x, self.layout, self.state(x, self.layout, f"the result of {place}"), None)

        place = f"region '{self.region}'"
        output = _with_items(output, {self.result: whole}, place)
        this = self._pass
        if this is not None:
            this.left = True

        def resume(gradient: Tensor) -> None:
            self._pass = this

        # Stages that are recomputed in the backward pass belong to the forward pass whose result got a gradient last.
        for x in (output,) if isinstance(output, Tensor) else output:
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(resume)
        return output

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Hook after the model's forward. A split tensor must have been gathered by now: nothing else would tell a shard
        from a whole tensor.
        """
        if self._pass is not None and not self._pass.left:
            raise UserError(
                f"the region '{self.region}' was entered but not left, because its last module did not run; "
                "name a module that always runs as the region"
            )

    def sizes(self) -> dict[str, int]:
        """Whole sizes of the axes that may be sharded."""
        assert self._pass is not None
        return self._pass.sizes

    def state(self, x: Any, layout: Sequence[str], name: str) -> State:
        """The state of `x`, inferred from its shape. Sharded axes have at least two positions, so each state has another
        shape.

        Inference from the shape, unlike a record of the state, also works for recomputed activations, skipped blocks and
        tensors that a model keeps.
        """
        if self._pass is None:
            raise UserError(
                f"{name} came before the region '{self.region}' was entered; name the region whose input must be split"
            )
        x, whole, rank = _with_layout(x, layout, name), self.sizes(), self.group.rank
        found = {axis: x.shape[layout.index(axis)] for axis in whole}
        for sharded in (None, *whole):
            local = {axis: shard_sizes(n, self.group.size)[rank] if axis == sharded else n for axis, n in whole.items()}
            if found == local:
                return sharded
        sizes = ", ".join(f"{axis} {n}" for axis, n in whole.items())
        raise UserError(
            f"{name} has the shape {list(x.shape)}, which is no shard of '{' '.join(layout)}' with {sizes}; if code "
            "outside a stage adds its result to its input, the stage needs residual='outside'"
        )

    def part(self, x: Any, layout: Sequence[str], state: State, name: str) -> Tensor:
        """The shard of `x`, which every rank holds whole. An axis of one position is broadcast, and not divided."""
        x = _with_layout(x, layout, name)
        for axis, size in zip(layout, x.shape, strict=True):
            if size not in (1, self.sizes().get(axis, size)):
                raise UserError(
                    f"{name} has {size} positions along {axis}, but the whole axis has {self.sizes()[axis]}; "
                    "list arguments that every rank holds whole under `whole`"
                )
        if state is None or state not in layout or x.shape[layout.index(state)] == 1:
            return x
        return split(x, layout.index(state), self.group)

    def free_axis(self, along: Sequence[str], position: int) -> State:
        """The axis to shard while a stage computes along `along`: the one that the later stages need whole last, so that
        the fewest switches follow. None if no axis is left."""

        def next_use(axis: str) -> int:
            return next((n for n, needed in enumerate(self.uses[position:]) if axis in needed), len(self.uses))

        free = [axis for axis in self.sizes() if axis not in along]
        return max(free, key=next_use) if free else None

    def move(self, x: Tensor, layout: Sequence[str], old: State, new: State) -> Tensor:
        """`x` in another state."""
        if old == new:
            return x
        if old is None:  # a copy, because a view would keep the whole tensor in memory
            return split(x, layout.index(str(new)), self.group).clone()
        source, whole = layout.index(old), self.sizes()[old]
        if new is None:
            return gather(x, source, whole, self.group)
        return switch(x, source, layout.index(new), whole, self.group)


class _StageHooks:
    """Moves a stage's arguments into the state that it needs, and its result back."""

    def __init__(self, router: _Router, path: str, stage: Stage, position: int) -> None:
        """`position`: the stage's number in the order of the model."""
        self.router, self.path, self.stage, self.position = router, path, stage, position
        self.along = stage.along.split()
        self._came: State = None
        """The state of the input in the latest call. (A stage does not call itself.)"""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        router, stage, place = self.router, self.stage, f"stage {self.path}"
        came: list[tuple[_Argument, list[str], State]] = []
        for name, axes in self._sharded():
            where = _Argument.named(module, name, args, kwargs, place)
            x = where.get(args, kwargs)
            if x is not None:
                came.append((where, axes, router.state(x, axes, f"argument {name or 1} of {place}")))
        if not came:
            raise UserError(f"{place} was called without its sharded argument; name it in Stage(sharded=...)")
        self._came = came[0][2]
        computing = self._computing(self._came)
        moved: dict[tuple[int, str], Tensor] = {}  # attention(x, x, x) moves its tensor once
        for where, axes, state in came:
            x = where.get(args, kwargs)
            key = id(x), " ".join(axes)
            if key not in moved:
                moved[key] = router.move(x, axes, state, computing)
            args, kwargs = where.put(moved[key], args, kwargs)
        for name, layout in stage.whole.items():
            where = _Argument.named(module, name, args, kwargs, place)
            x = where.get(args, kwargs)
            if x is not None:
                x = router.part(x, layout.split(), computing, f"argument {name} of {place}")
                args, kwargs = where.put(x, args, kwargs)
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.stage.residual == "inside" or not self.along:
            return output
        router, came, place = self.router, self._came, f"stage {self.path}"

        def back(axes: list[str]) -> Any:
            return lambda x: router.move(x, axes, router.state(x, axes, f"the result of {place}"), came)

        returned = self.stage.returns
        layouts = {0: self._sharded()[0][1]} if returned is None else {n: item.split() for n, item in returned.items()}
        return _with_items(output, {n: back(axes) for n, axes in layouts.items()}, place)

    def _sharded(self) -> list[tuple[str, list[str]]]:
        """Names of the sharded arguments, and their axes."""
        if self.stage.sharded is None:
            return [("", list(self.router.layout))]
        return [(name, layout.split()) for name, layout in self.stage.sharded.items()]

    def _computing(self, came: State) -> State:
        """The state in which the stage computes, for an input in state `came`."""
        if came not in self.along and (came is not None or not self.along):
            return came
        return self.router.free_axis(self.along, self.position + 1)


@dataclass(frozen=True)
class _Argument:
    """The place of an argument in a call: its position, or its keyword."""

    key: int | str

    @classmethod
    def named(
        cls, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], place: str
    ) -> _Argument:
        """The argument with this name of the module's forward; "" is the first one."""
        if name in kwargs:
            return cls(name)
        parameters = inspect.signature(module.forward).parameters
        names = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if not name:
            first = names[0] if names else next(iter(kwargs), "")
            return cls(first if not args and first in kwargs else 0)
        if name not in names:
            raise UserError(
                f"{place}: its forward has no argument {name}, only {', '.join(parameters)}.{nearest(name, parameters)}"
            )
        return cls(names.index(name))

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument; None if the call leaves it out."""
        if isinstance(self.key, str):
            return kwargs[self.key]
        return args[self.key] if self.key < len(args) else None

    def put(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with this one replaced."""
        if isinstance(self.key, str):
            return args, {**kwargs, self.key: x}
        return (*args[: self.key], x, *args[self.key + 1 :]), kwargs


def _with_items(output: Any, changes: Mapping[int, Any], place: str) -> Any:
    """A module's output, one tensor or a tuple, with functions applied to some items."""
    if isinstance(output, Tensor):
        items: Sequence[Any] = (output,)
    elif isinstance(output, tuple | list):
        items = output
    else:
        raise UserError(f"{place} returned a {type(output).__name__}, expected a tensor or a tuple; let it return one")
    if max(changes, default=0) >= len(items):
        raise UserError(
            f"{place} returned {len(items)} items, but item {max(changes)} should be sharded; items count from 0"
        )
    changed = [changes[n](x) if n in changes and x is not None else x for n, x in enumerate(items)]
    if isinstance(output, Tensor):
        return changed[0]
    return type(output)(*changed) if hasattr(output, "_fields") else type(output)(changed)


def _with_layout(x: Any, layout: Sequence[str], name: str) -> Tensor:
    """`x`, if it is a tensor with these axes; otherwise raises UserError."""
    if isinstance(x, Tensor) and x.ndim == len(layout):
        return x
    found = f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"of type {type(x).__name__}"
    raise UserError(
        f"{name} is {found}, but its layout '{' '.join(layout)}' has {len(layout)} axes; give the layout of this tensor"
    )
