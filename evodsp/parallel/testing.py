"""Compares a model that runs on several ranks with the same model on one device: outputs and all gradients.

    check(model, (video,), partial(parallelize, layout="batch time space channel", stages=stages, region="blocks"))

The ranks are processes of this machine, which communicate by gloo. Everything is in double precision, so that a difference is a
mistake. Every parameter is random: most models start with zeros in their residual branches, which hide what lies behind them.
"""

from __future__ import annotations

import copy
import pickle
import re
import sysconfig
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException, start_processes
from torch.utils._pytree import tree_leaves, tree_map

from evodsp.errors import UserError
from evodsp.parallel.collectives import shard_sizes
from evodsp.parallel.group import Group

Model = TypeVar("Model", bound=nn.Module)


def check(
    model: Callable[..., Any],
    example: Sequence[Any],
    sharded: Callable[[Any, Group], Callable[..., Any] | None],
    ranks: Sequence[int] = (2, 3, 4),
    tolerance: float = 1e-10,
    timeout: float = 60.0,
    run: Callable[..., list[Any]] | None = None,
) -> str:
    """Compare `sharded(model, group)`, on each number of ranks, with `model` on one device. Returns a line on what agreed.

    `model`: a module, or a function. `example`: its arguments, which every rank gets; choose sizes that the numbers of ranks
    do not divide. `sharded`: makes the model parallel in place, as `parallelize` does, or returns a module or function that
    takes the same arguments. What it returns is whole on all ranks, or sharded along an axis of two or more positions, in
    shards of `torch.tensor_split`'s sizes; a number is a loss, whose mean over ranks counts. So does the mean of gradients: of
    all parameters, and of the arguments that require gradients (if none does, of all floating-point ones).

    `tolerance`: of the largest element. `timeout`: seconds that a rank may wait for another. `run` starts the ranks in place
    of this function: run(n, function, *arguments) returns function(process group, *arguments) of n ranks.

    Raises AssertionError with the first module whose output differs, in the order in which modules end, or with the first
    wrong gradient of the backward pass; TimeoutError if a rank takes no part in a collective, RuntimeError if one fails, and
    UserError for what cannot be sent to another process. No process outlives the call.
    """
    model = dense(copy.deepcopy(model)) if isinstance(model, nn.Module) else model
    every = not any(_floats(x) and x.requires_grad for x in tree_leaves(example))
    example = tree_map(
        lambda x: x.detach().double().clone().requires_grad_(every or x.requires_grad) if _floats(x) else x,
        tuple(example),
    )
    try:
        sent = pickle.dumps((model, example, sharded))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"model, example and `sharded` go to processes of their own, but {error}; define classes and functions at the top "
            "of a module, and use functools.partial in place of a lambda"
        ) from None
    alone = _in_double(_pass, model, example)
    shapes, sizes = [x.shape for x in alone.outputs.values()], set[int]()
    for n in ranks:
        answers = (run or partial(_start, timeout))(n, _on_rank, sent, shapes)
        sizes |= _compare(alone, [pickle.loads(answer) for answer in answers], tolerance)
    axes = f"axes of {', '.join(map(str, sorted(sizes)))} positions" if sizes else "NO axis of a module's result"
    return (
        f"{', '.join(map(str, ranks))} ranks compute what one device does: {len(alone.outputs)} outputs, "
        f"{len(alone.gradients)} gradients; sharded were {axes}"
    )


def dense(model: Model) -> Model:
    """Make every parameter of `model` random, in double precision. Returns the model."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return model


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _tensors(x: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


@dataclass
class _Found:
    """Tensors of a pass, by name."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, Tensor] = field(default_factory=dict)
    """Results of all calls of modules, in the order in which the calls ended."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """In the order of the backward pass. Those that it did not reach come last, and are zero."""
    failure: str = ""
    """The traceback of the backward pass. The outputs may tell why it failed."""


def _on_rank(handle: Any, sent: bytes, shapes: Sequence[torch.Size]) -> bytes:
    """One rank's part. `shapes`: of the whole outputs."""
    model, example, sharded = pickle.loads(sent)
    return pickle.dumps(_in_double(_pass, model, example, sharded, shapes, Group(handle)))


