"""Compile for an H100, without a GPU, every Triton kernel that the GPU programs and the quickstart launch.

    python -m scripts.benchmarks.gpu_ahead [--processes 2] [--only blocks model]

Blocks, operators and models run on tensors without numbers, which says what they would launch. Kernels are told apart as Triton
does: by types, by constants, and by which numbers and addresses 16 divides. Each is compiled for sm_90 into Triton's cache
(TRITON_CACHE_DIR). A line is printed for each set of sizes, and for each kernel that cannot be compiled, needs more shared
memory than there is, or spills registers. The exit code is 1 if any cannot be compiled or does not fit.

Not here: the blocks beside other programs' with fp32 inputs under autocast, which a tensor without numbers does not have, and
variants that only scripts for tuning launch.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from evodsp.config import ModelConfig
from evodsp.inference.devices import WORKING_SHARE
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.kernels import triton as own
from evodsp.model.kernels.operators import OPERATORS, Kernels
from evodsp.model.kernels.triton import LAUNCHED
from evodsp.model.kernels.triton_kernels.launch import Launch, Operator
from evodsp.model.layers import TriangleMultiplication
from evodsp.model.primitives import use_kernels
from evodsp.model.templates import TemplatePairStack
from evodsp.planner.program import PlannedStep, SampleSizes, program
from evodsp.rng import Draws
from evodsp.selftest.shared_device import EVERY_TERM

from . import gpu_anchors, gpu_cases, host_time
from .gpu_rows import operators_of
from .triton_ahead import SHARED_LIMIT, Specialised, specialised, spilled_and_shared

META = torch.device("meta")
SINGLE, HALF = torch.float32, torch.bfloat16
ARCHITECTURE = 90
WORKING_MEMORY = (80 << 30) // WORKING_SHARE
"""Bytes that a layer of a prediction on an H100 may take beside the representations."""
GRAPHS = (("evoformer", 32, 64), ("extra", 64, 64), ("templates", 2, 64))
"""The stacks of `gpu_graphs`, with their sizes."""
QUICKSTART = SampleSizes(residues=53, clusters=16, extra=16)


class Launches(TorchDispatchMode):
    """Notes what own operators would launch."""

    def __init__(self, shift: int = 0) -> None:
        """`shift`: elements after an aligned address at which all tensors begin."""
        super().__init__()
        self.found: dict[str, Specialised] = {}
        self.calls, self._shift, self._operators = 0, shift, LAUNCHED

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "evodsp" and (operator := self._operators.get(func.name())):
            self.calls += 1
            self._note(operator, args)
        return func(*args, **(kwargs or {}))

    def _note(self, operator: Operator, arguments: Sequence[Any]) -> None:
        launches: list[Launch] = []
        operator.body(launches.append, *tree_map_only(Tensor, self._placed, arguments))
        for launch in launches:
            if launch.programs:
                one = specialised(launch)
                self.found.setdefault(one.key, one)

    def _placed(self, x: Tensor) -> Tensor:
        """Without numbers, where the tensor is in its memory."""
        offset = int(x.storage_offset()) + self._shift
        reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
        return x.new_empty(offset + max(reach, 0)).as_strided(x.shape, x.stride(), offset)


def block(config: ModelConfig, kind: str, first: int, residues: int, dtype: torch.dtype) -> None:
    """Forward and backward pass of one block, as `gpu_cases.block` makes it."""
    channels, pair = config.channels, (1, residues, residues, config.channels.pair)
    draws, stack, samples = [Draws.root(0)], nn.Module(), 1
    with META:
        if kind == "templates":
            stack = TemplatePairStack(dataclasses.replace(config.templates, checkpoint=False))
            shapes, samples = [(first, residues, residues, config.templates.channels)], first
        else:
            extra = kind == "extra"
            settings = dataclasses.replace(config.extra_msa if extra else config.evoformer, blocks=1, checkpoint=False)
            c_m = channels.extra_msa if extra else channels.msa
            stack, shapes = EvoformerStack(c_m, channels.pair, settings, extra), [(1, first, residues, c_m), pair]
        streams_of: Callable[..., Any] = stack.dropout_streams
        keys = DropoutKeys.of(streams_of(draws * samples), META)
        leaves = [torch.empty(shape, dtype=dtype).requires_grad_() for shape in shapes]
        masks = [torch.empty(shape[:-1]) for shape in shapes]
    stack.to(META, dtype)  # as casts leave the parameters; the meta device has no autocast
    use_kernels(stack, Kernels.of(own))
    results = stack(*leaves, *masks, keys)
    results = [results] if isinstance(results, Tensor) else list(results)
    torch.autograd.grad(results, [*leaves, *stack.parameters()], [torch.empty_like(x) for x in results])


def checked(operator: str, dtype: torch.dtype) -> None:
    """An operator as the self-check of a run's start calls it."""
    spec = OPERATORS[operator]
    inputs = [x.to(META) for x in spec.inputs(torch.device("cpu"), dtype)]
    wanted = [inputs[n].requires_grad_() for n in spec.differentiable(inputs)]
    results = spec.call(getattr(own, operator), inputs)
    torch.autograd.grad(results, wanted, [torch.empty_like(x) for x in results])


