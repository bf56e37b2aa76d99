"""From backward passes to new weights: gradients on one process and on several, the learning rate, the moving average."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.parallel.group import init_mesh
from evodsp.training import command
from evodsp.training.checkpoints import ExponentialMovingAverage, decay_at
from evodsp.training.config import OptimizerConfig
from evodsp.training.gradients import BatchGradients, PlainGradients, SampleGradients, learning_rate
from tests.builders.training import CommandPool
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


class Fails(Callback):
    """Ends the run in the second step, on all ranks."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            raise UserError("planted")


@contextmanager
def _hooks_are_gone_afterwards() -> Iterator[None]:
    built: list[command.Built] = []
    seen: list[int] = []
    build, hook = command.build, "register_post_accumulate_grad_hook"

    def remember(*given: Any) -> command.Built:
        built.append(build(*given))
        parameter = type(next(built[0].module.parameters()))
        register = getattr(parameter, hook)
        patch = mock.patch.object(parameter, hook, lambda *of: (seen.append(1), register(*of))[1])
        patch.start()
        return built[0]

    try:
        with mock.patch.object(command, "build", remember):
            yield
    finally:
        mock.patch.stopall()
    assert seen, "no hook was ever there"
    left = [name for name, parameter in built[0].module.named_parameters() if parameter._post_accumulate_grad_hooks]
    assert not left, left


