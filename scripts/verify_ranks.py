"""The checks that `verify_gpus.sh` runs on several ranks, and the comparison of their learning curves.

    torchrun --nproc-per-node 2 scripts/verify_ranks.py collectives|model|switch cuda|cpu
    python scripts/verify_ranks.py curves FILE FILE...

Prints a line that begins with 'result:', or raises if a check fails.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from evodsp.config import ModelConfig
from evodsp.launch.process_group import guarded, stop
from evodsp.launch.process_group import start as start_ranks
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.parallel.collectives import Collective, Gather, ScatterSum, Sum, Switch
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.parallel.layout import shard_sizes
from evodsp.parallel.mesh import init_mesh
from evodsp.parallel.pending import start
from evodsp.rng import Draws


def collectives(group: Group, device: torch.device) -> str:
    """Check that the backward pass of every collective is its exact transpose: <A x, y> = <x, A' y>, summed over ranks."""
    largest = 0.0
    sizes = [shard_sizes(size, group.size) for size in (11, 13)]
    whole, rows, columns = (2, 11, 13), (2, sizes[0][group.rank], 13), (2, 11, sizes[1][group.rank])
    cases: list[tuple[Collective, tuple[int, ...]]] = [
        (Switch(group, 1, 2, sizes[0], sizes[1]), rows),
        (Switch(group, 2, 1, sizes[1], sizes[0]), columns),
        (Gather(group, 1, sizes[0]), rows),
        (ScatterSum(group, 2, sizes[1]), whole),
        (Sum(group), whole),
    ]
    for number, (collective, shape) in enumerate(cases):
        torch.manual_seed(100 * group.rank + number)
        x = torch.randn(shape, dtype=torch.float64, device=device, requires_grad=True)
        y = start(x, collective).wait()
        weight = torch.randn_like(y)
        (y * weight).sum().backward()
        assert x.grad is not None
        # The transpose applied to the weights must equal the gradient, and both inner products must agree.
        back = start(weight, collective.transpose()).wait()
        torch.testing.assert_close(back, x.grad, rtol=0, atol=1e-12)
        sides = torch.stack([(y.detach() * weight).sum(), (x.detach() * back).sum()])
        dist.all_reduce(sides)
        largest = max(largest, float((sides[0] - sides[1]).abs() / sides[0].abs().clamp(min=1)))
    if largest > 1e-12:
        raise AssertionError(f"inner products differ by {largest:.1e}, more than 1e-12")
    return f"inner products agree to {largest:.0e}"


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


def curves(paths: list[Path]) -> str:
    """Check that the training losses of several runs agree to 1e-5."""
    losses = []
    for path in paths:
        with path.open() as file:
            found = [float(row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]
        losses.append(torch.tensor(found, dtype=torch.float64))
    if len(losses[0]) == 0 or len({len(loss) for loss in losses}) > 1:
        raise AssertionError(
            f"the curves must have equally many rows, and at least one; found {[len(loss) for loss in losses]} rows in "
            f"{[str(path) for path in paths]}"
        )
    largest = max(float(((loss - losses[0]) / losses[0]).abs().max()) for loss in losses)
    if largest > 1e-5:
        raise AssertionError(
            f"losses differ by {largest:.1e} (relative), more than 1e-5: {[loss.tolist() for loss in losses]}"
        )
    return f"{len(losses)} meshes, {len(losses[0])} steps: losses agree to {largest:.0e}"


def main(check: str, *arguments: str) -> None:
    """Run one check and print its result."""
    if check == "curves":
        print("result:", curves([Path(argument) for argument in arguments]))
        return
    cuda = arguments[0] == "cuda"
    with guarded():
        start_ranks("nccl" if cuda else "gloo", timeout_s=120)
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        group = init_mesh(dist.get_world_size()).sequence_group()
        result = {"collectives": collectives, "model": model, "switch": switch}[check](group, device)
        if group.rank == 0:
            print("result:", result)
        stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
