"""Functions that the checks of `evodsp selftest` run on one or several ranks, and the comparison of files that runs wrote.

    torchrun --nproc-per-node 2 -m evodsp.selftest.ranks half|collectives|model|switch cuda|cpu
    torchrun --nproc-per-node 1 -m evodsp.selftest.ranks kernels cuda|cpu [PROCESSES]
    python -m evodsp.selftest.ranks shared cuda|cpu
    python -m evodsp.selftest.ranks curves TOLERANCE FILE FILE...
    python -m evodsp.selftest.ranks predictions FOLDER FOLDER

`shared` starts its ranks itself, three on one device.

Prints lines that begin with 'result:', or raises if a check fails.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.config import KernelsConfig, ModelConfig
from evodsp.launch.environment import under_launcher
from evodsp.launch.process_group import guarded, stop
from evodsp.launch.process_group import start as start_ranks
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.kernels import BACKENDS
from evodsp.model.kernels.operators import OPERATORS, choose, problem_of
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.parallel.collectives import Broadcast, Collective, Gather, Reduce, ScatterSum, Sum, Switch, shard_sizes
from evodsp.parallel.exchange import ShardedExchange, start
from evodsp.parallel.group import Group, init_mesh, whole_group
from evodsp.printing import show
from evodsp.report.runs import read_curve
from evodsp.rng import Draws
from evodsp.selftest.shared_device import shared


def kernels(device: torch.device, processes: str = "1") -> str:
    """Compare every operator of every backend with its formula, forward and backward, in float32 and bf16.

    `processes`: the number of processes that compile and compare at once.
    """
    lines: list[str] = []
    cases: list[tuple[str, str, torch.dtype, torch.device]] = []
    for name, backend in BACKENDS.items():
        if backend.devices and device.type not in backend.devices:
            lines.append(f"{name}: for {', '.join(backend.devices)} only")
            continue
        try:
            module = backend.load()
        except ImportError as error:
            lines.append(f"{name}: {error}")
            continue
        # flash-attn has no float32.
        dtypes = [torch.bfloat16] if name == "flash_attn" else [torch.float32, torch.bfloat16]
        operators = [name for name in OPERATORS if hasattr(module, name)]
        cases += [(name, *case, device) for case in itertools.product(operators, dtypes)]
        lines.append(f"{name}: {', '.join(operators)}")
    if int(processes) > 1:
        with ProcessPoolExecutor(int(processes), multiprocessing.get_context("spawn")) as pool:
            problems = list(pool.map(_problem, cases))
    else:
        problems = list(map(_problem, cases))
    if any(problems):
        raise AssertionError("\n".join(filter(None, problems)))
    return "\n".join(lines)


def _problem(case: tuple[str, str, torch.dtype, torch.device]) -> str:
    """Fault of an operator; '' if there is none."""
    name, operator, dtype, device = case
    function = getattr(BACKENDS[name].load(), operator)
    problem = problem_of(operator, function, device, dtype)
    return problem and f"{name}, {operator}, {str(dtype).removeprefix('torch.')}: {problem}"


def half(device: torch.device) -> str:
    """Check a block of each stack in bf16-mixed, full widths, with the default kernels, on a GPU at the sizes of training.

    Its outputs, gradients of inputs and gradients of all parameters together may be at most twice as far from float32 as those
    that the formulas give in bf16-mixed.
    """
    large = device.type == "cuda"
    config, lines = ModelConfig(), []
    for extra, s, r in ((False, *((128, 256) if large else (11, 13))), (True, *((1024, 256) if large else (17, 13)))):
        c_m = config.channels.extra_msa if extra else config.channels.msa
        sizes = dataclasses.replace(config.extra_msa if extra else config.evoformer, blocks=1, checkpoint=False)
        torch.manual_seed(0)
        stack = EvoformerStack(c_m, config.channels.pair, sizes, extra)
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.add_(
                    torch.randn_like(parameter) * (0.1 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5)
                )
        m, z = (torch.randn(shape, device=device) for shape in ((1, s, r, c_m), (1, r, r, config.channels.pair)))
        stack.to(device)
        exact = _gradients(stack, m, z, "reference", torch.float32)
        formulas, own = (_gradients(stack, m, z, backend, torch.bfloat16) for backend in ("reference", "auto"))
        errors = {
            name: [float((x[name] - exact[name]).norm() / exact[name].norm()) for x in (own, formulas)]
            for name in exact
        }
        text = ", ".join(f"{name} {ours:.1e} ({theirs:.1e})" for name, (ours, theirs) in errors.items())
        lines.append(f"{'extra-MSA' if extra else 'Evoformer'} block {s} x {r}, errors (and the formulas'): {text}")
        if any(not ours <= 2 * theirs + 1e-3 for ours, theirs in errors.values()):
            raise AssertionError(lines[-1])
    return "\n".join(lines)


def _gradients(stack: EvoformerStack, m: Tensor, z: Tensor, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of a stack with dropout, and the gradients of a weighted sum of them, all in float32."""
    device, half = m.device, dtype == torch.bfloat16
    use_kernels(stack, choose(KernelsConfig(backend=backend), device, dtype)[0])
    leaves = [x.to(dtype).requires_grad_() for x in (m, z)]
    masks = torch.ones(m.shape[:3], device=device), torch.ones(z.shape[:3], device=device)
    keys = DropoutKeys.of(stack.dropout_streams([Draws.root(0).at(0)]), device)
    casts = CastParameters(stack)
    with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        casts.make()
        results = stack(*leaves, *masks, keys)
    generator = torch.Generator(device).manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, device=device).to(x) for x in results]
    gradients = torch.autograd.grad(results, [*leaves, *stack.parameters()], weights)
    casts.drop()
    of_parameters = torch.cat([x.flatten() for x in gradients[2:]])
    found = dict(zip(("m", "z", "dm", "dz"), (*results, *gradients[:2]), strict=True)) | {"parameters": of_parameters}
    return {name: x.detach().float() for name, x in found.items()}


