"""Time and memory of evodsp's stacks against the formulas written out (`formulas.py`), on this machine's CPU.

    python -m scripts.benchmarks.bench [--cases evoformer_64x128 ...] [--rounds 20] [--threads 1] [--clock wall]
        [--alphafold PYTHON] [--openfold PYTHON --openfold-source DIR] [--output FILE.csv]

fp32, full widths, forward and backward pass, no dropout. Each round runs each once, in alternating order, so that other load on
the machine affects all; with `--clock cpu` the time is the processor's, which other load affects least. The ratio of a round is
evodsp's time over another's: below 1, evodsp is faster. The table shows the median of the ratios, to the formulas with the
first and third quartile. Memory is the peak of all tensors that the passes create, and operators are those of torch that
compute something (not views); both are counted in a run of their own. DeepMind's JAX code and OpenFold take part where they
are installed (`peers.py`). `make bench` writes the CSV file that is committed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from evodsp.config import ModelConfig
from evodsp.model.evoformer import EvoformerBlock, EvoformerStack
from evodsp.model.templates import TemplatePairStack
from evodsp.weights.command import randomise

from . import formulas, peers
from .peak_memory import PeakMemory
from .tables import write_csv

MIB = 2**20
Step = Callable[[], list[Tensor]]
"""One forward and backward pass; the outputs and the gradients of the inputs."""


@dataclass(frozen=True)
class Case:
    """What is measured."""

    make: Callable[[], tuple[Step, Step]]
    """evodsp's step and the formulas'."""
    limit: float
    """Ratio of times that evodsp aims at."""
    memory_limit: float | None = None
    """Ratio of memory that it aims at."""
    peer: tuple[str, int, int] = ("", 0, 0)
    """The case as a peer knows it: its kind, its first size and its number of residues."""


def _step(model: nn.Module, inputs: list[Tensor], masks: list[Tensor]) -> Step:
    """Forward and backward pass, with cotangents that are equal for all models."""
    leaves = [x.clone().requires_grad_() for x in inputs]

    def run() -> list[Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        outputs = model(*leaves, *masks)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        gradients = torch.autograd.grad(outputs, [*leaves, *model.parameters()], [x.detach() for x in outputs])
        return [x.detach() for x in outputs] + list(gradients[: len(leaves)])

    return run


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def block(sequences: int, residues: int, extra: bool = False) -> tuple[Step, Step]:
    """A block of the Evoformer or of the extra-MSA stack."""
    config = ModelConfig()
    c_m = config.channels.extra_msa if extra else config.channels.msa
    own = EvoformerBlock(c_m, config.channels.pair, config.extra_msa if extra else config.evoformer, extra)
    randomise(own)
    inputs = [_random(1, sequences, residues, c_m), _random(1, residues, residues, config.channels.pair)]
    masks = [torch.ones(1, sequences, residues), torch.ones(1, residues, residues)]
    return _step(own, inputs, masks), _step(formulas.Block(own), inputs, masks)


def templates(count: int, residues: int) -> tuple[Step, Step]:
    """The template pair stack, for all templates of a sample."""
    config = dataclasses.replace(ModelConfig.preset("model_1").templates, checkpoint=False)
    own = TemplatePairStack(config)
    randomise(own)
    inputs, masks = [_random(count, residues, residues, config.channels)], [torch.ones(count, residues, residues)]
    return _step(own, inputs, masks), _step(formulas.TemplatePairStack(own), inputs, masks)


class RecomputedFormulas(nn.Module):
    """Blocks of formulas, each of which is computed again in the backward pass."""

    def __init__(self, source: EvoformerStack) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(formulas.Block(block) for block in source.blocks)

    def forward(self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        for one in self.blocks:
            m, z = checkpoint(one, m, z, msa_mask, pair_mask, use_reentrant=False)
        return m, z


def recomputed(sequences: int, residues: int, blocks: int = 4) -> tuple[Step, Step]:
    """A stack whose activations are recomputed, as in training."""
    config = ModelConfig()
    own = EvoformerStack(
        config.channels.msa,
        config.channels.pair,
        dataclasses.replace(config.evoformer, blocks=blocks, checkpoint=True),
    )
    randomise(own)
    inputs = [
        _random(1, sequences, residues, config.channels.msa),
        _random(1, residues, residues, config.channels.pair),
    ]
    masks = [torch.ones(1, sequences, residues), torch.ones(1, residues, residues)]
    return _step(own, inputs, masks), _step(RecomputedFormulas(own), inputs, masks)


CASES: dict[str, Case] = {
    "evoformer_64x128": Case(lambda: block(64, 128), 0.78, 0.50, ("evoformer", 64, 128)),
    "evoformer_128x256": Case(lambda: block(128, 256), 0.78, 0.50, ("evoformer", 128, 256)),
    "extra_msa_1024x128": Case(lambda: block(1024, 128, extra=True), 0.75, None, ("extra", 1024, 128)),
    "templates_4x128": Case(lambda: templates(4, 128), 0.70, None, ("templates", 4, 128)),
    "recomputed_128x64": Case(lambda: recomputed(128, 64), 0.75, 0.80, ("recomputed", 128, 64)),
}


@dataclass
class Result:
    """A line of the table."""

    case: str
    evodsp_s: float
    formulas_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    limit: float
    evodsp_mib: float
    formulas_mib: float
    memory_ratio: float
    memory_limit: float | None
    difference: float
    """The largest difference of an output or gradient: the norm of the difference over the norm of the tensor."""
    evodsp_operators: int
    formulas_operators: int
    """Operators of torch that compute something in both passes."""
    alphafold_s: float | None = None
    alphafold_ratio: float | None = None
    """evodsp's time over that of DeepMind's JAX code, median of the rounds; None where it is absent."""
    openfold_s: float | None = None
    openfold_ratio: float | None = None
    absent: str = ""
    """Why a peer has no numbers."""


class OperatorCount(TorchDispatchMode):
    """Counts the operators that compute or copy something; views and allocations do not."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        schema = func._schema
        view = not schema.is_mutable and any(result.alias_info is not None for result in schema.returns)
        if not view and not func.overloadpacket.__name__.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            self.operators += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Pythons:
    """Where the peers are; None: absent."""

    alphafold: Path | None = None
    openfold: Path | None = None
    openfold_source: Path | None = None


