"""What is in half precision and what is not (`evodsp.model.precision`): rounding errors, and what a GPU would keep and send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from evodsp.config import ModelConfig
from evodsp.model.dropout import DropoutKeys
from evodsp.model.evoformer import EvoformerStack
from evodsp.model.kernels import by_chunks, chunked
from evodsp.model.sharded import Sharded
from evodsp.model.templates import TemplateEmbedder, Templates
from evodsp.rng import Draws
from tests.builders.fake_cuda import Case, Counts, measure
from tests.builders.small_model import config, features

ONE_ROUNDING = 1.9e-3
"""Relative error of random numbers that are rounded to bf16 once: 1.7e-3 (numbers near 10: 1.8e-3), and a margin."""
TWO_ROUNDINGS = 2.5e-3


def errors(function: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> list[float]:
    """Relative errors (norms) in bf16 of the result and of the gradients of `inputs`, against float64 on the same numbers."""
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.bfloat16().to(dtype))])
    return [((half.double() - exact).norm() / exact.norm()).item() for exact, half in zip(*found, strict=True)]


@pytest.mark.parametrize("offset", ["none", "values", "gradient"])
def test_attention_is_rounded_once(offset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches scaled queries, logits, weights, a softmax gradient or sums of the bias gradient that are rounded to bf16.

    With a common offset in values, the softmax gradient is a small difference of large numbers: its error was 30 times larger.
    """
    monkeypatch.setattr(by_chunks, "CPU_NUMBERS", 1 << 16)  # several chunks
    generator = torch.Generator().manual_seed(0)
    q, k, v, gate, upstream = (torch.randn(1, 8, 96, 4, 32, generator=generator) for _ in range(5))
    v, upstream = v + 10 * (offset == "values"), upstream + 10 * (offset == "gradient")
    bias, keys = torch.randn(1, 4, 96, 96, generator=generator), torch.ones(1, 8, 96)
    inputs = [q, k, v, gate, bias]

    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
        return chunked.biased_attention(torch.stack([q, k, v, gate], 3), keys, bias)

    found = errors(attention, inputs, upstream)
    assert found.pop(4) < TWO_ROUNDINGS, found  # of the gate: its factor, the result, was rounded before
    assert max(found) < ONE_ROUNDING, found


