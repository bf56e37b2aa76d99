"""What a block would launch, move and keep on a GPU (bf16-mixed, dropout, own kernels), counted without one.

Limits lie at what was counted. Lower them when a count falls. A bias's gradient is two launches, sums of parts and their sum:
torch's single one took several times as long on an H200. So is the division of the outer product mean's gradient, with its sum:
the products after it then load what they multiply without a pass through registers.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest
import torch

from evodsp.config import EvoformerConfig, LossConfig, ModelConfig
from evodsp.model.dropout import Dropout
from evodsp.model.kernels import triton
from evodsp.model.kernels.operators import Kernels
from evodsp.model.layers import TriangleMultiplication
from evodsp.model.primitives import use_kernels
from evodsp.model.sharded import Sharded
from evodsp.planner.program import PlannedStep, SampleSizes, program
from evodsp.planner.trace import Operation, ProgramRecorder
from evodsp.training.logs import backward_flops, pass_flops, training_flops
from tests.builders import small_model
from tests.builders.fake_cuda import Case, Counts, measure

GB = 1e9


def block(what: str, sequences: int, residues: int, ranks: int = 1, projections: bool = False) -> Counts:
    sizes: Any = {"what": what, "sequences": sequences, "residues": residues, "ranks": ranks}
    return measure(Case(**sizes, dropout=True, kernels="triton", projections=projections))


@pytest.mark.parametrize(
    ("size", "forward", "backward", "gigabytes", "kept"),
    [
        (("evoformer", 128, 256), 73, 145, (2.5, 6.5), 0.54),
        pytest.param(("evoformer", 512, 384), 73, 145, (8.9, 22.6), 2.1, marks=pytest.mark.verify),
        pytest.param(("extra_msa", 5120, 384), 89, 204, (18.3, 45.3), 3.5, marks=pytest.mark.verify),
    ],
)
def test_a_block_on_one_gpu(
    size: tuple[str, int, int], forward: int, backward: int, gigabytes: tuple[float, float], kept: float
) -> None:
    """Catches a fused operator that falls apart, a mask that makes activations float32, a tensor that is kept twice, and a copy
    from the host or a wait for it, which a CUDA graph could not capture."""
    counts = block(*size)
    assert (counts.forward.host, counts.backward.host) == ({}, {})
    assert counts.forward.launches <= forward
    assert counts.backward.launches <= backward
    assert counts.forward.bytes <= gigabytes[0] * GB
    assert counts.backward.bytes <= gigabytes[1] * GB
    assert counts.kept <= kept * GB


@pytest.mark.parametrize(
    ("size", "backward", "gigabytes", "kept"),
    [
        (("evoformer", 128, 256), 161, 7.0, 0.28),
        pytest.param(("evoformer", 512, 384), 161, 24.5, 0.96, marks=pytest.mark.verify),
        pytest.param(("extra_msa", 5120, 384), 219, 47.8, 2.2, marks=pytest.mark.verify),
        pytest.param(("evoformer", 128, 256, 8), 222, 1.3, 0.06, marks=pytest.mark.verify),
    ],
)
def test_a_block_that_computes_projections_again(
    size: tuple[Any, ...], backward: int, gigabytes: float, kept: float
) -> None:
    """Catches projections that are kept after all, or computed once for each tensor that attention keeps. Each of the four
    attentions costs four launches: a norm, a product, and its bias padded in two."""
    counts = block(*size, projections=True)
    assert (counts.forward.host, counts.backward.host) == ({}, {})
    assert counts.forward.launches == block(*size).forward.launches
    assert counts.backward.launches <= backward
    assert counts.backward.bytes <= gigabytes * GB
    assert counts.kept <= kept * GB


@pytest.mark.verify_but("evoformer")
@pytest.mark.parametrize("what", ["evoformer", "extra_msa"])
def test_a_stack_can_be_recorded(what: Literal["evoformer", "extra_msa"]) -> None:
    """Catches a copy from the host or a wait for it between blocks or in a recomputation: a CUDA graph could not capture it."""
    counts = measure(
        Case(
            what=what, sequences=8, residues=16, blocks=2, dropout=True, recompute=True, cast_once=True, kernels="triton"
        )
    )  # fmt: skip
    assert (counts.forward.host, counts.backward.host) == ({}, {})


@pytest.mark.verify
def test_the_model_reads_from_the_host_outside_of_stacks_only() -> None:
    """Catches a copy or a wait in the template stack, which is recorded as a CUDA graph too. Tables of constants are copied
    once."""
    counts = measure(
        Case(
            what="model", sequences=8, residues=16, templates=2, dropout=True, recompute=True, cast_once=True, kernels="triton"
        )
    )  # fmt: skip
    assert {name.rpartition(" ")[2].partition(":")[0] for name in counts.forward.host} == {
        "model/dropout.py",
        "geometry/frames.py",
    }
    assert counts.backward.host == {}


def test_a_block_on_one_of_eight_gpus() -> None:
    """Catches launches that grow with the number of ranks, such as a copy for each rank in every switch."""
    counts = block("evoformer", 128, 256, ranks=8)
    assert counts.forward.launches <= 104
    assert counts.backward.launches <= 188
    assert (counts.forward.host, counts.backward.host) == ({}, {})


@pytest.mark.verify
def test_an_extra_msa_block_on_one_of_eight_gpus() -> None:
    """Catches a collective, a sum and a slice for each rank where partial sums are reduced."""
    counts = block("extra_msa", 5120, 384, ranks=8)
    assert counts.forward.launches <= 134
    assert counts.backward.launches <= 243
    assert counts.forward.bytes <= 3.3 * GB
    assert counts.backward.bytes <= 7.8 * GB


@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("residues", [256, 512])
def test_triangle_multiplication_with_dropout_and_sum(residues: int, channels: int) -> None:
    """Catches a tensor of the pair's size that is written and read again: operands, product and result are all that a forward
    pass needs, in passes over 9 representations; over 25 in the backward pass. Partial sums make the rest."""
    with torch.device("meta"):
        layer = TriangleMultiplication(channels, channels, "outgoing").to(torch.bfloat16)
        dropout = Dropout(channels, 0.25, "it", "i")
        z = torch.empty(1, residues, residues, channels, dtype=torch.bfloat16, requires_grad=True)
        mask, keys = torch.empty(z.shape[:3]), torch.empty(1, dtype=torch.int64)
    for module in (layer, dropout):
        use_kernels(module, Kernels.of(triton))
    with ProgramRecorder() as recorder:
        pair = Sharded.whole(z, "j", mask)
        pair += dropout(layer(pair), {"it": keys})
        pair.x.backward(torch.empty_like(z))
    passes = {"forward": (0, 0.0), "backward": (0, 0.0)}
    for event in recorder.events:
        assert isinstance(event, Operation)
        launches, moved = passes[event.phase]
        passes[event.phase] = launches + event.launches, moved + event.bytes / (2 * z.numel())
    assert passes["forward"][0] <= 6
    assert passes["backward"][0] <= 14
    assert passes["forward"][1] <= 9.1
    assert passes["backward"][1] <= (25.9 if residues == 512 else 27.9)


@pytest.mark.verify
def test_the_whole_model() -> None:
    """model_1_ptm forward, with four templates. Catches launches outside of the blocks: loops over templates or recycled
    parts, tables that are copied each pass. Stacks of one block are counted, and what each further block adds."""
    sizes: dict[str, Any] = {"sequences": 124, "residues": 256, "dropout": True, "kernels": "triton"}
    whole = measure(Case(what="model", extra_sequences=1024, templates=4, **sizes)).forward.launches

    def further(what: Literal["evoformer", "extra_msa"], blocks: int, **changes: int) -> int:
        one, two = (measure(Case(what=what, blocks=n, **(sizes | changes))).forward.launches for n in (1, 2))
        return (blocks - 1) * (two - one)

    assert whole + further("evoformer", 48) + further("extra_msa", 4, sequences=1024) <= 4_850


def test_the_structure_module() -> None:
    """AlphaFold2's eight iterations, as the planner sees them. Catches projections and points that are computed one by one, the
    angles of each iteration by themselves, and rotations whose gradients are left to autograd: twice as many launches."""
    model = ModelConfig()
    one = {
        part: dataclasses.replace(getattr(model, part), blocks=1) for part in ("evoformer", "extra_msa", "templates")
    }
    events = program(PlannedStep(dataclasses.replace(model, **one), SampleSizes(32, 8, 8), LossConfig())).events
    places = [(event.place[0], event.phase) for event in events if isinstance(event, Operation)]
    assert places.count(("structure_module", "forward")) <= 730
    assert places.count(("structure_module", "backward")) <= 1_085


def block_flops(config: ModelConfig, batch: int, s: int, r: int) -> int:
    """One Evoformer block (algorithm 6) on `s` rows and `r` residues: 2 for each multiplication."""
    sizes: EvoformerConfig = config.evoformer
    m, z = config.channels.msa, config.channels.pair

    def attention(rows: int, length: int, channels: int, heads: int, width: int) -> int:
        """Queries, keys, values, gates and output; logits and sums over `length` for each of `rows` rows."""
        return rows * length * channels * heads * width * 5 + 2 * rows * heads * length**2 * width

    h, c = sizes.msa_heads, sizes.msa_head_width
    msa = attention(s, r, m, h, c) + r * r * z * h  # with the pair bias
    msa += attention(r, s, m, h, c)
    msa += s * r * m * sizes.transition_factor * m * 2
    o = sizes.outer_product_channels
    msa += s * r * m * 2 * o + r * r * s * (o * o + 1) + r * r * o * o * z  # with the number of sequences of each pair
    t = sizes.triangle_channels
    pair = 2 * (r * r * z * 4 * t + r**3 * t + r * r * t * z + r * r * z * z)
    pair += 2 * (attention(r, r, z, sizes.pair_heads, sizes.pair_head_width) + r * r * z * sizes.pair_heads)
    pair += r * r * z * sizes.transition_factor * z * 2
    return 2 * batch * (msa + pair)


def test_a_block_is_the_sum_of_its_products() -> None:
    """A backend that computes something twice, a sub-layer that the counter does not see, samples of a batch that do not
    count, a cost that depends on the number of iterations."""
    config, samples, (s, e, r) = small_model.config(), 2, small_model.SMALL
    more = dataclasses.replace(config.evoformer, blocks=config.evoformer.blocks + 1)
    batch = small_model.features(samples, (s, e, r))
    found = pass_flops(dataclasses.replace(config, evoformer=more), batch) - pass_flops(config, batch)
    rows = s + small_model.TEMPLATES * (config.templates.torsions)  # rows of template torsion angles
    assert found == block_flops(config, samples, rows, r)


def test_only_the_last_iteration_has_a_backward_pass() -> None:
    """Three times the FLOPs for each recycling iteration."""
    assert [training_flops(10, passes) for passes in (1, 2, 4)] == [30, 40, 60]


@pytest.mark.verify
def test_frozen_parts_need_fewer_products() -> None:
    """A gradient of frozen weights that counts, and one of what comes before the first trained weight."""
    config, batch = small_model.config(), small_model.features(1, small_model.SMALL)
    forward, backward = pass_flops(config, batch), backward_flops(config, batch, ())
    assert 1.8 * forward < backward < 2 * forward
    heads_only = backward_flops(config, batch, ("*embedder", "*stack", "evoformer", "single", "structure_module"))
    stacks = dataclasses.replace(config, evoformer=dataclasses.replace(config.evoformer, blocks=9))
    frozen = ("*embedder", "*stack", "evoformer", "single", "structure_module")
    assert backward_flops(stacks, batch, frozen) == heads_only < backward / 20
    middle = backward_flops(config, batch, ("evoformer",))
    assert backward - forward < middle < backward
    assert training_flops(10, 4, middle) == 40 + middle
