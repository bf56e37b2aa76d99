"""A protein of 1,024 residues through the full-width model, on one process and on ranks of this machine: memory of each rank.

    python -m scripts.benchmarks.long_protein [--ranks 1 2 4] [--residues 1024] [--backward]

Random features, two Evoformer blocks and one extra-MSA block, fp32, one pass. Ranks share the cores, so that the time says
nothing about a machine with a core, or a GPU, for each. Tensors: the most that a rank's tensors held, beyond parameters and
features. Resident: what the operating system saw the process grow by. Both are of the rank that had most.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evodsp.config import ModelConfig
from evodsp.model.alphafold import AlphaFold
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group

from .held import Activations
from .samples import output_tensors, random_features, randomise

CLUSTERS, EXTRA = 32, 64


def measured(exchange: Exchange, residues: int, backward: bool) -> dict[str, Any]:
    """One pass of the model on this rank: memory in MiB, seconds, and a number to compare ranks and runs by."""
    torch.manual_seed(0)
    config = ModelConfig.preset("model_3")
    config = dataclasses.replace(
        config,
        evoformer=dataclasses.replace(config.evoformer, blocks=2),
        extra_msa=dataclasses.replace(config.extra_msa, blocks=1),
    )
    model = AlphaFold(config)
    randomise(model)
    use_exchange(model, exchange)
    batch = random_features(CLUSTERS, EXTRA, residues)
    if backward:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    before, start = _resident(), time.perf_counter()
    with torch.set_grad_enabled(backward), Activations() as held:
        output = model.one_pass([{name: batch[name][:, 0] for name in model.features}], model._first(batch))
        if backward:
            torch.stack([x.mean() for x in output_tensors(output) if x.requires_grad]).sum().backward()
    return {
        "tensors": held.peak / 2**20,
        "resident": _resident() - before,
        "seconds": time.perf_counter() - start,
        "plddt logits": float(output.plddt_logits.detach().double().square().mean().sqrt()),
    }


def _resident() -> float:
    """The most memory that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _rank(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    exchange: Exchange = LocalExchange()
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
        handle = dist.group.WORLD
        assert handle is not None  # it was made a line above
        exchange = ShardedExchange(Group(handle))
    result = measured(exchange, arguments.residues, arguments.backward)
    torch.save(result, f"{folder}/{rank}.pt")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=(1, 2, 4), help="numbers of ranks (default: %(default)s)"
    )
    parser.add_argument("--residues", type=int, default=1024, help="length of the protein (default: 1024)")
    parser.add_argument("--backward", action="store_true", help="the backward pass, too, recomputing activations")
    arguments = parser.parse_args()
    print(
        f"{arguments.residues} residues, {CLUSTERS} clusters, {EXTRA} extra sequences, full widths, 2 Evoformer blocks, "
        f"1 extra-MSA block, fp32, {'forward + backward' if arguments.backward else 'forward'}, one thread a rank"
    )
    print(f"{'ranks':>5}{'tensors MiB':>13}{'of 1 rank':>11}{'resident MiB':>14}{'wall s':>8}  pLDDT logits")
    first = None
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (ranks, folder, arguments), nprocs=ranks)
            results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(ranks)]
        most = {name: max(result[name] for result in results) for name in results[0]}
        first = first or most["tensors"]
        print(
            f"{ranks:5}{most['tensors']:13.0f}{most['tensors'] / first:11.3f}{most['resident']:14.0f}"
            f"{most['seconds']:8.0f}  {most['plddt logits']:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
