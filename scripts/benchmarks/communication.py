"""Bytes that one block moves in training, from the ledger of a forward and backward pass.

    python -m scripts.benchmarks.communication [--ranks 2 4 8 16 64]

Whole blocks: DSP's schedule against FastFold's DAP. Their pair stacks alone: against Fold-CP's one-dimensional mode too
(`pair_volume.py`). The program of one rank runs on fake ranks (`fake_ranks.py`), so that any number of ranks can be counted.
Settings are the defaults: activations are recomputed in the backward pass (`model.evoformer.checkpoint`), and results of
all-gathers and all-reduces are kept for the recomputation (`plan.keep_gathered`). A block is the difference between a stack of
three and a stack of two, so it is not the last block. Every count is compared with a formula and, for whole blocks, with the
schedule's prediction. The exit code is 1 if one differs, or if DSP's forward bytes exceed the design's limit.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import DAP, CommunicationPlan
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Entry, Ledger, Phase

from . import pair_volume
from .fake_ranks import fake_group
from .pair_volume import MIB, PHASES
from .traffic import CollectiveCall, StackSizes, extra_msa_calls, inner_block, recomputed

RANKS = (2, 4, 8, 16, 64)
DIVISIBLE = 128
"""The largest number that divides every size and width here."""
LIMITS = {4: 0.80, 8: 0.60, 16: 0.45, 64: 0.27}
"""Largest allowed ratio of DSP's to DAP's bytes in a forward pass of an Evoformer block, by number of ranks."""
EXPLANATION = """\
Bytes that one block moves per rank in training with default settings: one sample, from the ledger; fp32 moves twice as much.
The part that a rank sends to itself is included. DSP: evodsp's schedule. DAP: FastFold's, with exact transposes.
recompute: what activation checkpointing launches again in the backward pass. Both schedules keep the results of their
all-gathers and all-reduces for it. For DAP this is costly: per block, one whole operand of both triangle multiplications,
R x R x 128 numbers each. 'DAP regathers': DSP's total over DAP's if DAP gathers them again instead.
calls: collectives in a forward pass. limit: the design's limit for the ratio of forward bytes."""
DSP = CommunicationPlan()
DAP_REGATHERING = dataclasses.replace(DAP, keep_gathered=False)


@dataclass(frozen=True)
class Case:
    """A block at full width, and the size of the one sample in the batch."""

    sequences: int
    residues: int
    extra: bool = False
    limit_at_4: float = LIMITS[4]
    """Largest allowed ratio of DSP's to DAP's bytes at 4 ranks."""

    def __str__(self) -> str:
        return f"{'extra-MSA' if self.extra else 'Evoformer'} block, S={self.sequences} R={self.residues}"

    @property
    def c_m(self) -> int:
        return ModelConfig().channels.extra_msa if self.extra else ModelConfig().channels.msa

    @property
    def config(self) -> EvoformerConfig:
        return ModelConfig().extra_msa if self.extra else ModelConfig().evoformer

    def limit(self, ranks: int) -> float | None:
        """Largest allowed ratio of DSP's to DAP's bytes; None if the design sets no limit."""
        if self.extra:
            return self.limit_at_4 if ranks == 4 else None
        return LIMITS.get(ranks)

    def predicted(self, ranks: int, plan: CommunicationPlan) -> list[CollectiveCall]:
        """The schedule's prediction for the forward pass of a block."""
        n = StackSizes(
            ranks, 0, 1, self.sequences, self.residues, self.c_m, ModelConfig().channels.pair, self.config, plan
        )
        if self.extra and plan == DSP:
            return extra_msa_calls(dataclasses.replace(n, config=dataclasses.replace(self.config, blocks=1)))
        return inner_block(n, self.extra)

    def formula(self, ranks: int, plan: CommunicationPlan) -> int | None:
        """Numbers that the forward pass of an Evoformer block moves, if N divides all sizes (DESIGN, section 3)."""
        if self.extra:
            return None
        msa, pair = self.sequences * self.residues * 256, self.residues**2 * 128
        pair_volume = pair // 8 + (8 * pair // ranks if plan == DSP else 2 * pair + 4 * pair // ranks)
        return 2 * msa // ranks + msa // 8 + pair_volume


CASES = (
    Case(128, 256),
    Case(512, 384),
    Case(1024, 256, extra=True, limit_at_4=0.65),
    Case(5120, 384, extra=True, limit_at_4=0.35),
)


@dataclass(frozen=True)
class Moved:
    """What one block moves on one rank, phase by phase."""

    forward: list[Entry]
    """Collectives of the forward pass, in the order of launch."""
    recompute: Counter[Entry]
    """Collectives of the forward pass that the backward pass launches again."""
    backward: Counter[Entry]

    @property
    def elements(self) -> int:
        """Numbers moved by the forward pass."""
        return sum(entry.elements for entry in self.forward)

    def bytes(self, phase: Phase) -> int:
        """Bytes of one phase."""
        return sum(entry.bytes for entry in Counter[Entry](getattr(self, phase)).elements())

    @property
    def total(self) -> int:
        """Bytes of all phases: what training moves."""
        return sum(self.bytes(phase) for phase in PHASES)