@pytest.mark.verify
def test_hooks_end_with_the_fit(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """Catches a second fit of the same module in which the hooks of the first one send buckets too, also where the first one
    failed: Lightning then calls no `teardown` of the module."""
    words = ("fit", f"--config={chains}/tiny.yaml", "--parallel.sequence=2", "--trainer.max_steps=2",
             "--trainer.limit_val_batches=0", "--model.optimizer.clip=batch")  # fmt: skip
    fails = "--trainer.callbacks=tests.training.test_optimization.Fails"
    for code, options in ((0, []), (2, [fails])):
        output = f"--output={tmp_path}/{code}"
        outcomes = commands.evodsp(2, *words, *options, output, around=_hooks_are_gone_afterwards)
        assert [outcome.code for outcome in outcomes] == [code, code], outcomes


def rates(config: OptimizerConfig, steps: list[int], batch: int = 1, total: int = 100) -> list[float]:
    """The learning rates of optimizer steps, in a run of `total` steps of `batch` samples."""
    return [learning_rate(step * batch, batch, config, total * batch) for step in steps]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_warm_up_is_linear_and_its_first_step_learns(batch: int) -> None:
    """A warm-up from exactly zero wastes a step; one off by a step never reaches the full rate."""
    config = OptimizerConfig(lr=1e-3, warmup_samples=4 * batch)
    assert rates(config, [0, 1, 2, 3, 4, 5], batch) == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("batch", [1, 8, 128])
def test_alphafolds_schedule_on_any_global_batch(batch: int) -> None:
    """A schedule that counts steps, or batches of a rank: eight times as many data ranks would warm up eight times as long.
    Supplement 1.11.3: 1e-3 after 128,000 samples, 0.95 of that from 6.4 million on."""
    expected = {63_872: 0.5e-3, 128_000: 1e-3, 6_399_872: 1e-3, 6_400_000: 0.95e-3, 9_999_872: 0.95e-3}
    for sample, rate in expected.items():
        assert sample % batch == 0
        [found] = rates(OptimizerConfig(), [sample // batch], batch)
        assert found == pytest.approx(rate, rel=128 / 64_000)


def test_the_constant_schedule_drops_once() -> None:
    """A drop applied at every multiple of its sample, one step late, or one step early where a step goes across it."""
    config = OptimizerConfig(lr=1.0, warmup_samples=0, drop_samples=10, drop_factor=0.95)
    assert rates(config, [0, 9, 10, 20, 1000]) == pytest.approx([1, 1, 0.95, 0.95, 0.95])
    assert rates(config, [0, 4, 5, 10], batch=2) == pytest.approx([1, 1, 0.95, 0.95])
    assert rates(config, [1, 2, 3], batch=4) == pytest.approx([1, 1, 0.95]), "of the first step that begins after it"


@pytest.mark.parametrize("batch", [1, 4])
def test_the_cosine_goes_from_the_full_rate_to_the_final_one(batch: int) -> None:
    """A cosine that ends above its floor, or rises again beyond its end."""
    config = OptimizerConfig(lr=1.0, warmup_samples=10 * batch, schedule="cosine", final_lr=0.1)
    first, middle, last, beyond = rates(config, [10, 60, 110, 500], batch, total=111)
    assert first == 1.0
    assert middle == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert last == beyond == pytest.approx(0.1)


def test_no_warm_up_and_a_run_no_longer_than_the_warm_up_divide_by_nothing() -> None:
    """Division by zero in degenerate configs."""
    assert rates(OptimizerConfig(lr=1.0, warmup_samples=0), [0], total=1) == [1.0]
    [rate] = rates(OptimizerConfig(lr=1.0, warmup_samples=5, schedule="cosine"), [5], total=5)
    assert rate >= 0


def test_a_negative_learning_rate_is_refused() -> None:
    with pytest.raises(UserError, match="lr is -1"):
        OptimizerConfig(lr=-1.0)


class Toy(LightningModule):
    """One layer of weights."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(width)))


def following(module: Toy, decay: float) -> tuple[ExponentialMovingAverage, Mock]:
    average, trainer = ExponentialMovingAverage(decay), Mock(spec=Trainer, global_step=0)
    average.on_fit_start(trainer, module)
    return average, trainer


def checkpoint_of(average: ExponentialMovingAverage, module: Toy) -> dict[str, Any]:
    checkpoint: dict[str, Any] = {"state_dict": {k: v.clone() for k, v in module.state_dict().items()}}
    average.on_save_checkpoint(Mock(spec=Trainer), module, checkpoint)
    return {name: {k: v.clone() for k, v in weights.items()} for name, weights in checkpoint.items()}


def test_the_average_follows_its_formula() -> None:
    """average <- decay average + (1 - decay) weights with the two exchanged, or the warm-up's decay off by one."""
    module = Toy(1)
    nn.init.constant_(module.weight, 1.0)
    average, trainer = following(module, 0.5)
    expected = 1.0
    for step, weight in enumerate((2.0, 3.0, -1.0), start=1):
        nn.init.constant_(module.weight, weight)
        trainer.global_step = step
        average.on_train_batch_end(trainer, module)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight
    assert checkpoint_of(average, module)["ema_state_dict"]["weight"].item() == pytest.approx(expected)


def test_the_decay_becomes_af2s() -> None:
    assert decay_at(1, 0.999) == pytest.approx(2 / 11)
    assert decay_at(8989, 0.999) < 0.999
    assert decay_at(8990, 0.999) == decay_at(10**6, 0.999) == 0.999


class Grown(Toy):
    """A layer with weights of a file, and one that is new."""

    def __init__(self) -> None:
        super().__init__(1)
        self.head = nn.Parameter(torch.zeros(1))


def test_weights_of_a_file_are_kept_as_long_as_the_decay_says() -> None:
    """A run that begins with trained weights loses them from its average in a few steps; a new head that never arrives there;
    and either of them once the run is resumed."""
    module, decay = Grown(), 0.999
    nn.init.constant_(module.weight, 1.0)
    average, trainer = ExponentialMovingAverage(decay), Mock(spec=Trainer, global_step=0)
    average.begin_trained(["weight"])
    average.on_fit_start(trainer, module)
    nn.init.zeros_(module.weight)
    nn.init.ones_(module.head)
    for step in range(1, 101):
        if step == 51:
            checkpoint, state = checkpoint_of(average, module), average.state_dict()
            average = ExponentialMovingAverage(decay)
            average.on_load_checkpoint(trainer, module, checkpoint)
            average.load_state_dict(state)
            average.on_fit_start(trainer, module)
        trainer.global_step = step
        average.on_train_batch_end(trainer, module)
    found = checkpoint_of(average, module)["ema_state_dict"]
    assert found["weight"].item() == pytest.approx(decay**100, rel=1e-5)  # 0.905; with the rising decay 2e-7
    left = math.prod((1 + step) / (10 + step) for step in range(1, 101))
    assert found["head"].item() == pytest.approx(1 - left, abs=1e-6)


def test_accumulated_batches_are_one_update() -> None:
    """Averaging once per batch instead of once per optimizer step changes the decay."""
    module = Toy(1)
    average, trainer = following(module, 0.9)
    trainer.global_step = 1
    nn.init.constant_(module.weight, 5.0)
    average.on_train_batch_end(trainer, module)
    once = checkpoint_of(average, module)["ema_state_dict"]["weight"].clone()
    average.on_train_batch_end(trainer, module)
    assert torch.equal(checkpoint_of(average, module)["ema_state_dict"]["weight"], once)


def test_validation_sees_the_average_and_leaves_the_weights_as_they_were() -> None:
    """Training going on from the average, or a checkpoint written in validation with the two exchanged."""
    module = Toy()
    average, trainer = following(module, 0.9)
    start = module.weight.detach().clone()
    nn.init.constant_(module.weight, 5.0)
    average.on_validation_start(trainer, module)
    assert torch.equal(module.weight, start)
    during = checkpoint_of(average, module)
    average.on_validation_end(trainer, module)
    assert (module.weight == 5).all()
    after = checkpoint_of(average, module)
    for name in ("state_dict", "ema_state_dict"):
        assert torch.equal(during[name]["weight"], after[name]["weight"])
    assert torch.equal(after["ema_state_dict"]["weight"], start)


def test_a_resumed_average_goes_on() -> None:
    """A resume that starts the average anew at the raw weights, or takes an accumulated batch for an optimizer step."""
    module = Toy()
    average, trainer = following(module, 0.9)
    nn.init.constant_(module.weight, 5.0)
    trainer.global_step = 1
    average.on_train_batch_end(trainer, module)
    checkpoint, state = checkpoint_of(average, module), average.state_dict()
    other = ExponentialMovingAverage(0.9)
    other.on_load_checkpoint(trainer, module, checkpoint)
    other.load_state_dict(state)
    other.on_fit_start(trainer, module)
    other.on_train_batch_end(trainer, module)  # of the second step, which has not been taken yet
    assert torch.equal(checkpoint_of(other, module)["ema_state_dict"]["weight"], checkpoint["ema_state_dict"]["weight"])


def test_a_decay_of_one_is_refused() -> None:
    with pytest.raises(UserError, match="ema_decay"):
        ExponentialMovingAverage(1.0)
