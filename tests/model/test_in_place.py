"""Passes without gradients in place, piece by piece: the same results as whole, within the memory that was given.

In double precision, with dense parameters and sizes that all differ. A budget of one byte cuts everything into its smallest
pieces: single rows, columns and channels.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.model.alphafold import TEMPLATE_FEATURES, AlphaFold
from evodsp.model.dropout import NO_DROPOUT
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.layers import TriangleMultiplication
from evodsp.model.primitives import use_exchange, use_memory
from evodsp.model.schedule import DAP, CommunicationPlan
from evodsp.model.sharded import Budget, Sharded
from evodsp.model.templates import TemplateEmbedder, Templates
from evodsp.parallel.collectives import DIMENSION, shard_sizes
from evodsp.parallel.exchange import Exchange, LocalExchange, Ready, ShardedExchange
from evodsp.parallel.testing import _in_double as in_double
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from scripts.benchmarks import formulas
from scripts.benchmarks.peak_memory import PeakMemory
from tests.builders.comparison import close
from tests.builders.poisoned_group import PoisonedGroup
from tests.builders.sharded_stacks import RESIDUES, Case, Stack, given, stack_of
from tests.builders.small_model import (
    chains,
    config,
    features,
    features_of_chains,
    gathered,
    halved,
    in_float32,
    tensors,
)
from tests.ranks import RankPool

STACKS: tuple[Stack, ...] = ("evoformer", "extra", "extra_deep", "templates")


def run(
    kind: Stack, memory: int | None, exchange: Exchange, plan: CommunicationPlan, dropout: bool = False
) -> dict[str, Tensor]:
    """This rank's shards of the results for a batch of two."""
    stack, inputs, shards, (*masks, keys), _ = given(Case(kind, batch=2, plan=plan, blocks=2), exchange)
    use_memory(stack, memory)
    with torch.no_grad():
        results = stack(*(x.clone() for x in shards), *masks, keys if dropout else NO_DROPOUT)
    return dict(zip(inputs, [results] if isinstance(results, Tensor) else results, strict=True))


def run_rank(handle: Any, *arguments: Any) -> dict[str, Tensor]:
    kind, memory, plan, *dropout = arguments
    return run(kind, memory, ShardedExchange(PoisonedGroup(handle)), plan, *dropout)


@pytest.mark.parametrize("memory", [1, 3000])
@pytest.mark.parametrize("kind", STACKS)
def test_pieces_equal_the_whole(kind: Stack, memory: int) -> None:
    """Catches a piece that reads rows which have changed already, another piece's mask, rows left out or added twice."""
    found, expected = (run(kind, limit, LocalExchange(), CommunicationPlan()) for limit in (memory, None))
    for name, x in expected.items():
        close(found[name], x, name)


@pytest.mark.parametrize("kind", ["evoformer", "templates"])
def test_pieces_under_dropout(pool: RankPool, kind: Stack) -> None:
    """Catches dropout that is lost, or of another shard."""
    expected, without = (run(kind, None, LocalExchange(), CommunicationPlan(), kept) for kept in (True, False))
    assert not torch.allclose(expected["z"], without["z"])
    close(run(kind, 1, LocalExchange(), CommunicationPlan(), True)["z"], expected["z"], "z")
    found = pool.run(2, run_rank, kind, 1, CommunicationPlan(), True)
    close(torch.cat([rank["z"] for rank in found], 2), expected["z"], "z")


STREAMED = CommunicationPlan(outer_product_mean="sum", stream_bias=True)