def anchors(sizes: gpu_anchors.Sizes) -> None:
    """Operators at published sizes, as `gpu_anchors` calls them."""

    def leaf(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=HALF, device=META).requires_grad_()

    def run(function: Callable[..., Tensor], *leaves: Tensor) -> None:
        result = function(*leaves)
        torch.autograd.grad(result, leaves, torch.empty_like(result))

    def attention(rows: int, length: int, heads: tuple[int, int], biased: bool) -> None:
        bias = [leaf(1, 1, heads[0], length, length)] if biased else []
        keys = torch.empty(1, rows, length, device=META)
        run(partial(gpu_anchors.gated, keys, own), leaf(1, rows, length, 4, *heads), *bias)

    for n in sizes.triangle:
        attention(n, n, sizes.heads, True)
        with META:
            layer = TriangleMultiplication(sizes.channels, sizes.channels, "outgoing").to(HALF)
        use_kernels(layer, Kernels.of(own))
        mask, whole = torch.empty(1, n, n, device=META), gpu_anchors.Whole(layer)
        run(
            lambda z, *_, whole=whole, mask=mask: whole(z, mask),
            leaf(1, n, n, sizes.channels),
            *layer.parameters(),
        )
    for s, r in sizes.msa:
        attention(s, r, sizes.msa_heads, True)
        attention(r, s, sizes.msa_heads, False)
    for s, r in sizes.extra:
        keys = torch.empty(1, s, r, device=META)
        function = partial(gpu_anchors.global_by_sums, keys, own)
        run(function, leaf(1, r, *sizes.extra_heads), leaf(1, s, r, 2, sizes.extra_heads[1]))


def model(config: ModelConfig, sizes: SampleSizes, training: bool, dtype: torch.dtype) -> None:
    """A pass of the whole model, with gradients or as a prediction."""
    heads = config.heads.predicted_aligned_error
    loss = dataclasses.replace(EVERY_TERM, experimentally_resolved=0.0, pae=EVERY_TERM.pae if heads else 0.0)
    program(PlannedStep(config, sizes, loss if training else None, half=dtype == HALF, memory=WORKING_MEMORY))


Task = tuple[str, str, Callable[[], None], int]
"""A group, what is run in it, and by how many elements its tensors are shifted."""


