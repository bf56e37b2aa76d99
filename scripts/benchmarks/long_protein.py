"""Memory of each rank when a protein of 1,024 residues passes through the full-width model, on 1, 2 and 4 ranks of one machine.

    python -m scripts.benchmarks.long_protein [--ranks 1 2 4] [--residues 1024] [--working_memory 64MiB | --backward]

The features are random; the model has two Evoformer blocks and one extra-MSA block, fp32, without recycling. The ranks share
the machine's cores, so the time says nothing about a machine with a core or GPU per rank. "tensors": peak memory of the tensors
created during the pass, parameters and features excluded. "resident": growth of the process's resident memory. Both are the
maximum over ranks. With `--working_memory` updates and switches are made in place and in pieces, as in `evodsp predict`;
without it layers are computed whole.
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
from evodsp.errors import SettingError
from evodsp.model.alphafold import AlphaFold
from evodsp.model.in_place import use_memory
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.mesh import init_mesh
from evodsp.ranges import memory_size

from .peak_memory import PeakMemory
from .random_inputs import output_tensors, random_features, randomise

CLUSTERS, EXTRA = 32, 64


def measured(exchange: Exchange, residues: int, backward: bool, working_memory: int | None) -> dict[str, Any]:
    """One pass of the model on this rank: memory in MiB, seconds, and the RMS of the pLDDT logits, equal at any mesh."""
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
    use_memory(model, working_memory)
    batch = random_features(CLUSTERS, EXTRA, residues)
    if backward:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    before, start = _resident(), time.perf_counter()
    with torch.set_grad_enabled(backward), PeakMemory() as memory:
        features = {name: batch[name][:, 0] for name in model.features}
        output = model.one_pass([features], model._first(features))
        if backward:
            torch.stack([x.mean() for x in output_tensors(output) if x.requires_grad]).sum().backward()
    return {
        "tensors": memory.peak / 2**20,
        "resident": _resident() - before,
        "seconds": time.perf_counter() - start,
        "plddt logits": float(output.logits["plddt"].detach().double().square().mean().sqrt()),
    }


def _size(text: str) -> int:
    try:
        return memory_size("the size", text)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _resident() -> float:
    """Peak resident memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _rank(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    exchange: Exchange = LocalExchange()
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
        exchange = ShardedExchange(init_mesh(ranks).sequence_group())
    result = measured(exchange, arguments.residues, arguments.backward, arguments.working_memory)
    torch.save(result, f"{folder}/{rank}.pt")
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=(1, 2, 4), help="numbers of ranks to measure (default: %(default)s)"
    )
    parser.add_argument("--residues", type=int, default=1024, help="length of the protein (default: 1024)")
    parser.add_argument("--backward", action="store_true", help="run the backward pass too, recomputing activations")
    parser.add_argument(
        "--working_memory",
        type=_size,
        help="memory of a rank for a layer's intermediates, such as 64MiB",
    )
    arguments = parser.parse_args()
    if arguments.backward and arguments.working_memory is not None:
        parser.error("--working_memory is for passes without gradients; leave out --backward")
    memory = f", working memory {arguments.working_memory >> 20} MiB" if arguments.working_memory is not None else ""
    print(
        f"{arguments.residues} residues, {CLUSTERS} clusters, {EXTRA} extra sequences, full widths, 2 Evoformer blocks, "
        f"1 extra-MSA block, fp32, {'forward + backward' if arguments.backward else 'forward'}{memory}, one thread per rank"
    )
    print(f"{'ranks':>5}{'tensors MiB':>13}{'of 1 rank':>11}{'resident MiB':>14}{'wall s':>8}  pLDDT logits")
    first = None
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (ranks, folder, arguments), nprocs=ranks)
            results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
        largest = {name: max(result[name] for result in results) for name in results[0]}
        first = first or largest["tensors"]
        print(
            f"{ranks:5}{largest['tensors']:13.0f}{largest['tensors'] / first:11.3f}{largest['resident']:14.0f}"
            f"{largest['seconds']:8.0f}  {largest['plddt logits']:.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
