"""Makes a model written for one device parallel: its stages say along which axis they compute, and the rest is done here.

    mesh = init_mesh(sequence=4)
    parallelize(model, mesh, "batch time space channel",
                {"blocks.*.spatial": "space", "blocks.*.temporal": "time"}, region="blocks")

The tensor is split where it enters the region, and gathered where it leaves it. A stage is a submodule that mixes positions
along some axes. If the tensor is sharded along one of them, it is switched to another axis before the stage. All other
modules treat positions one by one, run on shards, and need not be mentioned. Modules are not changed: they get hooks.

A tensor is here in one of several STATES: whole, or sharded along one axis (the arXiv paper's table 2).

    from \\ to     whole      axis i
    whole          -          split (no communication)
    axis i         gather     -
    axis j         gather     switch (all-to-all)
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from evodsp.errors import UserError, nearest
from evodsp.parallel.functional import gather, split, switch
from evodsp.parallel.group import Group
from evodsp.parallel.layout import shard_sizes
from evodsp.parallel.mesh import Ranks, group_of

Model = TypeVar("Model", bound=nn.Module)
State = str | None
"""Name of the sharded axis; None: whole."""


@dataclass(frozen=True)
class Stage:
    """What a submodule computes along, and which of its arguments are sharded. A layout names a tensor's axes, in order."""

    along: str = ""
    """Axes along which the stage mixes positions, separated by spaces. They are whole while it runs. If that leaves no axis to
    shard, the tensor is gathered for the stage. Empty: the stage treats positions one by one, and is listed for its `whole`
    arguments."""
    residual: Literal["outside", "inside"] = "outside"
    """`outside`: the result takes the state of the input again, because the caller adds it to that input (x +
    stage(x)). `inside`: the stage holds its residual connection, as a whole transformer block does; the result stays in
    the state in which it was computed, which saves a switch if the next stage needs it so."""
    sharded: Mapping[str, str] | None = None
    """Arguments that arrive sharded, with their layouts: {"x": "batch time space channel"}. None: the first argument,
    in the model's layout."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Arguments that every rank holds whole and of which the stage needs its shard, with their layouts: masks, positions."""
    returns: Mapping[int, str] | None = None
    """Which items of a returned tuple are sharded, with their layouts. None: the only or first one, in the layout of the first
    sharded argument."""


def parallelize(
    model: Model,
    mesh: Ranks,
    layout: str,
    stages: Mapping[str, str | Stage],
    region: str = "",
    shard: str | None = None,
) -> Model:
    """Spread each forward and backward pass of `model` over the ranks of `mesh`. Returns `model`.

    `layout`: names of the axes of the tensor that is sharded, in order, such as "batch time space channel". `stages`:
    by path of a submodule (`*` stands for any one name), the axes along which it computes, or a `Stage`. `region`: path
    of the submodule whose first argument is split and whose result is gathered; "" is the model. A ModuleList or
    Sequential stands for its first and last member. `shard`: the axis along which to split; None: the one that is
    needed whole last.

    All ranks must call the model with the same arguments. After `backward`, the mean over ranks of each parameter's
    gradient is its gradient: DDP and FSDP over all ranks compute it, otherwise `average_gradients`. Random numbers are
    each rank's own, unless they are drawn with `dropout` of this package. Axes of one position are never sharded.

    A model may be parallelized twice, for two tensors with different axes (an MSA and a pair representation, for instance).

    Raises UserError for a path that names no module, an axis that is not in the layout, and a module named twice.
    """
    names = _axes(layout)
    found = _find_stages(model, stages, names)
    candidates = [name for name in names if name == shard or any(name in s.along.split() for s in found.values())]
    if shard is not None and shard not in names:
        raise UserError(f"shard is '{shard}', but the layout has the axes {', '.join(names)}.{nearest(shard, names)}")
    for path, stage in found.items():
        for argument, given in (stage.sharded or {}).items():
            lacking = [name for name in candidates if name not in given.split()]
            if lacking:
                raise UserError(
                    f"stage {path}: the layout '{given}' of argument {argument} lacks the axis {lacking[0]}, along which "
                    "tensors are sharded; pass the argument whole, and list it under `whole`"
                )
    first, last = _ends(model, region)
    router = _Router(group_of(mesh), names, candidates, [stage.along.split() for stage in found.values()], shard)
    if router.group.size > 1:
        # Hooks run in the order of registration: the region is entered before its first stage, and left after its last one.
        first.register_forward_pre_hook(router.enter, with_kwargs=True)
        for position, (path, stage) in enumerate(found.items()):
            hooks = _StageHooks(router, path, stage, position)
            module = model.get_submodule(path)
            module.register_forward_pre_hook(hooks.before, with_kwargs=True)
            module.register_forward_hook(hooks.after)
        last.register_forward_hook(router.leave)
    return model


