"""Bytes that one block moves, from the ledger of a forward and backward pass: DSP's schedule against DAP's.

    python -m scripts.benchmarks.communication [--ranks 2 4 8 16 64]

The program of one rank runs on fake ranks (`fake_ranks.py`), so that any number of ranks can be counted. A block is the
difference between a stack of three and one of two: it is not the last one. Each count is held against the formula of the design
and the schedule's own prediction. Exit code 1 where one differs, or where DSP's bytes are above what is asked of DAP's.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.primitives import use_exchange
from evodsp.model.schedule import DAP, CommunicationPlan
from evodsp.model.traffic import Call, Sizes, extra_msa_calls, inner_block
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.ledger import Entry, Ledger

from .fake_ranks import fake_group

MIB = 2**20
RANKS = (2, 4, 8, 16, 64)
ASKED = {4: 0.80, 8: 0.60, 16: 0.45, 64: 0.27}
"""Most of DAP's bytes that an Evoformer block may move."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """A block and the size of the sample; one sample, full widths."""

    sequences: int
    residues: int
    extra: bool = False
    asked_of_4: float = ASKED[4]
    """Most of DAP's bytes at 4 ranks."""

    def __str__(self) -> str:
        return f"{'extra-MSA' if self.extra else 'Evoformer'} block, S={self.sequences} R={self.residues}"

    @property
    def c_m(self) -> int:
        return ModelConfig().channels.extra_msa if self.extra else ModelConfig().channels.msa

    @property
    def config(self) -> EvoformerConfig:
        config = ModelConfig().extra_msa if self.extra else ModelConfig().evoformer
        return dataclasses.replace(config, checkpoint=False)

    def asked(self, ranks: int) -> float | None:
        """Most of DAP's bytes that may be moved; None: nothing is asked."""
        if self.extra:
            return self.asked_of_4 if ranks == 4 else None
        return ASKED.get(ranks)

    def predicted(self, ranks: int, dap: bool) -> list[Call]:
        """The forward pass of a block, by the schedule."""
        plan = DAP if dap else CommunicationPlan()
        n = Sizes(ranks, 0, 1, self.sequences, self.residues, self.c_m, ModelConfig().channels.pair, self.config, plan)
        if self.extra and not dap:
            return extra_msa_calls(dataclasses.replace(n, config=dataclasses.replace(self.config, blocks=1)))
        return inner_block(n, self.extra)

    def formula(self, ranks: int, dap: bool) -> int | None:
        """Numbers moved by an Evoformer block's forward pass, where sizes divide (DESIGN, section 3)."""
        if self.extra:
            return None
        msa, pair = self.sequences * self.residues * 256, self.residues**2 * 128
        whole = pair // 8 + (2 * pair + 4 * pair // ranks if dap else 8 * pair // ranks)
        return 2 * msa // ranks + msa // 8 + whole


CASES = (
    Case(128, 256),
    Case(512, 384),
    Case(1024, 256, extra=True, asked_of_4=0.65),
    Case(5120, 384, extra=True, asked_of_4=0.35),
)


@dataclass(frozen=True)
class Moved:
    """What one block moves, on one rank."""

    forward: list[Entry]
    backward_bytes: int

    @property
    def elements(self) -> int:
        return sum(entry.elements for entry in self.forward)

    @property
    def bytes(self) -> int:
        """Both passes."""
        return sum(entry.bytes for entry in self.forward) + self.backward_bytes


def passes(case: Case, ranks: int, dap: bool, dtype: torch.dtype, blocks: int) -> list[Entry]:
    """The ledger of a forward and backward pass of a stack; numbers travel as `dtype`."""
    ledger = Ledger()
    with fake_group(ranks, ledger=ledger) as group, torch.device("meta"):
        stack = EvoformerStack(case.c_m, 128, dataclasses.replace(case.config, blocks=blocks), case.extra)
        exchange = ShardedExchange(group, dtype=dtype)
        use_exchange(stack, exchange, DAP if dap else CommunicationPlan())
        s, r = case.sequences, case.residues
        m = exchange.shard(torch.empty(1, s, r, case.c_m), "seq").requires_grad_()
        z = exchange.shard(torch.empty(1, r, r, 128), "j").requires_grad_()
        m, z = stack(m, z, torch.empty(1, s, r), torch.empty(1, r, r))
        (m.sum() + z.sum()).backward()
    return ledger.entries


