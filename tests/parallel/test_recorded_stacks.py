"""Stacks that are recorded with their collectives, on several ranks, with a recorder that launches again in the place of CUDA
graphs. The transport shows what is read or changed in flight.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.launch.consensus import all_of
from evodsp.model.dropout import DropoutKeys
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.primitives import use_exchange
from evodsp.model.recordings import CudaRecorder, Rerun, Results, Taken
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group, Ledger
from evodsp.rng import Draws
from tests.builders.poisoned_group import PoisonedGroup
from tests.builders.sharded_stacks import RESIDUES, SEQUENCES, Case, is_extra, stack_of
from tests.ranks import RankPool


class Run:
    """Steps of a sharded stack with dropout, in float32. Weights, inputs and keys of dropout change with each step."""

    def __init__(self, handle: Any, case: Case) -> None:
        self.case, self.group = case, PoisonedGroup(handle, Ledger())
        self.exchange = ShardedExchange(self.group, case.overlap)
        self.stack = stack_of(case).float()
        use_exchange(self.stack, self.exchange, case.plan)
        self.number = 0

    def inputs(self, residues: int = RESIDUES) -> tuple[Any, ...]:
        case, generator = self.case, torch.Generator().manual_seed(self.number)
        config, b, s = ModelConfig.preset("test").channels, case.batch, SEQUENCES[case.stack]
        pair = torch.randn(b, residues, residues, config.pair, generator=generator)
        pair_mask = (torch.randn(b, residues, residues, generator=generator) > -1).float()
        keys = DropoutKeys.of(self.stack.dropout_streams([Draws.root(self.number).at(n) for n in range(b)]))
        if case.stack == "templates":
            return self.exchange.shard(pair, "i").requires_grad_(), pair_mask, keys
        msa = torch.randn(b, s, residues, config.extra_msa if is_extra(case.stack) else config.msa, generator=generator)
        mask = (torch.randn(b, s, residues, generator=generator) > -1).float()
        shards = self.exchange.shard(msa, "seq"), self.exchange.shard(pair, "j")
        return *(x.requires_grad_() for x in shards), mask, pair_mask, keys

    def step(self) -> list[Tensor]:
        """Results and all gradients; then other weights."""
        inputs = self.inputs()
        results = self.stack(*inputs)
        results = [results] if isinstance(results, Tensor) else list(results)
        parameters = list(self.stack.parameters())
        leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        gradients = torch.autograd.grad(results, [*leaves, *parameters], [x.detach().cos() for x in results])
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients[len(leaves) :], strict=True):
                parameter.sub_(1e-3 * gradient.sign())
        self.number += 1
        return [x.detach().clone() for x in (*results, *gradients)]


def compared(handle: Any, case: Case) -> None:
    """Four steps with recordings against the same without, bit by bit; and the ledgers of the last steps."""
    usual, recorded = Run(handle, case), Run(handle, case)
    graphs = Graphs(Rerun(), agree=lambda text: all_of(text, Group(handle)))
    use_graphs(recorded.stack, graphs)
    for number in range(4):
        for run in (usual, recorded):
            assert run.group.ledger is not None
            run.group.ledger.entries.clear()
        expected, found = usual.step(), recorded.step()
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)), number
        if number != 1:  # the step that records
            assert recorded.group.ledger == usual.group.ledger
            assert usual.group.ledger is not None
            assert usual.group.ledger.of("backward")
    assert not graphs.given_up
    assert (len(graphs), graphs.replays) == (1, 3)
    assert recorded.exchange.repeats > 0
    with torch.no_grad():
        inputs = usual.inputs()
        for _ in range(4):
            expected, found = usual.stack(*inputs), recorded.stack(*inputs)
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one, other)
    assert (len(graphs), graphs.replays) == (2, 6)


@pytest.mark.verify_but("templates,batch=1,overlap-2")
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (Case("evoformer", recompute=True), 3),
        (Case("extra", batch=2), 3),
        (Case("templates"), 2),
        (Case("evoformer"), 2),
        (Case("outer_first", overlap=False), 2),
        (Case("extra", recompute=True), 4),
        (Case("templates", batch=3), 3),
    ],
    ids=str,
)
def test_a_replay_on_several_ranks_is_the_step(pool: RankPool, case: Case, ranks: int) -> None:
    """Catches old weights, keys or inputs in a replay that communicates, collectives in another order than other ranks launch
    them, bytes of replays that nobody counts, and a buffer that is read before it has arrived."""
    pool.run(ranks, compared, case)


def _other_sizes(handle: Any) -> str:
    run = Run(handle, Case("evoformer"))
    use_graphs(run.stack, Graphs(Rerun(), agree=lambda text: all_of(text, Group(handle))))
    with pytest.raises(UserError) as error:
        run.stack(*run.inputs(RESIDUES + run.group.rank))
    return str(error.value)


def test_a_rank_with_other_sizes_is_found_before_anybody_waits(pool: RankPool) -> None:
    """Catches ranks that hang in the collectives of each other's calls."""
    one, other = pool.run(2, _other_sizes)
    assert one == other
    assert f"[1, {RESIDUES}, {RESIDUES}]" in one
    assert f"rank 1 EvoformerStack 1, training True, sizes [[1, 5, {RESIDUES + 1}]" in one