def passes(case: Case, ranks: int, plan: CommunicationPlan, dtype: torch.dtype, blocks: int) -> Ledger:
    """The ledger of a forward and backward pass of a stack whose numbers travel as `dtype`."""
    ledger = Ledger()
    with fake_group(ranks, ledger=ledger) as group, torch.device("meta"):
        stack = EvoformerStack(case.c_m, 128, dataclasses.replace(case.config, blocks=blocks), case.extra)
        exchange = ShardedExchange(group, dtype=dtype)
        use_exchange(stack, exchange, plan)
        s, r = case.sequences, case.residues
        m = exchange.shard(torch.empty(1, s, r, case.c_m), "seq").requires_grad_()
        z = exchange.shard(torch.empty(1, r, r, 128), "j").requires_grad_()
        m, z = stack(m, z, torch.empty(1, s, r), torch.empty(1, r, r))
        (m.sum() + z.sum()).backward()
    return ledger


def measure(case: Case, ranks: int, plan: CommunicationPlan, dtype: torch.dtype = torch.float32) -> Moved:
    """What one block moves that is not the last block of its stack."""
    three, two = (passes(case, ranks, plan, dtype, blocks) for blocks in (3, 2))
    calls = len(three.of("forward")) - len(two.of("forward"))
    recompute, backward = (Counter(three.of(phase)) - Counter(two.of(phase)) for phase in PHASES[1:])
    return Moved(three.of("forward")[:calls], recompute, backward)


def differences(case: Case, ranks: int, plan: CommunicationPlan, moved: Moved) -> list[str]:
    """Where the ledger differs from the formula or from the schedule; one line each."""
    found, name = [], f"{case}, {ranks} ranks, {'DSP' if plan == DSP else 'DAP'}"
    formula, predicted = case.formula(ranks, plan), case.predicted(ranks, plan)
    if formula is not None and moved.elements != formula:
        found.append(f"{name}: {moved.elements} numbers in the ledger, {formula} by the formula")
    if [(entry.kind, entry.elements) for entry in moved.forward] != [(call.kind, call.elements) for call in predicted]:
        found.append(f"{name}: the forward pass in the ledger differs from the schedule's calls")
    again = Counter((entry.kind, entry.elements) for entry in moved.recompute.elements())
    if again != Counter((call.kind, call.elements) for call in recomputed(predicted, plan)):
        found.append(f"{name}: the recomputation in the ledger differs from the schedule's calls")
    return found


def print_table(case: Case, all_ranks: Sequence[int]) -> list[str]:
    """Print the bytes of one block by phase and schedule; return what differs from the design."""
    wrong = []
    print(f"\n{case}, bf16, MiB per rank")
    print(f"{'':5}{'DSP':>9}{'':31}{'DAP':>11}{'':31}{'calls':>8}{'DSP/DAP':>9}")
    phases = f"{'forward':>9}{'recompute':>11}{'backward':>10}{'total':>10}"
    print(f"{'ranks':>5}{phases}{'':2}{phases}{'':8}{'forward':>9}{'limit':>7}{'total':>7}{'DAP regathers':>15}")
    for ranks in all_ranks:
        dsp, dap, regathering = (measure(case, ranks, plan, torch.bfloat16) for plan in (DSP, DAP, DAP_REGATHERING))
        for plan, moved in ((DSP, dsp), (DAP, dap), (DAP_REGATHERING, regathering)):
            wrong += differences(case, ranks, plan, moved)
        cells = [
            f"{moved.bytes('forward') / MIB:9.2f}{moved.bytes('recompute') / MIB:11.2f}"
            f"{moved.bytes('backward') / MIB:10.2f}{moved.total / MIB:10.2f}"
            for moved in (dsp, dap)
        ]
        ratio, limit = dsp.bytes("forward") / dap.bytes("forward"), case.limit(ranks)
        if limit is not None and ratio > limit:
            wrong.append(f"{case}, {ranks} ranks: {ratio:.3f} of DAP's bytes, the limit is {limit}")
        calls = f"{len(dsp.forward)}/{len(dap.forward)}"
        print(
            f"{ranks:5}{'  '.join(cells)}{calls:>8}{ratio:9.3f}{'' if limit is None else limit:>7}"
            f"{dsp.total / dap.total:7.3f}{dsp.total / regathering.total:15.3f}",
            flush=True,
        )
    return wrong


def print_calls(case: Case, ranks: int) -> None:
    """Print a block's collectives in the order of the forward pass."""
    print(f"\n{case}, {ranks} ranks: every collective in order, bf16, MiB per rank")
    print(f"{'':4}{'for':22}{'forward':16}{'MiB':>8}{'recompute MiB':>15}  {'backward':16}{'MiB':>8}")
    transposed = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
    calls = case.predicted(ranks, DSP)
    again = recomputed(calls, DSP)
    for number, call in enumerate(calls, 1):
        forward = f"{2 * call.elements / MIB:8.2f}"
        row = f"{number:2}  {call.layer:22}{call.kind:16}{forward}{forward if call in again else '':>15}"
        if call.backward:
            row += f"  {transposed.get(call.kind, call.kind):16}{2 * call.backward / MIB:8.2f}"
        print(row.rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default: %(default)s)")
    arguments = parser.parse_args()
    if refused := [ranks for ranks in arguments.ranks if ranks < 2 or DIVISIBLE % ranks]:
        parser.error(f"--ranks {refused[0]}: the formulas hold for powers of two from 2 to {DIVISIBLE}")
    print(EXPLANATION)
    wrong = []
    for case in CASES:
        wrong += print_table(case, arguments.ranks)
    print(f"\n{pair_volume.EXPLANATION}")
    for residues in pair_volume.RESIDUES:
        wrong += pair_volume.print_table(residues, arguments.ranks)
    for case in (CASES[0], CASES[2]):
        print_calls(case, 4)
    print(
        "\n"
        + (
            "\n".join(wrong)
            or "ok: every count equals its formula and its schedule, and every ratio is within its limit"
        )
    )
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