def collectives(group: Group, device: torch.device) -> str:
    """Check every collective, with uneven and empty shards: three in flight bring what is expected, in three precisions, and
    the backward pass is the exact transpose: <A x, y> = <x, A' y>, summed over the ranks of the group."""
    largest = 0.0
    for number, sizes in enumerate(((11, 13), (1, group.size + 1))):
        whole = (torch.arange(2 * sizes[0] * sizes[1], device=device) % 5).view(2, *sizes)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):  # which add these numbers exactly
            cases = _every_collective(group, whole.to(dtype))
            for three in (cases[:3], cases[3:6], cases[4:]):
                pending = [start(x, collective) for collective, x, _ in three]
                for (collective, _, expected), result in reversed([*zip(three, pending, strict=True)]):
                    if not torch.equal(result.wait(), expected):
                        raise AssertionError(f"{collective.kind} of {list(sizes)} in {dtype}: other numbers arrived")
        for place, (collective, x, _) in enumerate(_every_collective(group, whole.double())):
            torch.manual_seed(1000 * number + 100 * group.rank + place)
            x = torch.randn_like(x).requires_grad_()
            y = start(x, collective).wait()
            weight = torch.randn_like(y)
            (y * weight).sum().backward()
            assert x.grad is not None
            # The transpose applied to the weights must equal the gradient, and both inner products must agree.
            back = start(weight, collective.transpose()).wait()
            torch.testing.assert_close(back, x.grad, rtol=0, atol=1e-12)
            sides = torch.stack([(y.detach() * weight).sum(), (x.detach() * back).sum()])
            group.all_reduce(sides).wait()
            largest = max(largest, float((sides[0] - sides[1]).abs() / sides[0].abs().clamp(min=1)))
    if largest > 1e-12:
        raise AssertionError(f"inner products differ by {largest:.1e}, more than 1e-12")
    return f"inner products agree to {largest:.0e}"


def _every_collective(group: Group, whole: Tensor) -> list[tuple[Collective, Tensor, Tensor]]:
    """Each collective, this rank's input and its result, from a tensor [2, rows, columns] that all ranks have."""
    rows, columns = (shard_sizes(size, group.size) for size in whole.shape[1:])
    root = group.size - 1 if rows[-1] else 0
    by_row, by_column = whole.split(rows, 1), whole.split(columns, 2)
    own, across = by_row[group.rank], by_column[group.rank]
    return [
        (Switch(group, 1, 2, rows, columns), own, across),
        (Switch(group, 2, 1, columns, rows), across, own),
        (Gather(group, 1, rows), own, whole),
        (ScatterSum(group, 2, columns), whole, group.size * across),
        (Sum(group), whole, group.size * whole),
        (Broadcast(group, root, 1, rows), own, by_row[root]),
        (Reduce(group, root, 1, rows), by_row[root], group.size * own * (group.rank == root)),
    ]


def model(group: Group, device: torch.device) -> str:
    """Check three Evoformer blocks, with random parameters and dropout: the mean of the ranks' gradients is the gradient."""
    config = ModelConfig.preset("test")
    sizes = dataclasses.replace(config.evoformer, blocks=3)
    s, r = 11, 13
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(device)

    stack = EvoformerStack(config.channels.msa, config.channels.pair, sizes).double().to(device)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(0.4 * random(*parameter.shape))
    m, z = random(1, s, r, config.channels.msa), random(1, r, r, config.channels.pair)
    weight, masks = (
        random(1, r, r, config.channels.pair),
        (random(1, s, r).abs() * 0 + 1, random(1, r, r).abs() * 0 + 1),
    )
    keys = DropoutKeys.of(stack.dropout_streams([Draws.root(0).at(0)]), device)
    stack(m, z, *masks, keys)[1].mul(weight).sum().backward()
    serial = [parameter.grad.clone() for parameter in stack.parameters() if parameter.grad is not None]
    stack.zero_grad()
    exchange = ShardedExchange(group)
    use_exchange(stack, exchange)
    out = stack(exchange.shard(m, "seq"), exchange.shard(z, "j"), *masks, keys)[1]
    (group.size * out.mul(exchange.shard(weight, "j")).sum()).backward()
    largest = 0.0
    for gradient, expected in zip(
        (parameter.grad for parameter in stack.parameters() if parameter.grad is not None), serial, strict=True
    ):
        dist.all_reduce(gradient)
        error = (gradient / group.size - expected).abs().max() / expected.abs().max().clamp(min=0.1)
        largest = max(largest, float(error))
    if largest > 1e-9:
        raise AssertionError(f"gradients differ by {largest:.1e}, more than 1e-9")
    return f"gradients agree to {largest:.0e}"