def tasks() -> Iterator[Task]:
    """Everything that is run."""
    sizes, config = gpu_cases.FULL, gpu_cases.config_of(gpu_cases.FULL)
    half = dict.fromkeys(
        (*sizes.blocks, *sizes.operators, *sizes.profiled, *sizes.checks, *GRAPHS, ("extra", 1024, 256))
    )
    single = dict.fromkeys((sizes.blocks[0], *sizes.checks))
    for dtype, cases in ((HALF, half), (SINGLE, single)):
        for case in cases:
            yield "blocks", f"{' '.join(map(str, case))}, {_name(dtype)}", partial(block, config, *case, dtype), 0
    for operator in operators_of("triton"):
        for dtype in (HALF, SINGLE):
            yield "self-checks", f"{operator}, {_name(dtype)}", partial(checked, operator, dtype), 0
    yield "anchors", "published sizes", partial(anchors, gpu_anchors.FULL), 0
    for case in host_time.COMPARED:
        for shift in (0, 1):
            name = f"{' '.join(map(str, case))}, {shift} elements after an aligned address"
            yield "host_time", name, partial(block, config, *case, HALF), shift
    for inputs, training in (*((x, True) for x in sizes.training), *((x, False) for x in sizes.inference)):
        if inputs.passes > 1 and training:
            continue  # a recycled pass computes what a pass with gradients does
        of = SampleSizes(inputs.residues, inputs.sequences, inputs.extra, inputs.templates)
        name = f"{'training' if training else 'prediction'}, {inputs}"
        yield "model", name, partial(model, gpu_cases.config_of(sizes, inputs), of, training, HALF), 0
    small = ModelConfig.preset("small")
    for dtype in (SINGLE, HALF):
        for training in (True, False):
            name = f"{'training' if training else 'prediction'}, {_name(dtype)}"
            yield "quickstart", name, partial(model, small, QUICKSTART, training, dtype), 0


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == HALF else "fp32"


def verdict(one: Specialised) -> tuple[str, int]:
    """What is wrong with a kernel, '' if nothing is, and the bytes that it spills. Run in a process of its own."""
    try:
        spilled, shared = spilled_and_shared(one, ARCHITECTURE)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}", 0
    if shared > SHARED_LIMIT[ARCHITECTURE]:
        return f"needs {shared} bytes of shared memory, of {SHARED_LIMIT[ARCHITECTURE]}", spilled
    return "", spilled


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile all, and print what is wrong. Returns the exit code."""
    names = list(dict.fromkeys(group for group, *_ in tasks()))
    parser = argparse.ArgumentParser(prog="gpu_ahead", description="Compile kernels of GPU programs without a GPU.")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="processes that compile at once (default: all cores)"
    )
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="GROUP", help=", ".join(names))
    options = parser.parse_args(arguments)
    begun, failed, spilling = time.monotonic(), 0, 0
    kernels: dict[str, Specialised] = {}
    places: dict[str, str] = {}
    for group, name, function, shift in tasks():
        if group not in options.only:
            continue
        try:
            with Launches(shift) as launches:
                function()
        except Exception as error:
            failed += 1
            print(f"FAILED {group}, {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", flush=True)
            continue
        new = launches.found.keys() - kernels.keys()
        print(f"{group}, {name}: {launches.calls} calls, {len(launches.found)} kernels, {len(new)} new", flush=True)
        places |= dict.fromkeys(new, f"{group}, {name}")
        kernels |= {key: launches.found[key] for key in launches.found if key in new}
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        for (key, one), (problem, spilled) in zip(kernels.items(), pool.map(verdict, kernels.values()), strict=True):
            where = f"{one.launch.kernel} of {places[key]}"
            if problem:
                failed += 1
                print(f"FAILED {where}: {problem}", flush=True)
            if spilled:
                spilling += 1
                print(f"spills {spilled} bytes a thread: {where}", flush=True)
    seconds = time.monotonic() - begun
    print(f"{len(kernels)} kernels for sm_{ARCHITECTURE} in {seconds:.0f} s: {failed} failures, {spilling} spill")
    return int(failed > 0 or not kernels)


if __name__ == "__main__":
    sys.exit(main())
