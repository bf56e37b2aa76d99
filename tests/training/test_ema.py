from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from evodsp.errors import UserError
from evodsp.training.checkpoints import ExponentialMovingAverage, decay_at


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
    """A resume that starts the average anew at the raw weights."""
    module = Toy()
    average, trainer = following(module, 0.9)
    nn.init.constant_(module.weight, 5.0)
    checkpoint, state = checkpoint_of(average, module), average.state_dict()
    other = ExponentialMovingAverage(0.9)
    other.on_load_checkpoint(trainer, module, checkpoint)
    other.load_state_dict(state)
    other.on_fit_start(trainer, module)
    assert torch.equal(checkpoint_of(other, module)["ema_state_dict"]["weight"], checkpoint["ema_state_dict"]["weight"])


def test_a_decay_of_one_is_refused() -> None:
    with pytest.raises(UserError, match="ema_decay"):
        ExponentialMovingAverage(1.0)