@dataclass(eq=False)
class _Pass:
    """A forward pass: the whole size of each axis."""

    sizes: dict[str, int]


class _Router:
    """Moves the tensors of one model between states."""

    def __init__(
        self,
        group: Group,
        layout: Sequence[str],
        candidates: Sequence[str],
        uses: Sequence[Sequence[str]],
        shard: str | None,
    ) -> None:
        """`candidates`: axes that may be sharded. `uses`: axes that each stage needs whole, in the order of the stages."""
        self.group, self.layout, self.candidates, self.uses, self.shard = group, layout, candidates, uses, shard
        self._pass: _Pass | None = None
        self._unfinished: weakref.WeakSet[_Pass] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Router:
        """Copies of a model share it: a process group cannot be copied."""
        return self

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Split the first argument of the region."""
        where = _Argument.first(args, kwargs)
        x = where.get(args, kwargs)
        if not isinstance(x, Tensor) or x.ndim != len(self.layout):
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UserError(
                f"the region's first argument is {shape}, but the layout '{' '.join(self.layout)}' has "
                f"{len(self.layout)} axes; give the layout of this tensor, or another region"
            )
        sizes = dict(zip(self.layout, x.shape, strict=True))
        self._pass = _Pass({name: sizes[name] for name in self.candidates if sizes[name] > 1})
        home = self.shard if self.shard in self._pass.sizes else self.free_axis((), 0)
        x = self.move(x, self.layout, None, home)
        if x.requires_grad:
            done, unfinished = weakref.ref(self._pass), self._unfinished
            x.register_hook(lambda _: unfinished.discard(found) if (found := done()) else None)
        return where.put(x, args, kwargs)

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Gather the region's result."""

        def whole(x: Tensor) -> Tensor:
            return self.move(x, self.layout, self.state(x, self.layout, "the region's result"), None)

        output = _with_items(output, {0: whole})
        first = output[0] if isinstance(output, tuple) else output
        if first.grad_fn is not None and self._pass is not None:
            first.grad_fn.metadata["evodsp pass"] = self._pass  # lives as long as this graph
            self._unfinished.add(self._pass)
        return output

    def sizes(self) -> dict[str, int]:
        """Whole sizes of the axes that may be sharded, in the pass that is running."""
        if self._pass is None:
            raise UserError("a stage ran before the region that holds it; name the region whose input must be split")
        # Activation checkpointing runs stages again, in the backward pass. Nothing says to which forward pass they belong.
        recomputing = torch._C._current_graph_task_id() != -1
        if recomputing and any(other.sizes != self._pass.sizes for other in self._unfinished):
            raise UserError(
                "activations are recomputed, but two forward passes with inputs of different sizes await their backward pass; "
                "run the backward pass of one before the forward pass of the other"
            )
        return self._pass.sizes

    def state(self, x: Tensor, layout: Sequence[str], name: str) -> State:
        """How `x` is sharded, from its shape. Axes have at least two positions, so that each state has another shape.

        The shape is a better witness than a record of what was done: it also holds for recomputed activations, skipped blocks
        and tensors that a model keeps.
        """
        whole, rank = self.sizes(), self.group.rank
        found = {axis: x.shape[layout.index(axis)] for axis in whole} if x.ndim == len(layout) else {}
        for sharded in (None, *whole):
            local = {axis: shard_sizes(n, self.group.size)[rank] if axis == sharded else n for axis, n in whole.items()}
            if found == local:
                return sharded
        sizes = ", ".join(f"{axis} {n}" for axis, n in whole.items())
        raise UserError(
            f"{name} has the shape {list(x.shape)}, which is no shard of '{' '.join(layout)}' with {sizes}; if code outside a "
            "stage adds its result to its input, the stage needs residual='outside'"
        )

    def free_axis(self, along: Sequence[str], position: int) -> State:
        """The axis to shard while a stage computes along `along`: the one that a later stage needs whole last, so that
        the fewest switches follow. None if there is none."""

        def next_use(axis: str) -> int:
            return next((n for n, needed in enumerate(self.uses[position:]) if axis in needed), len(self.uses))

        free = [axis for axis in self.sizes() if axis not in along]
        return max(free, key=next_use) if free else None

    def move(self, x: Tensor, layout: Sequence[str], old: State, new: State) -> Tensor:
        """`x` in another state."""
        if old == new:
            return x
        if old is None:
            return split(x, layout.index(str(new)), self.group)
        source, whole = layout.index(old), self.sizes()[old]
        if new is None:
            return gather(x, source, whole, self.group)
        return switch(x, source, layout.index(new), whole, self.group)


