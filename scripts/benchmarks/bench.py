"""Time and memory of evodsp's stacks against the formulas written out (`formulas.py`), on this machine's CPU.

    python -m scripts.benchmarks.bench [--cases evoformer_64x128 ...] [--rounds 20] [--threads 1] [--clock wall]
        [--output FILE.csv]

fp32, full widths, forward and backward pass, no dropout. Each round runs each once, in alternating order, so that other load on
the machine affects all; with `--clock cpu` the time is the processor's, which other load affects least. The ratio of a round is
evodsp's time over another's: below 1, evodsp is faster. The table shows the median of the ratios, to the formulas with the
first and third quartile. Memory is the peak of all tensors that the passes create, and operators are those of torch that
compute something (not views); both are counted in a run of their own. `make bench` writes the CSV file that is committed.
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
from collections.abc import Callable
from dataclasses import dataclass
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

from . import formulas
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
    "evoformer_64x128": Case(lambda: block(64, 128), 0.78, 0.50),
    "evoformer_128x256": Case(lambda: block(128, 256), 0.78, 0.50),
    "extra_msa_1024x128": Case(lambda: block(1024, 128, extra=True), 0.75, None),
    "templates_4x128": Case(lambda: templates(4, 128), 0.70, None),
    "recomputed_128x64": Case(lambda: recomputed(128, 64), 0.75, 0.80),
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


def measure(name: str, rounds: int, clock: str = "wall") -> Result:
    """Run both `rounds` times, in turns. `clock`: wall or cpu."""
    case = CASES[name]
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
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(_seconds((own, formula)[which], clock))
    ratios = torch.tensor(times[0], dtype=torch.float64) / torch.tensor(times[1], dtype=torch.float64)
    low, middle, high = (float(ratios.quantile(at)) for at in (0.25, 0.5, 0.75))
    return Result(
        name, statistics.median(times[0]), statistics.median(times[1]), middle, low, high, case.limit,
        peaks[0], peaks[1], peaks[0] / peaks[1], case.memory_limit, difference, counts[0], counts[1],
    )  # fmt: skip


def _seconds(step: Step, clock: str) -> float:
    now = time.perf_counter if clock == "wall" else time.process_time
    start = now()
    step()
    return now() - start


HEAD = (
    f"{'case':20}{'evodsp s':>10}{'formulas s':>12}{'ratio':>7}  {'middle half':14}{'aim':>5}"
    f"{'evodsp MiB':>12}{'formulas MiB':>14}{'ratio':>7}{'aim':>6}{'difference':>12}"
    f"{'operators':>14}"
)


def line(result: Result) -> str:
    """The result as a line of the table."""
    aim = "" if result.memory_limit is None else f"{result.memory_limit:.2f}"
    spread = f"{result.ratio_low:.2f} to {result.ratio_high:.2f}"
    return (
        f"{result.case:20}{result.evodsp_s:10.3f}{result.formulas_s:12.3f}{result.ratio:7.2f}  {spread:14}{result.limit:5.2f}"
        f"{result.evodsp_mib:12.0f}{result.formulas_mib:14.0f}{result.memory_ratio:7.2f}{aim:>6}{result.difference:12.1e}"
        f"{result.evodsp_operators:7d}/{result.formulas_operators:<6d}"
    )


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
    for name in arguments.cases:
        results.append(measure(name, arguments.rounds, arguments.clock))
        print(line(results[-1]), flush=True)
        if arguments.output is not None:
            write(arguments.output, results, arguments.clock)


if __name__ == "__main__":
    main()
