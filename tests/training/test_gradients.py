"""From backward passes to what the optimizer takes, on one process and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evodsp.parallel.group import init_mesh
from evodsp.training.gradients import BatchGradients, PlainGradients, SampleGradients
from tests.ranks import RankPool

SAMPLES = 4


def toy() -> nn.Module:
    """Two layers, of which a sample uses the second one only where its number is odd."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleDict({"first": nn.Linear(3, 5), "second": nn.Linear(5, 2)}).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def loss_of(model: nn.Module, sample: int) -> Tensor:
    """Of very different size from sample to sample: some gradients are clipped, some are not."""
    hidden = model["first"](torch.arange(3.0, dtype=torch.float64) + sample)  # type: ignore[index]
    return (model["second"](hidden) if sample % 2 else hidden).square().sum() * 10.0 ** -(2 * sample)  # type: ignore[index]


def loop_over_samples(clip: float) -> tuple[list[Tensor], list[float]]:
    """AF2's rule, written out: each sample's gradient by itself, clipped, then the mean."""
    model = toy()
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    norms = []
    for sample in range(SAMPLES):
        gradients = torch.autograd.grad(loss_of(model, sample), list(model.parameters()), allow_unused=True)
        norm = torch.sqrt(sum((g.square().sum() for g in gradients if g is not None), torch.zeros(())).double())
        norms.append(float(norm))
        for sums, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                sums += gradient * min(1.0, clip / (float(norm) + 1e-6)) / SAMPLES
    return total, norms


def test_clipping_per_sample_is_a_loop_over_samples() -> None:
    """Clipping the accumulated gradient, forgetting that the loss was divided, or a parameter that one sample does not use."""
    clip = 0.1
    expected, norms = loop_over_samples(clip)
    assert min(norms) < clip < max(norms), "some must be clipped and some not"
    model = toy()
    gradients = SampleGradients(model.parameters(), None, clip)
    for _ in range(2):  # a second step starts anew
        gradients.begin()
        for sample in range(SAMPLES):
            loss = loss_of(model, sample)
            (loss / SAMPLES).backward()
            gradients.add(SAMPLES, loss.detach())
        found = gradients.finish()
        assert float(found.norm) == pytest.approx(sum(norms) / SAMPLES)
        assert float(found.clipped) == sum(norm > clip for norm in norms) / SAMPLES
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("clip", [None, 0.1, 1e6])
def test_clipping_by_batch_is_pytorchs(clip: float | None) -> None:
    reference = toy()
    sum((loss_of(reference, sample) / SAMPLES for sample in range(SAMPLES)), torch.zeros(())).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or float("inf"))
    for kind in ("flat", "plain"):
        model = toy()
        parameters = list(model.parameters())
        gradients: Any = (
            BatchGradients(parameters, None, clip, SAMPLES) if kind == "flat" else PlainGradients(parameters, clip)
        )
        gradients.begin()
        for sample in range(SAMPLES):
            loss = loss_of(model, sample)
            (loss / SAMPLES).backward()
            gradients.add(SAMPLES, loss.detach())
        found = gradients.finish()
        assert float(found.norm) == pytest.approx(float(norm))
        assert float(found.clipped) == (clip is not None and norm > clip)
        for parameter, other in zip(parameters, reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("kind", ["sample", "batch", "plain"])
def test_the_norm_of_many_numbers_in_fp32(kind: str) -> None:
    """A norm that adds two million squares in order, as torch does on a CPU: 1e-4 too small, and each way of cutting the
    gradient clips by another factor."""
    parameter = nn.Parameter(torch.zeros(2_000_003))
    weights = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    gradients: Any = {
        "sample": lambda: SampleGradients([parameter], None, 1.0),
        "batch": lambda: BatchGradients([parameter], None, 1.0),
        "plain": lambda: PlainGradients([parameter], 1.0),
    }[kind]()
    gradients.begin()
    loss = (parameter * weights).sum()
    loss.backward()
    gradients.add(1, loss.detach())
    assert float(gradients.finish().norm) == pytest.approx(float(weights.double().norm()), rel=1e-6)
    assert parameter.grad is not None
    assert float(parameter.grad.double().norm()) == pytest.approx(1, rel=1e-6)


def test_gradients_survive_a_zero_grad_elsewhere() -> None:
    """Lightning sets gradients to None before a validation; autograd would then put them beside the flat tensor."""
    model = toy()
    gradients = BatchGradients(model.parameters(), None, None)
    model.zero_grad(set_to_none=True)
    gradients.begin()
    loss = loss_of(model, 1)
    loss.backward()
    gradients.add(1, loss.detach())
    assert float(gradients.finish().norm) > 0


def test_a_sample_that_is_not_finite_is_left_out_and_the_others_count() -> None:
    """A mean that still divides by all samples, a bad gradient multiplied by zero (which is nan), a loss that is not looked
    at, or a sample blamed for the parameters of another one."""
    good = (0, 3)
    expected = [torch.zeros_like(parameter) for parameter in toy().parameters()]
    for sample in good:
        model = toy()
        for sums, gradient in zip(
            expected,
            torch.autograd.grad(loss_of(model, sample), list(model.parameters()), allow_unused=True),
            strict=True,
        ):
            if gradient is not None:
                sums += gradient / len(good)
    model = toy()
    gradients = SampleGradients(model.parameters(), None, 1e9)
    for _ in range(2):  # a second step starts anew
        gradients.begin()
        for sample in range(SAMPLES):
            loss = loss_of(model, sample)
            (loss / SAMPLES).backward()
            if sample == 1:
                list(model.parameters())[2].grad[0, 1] = torch.inf  # type: ignore[index]
            gradients.add(SAMPLES, loss.detach() * (torch.nan if sample == 2 else 1))
        found = gradients.finish()
        assert found.counted.tolist() == [True, False, False, True]
        assert gradients.not_finite() == [2]
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)
    gradients.discard()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["flat", "plain"])