def measure(name: str, rounds: int, pythons: Pythons = Pythons(), clock: str = "wall") -> Result:
    """Run all of them `rounds` times, in turns. `clock`: wall or cpu."""
    case, threads = CASES[name], torch.get_num_threads()
    own, formula = case.make()
    pairs = zip(own(), formula(), strict=True)  # which is the warm-up, too
    difference = max(float((x - y).norm() / y.norm()) for x, y in pairs)
    peaks, counts = [], []
    for step in (own, formula):
        with PeakMemory() as memory:
            step()
        with OperatorCount() as operators:
            step()
        peaks.append(memory.peak / MIB)
        counts.append(operators.operators)
    with (
        peers.alphafold(pythons.alphafold, threads, case.peer) as alphafold,
        peers.openfold(pythons.openfold, pythons.openfold_source, threads, case.peer) as openfold,
    ):
        runs: tuple[Callable[[], float | None], ...] = (
            partial(_seconds, own, clock), partial(_seconds, formula, clock),
            partial(alphafold.seconds, clock), partial(openfold.seconds, clock),
        )  # fmt: skip
        times: list[list[float | None]] = [[] for _ in runs]
        for number in range(rounds):
            for which in range(len(runs)) if number % 2 else reversed(range(len(runs))):
                times[which].append(runs[which]())
    low, middle, high = (float(_ratios(times[0], times[1]).quantile(at)) for at in (0.25, 0.5, 0.75))
    others: dict[str, float | None] = {}
    for peer, found in (("alphafold", times[2]), ("openfold", times[3])):
        if None not in found:
            others[f"{peer}_s"] = float(torch.tensor(found).median())
            others[f"{peer}_ratio"] = float(_ratios(times[0], found).median())
    return Result(
        name, statistics.median(_numbers(times[0])), statistics.median(_numbers(times[1])), middle, low, high, case.limit,
        peaks[0], peaks[1], peaks[0] / peaks[1], case.memory_limit, difference, counts[0], counts[1],
        absent="; ".join(filter(None, (alphafold.absent, openfold.absent))), **others,
    )  # fmt: skip


