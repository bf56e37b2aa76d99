"""The counted FLOPs of the model against the sum of its matrix products, written down by hand."""

from __future__ import annotations

import dataclasses

import pytest

from evodsp.config import EvoformerConfig, ModelConfig
from evodsp.training.logs import backward_flops, pass_flops, training_flops
from tests.builders import small_model


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