@pytest.mark.parametrize(
    ("kind", "ranks", "plan"),
    [
        ("evoformer", 3, CommunicationPlan()),
        ("evoformer", 2, DAP),
        ("evoformer", 3, STREAMED),
        ("extra", 3, CommunicationPlan()),
        ("extra", 3, STREAMED),
        ("extra_deep", 2, DAP),
        ("extra_deep", 4, CommunicationPlan()),
        ("templates", 3, CommunicationPlan()),
        ("templates", 2, CommunicationPlan(triangle_outgoing="gather", triangle_incoming="gather", stream_bias=True)),
    ],
)
@pytest.mark.parametrize("memory", [1, pytest.param(3000, marks=pytest.mark.verify)])
def test_pieces_of_shards_equal_the_whole(
    pool: RankPool, kind: Stack, ranks: int, plan: CommunicationPlan, memory: int
) -> None:
    """Catches ranks that cut their unequal shards into different numbers of pieces and wait for each other for ever, and a
    piece that communicates channels or rows of another one."""
    m_axis = plan.extra_msa_axis if kind.startswith("extra") else "res"
    axis_of = {"m": DIMENSION[m_axis], "z": 2}
    expected = run(kind, None, LocalExchange(), CommunicationPlan())
    found = pool.run(ranks, run_rank, kind, memory, plan)
    for name, x in expected.items():
        close(torch.cat([rank[name] for rank in found], axis_of[name]), x, name)


@pytest.mark.parametrize("memory", [1, 3000])
def test_one_template_after_another(memory: int) -> None:
    """Catches a template that is masked and counts, one that is forgotten, and an update for a sample that has none.

    Samples have the first and last of three templates, none, and the last two.
    """
    batch, count, sizes = 3, 3, ModelConfig.preset("test").channels
    own = features(batch)
    given = {name: own[name][:, 0, :1].repeat_interleave(count, 1) for name in TEMPLATE_FEATURES}
    torch.manual_seed(4)
    given = {name: x * torch.rand_like(x) if x.is_floating_point() else x for name, x in given.items()}
    given["template_mask"] = torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 1]], dtype=torch.float64)
    residues = given["template_aatype"].shape[2]
    embedder = dense(TemplateEmbedder(sizes.pair, config().templates)).double()
    z, mask = (f(batch, residues, residues, *c).double() for f, *c in ((torch.randn, sizes.pair), (torch.ones,)))
    templates = Templates.from_features(given)
    expected = embedder(Sharded.whole(z, "j", mask), templates).x
    assert not expected[1].any()
    assert expected[0].any()
    assert expected[2].any()
    found = z.clone()
    with torch.no_grad():
        pair = Sharded(found, "j", mask, LocalExchange(), Budget(memory, 1))
        pair += embedder(pair, templates)
    close(found, z + expected, "z")


def test_templates_in_half_precision() -> None:
    """Catches a mean or weights that lose more digits than bf16 itself does, and types that do not fit together."""
    torch.manual_seed(4)
    own, pair = features(1), ModelConfig.preset("test").channels.pair
    given = {name: own[name][:, 0] for name in TEMPLATE_FEATURES}
    templates = Templates.from_features(in_float32(given))
    residues = templates.aatype.shape[2]
    embedder = dense(TemplateEmbedder(pair, config().templates)).float()
    z, mask = torch.randn(1, residues, residues, pair).bfloat16(), torch.ones(1, residues, residues)
    found = torch.zeros_like(z)
    with torch.no_grad():
        exact = embedder(Sharded.whole(z.float(), "j", mask), templates).x
        with torch.autocast("cpu", torch.bfloat16):
            whole = embedder(Sharded.whole(z, "j", mask), templates).x
            pair = Sharded(found, "j", mask, LocalExchange(), Budget(3000, 1))
            pair += embedder(Sharded(z, "j", mask, LocalExchange(), pair.budget), templates)
    errors = [(x.float() - exact).abs().mean() for x in (found, whole)]
    assert 0 < errors[0] < 1.3 * errors[1] < 0.05 * exact.abs().mean()


def run_model(
    memory: int | None, exchange: Exchange, ensembles: int = 1, draws: bool = False, multimer: bool = False
) -> dict[str, Tensor]:
    """Outputs of the whole model, two samples, two feature sets."""
    model = halved(chains() if multimer else config())
    use_exchange(model, exchange)
    use_memory(model, memory)
    streams = [Draws.root(0).at(sample) for sample in range(2)] if draws else []
    with torch.inference_mode():
        output = model(features_of_chains(2) if multimer else features(2), streams, ensembles)
        found = {name: gathered(x, name, exchange) for name, x in tensors(output).items()}
    return {name: x.clone() for name, x in found.items()}