class _Wrong(Rerun):
    """Replays other numbers than were launched, or records nothing, on one rank."""

    def __init__(self, fails: bool, changes: bool) -> None:
        self.fails, self.changes, self.recorded = fails, changes, 0

    def record(self, run: Any, pool: Any) -> Taken:
        taken = super().record(run, pool)
        self.recorded += 1
        if self.fails and self.recorded == 2:  # this recorder communicates, so all ranks must have recorded both passes
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return Taken(taken.results, lambda: self._repeat(taken.repeat, taken.results), taken.free)

    def _repeat(self, repeat: Any, results: Results) -> None:
        repeat()
        if self.changes and results[0] is not None:
            results[0][..., 0] *= 1 + 1e-6


def _one_rank_fails(handle: Any, fails: bool, required: bool) -> tuple[str, int]:
    """What is said, and the number of replays."""
    usual, run = Run(handle, Case("evoformer")), Run(handle, Case("evoformer"))
    agree, last = (lambda text: all_of(text, Group(handle))), run.group.rank == run.group.size - 1
    graphs = Graphs(_Wrong(fails and last, not fails and last), agree=agree, required=required)
    use_graphs(run.stack, graphs)
    run.step(), usual.step()
    if fails and required:
        with pytest.raises(UserError) as error:
            run.step()
        return str(error.value), graphs.replays
    for _ in range(2):
        assert all(torch.equal(*pair) for pair in zip(usual.step(), run.step(), strict=True))
    assert len(graphs) == 0
    return graphs.given_up, graphs.replays


@pytest.mark.verify_but("False-True-*", "True-True-*")
@pytest.mark.parametrize(
    ("fails", "required", "said"),
    [
        (
            False,
            True,
            "a replay of EvoformerStack is not what was launched: result 1 has other bits (rank 1 of the sample)",
        ),
        (
            True,
            False,
            "EvoformerStack cannot be recorded as a CUDA graph: RuntimeError: operation not permitted when stream is "
            "capturing (rank 1 of the sample)",
        ),
        (
            True,
            True,
            "EvoformerStack cannot be recorded as a CUDA graph: RuntimeError: operation not permitted when stream is "
            "capturing (rank 1 of the sample); switch CUDA graphs off (cuda_graphs)",
        ),
    ],
)
def test_what_is_wrong_on_one_rank_is_known_to_all(pool: RankPool, fails: bool, required: bool, said: str) -> None:
    """Catches wrong numbers of a replay, ranks of which some replay and others launch, and a failure of one rank on which the
    others wait."""
    assert pool.run(2, _one_rank_fails, fails, required) == [(said, 0)] * 2


def _refused(handle: Any) -> str:
    run = Run(handle, Case("evoformer"))
    with pytest.raises(UserError) as error:
        use_graphs(run.stack, Graphs(CudaRecorder()))
    return str(error.value)


def test_collectives_of_gloo_are_not_recorded(pool: RankPool) -> None:
    """Catches a recording without the collectives, which gloo runs on the host."""
    (said, _) = pool.run(2, _refused)
    assert said.startswith(
        "CUDA graphs hold collectives of NCCL, but samples are sharded over ranks that communicate by gloo"
    )


def test_nccl_is_recorded() -> None:
    """Catches a refusal of the backend that graphs are for."""
    assert CudaRecorder().holds("nccl")
    assert CudaRecorder().holds("cpu:gloo,cuda:nccl")


def test_copies_have_no_recordings() -> None:
    """Catches a copied model that replays with the parameters of the original."""
    stack: nn.Module = stack_of(Case("evoformer"))
    use_graphs(stack, Graphs(Rerun()))
    assert copy.deepcopy(stack).graphs is not stack.graphs