def _in_double(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, where tensors that are made have double precision."""
    former = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return function(*arguments)
    finally:
        torch.set_default_dtype(former)


def _pass(
    model: Any, example: Any, sharded: Any = None, shapes: Sequence[torch.Size] = (), group: Group | None = None
) -> _Found:
    """A forward pass, and the backward pass of a loss that weighs each number of the outputs differently."""
    found, hooks, calls = _Found(), [], Counter[str]()
    rank, n = (group.rank, group.size) if group else (0, 1)
    form = (sharded(model, group) if sharded else None) or model
    module = form if isinstance(form, nn.Module) else model

    def ended(path: str, output: Any) -> None:
        calls[path] += 1
        for item, x in enumerate(_tensors(output)):
            found.modules[f"{path} (call {calls[path]}, result {item})"] = x.detach().clone()

    leaves = {f"argument {n}": x for n, x in enumerate(tree_leaves(example)) if _floats(x) and x.requires_grad}
    if isinstance(module, nn.Module):
        leaves |= {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        for path, each in module.named_modules():
            hooks.append(each.register_forward_hook(lambda _, __, x, path=path: ended(path or "the model", x)))
    torch.manual_seed(0)
    outputs = _tensors(form(*example))
    for hook in hooks:
        hook.remove()  # a backward pass that computes activations again calls modules
    found.outputs = {f"output {n}": x.detach().clone() for n, x in enumerate(outputs)}
    for name, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(lambda x, name=name: found.gradients.update({name: x.grad}))
    terms = []
    for x, whole in zip(outputs, shapes or [x.shape for x in outputs], strict=False):
        dim = _sharded_along({rank: x.shape}, whole, n)
        if x.requires_grad and dim is not None:
            weight = torch.arange(whole.numel()).view(whole).cos()
            terms.append((x * (weight if dim < 0 else n * weight.tensor_split(n, dim)[rank])).sum())
    try:
        if terms:
            torch.stack(terms).sum().backward()
    except Exception:
        found.failure = traceback.format_exc()
    found.gradients |= {name: torch.zeros_like(x) for name, x in leaves.items() if name not in found.gradients}
    return found


def _sharded_along(shapes: Mapping[int, Sequence[int]], whole: Sequence[int], n: int) -> int | None:
    """The dimension along which these shapes of some ranks are shards of n; -1 if they are whole; None if neither."""
    for dim in range(-1, len(whole)):
        sizes = shard_sizes(whole[dim], n) if dim >= 0 else []
        if all(
            [*shape] == [sizes[r] if d == dim else size for d, size in enumerate(whole)] for r, shape in shapes.items()
        ):
            return dim
    return None


def _compare(alone: _Found, found: list[_Found], tolerance: float) -> set[int]:
    """The sizes of the axes that are sharded. Raises AssertionError for the first difference."""
    n, sizes, wrong, first = len(found), set[int](), "", ""

    def difference(kind: str, name: str, whole: Tensor) -> str | None:
        """Difference in words; None if the ranks hold neither the whole tensor nor shards of it."""
        parts = [getattr(one, kind).get(name) for one in found]
        if kind == "gradients" or (kind == "outputs" and not whole.ndim and all(x.ndim == 0 for x in parts)):
            return _difference([torch.stack(parts).mean(0)], [whole], n, tolerance)
        shapes = {rank: x.shape for rank, x in enumerate(parts) if x is not None}
        dim = _sharded_along(shapes, whole.shape, n)
        if dim is None or len(shapes) < n:
            return None
        if dim >= 0:
            sizes.add(whole.shape[dim])
        shards = whole.tensor_split(n, dim) if dim >= 0 else [whole] * n
        text = _difference(parts, shards, n, tolerance)
        return f"{text} (shards along dimension {dim} of {[*whole.shape]})" if text and dim >= 0 else text

    for name, whole in alone.modules.items():
        first = first or (f"{name}: {text}" if (text := difference("modules", name, whole)) else "")
    for name, whole in alone.outputs.items():
        text = difference("outputs", name, whole)
        if text is None:
            shapes = [[*one.outputs[name].shape] if name in one.outputs else "missing" for one in found]
            text = f"shapes {shapes} on the ranks, expected {[*whole.shape]} or its shards along one axis"
        wrong = wrong or (f"{name}: {text}" if text else "")
    if wrong:
        raise AssertionError(f"on {n} ranks, {wrong}. The first module that differs is {first or 'none'}")
    for rank, one in enumerate(found):
        if one.failure:
            raise _failed(n, rank, one.failure)
    right = "the outputs"
    for name, whole in alone.gradients.items():
        if text := difference("gradients", name, whole):
            zero = [rank for rank, one in enumerate(found) if not one.gradients[name].any()]
            lost = f"; it is zero on ranks {zero}: a sum over ranks is missing" if zero else ""
            raise AssertionError(
                f"on {n} ranks, the gradient of {name}: {text}{lost}. The backward pass is right up to {right}: look at the "
                "collectives in between"
            )
        right = name
    return sizes


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor], n: int, tolerance: float) -> str:
    """Largest difference of the ranks' tensors, and the mistake of which it is typical; empty if they agree."""

    def errors(factor: float, found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[Tensor]:
        pairs = [(x.double(), factor * y.double()) for x, y in zip(found, expected, strict=True)]
        largest = max([0.1, *(y.abs().max().item() for _, y in pairs if y.numel())])
        return [
            ((x - y).abs() / largest).where((x != y) & ~(x.isnan() & y.isnan()), 0.0).nan_to_num(torch.inf)
            for x, y in pairs
        ]

    def agree(factor: float, found: Sequence[Tensor] = found, expected: Sequence[Tensor] = expected) -> bool:
        return all((error <= tolerance).all() for error in errors(factor, found, expected))

    if agree(1.0):
        return ""
    worst = [error.max().item() if error.numel() else 0.0 for error in errors(1.0, found, expected)]
    rank = worst.index(max(worst))
    place = torch.unravel_index(errors(1.0, found, expected)[rank].argmax(), found[rank].shape)
    values = found[rank][place].item(), expected[rank][place].item()
    text = f"{values[0]:.6g} at {[int(i) for i in place]} of {[*found[rank].shape]}"
    text += (
        f"{f' on rank {rank}' if len(found) > 1 else ''}, expected {values[1]:.6g} (off by {values[0] - values[1]:.1e})"
    )
    if agree(float(n)):
        return f"{text}; all of it is {n} times too large: 1/N is forgotten, or a sum is taken twice"
    if agree(1 / n):
        return f"{text}; all of it is 1/{n} of that: a sum over ranks is missing, or the factor N of a shard's loss"
    if len({x.shape for x in found}) == 1 < len(found) and agree(1.0, [sum(found[1:], found[0])], [expected[0]]):
        return f"{text}; the sum over ranks is right: a reduce-scatter or an all-reduce is missing"
    return text


_WAITED = re.compile("Timed out waiting|Connection closed by peer")
"""Messages of gloo on a rank that waited for another."""


def _failed(n: int, rank: int, trace: str) -> Exception:
    """The error for the traceback of a rank."""
    own = ("<", str(Path(__file__).parent), sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
    lines = re.findall(r'File "(.+)", line (\d+), in (.+)', trace)
    place = next(
        (f"{name} ({file}:{line})" for file, line, name in lines[::-1] if not file.startswith(own)), "backward"
    )
    if _WAITED.search(trace):
        return TimeoutError(
            f"on {n} ranks, rank {rank} waits in {place} for another, which takes no part in this collective"
        )
    return RuntimeError(f"on {n} ranks, rank {rank} failed in {place}: {trace.strip()}")


def _start(timeout: float, n: int, function: Callable[..., bytes], *arguments: Any) -> list[bytes]:
    """The results of `function(process group, *arguments)` in n processes, by rank. They end with this call."""
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        call = pickle.dumps((function, arguments))
        started = start_processes(_serve, (n, folder, timeout, call), n, join=False, daemon=True, start_method="spawn")
        assert started is not None
        deadline = time.monotonic() + 10 * timeout
        try:
            while not started.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"on {n} ranks, no answer within {10 * timeout:g} s, and no rank waits for another"
                    )
        except ProcessRaisedException:
            files = [Path(file) for file in started.error_files]
            traces = {rank: pickle.loads(file.read_bytes()) for rank, file in enumerate(files) if file.is_file()}
            first = min(traces, key=lambda rank: _WAITED.search(traces[rank]) is not None)  # others fail because it has
            raise _failed(n, first, traces[first]) from None
        finally:
            for process in started.processes:
                process.kill()
                process.join()
        return [Path(folder, f"answer_{rank}").read_bytes() for rank in range(n)]


def _serve(rank: int, n: int, folder: str, timeout: float, call: bytes) -> None:
    """A rank's process."""
    torch.set_num_threads(1)
    function, arguments = pickle.loads(call)
    meeting, answer = dist.FileStore(f"{folder}/meeting", n), Path(folder, f"answer_{rank}")
    meeting.add("arrived", 1)
    while meeting.add("arrived", 0) < n:  # starting takes longer than a collective may
        time.sleep(0.01)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=n, timeout=timedelta(seconds=timeout))
    answer.with_suffix(".part").write_bytes(function(dist.group.WORLD, *arguments))
    answer.with_suffix(".part").rename(answer)
    while len(list(Path(folder).glob("answer_?"))) < n:  # a rank that leaves early would abort the others
        time.sleep(0.01)