def run_model_rank(handle: Any, memory: int, multimer: bool) -> dict[str, Tensor]:
    return in_double(run_model, memory, ShardedExchange(PoisonedGroup(handle)), 1, False, multimer)


@pytest.mark.verify_but("1-1-True-False")
@pytest.mark.parametrize(
    ("memory", "ensembles", "draws", "multimer"),
    [
        (1, 1, True, False),
        (1, 2, False, False),
        (1, 2, False, True),
        (5000, 1, True, True),
        (1, 1, False, False),
        (5000, 1, False, False),
        (5000, 1, True, False),
        (5000, 2, False, False),
    ],
)
def test_the_whole_model_in_pieces(memory: int, ensembles: int, draws: bool, multimer: bool) -> None:
    """Catches a recycled pair representation that is overwritten while it is still needed (by the next feature set of an
    ensemble), templates that are mixed up, and dropout that is lost."""
    found, expected = (
        in_double(run_model, limit, LocalExchange(), ensembles, draws, multimer) for limit in (memory, None)
    )
    for name, x in expected.items():
        close(found[name], x, name)


@pytest.mark.verify
@pytest.mark.parametrize("multimer", [False, True])
def test_the_whole_model_in_pieces_over_ranks(pool: RankPool, multimer: bool) -> None:
    """Catches embedders, templates and the extra MSA cut by positions of the whole instead of the shard's."""
    expected = in_double(run_model, None, LocalExchange(), 1, False, multimer)
    for found in pool.run(3, run_model_rank, 1, multimer):
        for name, x in expected.items():
            close(found[name], x, name)


