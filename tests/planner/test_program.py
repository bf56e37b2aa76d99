"""What the planner follows on shapes is what runs: collectives of real ranks, operators of a GPU, memory and work of the whole
model.

The reduced model stands for the whole one, so most of these compare it with the whole model followed in the same way."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.config import HeadsConfig, LossConfig, ModelConfig, TemplateConfig
from evodsp.data.samples.dataset import listed_sizes
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels import by_chunks
from evodsp.model.primitives import use_exchange
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group, Ledger
from evodsp.planner import program as followed
from evodsp.planner import trace
from evodsp.planner.device import Links, load_device, load_link
from evodsp.planner.prediction import PlannedPrediction, prediction_times
from evodsp.planner.program import PlannedStep, Program, SampleSizes, program, sample_batch
from evodsp.planner.simulate import Item, Span, free_pass, items_of, segment, simulate, spans, whole
from evodsp.planner.trace import Communication, Operation
from evodsp.rng import Draws
from scripts.benchmarks.fake_ranks import fake_group
from tests.builders.fake_cuda import Case, measure
from tests.builders.labelled_batch import CHAIN_WEIGHTS, WEIGHTS, batch_of, whole_batch
from tests.builders.small_model import chains, config, features_of_chains
from tests.ranks import RankPool

SIZES = (5, 6, 7)
"""Clusters, extra sequences, residues: no two are equal, and no number of ranks divides them all."""


def few_parts(model: ModelConfig) -> ModelConfig:
    """With one block of each stack but the Evoformer, and one iteration of the structure module: the planner follows all of
    these one by one, so further ones show no more."""
    return dataclasses.replace(
        model,
        extra_msa=dataclasses.replace(model.extra_msa, blocks=1),
        templates=dataclasses.replace(model.templates, blocks=1),
        structure_module=dataclasses.replace(model.structure_module, iterations=1),
    )


def parts_of(arrangement: str) -> tuple[ModelConfig, LossConfig, dict[str, Tensor]]:
    """A small model, weights of its losses, and a batch."""
    if arrangement == "monomer":
        return few_parts(config(recompute=True)), WEIGHTS, whole_batch(1, SIZES)
    labels = batch_of(1, SIZES[2], chains=True)
    return few_parts(chains(recompute=True)), CHAIN_WEIGHTS, labels | features_of_chains(1, SIZES)


def real_step(handle: Any, arrangement: str) -> list[tuple[str, str, int]]:
    """The collectives of one pass with gradients on this rank: phase, kind, numbers."""
    ledger = Ledger()
    torch.set_default_dtype(torch.float64)
    try:
        small, weights, inputs = parts_of(arrangement)
        model = AlphaFold(small)
        exchange = ShardedExchange(Group(handle, ledger))
        use_exchange(model, exchange)
        inputs = {name: x[:, -1:] if name in model.features else x for name, x in inputs.items()}
        inputs |= {name: torch.arange(size)[None] for name, size in listed_sizes(SIZES[2]).items()}
        loss, _ = total_loss(model(inputs, [Draws.root(0)]), inputs, weights, small.heads, exchange)
        loss.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    return [(entry.phase, entry.kind, entry.elements) for entry in ledger.entries]


@pytest.mark.verify_but("3-monomer")
@pytest.mark.parametrize("arrangement", ["monomer", "multimer"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_collectives_are_those_of_real_ranks(pool: RankPool, ranks: int, arrangement: str) -> None:
    """Catches a collective that the planner leaves out, counts in another phase, or with another size, on any rank."""
    clusters, extra, residues = SIZES
    small, weights, batch = parts_of(arrangement)
    templates = batch["template_aatype"].shape[2]
    for rank, real in enumerate(pool.run(ranks, real_step, arrangement)):
        sizes = SampleSizes(residues, clusters, extra, templates)
        step = PlannedStep(small, sizes, weights, ranks, rank, half=False)
        assert [(entry.phase, entry.kind, entry.elements) for entry in program(step).sent] == real


def test_a_prediction_of_a_complex_scores_its_chains_and_their_pairs() -> None:
    """Catches a plan of a complex without ipTM, one that grows with no chain, and scores that a single chain does not have."""
    model = few_parts(chains())
    model = dataclasses.replace(model, heads=dataclasses.replace(model.heads, predicted_aligned_error=True))

    def of_confidence(number: int) -> tuple[int, int]:
        """Events of the scores, and collectives of a prediction."""
        found = program(PlannedStep(model, SampleSizes(7, 5, 6, 2, number), ranks=2, half=False))
        return sum(event.place[0] == "confidence" for event in found.events), len(found.sent)

    alone, two, three = map(of_confidence, (1, 2, 3))
    assert two[1] - alone[1] == three[1] - alone[1] == 6, "pTM, ipTM, actifpTM, chains, and twice their pairs"
    assert alone[0] < two[0] < three[0]


@pytest.mark.verify
def test_a_cpu_may_compute_in_half_precision() -> None:
    """Catches a plan of bf16 for a CPU that ends in a traceback, and activations in single precision."""
    model, sizes = few_parts(config(recompute=False)), SampleSizes(25, 5, 7, 1)
    half, single = (program(PlannedStep(model, sizes, WEIGHTS, half=half, on_gpu=False)) for half in (True, False))
    most = [max(event.live for event in one.events if isinstance(event, Operation)) for one in (half, single)]
    assert 0.4 * most[1] < most[0] < 0.8 * most[1]


@pytest.mark.verify
@pytest.mark.parametrize(("on_gpu", "residues"), [(True, 400), (False, 25)])
def test_remembered_shapes_are_those_of_the_operators(
    on_gpu: bool, residues: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a remembered result of other arguments, a view that is given memory of its own, and one that is not recorded."""
    model = few_parts(config(recompute=False))
    model = dataclasses.replace(model, evoformer=dataclasses.replace(model.evoformer, blocks=1))
    step = PlannedStep(model, SampleSizes(residues, 33, 41, 1), WEIGHTS, 2, half=on_gpu, on_gpu=on_gpu)
    program(
        dataclasses.replace(step, sizes=SampleSizes(5, 3, 4, 1))
    )  # brings tables of constants to the device, once a process
    found = program(step).events
    monkeypatch.setattr(trace.Shapes, "run", lambda _, function, args, kwargs: function(*args, **kwargs))
    assert found == program(step).events
    # Tensors are large enough to be followed.
    assert len({event.live for event in found if isinstance(event, Operation)}) > 30