class _StageHooks:
    """Brings a stage's arguments into the state that it needs, and its result back."""

    def __init__(self, router: _Router, path: str, stage: Stage, position: int) -> None:
        """`position`: the stage's number in the order of the model."""
        self.router, self.path, self.stage, self.position = router, path, stage, position
        self.along = stage.along.split()
        self._calls: list[tuple[State, State]] = []
        """Of each call that runs: the state in which its input came, and the one in which it computes. A call that fails leaves
        its entry behind, but the last entry is always the latest call's."""

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        router, stage = self.router, self.stage
        sharded = stage.sharded if stage.sharded is not None else {"": " ".join(router.layout)}
        came: list[tuple[_Argument, list[str], State]] = []
        for name, layout in sharded.items():
            where, axes = _Argument.named(module, name, args, kwargs, self.path), layout.split()
            x = where.get(args, kwargs)
            if x is not None:
                came.append((where, axes, router.state(x, axes, f"argument {name or 1} of stage {self.path}")))
        if not came:
            raise UserError(f"stage {self.path} was called without its sharded argument")
        computing = self._computing(came[0][2])
        self._calls.append((came[0][2], computing))
        for where, axes, state in came:
            args, kwargs = where.put(router.move(where.get(args, kwargs), axes, state, computing), args, kwargs)
        for name, layout in stage.whole.items():
            where, axes = _Argument.named(module, name, args, kwargs, self.path), layout.split()
            x = where.get(args, kwargs)
            if isinstance(x, Tensor) and computing in axes:
                args, kwargs = where.put(router.move(x, axes, None, computing), args, kwargs)
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        came, computed = self._calls.pop()
        if self.stage.residual == "inside" or came == computed:
            return output
        layout = next(iter(self.stage.sharded.values())) if self.stage.sharded else " ".join(self.router.layout)
        items = self.stage.returns if self.stage.returns is not None else {0: layout}

        def back(axes: list[str]) -> Any:
            return lambda x: self.router.move(x, axes, computed, came)

        return _with_items(output, {n: back(item.split()) for n, item in items.items()})

    def _computing(self, came: State) -> State:
        """The state in which the stage computes, for an input in state `came`."""
        if came not in self.along and (came is not None or not self.along):
            return came
        return self.router.free_axis(self.along, self.position + 1)


@dataclass(frozen=True)
class _Argument:
    """Where an argument of a call is: its position, or its keyword."""

    key: int | str

    @classmethod
    def first(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Argument:
        """The call's first argument."""
        return cls(0 if args else next(iter(kwargs), 0))

    @classmethod
    def named(cls, module: nn.Module, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], path: str) -> _Argument:
        """The argument of this name of the module's forward; "" is the first one."""
        if not name:
            return cls.first(args, kwargs)
        if name in kwargs:
            return cls(name)
        parameters = list(inspect.signature(module.forward).parameters)
        if name not in parameters:
            raise UserError(
                f"stage {path}: its forward has no argument {name}, only {', '.join(parameters)}.{nearest(name, parameters)}"
            )
        return cls(parameters.index(name))

    def get(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument; None if the call leaves it out."""
        if isinstance(self.key, str):
            return kwargs[self.key]
        return args[self.key] if self.key < len(args) else None

    def put(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with this one replaced."""
        if isinstance(self.key, str):
            return args, {**kwargs, self.key: x}
        return (*args[: self.key], x, *args[self.key + 1 :]), kwargs


def _with_items(output: Any, changes: Mapping[int, Any]) -> Any:
    """A module's output, one tensor or a tuple, with functions applied to some items."""
    if isinstance(output, Tensor):
        return changes[0](output) if 0 in changes else output
    items = [changes[n](x) if n in changes and x is not None else x for n, x in enumerate(output)]
    return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)


def _axes(layout: str) -> list[str]:
    """The names in a layout. Raises UserError if one occurs twice."""
    names = layout.split()
    if len(set(names)) < len(names):
        raise UserError(f"the layout '{layout}' names an axis twice; give every axis another name")
    return names


def _find_stages(model: nn.Module, stages: Mapping[str, str | Stage], layout: Sequence[str]) -> dict[str, Stage]:
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


def _matches(path: str, pattern: str) -> bool:
    """Whether a path fits a pattern; a `*` does not cross a dot."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _ends(model: nn.Module, region: str) -> tuple[nn.Module, nn.Module]:
    """The modules at whose entry and exit the region begins and ends."""
    try:
        module = model.get_submodule(region)
    except AttributeError:
        paths = [path for path, _ in model.named_modules()]
        raise UserError(f"region: no submodule is called {region}.{nearest(region, paths)}") from None
    if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
        return module[0], module[-1]
    return module, module