def switch(group: Group, device: torch.device) -> str:
    """Time the all-to-all of the pair representation: 128 channels, R = 128 in fp32, or R = 512 in bf16 on a GPU."""
    residues, dtype = (512, torch.bfloat16) if device.type == "cuda" else (128, torch.float32)
    sizes = shard_sizes(residues, group.size)
    x = torch.zeros(1, sizes[group.rank], residues, 128, dtype=dtype, device=device)
    collective = Switch(group, 1, 2, sizes, sizes)

    def synchronize() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    with torch.no_grad():
        marks = [synchronize()]
        for _ in range(25):
            start(x, collective).wait()
            marks.append(synchronize())
    seconds = sorted(after - before for before, after in itertools.pairwise(marks[5:]))[10]
    leaving = x.numel() * x.element_size() * (group.size - 1) / group.size
    return f"R = {residues}: {1e3 * seconds:.2f} ms, {leaving / seconds / 1e9:.1f} GB/s out of each rank"


def curves(tolerance: float, first: int, paths: list[Path]) -> str:
    """Check that the `first` training losses of several runs agree, relative to those of the first run."""
    losses = []
    for path in paths:
        found = [float(row["train/loss"]) for row in read_curve(path).values() if "train/loss" in row]
        losses.append(torch.tensor(found, dtype=torch.float64))
    if len(losses[0]) == 0 or len({len(loss) for loss in losses}) > 1:
        raise AssertionError(
            f"the curves must have equally many rows, and at least one; found {[len(loss) for loss in losses]} rows in "
            f"{[str(path) for path in paths]}"
        )
    compared = torch.stack(losses)[:, :first]
    largest = float(((compared - compared[0]) / compared[0]).abs().max())  # NaN if one is
    if not largest <= tolerance:
        raise AssertionError(
            f"losses differ by {largest:.1e} (relative), more than {tolerance:.0e}: {[loss.tolist() for loss in losses]}"
        )
    return f"{len(compared)} runs, {compared.shape[1]} steps: losses agree to {largest:.0e}"


def predictions(first: Path, second: Path) -> str:
    """Check that two predictions of a protein, in float32 and in bf16, agree: pLDDT to 2, CA-CA distances to 1 Å."""
    plddt, distances = [], []
    for folder in (first, second):
        scores = json.loads((folder / "seed_0_scores.json").read_text())
        plddt.append(torch.tensor(scores["plddt"]))
        lines = (folder / "seed_0.pdb").read_text().splitlines()
        atoms = [
            [float(line[at : at + 8]) for at in (30, 38, 46)]
            for line in lines
            if line.startswith("ATOM") and line[12:16].strip() == "CA"
        ]
        distances.append(torch.cdist(torch.tensor(atoms), torch.tensor(atoms)))
    score = float((plddt[0] - plddt[1]).abs().max())
    distance = float((distances[0] - distances[1]).square().mean().sqrt())
    text = f"pLDDT differs by at most {score:.2f} of 100, CA-CA distances by {distance:.2f} Å (root mean square)"
    if not (score <= 2 and distance <= 1):
        raise AssertionError(f"{text}; allowed are 2 and 1 Å")
    return text


ALONE = {"kernels": kernels, "half": half}
"""Checks that one rank runs by itself."""
TOGETHER = {"shared": shared, "collectives": collectives, "model": model, "switch": switch}


def _show(result: str) -> None:
    show("\n".join(f"result: {line}" for line in result.splitlines()), flush=True)


def main(check: str, *arguments: str) -> None:
    """Run one check and print its result."""
    if check == "curves":
        _show(curves(float(arguments[0]), int(arguments[1]), [Path(argument) for argument in arguments[2:]]))
        return
    if check == "predictions":
        _show(predictions(*map(Path, arguments)))
        return
    if check == "shared" and not under_launcher():
        launch = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "3", "-m", __spec__.name]
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *launch, check, *arguments])
    cuda = arguments[0] == "cuda"
    with guarded():
        # One rank compiles what the others wait for.
        start_ranks("nccl" if cuda and check != "shared" else "gloo", timeout_s=300 if check == "shared" else 120)
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        group = whole_group() if check == "shared" else init_mesh(dist.get_world_size()).sequence_group()
        result = ALONE[check](device, *arguments[1:]) if check in ALONE else TOGETHER[check](group, device)
        if group.rank == 0:
            _show(result)
        stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