def test_only_passes_without_gradients_overwrite() -> None:
    """Catches a training step that writes into tensors which its backward pass needs, and inputs overwritten unasked."""
    stack = stack_of(Case("evoformer"))
    sizes = ModelConfig.preset("test").channels
    inputs = torch.randn(1, 5, RESIDUES, sizes.msa).double(), torch.randn(1, RESIDUES, RESIDUES, sizes.pair).double()
    masks = torch.ones(1, 5, RESIDUES).double(), torch.ones(1, RESIDUES, RESIDUES).double()
    before = [x.clone() for x in inputs]
    whole = stack(*inputs, *masks)  # with gradients
    use_memory(stack, 1)
    for ours, theirs in zip(stack(*inputs, *masks), whole, strict=True):
        assert torch.equal(ours, theirs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    with torch.no_grad():
        m, z = stack(*inputs, *masks)
    assert (m.data_ptr(), z.data_ptr()) == tuple(x.data_ptr() for x in inputs)
    close(z, whole[1].detach(), "z")


@pytest.mark.parametrize("whole", [1, 5, 7, 16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_makes_the_same_pieces(whole: int, ranks: int) -> None:
    """Catches numbers of pieces that follow the size of the shard: ranks would make different numbers of collectives."""
    mask = torch.ones(2, whole, 3)
    for memory in (1, 100, 1000, 10**6):
        cuts = [Budget(memory, ranks).cut(size, 1, mask, 40) for size in shard_sizes(whole, ranks)]
        assert len({len(pieces) for pieces in cuts}) == 1
        for size, pieces in zip(shard_sizes(whole, ranks), cuts, strict=True):
            assert [at for piece in pieces for at in range(size)[piece]] == list(range(size))


@pytest.mark.parametrize(
    ("needed", "most", "ends"),
    [
        (0, 6, [6]), (100, 6, [6]), (101, 6, [3, 6]), (250, 6, [2, 4, 6]), (10**6, 6, [1, 2, 3, 4, 5, 6]), (10**6, 2, [3, 6]),
        (300, 1, [6]),
    ],
)  # fmt: skip
def test_no_more_pieces_than_the_memory_asks_for(needed: int, most: int, ends: list[int]) -> None:
    """Catches what fits cut in two, a piece that does not fit, and more pieces than all ranks have entries."""
    pieces = Budget(memory=100, ranks=1).equal(6, needed, most)
    assert pieces == [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    assert Budget(memory=100, ranks=1, samples=2).equal(6, needed, most) == pieces[:2]


@pytest.mark.parametrize("extra", [False, True])
def test_peak_memory(extra: bool) -> None:
    """Catches an intermediate of a full-width block that is made whole, and a representation that is copied.

    The peak is the representations, the budget, and either what must be whole (the product of triangle multiplication, the
    operands of the outer product) or the logits that attention holds at once (1 MiB, three times, and their factors): at most
    0.2 of what the formulas need, representations included.
    """
    sizes = ModelConfig()
    c_m, s, r = (sizes.channels.extra_msa, 240, 64) if extra else (sizes.channels.msa, 24, 96)
    torch.manual_seed(0)
    block = EvoformerBlock(c_m, sizes.channels.pair, sizes.extra_msa if extra else sizes.evoformer, extra)
    masks = [torch.ones(1, s, r), torch.ones(1, r, r)]
    representations = 4 * (s * r * c_m + r * r * sizes.channels.pair)
    whole_beside = 4 * max(r * r * sizes.channels.pair, s * r * c_m if extra else 0)
    budget = 3 << 20
    peaks = {}
    for name, model, memory in (("formulas", formulas.Block(block), None), ("pieces", block, budget)):
        use_memory(block, memory)
        with torch.no_grad(), PeakMemory() as count:
            model(torch.randn(1, s, r, c_m), torch.randn(1, r, r, sizes.channels.pair), *masks)
        peaks[name] = count.peak
    assert peaks["pieces"] < representations + budget + max(whole_beside, 4 << 20)
    assert peaks["pieces"] < 0.2 * peaks["formulas"]


def test_rows_of_the_extra_alignment_that_fit() -> None:
    """Catches one-hot letters of all rows at once where only a third of them fits, and pieces joined to another length."""
    sizes = config()
    sizes = dataclasses.replace(sizes, channels=dataclasses.replace(sizes.channels, extra_msa=60))
    model, pieces, joined = AlphaFold(sizes), [], []
    model.extra_msa_stack.forward = lambda m, z, *_: (joined.append(tuple(m.shape)), z)
    model.extra_msa_embedder.register_forward_hook(lambda module, inputs, output: pieces.append(output.shape[1]))
    given = {name: x[:, 0].float() for name, x in features(1).items() if name.startswith("extra")}
    given["extra_msa"] = given["extra_msa"].int()
    sequences, residues = given["extra_msa"].shape[1:]
    use_memory(model, -(-sequences * residues * (4 * 23 + 60) * 4 // 3))
    pair = torch.zeros(1, residues, residues, sizes.channels.pair)
    with torch.inference_mode():
        model._with_extra_msa(pair, given, pair[..., 0], NO_DROPOUT)
    assert pieces == [2, 2, 2]
    assert joined == [(1, sequences, residues, 60)]


def test_operands_that_other_ranks_get_are_made_within_the_memory() -> None:
    """Catches a pass over several ranks that makes the operands of all rows at once where only a third of them fits."""
    rows, channels, c_z = 12, 5, 7
    layer, made = TriangleMultiplication(c_z, channels, "outgoing"), []
    right = layer.kernels.gated_projection

    def counted(z: Tensor, *more: Tensor) -> Tensor:
        made.append(z.shape[1])
        return right(z, *more)

    layer.kernels = layer.kernels.replaced(gated_projection=counted)
    mask = torch.ones(1, rows, rows)
    memory = -(-rows * rows * (c_z + 2 * 2 * channels) * 4 // 3)
    pair = Sharded(torch.randn(1, rows, rows, c_z), "i", mask, LocalExchange(), Budget(memory, 1))
    with torch.no_grad():
        both = layer._start_product(lambda operands, *_: Ready(operands), "i", pair, slice(None)).wait()
    assert made == [4, 4, 4]
    assert both.shape == (2, 1, channels, rows, rows)