def test_without_clipping_per_sample_the_step_shows_what_is_not_finite(kind: str) -> None:
    """Clipping by a norm that is nan, after which every parameter is; a sample blamed that came after the bad one."""
    model = toy()
    parameters = list(model.parameters())
    gradients: Any = (
        BatchGradients(parameters, None, 0.1, SAMPLES) if kind == "flat" else PlainGradients(parameters, 0.1)
    )
    gradients.begin()
    for sample in range(SAMPLES):
        loss = loss_of(model, sample)
        (loss / SAMPLES).backward()
        if sample == 1:
            parameters[2].grad[0, 1] = torch.nan  # type: ignore[index]
        gradients.add(SAMPLES, loss.detach())
    found = gradients.finish()
    assert found.norm.isnan()
    assert gradients.not_finite() == [2]
    assert found.counted.tolist() == ([True, False, True, True] if kind == "flat" else [True] * SAMPLES)


def _mean_over_ranks(group: Any, bad_rank: int | None) -> tuple[list[Tensor], list[bool]]:
    """Four samples on 2 data ranks of 2; rank `bad_rank` has one bad number in its share of its second sample."""
    mesh = init_mesh(2, "cpu")
    model = toy()
    gradients = SampleGradients(model.parameters(), mesh, 1e9)
    gradients.begin()
    for number in range(2):
        loss = loss_of(model, mesh.data_rank + 2 * number)
        (loss / 2).backward()
        if number == 1 and bad_rank == group.rank():
            next(model.parameters()).grad[1, 1] = torch.nan  # type: ignore[index]
        gradients.add(2, loss.detach())
    found = gradients.finish()
    return [parameter.grad.clone() for parameter in model.parameters()], found.counted.tolist()  # type: ignore[union-attr]


def test_ranks_agree_on_the_sample_that_they_leave_out(pool: RankPool) -> None:
    """A number that is bad on one rank of four: the other rank of its sample counts it, the data ranks divide by different
    numbers, or the gradients differ afterwards."""
    expected = [torch.zeros_like(parameter) for parameter in toy().parameters()]
    for sample in (0, 1, 2):  # sample 3 is bad
        model = toy()
        found = torch.autograd.grad(loss_of(model, sample), list(model.parameters()), allow_unused=True)
        for sums, gradient in zip(expected, found, strict=True):
            if gradient is not None:
                sums += gradient / 3
    results = pool.run(4, _mean_over_ranks, 2)
    assert [counted for _, counted in results] == [[True, True]] * 2 + [[True, False]] * 2
    for gradients, _ in results:
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-15)


BUCKETS = {"one each": 1, "two": 64 * 8, "one for all": 1 << 20}


def _mean_of_batches(group: Any, clip: float | None, bucket_bytes: int) -> tuple[list[Tensor], float, list[bool], int]:
    """Two steps of four samples on 2 data ranks of 2, and how many buckets were under way when the last pass ended."""
    mesh, model, launched = init_mesh(2, "cpu"), toy(), 0
    gradients = BatchGradients(model.parameters(), mesh, clip, 2, bucket_bytes=bucket_bytes)
    for _ in range(2):
        gradients.begin()
        for number in range(2):
            loss = loss_of(model, mesh.data_rank + 2 * number)
            (loss / 2).backward()
            launched = len(gradients._sent)
            assert number == 1 or launched == 0, "a bucket that was sent before its last gradient"
            gradients.add(2, loss.detach())
        found = gradients.finish()
    kept = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    return kept, float(found.norm), found.counted.tolist(), launched


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("size", BUCKETS)
def test_buckets_sent_during_the_backward_pass_are_the_mean_of_the_batch(
    pool: RankPool, clip: float | None, size: str
) -> None:
    """Catches a bucket that is sent before the last pass or before its last parameter, twice, or never (the even samples, those
    of data rank 0, do not use all parameters); or a mean over the wrong number of ranks."""
    reference = toy()
    sum((loss_of(reference, sample) / SAMPLES for sample in range(SAMPLES)), torch.zeros(())).backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or float("inf"))
    for rank, (found, own_norm, counted, launched) in enumerate(pool.run(4, _mean_of_batches, clip, BUCKETS[size])):
        assert own_norm == pytest.approx(float(norm))
        assert counted == [True, True]
        for gradient, parameter in zip(found, reference.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-15)
        uses_all = rank >= 2
        assert launched == ({"one each": 4, "two": 2, "one for all": 1}[size] if uses_all else 0)