@pytest.mark.parametrize("chunk", [1, 1 << 21])
def test_sums_over_chunks_of_the_outer_product_are_not_rounded(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches partial sums in bf16: with a row per chunk the error of gradients was a fourth larger than with one chunk.

    The two roundings are those of the outer product, a factor of the next product, and of the result.
    """
    monkeypatch.setattr(by_chunks, "CPU_NUMBERS", chunk)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1, 64, 16, 16, generator=generator) for _ in range(2))
    weight, upstream = torch.randn(32, 256, generator=generator), torch.randn(1, 16, 16, 32, generator=generator)
    found = errors(chunked.outer_product, [left, right, weight], upstream)
    assert max(found) < TWO_ROUNDINGS, found


@pytest.mark.parametrize("extra", [False, True])
def test_a_stack_of_half_precision_runs_without_autocast(extra: bool) -> None:
    """Catches a float32 mask, sum or softmax whose result reaches a linear layer: an error here, and with autocast a tensor of
    twice the size."""
    sizes = ModelConfig.preset("test")
    c_m, c_z = sizes.channels.msa, sizes.channels.pair
    module = EvoformerStack(c_m, c_z, sizes.extra_msa if extra else sizes.evoformer, extra).bfloat16()
    m, z = (torch.randn(1, 5, 7, c_m), torch.randn(1, 7, 7, c_z))
    keys = DropoutKeys.of(module.dropout_streams([Draws.root(0)]))
    m, z = module(m.bfloat16(), z.bfloat16(), torch.ones(1, 5, 7), torch.ones(1, 7, 7), keys)
    assert m.dtype == z.dtype == torch.bfloat16
    (m.sum() + z.sum()).backward()


def test_templates_of_half_precision_run_without_autocast() -> None:
    """Catches a float32 softmax whose product with the values reaches a linear layer."""
    sizes = config()
    module = TemplateEmbedder(sizes.channels.pair, sizes.templates).bfloat16()
    batch = {name: x[:, 0].float() if x.is_floating_point() else x[:, 0] for name, x in features(1).items()}
    residues = batch["aatype"].shape[1]
    z = torch.randn(1, residues, residues, sizes.channels.pair).bfloat16()
    pair = Sharded.whole(z, "j", torch.ones(1, residues, residues))
    update = module(pair, Templates.from_features(batch)).x
    assert update.dtype == torch.bfloat16


MIB = 2**20
Stack = Literal["evoformer", "extra_msa"]


def stack(what: Stack, ranks: int = 4) -> Counts:
    """Two blocks at AlphaFold2's initial training sizes under a GPU's autocast, with bf16 representations and float32 masks."""
    return measure(Case(what=what, sequences=128 if what == "evoformer" else 1024, ranks=ranks, blocks=2))


@pytest.mark.verify_but("4-44")
@pytest.mark.parametrize(("ranks", "mib"), [(4, 44), (8, 24)])
def test_a_block_sends_half_precision(ranks: int, mib: int) -> None:
    """Catches anything in float32 on the wire: 78 MiB at four ranks were sent where masks made z float32."""
    counts = stack("evoformer", ranks)
    assert {entry.element_size for entry in counts.sent} == {2}
    # The first block: the last one does not switch m back.
    assert sum(entry.bytes for entry in counts.of("forward")[:12]) == mib * MIB
    assert sum(entry.bytes for entry in counts.of("backward")[-12:]) == mib * MIB


def test_the_extra_msa_stack_sends_half_precision_but_for_its_sums() -> None:
    """Catches float32 on the wire. Sums over sequences, a few hundred numbers a residue, are float32 as all sums.

    They are, of each of the two blocks, the mean query and the softmax average, which are gathered.
    """
    sent = stack("extra_msa").sent
    wide = [entry for entry in sent if entry.element_size != 2]
    assert {entry.element_size for entry in wide} == {4}
    forward, backward = ("all-reduce", "all-gather"), ("reduce-scatter", "all-reduce")
    assert [entry.kind for entry in wide] == [*forward, *forward, *backward, *backward]
    assert sum(entry.bytes for entry in wide) < 2 * MIB


@pytest.mark.parametrize("what", ["evoformer", "extra_msa"])
def test_representations_stay_in_half_precision(what: Stack) -> None:
    """Catches a mask, a norm or a count that turns m or z into float32."""
    assert stack(what).dtypes == {
        f"blocks.{number}.{part}": ["bfloat16"] * (2 if part == "msa_stack" else 1)
        for number in range(2)
        for part in ("msa_stack", "pair_stack")
    }


WHOLE_MODEL = Case(
    what="model", sequences=8, residues=16, templates=2, iterations=1, dropout=True, recompute=True, cast_once=True
)  # fmt: skip


@pytest.mark.verify
def test_every_part_of_the_model_keeps_half_precision() -> None:
    """Catches an embedder, recycling, templates, dropout or a head in float32, and a structure module or pLDDT that is not.

    The embedders of input and recycling show in the stacks: with m or z in float32, so would be the stack's results.
    """
    found = dict(measure(WHOLE_MODEL).dtypes)
    assert found.pop("structure_module") == ["float32"] * 10
    assert found.pop("heads.plddt") == ["float32"]
    rows, mask = found.pop("template_torsion_embedder")  # rows of the MSA, and their mask
    assert (rows, mask) == ("bfloat16", "float32")
    assert len(found) == 14
    assert {dtype for part in found.values() for dtype in part} == {"bfloat16"}, found


def test_a_step_of_the_model_casts_parameters_in_three_launches() -> None:
    """Catches a cast of a parameter wherever it is used: 101 launches a block, and more where activations are recomputed."""
    counts = measure(WHOLE_MODEL)
    assert (counts.forward.parameter_casts, counts.backward.parameter_casts) == (1, 2)


def test_casts_at_the_place_of_use_are_counted() -> None:
    """Catches a count that sees no casts: without `CastParameters` there are dozens a block."""
    counts = measure(Case(sequences=8, residues=16))
    assert counts.forward.parameter_casts > 40
    assert counts.backward.parameter_casts > 40