PRESET = ModelConfig.preset("model_1_ptm")
FINE_TUNING = LossConfig(violation=1.0, experimentally_resolved=0.01, pae=0.1)


def test_products_of_blocks_are_planned_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches sums over chunks that are planned as products in float32, fifteen times slower than a GPU multiplies them, and
    products that are taken for such because their results are in float32."""
    monkeypatch.setattr(by_chunks, "GPU_NUMBERS", 1 << 19)  # several chunks, as in fine-tuning
    model = dataclasses.replace(few_parts(model_with(1, False)), templates=TemplateConfig())
    step = PlannedStep(model, SampleSizes(64, 32, 48), LossConfig())
    works = [e for e in program(step).events if isinstance(e, Operation) and e.flops and e.place[0] == "evoformer"]
    assert {work.name for work in works if work.phase == "backward"} > {"mm", "bmm"}
    # Numbers of sequences per pair of residues are in float32.
    assert sum(work.flops for work in works if not work.half) < 1e-3 * sum(work.flops for work in works)


H100 = load_device("h100")


def both(step: PlannedStep, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Item], list[Item]]:
    """The items of the reduced model with repeats, and of the whole model."""

    def items(found: Program) -> list[Item]:
        return whole(spans(found.events, H100), found.repeats)

    few = items(program(step))
    with monkeypatch.context() as patch:
        patch.setattr(followed, "reduced", lambda model: (model, []))
        return few, items(program(step))


def model_with(blocks: int, recomputed: bool | int, projections: bool | int = False) -> ModelConfig:
    """The preset with fewer blocks, so that the whole can be followed."""
    again = {"checkpoint": recomputed, "checkpoint_projections": projections}
    evoformer = dataclasses.replace(PRESET.evoformer, blocks=blocks, **again)
    return dataclasses.replace(PRESET, evoformer=evoformer)


@pytest.mark.verify
@pytest.mark.parametrize(
    ("model", "ranks", "sizes"),
    [
        (few_parts(model_with(9, 4)), 3, SampleSizes(100, 20, 70, 2)),
        (few_parts(model_with(9, 4, True)), 3, SampleSizes(100, 20, 70, 2)),
        (few_parts(model_with(10, 0, 6)), 1, SampleSizes(100, 20, 70, 2)),
        *(
            (model_with(9, recomputed, projections), ranks, sizes)
            for recomputed, projections, ranks in ((True, 0, 1), (4, 0, 2), (False, 0, 8), (4, True, 1), (0, 5, 2))
            for sizes in (
                SampleSizes(256, 124, 1024, 4),
                SampleSizes(384, 508, 5120, 4),
                SampleSizes(768, 128, 512),
                SampleSizes(2048, 64, 64),
            )
        ),
    ],
)
def test_repeated_segments_are_the_whole_model(
    model: ModelConfig, ranks: int, sizes: SampleSizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a segment that is repeated once too often, memory that a repetition does not carry on, and a collective that is
    awaited in another segment than the one that began it."""
    if not sizes.templates:
        model = dataclasses.replace(model, templates=dataclasses.replace(model.templates, enabled=False))
    few, all_of_it = both(PlannedStep(model, sizes, FINE_TUNING, ranks), monkeypatch)
    links = Links(load_link("nvlink4"), load_link("infiniband"), 8)

    def summary(items: list[Item]) -> tuple[int, int, int, int]:
        times = simulate(items, 8e-6, lambda kind, counted: links.seconds(kind, counted, ranks))
        return times.launches, times.flops, times.calls, times.bytes

    repeated, real = summary(few), summary(all_of_it)
    assert repeated[2:] == real[2:]
    assert repeated[0] == pytest.approx(real[0], rel=0.005)
    assert repeated[1] == pytest.approx(real[1], rel=1e-4)
    peaks = [max(item.peak for item in items if isinstance(item, Span)) for items in (few, all_of_it)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    exposed = [
        simulate(items, 0.0, lambda kind, counted: links.seconds(kind, counted, ranks)).exposed
        for items in (few, all_of_it)
    ]
    assert exposed[0] == pytest.approx(exposed[1], rel=0.02)


@pytest.mark.verify_but("True")
@pytest.mark.parametrize("projections", [False, True])
def test_a_block_launches_and_moves_what_it_does_on_a_gpu(projections: bool) -> None:
    """Catches operators that the planner does not see, and activations in another precision than under autocast: compares with
    the counts under the real CUDA dispatch (`tests.builders.fake_cuda`)."""
    sizes: Any = {"what": "evoformer", "sequences": 128, "residues": 256, "projections": projections}
    counted = measure(Case(**sizes, dropout=True, kernels="triton", cast_once=True))
    model = few_parts(model_with(48, False, projections))
    found = program(PlannedStep(model, SampleSizes(256, 124, 16, 4), LossConfig()))
    block = [item for item in segment(spans(found.events, H100), ("evoformer", 1)) if isinstance(item, Span)]
    back = [
        item for item in segment(spans(found.events, H100), ("evoformer", 1), forward=False) if isinstance(item, Span)
    ]
    # In the count are also what the planner has outside of blocks: the cast of parameters into new memory, and dropout's keys.
    outside = 1 + counted.forward.operators["zeros"] + counted.forward.operators["stack"]
    assert sum(item.launches for item in block) == pytest.approx(counted.forward.launches - outside, rel=0.03)
    assert sum(item.bytes for item in block) == pytest.approx(counted.forward.bytes, rel=0.03)
    assert sum(item.launches for item in back) == pytest.approx(counted.backward.launches, rel=0.05)
    assert sum(item.bytes for item in back) == pytest.approx(counted.backward.bytes, rel=0.05)
    assert block[-1].after - block[0].before == pytest.approx(counted.kept, rel=0.05)


@pytest.mark.verify
def test_a_multimer_stands_still_no_longer_than_a_monomer() -> None:
    """Catches an order of the sub-layers of a block in which a multimer's switches of the MSA no longer travel while the pair
    representation is updated."""
    links, exposed = Links(load_link("nvlink4"), load_link("infiniband"), 8), []
    for base in (PRESET, ModelConfig.preset("model_1_multimer_v3")):
        model = dataclasses.replace(few_parts(base), templates=TemplateConfig(), evoformer=PRESET.evoformer)
        found = program(PlannedStep(model, SampleSizes(1024, 252, 1152), FINE_TUNING, 8))
        items = whole(spans(found.events, H100), found.repeats)
        exposed.append(simulate(items, 0.0, lambda kind, counted: links.seconds(kind, counted, 8)).exposed)
    assert 0 < exposed[1] <= exposed[0]


def test_the_parameters_of_the_preset() -> None:
    """Catches blocks that are not counted: DeepMind's model_1_ptm has so many parameters."""
    assert followed.parameters(PRESET) == 93_237_338
    assert followed.parameters(model_with(3, True)) < followed.parameters(model_with(4, True))
    assert followed.parameters(dataclasses.replace(PRESET, heads=HeadsConfig())) < 93_237_338


@pytest.mark.verify
def test_torsions_of_templates_are_made_once_a_sample() -> None:
    """Catches torsions that are planned in each pass of a sample, and a plan without them."""
    model = few_parts(config())
    found = whole(spans(program(PlannedStep(model, SampleSizes(7, 5, 6, 2), WEIGHTS)).events, H100), [])
    once = [item for item in found if isinstance(item, Span) and item.place == followed.MADE_ONCE]
    assert sum(item.operators for item in once) > 100
    assert all(item.phase == "forward" for item in once)
    assert not any(item.place == followed.MADE_ONCE for item in free_pass(found))

    def host(passes: int) -> float:
        what = PlannedPrediction(model, SampleSizes(7, 5, 6, 2), passes)
        return prediction_times(what, H100).host

    assert 4 * host(4) - 3 * host(3) == pytest.approx(host(1) - 1e-6 * H100.launch_us * sum(x.operators for x in once))


LOSS = LossConfig(violation=1.0, experimentally_resolved=0.01, pae=0.1)
LARGE = SampleSizes(residues=530, clusters=519, extra=1030, templates=4)
"""Every rank of 512 has a shard; 16 divides none of the sizes."""


def model_of(blocks: int, recomputed: bool | int) -> ModelConfig:
    """The preset's widths with fewer blocks: the planner follows four, or seven, and repeats them. Of other parts, which it
    follows one by one, there is one."""
    return dataclasses.replace(
        PRESET,
        evoformer=dataclasses.replace(PRESET.evoformer, blocks=blocks, checkpoint=recomputed),
        extra_msa=dataclasses.replace(PRESET.extra_msa, blocks=1),
        templates=dataclasses.replace(PRESET.templates, blocks=1),
        structure_module=dataclasses.replace(PRESET.structure_module, iterations=1),
    )


def on_fake_ranks(step: PlannedStep) -> Counter[tuple[bool, str, int]]:
    """Collectives in the ledger after a pass with gradients: whether in the forward pass, kind, bytes."""
    ledger = Ledger()
    with fake_group(step.ranks, step.rank, ledger) as group, torch.device("meta"):
        model = AlphaFold(step.model).to("meta")  # its buffers are made from arrays
        exchange = ShardedExchange(group)
        use_exchange(model, exchange)
        batch = sample_batch(step)
        assert step.loss is not None
        loss, _ = total_loss(model(batch, [Draws.root(0)]), batch, step.loss, step.model.heads, exchange)
        loss.backward()
    return Counter((entry.phase == "forward", entry.kind, entry.bytes) for entry in ledger.entries)


@pytest.mark.verify
@pytest.mark.parametrize(
    ("ranks", "rank", "recomputed"),
    [
        (8, 7, True),
        *(
            (ranks, rank, recomputed)
            for ranks, recomputed in ((8, 4), (64, False), (512, True))
            for rank in (0, ranks - 1)
        ),
    ],
)
def test_collectives_are_those_of_the_whole_model(ranks: int, rank: int, recomputed: bool | int) -> None:
    """Catches a segment that is repeated once too often, and a number of ranks at which the planner cuts other shards."""
    step = PlannedStep(model_of(5 if recomputed is True else 9, recomputed), LARGE, LOSS, ranks, rank, half=False)
    items = items_of(program(step), load_device("h100"))
    planned = Counter(
        (item.phase == "forward", item.kind, item.bytes) for item in items if isinstance(item, Communication)
    )
    assert planned == on_fake_ranks(step)