def _seconds(step: Step, clock: str) -> float:
    now = time.perf_counter if clock == "wall" else time.process_time
    start = now()
    step()
    return now() - start


def _numbers(times: Sequence[float | None]) -> list[float]:
    return [x for x in times if x is not None]


def _ratios(first: Sequence[float | None], second: Sequence[float | None]) -> Tensor:
    """The ratio of the two times in each round."""
    return torch.tensor(_numbers(first), dtype=torch.float64) / torch.tensor(_numbers(second), dtype=torch.float64)


HEAD = (
    f"{'case':20}{'evodsp s':>10}{'formulas s':>12}{'ratio':>7}  {'middle half':14}{'aim':>5}"
    f"{'evodsp MiB':>12}{'formulas MiB':>14}{'ratio':>7}{'aim':>6}{'difference':>12}"
    f"{'operators':>14}{'to JAX':>8}{'to OpenFold':>13}"
)


def line(result: Result) -> str:
    """The result as a line of the table."""
    aim = "" if result.memory_limit is None else f"{result.memory_limit:.2f}"
    spread = f"{result.ratio_low:.2f} to {result.ratio_high:.2f}"
    return (
        f"{result.case:20}{result.evodsp_s:10.3f}{result.formulas_s:12.3f}{result.ratio:7.2f}  {spread:14}{result.limit:5.2f}"
        f"{result.evodsp_mib:12.0f}{result.formulas_mib:14.0f}{result.memory_ratio:7.2f}{aim:>6}{result.difference:12.1e}"
        f"{result.evodsp_operators:7d}/{result.formulas_operators:<6d}{_shown(result.alphafold_ratio):>8}"
        f"{_shown(result.openfold_ratio):>13}"
    )


def _shown(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def write(path: Path, results: list[Result], clock: str) -> None:
    """The table as CSV, with machine, versions and command in every row."""
    about = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "threads": torch.get_num_threads(),
        "clock": clock,
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "command": f"python -m scripts.benchmarks.bench {' '.join(sys.argv[1:])}".strip(),
    }
    rows = [dataclasses.asdict(result) | about for result in results]
    for row in rows:
        row |= {name: float(f"{value:.4g}") for name, value in row.items() if isinstance(value, float)}
    write_csv(path, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--rounds", type=int, default=20, help="rounds per case (default: 20)")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads (default: 1)")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="the clock (default: wall); cpu counts the processor's time, for a busy machine",
    )
    parser.add_argument("--alphafold", type=Path, help="python of an environment with alphafold-colabfold")
    parser.add_argument("--openfold", type=Path, help="python of an environment with OpenFold's requirements")
    parser.add_argument("--openfold-source", type=Path, help="a clone of OpenFold")
    parser.add_argument("--output", type=Path, help="CSV file for the results")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    torch.set_num_threads(arguments.threads)
    print(
        f"PyTorch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds, forward + backward, fp32"
    )
    print(HEAD)
    results = []
    pythons = Pythons(arguments.alphafold, arguments.openfold, arguments.openfold_source)
    for name in arguments.cases:
        results.append(measure(name, arguments.rounds, pythons, arguments.clock))
        print(line(results[-1]), flush=True)
        if results[-1].absent:
            print(f"    {results[-1].absent}")
        if arguments.output is not None:
            write(arguments.output, results, arguments.clock)


if __name__ == "__main__":
    main()