def measure(case: Case, ranks: int, dap: bool, dtype: torch.dtype = torch.float32) -> Moved:
    """One block that is not the last."""
    three, two = (passes(case, ranks, dap, dtype, blocks) for blocks in (3, 2))
    forward = [entry for entry in three if entry.phase == "forward"]
    per_block = len(forward) - sum(entry.phase == "forward" for entry in two)

    def back(entries: Sequence[Entry]) -> int:
        return sum(entry.bytes for entry in entries if entry.phase == "backward")

    return Moved(forward[:per_block], back(three) - back(two))


def differences(case: Case, ranks: int, dap: bool, moved: Moved) -> list[str]:
    """Where the ledger is not what formula and schedule say."""
    found, name = [], f"{case}, {ranks} ranks, {'DAP' if dap else 'DSP'}"
    formula, predicted = case.formula(ranks, dap), case.predicted(ranks, dap)
    if formula is not None and moved.elements != formula:
        found.append(f"{name}: {moved.elements} numbers in the ledger, {formula} by the formula")
    if [(entry.kind, entry.elements) for entry in moved.forward] != [(call.kind, call.elements) for call in predicted]:
        found.append(f"{name}: the ledger's calls are not the schedule's")
    return found


def compare(case: Case, all_ranks: Sequence[int], dtype: str) -> list[str]:
    """Print a table; what is wrong with it."""
    wrong = []
    print(f"\n{case}, {dtype}, MiB a rank")
    parts = [f"{name:>13}" for way in ("DSP", "DAP") for name in (f"{way} forward", f"{way} backward")]
    print(f"{'ranks':>5}{''.join(parts)}{'calls':>8}{'DSP/DAP':>9}{'asked':>7}")
    for ranks in all_ranks:
        both = {dap: measure(case, ranks, dap, DTYPES[dtype]) for dap in (False, True)}
        for dap, moved in both.items():
            wrong += differences(case, ranks, dap, moved)
        cells = [
            f"{volume / MIB:13.2f}"
            for moved in both.values()
            for volume in (moved.bytes - moved.backward_bytes, moved.backward_bytes)
        ]
        ratio, asked = both[False].bytes / both[True].bytes, case.asked(ranks)
        if asked is not None and ratio > asked:
            wrong.append(f"{case}, {ranks} ranks: {ratio:.3f} of DAP's bytes, asked at most {asked}")
        calls = f"{len(both[False].forward)}/{len(both[True].forward)}"
        print(f"{ranks:5}{''.join(cells)}{calls:>8}{ratio:9.3f}{'' if asked is None else asked:>7}", flush=True)
    return wrong


def call_by_call(case: Case, ranks: int) -> None:
    """Print a block's collectives in the order of the forward pass."""
    print(f"\n{case}, {ranks} ranks: every collective in order, MiB a rank, bf16")
    print(f"{'':4}{'for':22}{'forward':16}{'MiB':>8}  {'backward':16}{'MiB':>8}")
    transposed = {"all-gather": "reduce-scatter", "reduce": "broadcast"}
    for number, call in enumerate(case.predicted(ranks, dap=False), 1):
        back = (transposed.get(call.kind, call.kind), f"{2 * call.backward / MIB:8.2f}") if call.backward else ("", "")
        print(f"{number:2}  {call.layer:22}{call.kind:16}{2 * call.elements / MIB:8.2f}  {back[0]:16}{back[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="numbers of ranks (default: %(default)s)")
    arguments = parser.parse_args()
    print("Bytes moved by one block and rank, one sample, the part that a rank keeps included; from the ledger.")
    print("DSP: evodsp's schedule. DAP: FastFold's, with exact transposes. The ledger equals formula and schedule.")
    wrong = []
    for dtype in DTYPES:
        for case in CASES:
            wrong += compare(case, arguments.ranks, dtype)
    for case in (CASES[0], CASES[2]):
        call_by_call(case, 4)
    print(
        "\n"
        + ("\n".join(wrong) if wrong else "Every count is the formula's and the schedule's; every ratio is as asked.")
    )
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
