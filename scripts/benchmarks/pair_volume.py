"""What the pair stack of one block moves, from the ledger, under each way of communicating; and the formulas it must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evodsp.config import ModelConfig
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Kind, Ledger, Phase

from .fake_ranks import fake_group
from .pair_stacks import DAP_REGATHERING, DSP, DSP_REGATHERING, FASTFOLD, FOLD_CP, FOLD_CP_PROJECTIONS, Method

MIB = 2**20
PHASES: tuple[Phase, ...] = ("forward", "recompute", "backward")
METHODS = (DSP, DSP_REGATHERING, FASTFOLD, DAP_REGATHERING, FOLD_CP, FOLD_CP_PROJECTIONS)
RESIDUES = (256, 384)
EXPLANATION = """\
Pair stacks. 'regathers': what was gathered is not kept but gathered again for the recomputation. Fold-CP 1d: boltz-cp with
cp_topology "1d", as its code communicates. Fold-CP 1d, q k v: as its docstring says, with five all-to-alls and a gather in
attention around the ending node. calls: collectives, and after the + tensors that go round a ring, each by N - 1 hops; a ring
counts what an all-gather counts. DSP of it: DSP's bytes over this row's. Every number is counted as bf16. Fold-CP's code sends
its rings in fp32, so it moves more than is counted here."""


@dataclass(frozen=True)
class Count:
    """Collectives of one kind, or rings, in one phase."""

    calls: int
    elements: int


Counts = dict[tuple[Phase, Kind], Count]


def formula(method: Method, ranks: int, residues: int) -> Counts:
    """What one rank moves for the pair stack of a block, recomputed; `ranks` divides everything that is sharded.

    `scripts.benchmarks.fold_cp` and `evodsp.model.evoformer` derive these sums sub-layer by sub-layer.
    """
    n, config, pairs = ranks, ModelConfig().evoformer, residues**2
    z, operand = pairs * ModelConfig().channels.pair, pairs * config.triangle_channels
    biases = 2 * pairs * config.pair_heads
    forward: dict[Kind, Count]
    backward: dict[Kind, Count]
    if method.plan is None:
        switched = 2 * z if method.ending == "z" else 4 * pairs * config.pair_heads * config.pair_head_width
        switches = 2 if method.ending == "z" else 4
        forward = {
            "send-receive": Count(1, operand),
            "reduce-scatter": Count(n, operand),
            "all-to-all": Count(switches + 1, (switched + pairs) // n),
            "all-gather": Count(2, biases),
        }
        backward = {
            "send-receive": Count(5, 5 * operand),
            "all-to-all": Count(switches, switched // n),
            "all-gather": Count(2, biases),
            "reduce-scatter": Count(2, biases),
        }
        recompute = forward
    else:
        gathers = method.plan.triangle_outgoing == "gather"
        all_to_all = Count(4, 4 * z // n) if gathers else Count(6, (6 * operand + 2 * z) // n)
        gathered = Count(4, 2 * operand + biases) if gathers else Count(2, biases)
        forward = {"all-to-all": all_to_all, "all-gather": gathered}
        backward = {"all-to-all": all_to_all, "reduce-scatter": gathered}
        recompute = {"all-to-all": all_to_all} if method.plan.keep_gathered else forward
    phases = zip(PHASES, (forward, recompute, backward), strict=True)
    return {(phase, kind): count for phase, kinds in phases for kind, count in kinds.items()}


def measure(method: Method, ranks: int, residues: int, dtype: torch.dtype = torch.bfloat16) -> Ledger:
    """The ledger of the first of `ranks` ranks: forward and backward pass of one recomputed pair stack at full width."""
    ledger, config = Ledger(), ModelConfig()
    with fake_group(ranks, ledger=ledger) as group, torch.device("meta"):
        exchange = ShardedExchange(group)
        stack = method.stack(1, config.channels.pair, config.evoformer, exchange).to(dtype)
        z = exchange.shard(torch.empty(1, residues, residues, config.channels.pair, dtype=dtype), method.axis)
        stack(z.requires_grad_(), torch.empty(1, residues, residues, dtype=dtype)).sum().backward()
    return ledger


def counted(ledger: Ledger) -> Counts:
    """The ledger's entries, added up by phase and kind."""
    counts: Counts = {}
    for entry in ledger.entries:
        before = counts.get((entry.phase, entry.kind), Count(0, 0))
        counts[entry.phase, entry.kind] = Count(before.calls + 1, before.elements + entry.elements)
    return counts


def differences(method: Method, ranks: int, residues: int, ledger: Ledger) -> list[str]:
    """Where the ledger differs from the formula; one line each."""
    found, expected = counted(ledger), formula(method, ranks, residues)
    return [
        f"pair stack, R={residues}, {ranks} ranks, {method.name}: {phase} {kind}: {found.get((phase, kind))} in the ledger, "
        f"{expected.get((phase, kind))} by the formula"
        for phase, kind in sorted(found.keys() | expected.keys())
        if found.get((phase, kind)) != expected.get((phase, kind))
    ]


def print_table(residues: int, all_ranks: Sequence[int]) -> list[str]:
    """Print what each method moves for the pair stack of one block; return what differs from the formulas."""
    wrong = []
    print(f"\npair stack of a block, R={residues}, bf16, MiB per rank")
    print(f"{'':26}{'MiB':>10}{'':31}{'calls':>19}{'':9}{'DSP of it':>11}")
    print(
        f"{'ranks':>5}  {'':18}{'forward':>10}{'recompute':>11}{'backward':>10}{'total':>10}"
        f"{'forward':>10}{'recompute':>10}{'backward':>9}{'forward':>9}{'total':>7}"
    )
    for ranks in all_ranks:
        dsp: Ledger | None = None
        for method in METHODS:
            ledger = measure(method, ranks, residues)
            dsp = dsp or ledger
            wrong += differences(method, ranks, residues, ledger)
            volumes = [ledger.bytes(phase) / MIB for phase in PHASES]
            calls = [_calls(ledger, phase) for phase in PHASES]
            print(
                f"{ranks:5}  {method.name:18}{volumes[0]:10.2f}{volumes[1]:11.2f}{volumes[2]:10.2f}{sum(volumes):10.2f}"
                f"{calls[0]:>10}{calls[1]:>10}{calls[2]:>9}"
                f"{dsp.bytes('forward') / ledger.bytes('forward'):9.3f}{dsp.bytes() / ledger.bytes():7.3f}",
                flush=True,
            )
    return wrong


def _calls(ledger: Ledger, phase: Phase) -> str:
    rings = sum(entry.kind == "send-receive" for entry in ledger.of(phase))
    return f"{len(ledger.of(phase)) - rings}" + (f"+{rings}" if rings else "")
