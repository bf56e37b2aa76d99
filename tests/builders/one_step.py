"""One optimizer step from a checkpoint, written out without Lightning and evodsp.training: what a resumed run must compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.rng import Draws
from evodsp.training.config import TrainingConfig


def next_weights(
    checkpoint: Mapping[str, Any], config: TrainingConfig, clip: float, batch: dict[str, Tensor], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights and their moving average after one more step, on `batch` of one sample, by their names in a checkpoint.

    The learning rate is constant, the seed 0, and the gradient clipped per sample; all of it in `dtype`.
    """
    model = AlphaFold(config.model_config()).to(dtype).train()
    named = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(checkpoint["state_dict"][name])
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    draws = [Draws.root(0).at("dropout").at(index) for index in batch["sample_index"].tolist()]
    loss, _ = total_loss(model(batch, draws), batch, config.loss, config.heads, model.exchange)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
    state, adam, averages = checkpoint["optimizer_states"][0]["state"], config.optimizer, {}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(named.items()):
            gradient = gradients[number] * min(1.0, clip / norm)
            mean = adam.beta1 * state[number]["exp_avg"].to(dtype) + (1 - adam.beta1) * gradient
            square = adam.beta2 * state[number]["exp_avg_sq"].to(dtype) + (1 - adam.beta2) * gradient**2
            step = int(state[number]["step"]) + 1
            corrected = (square / (1 - adam.beta2**step)).sqrt() + adam.eps
            parameter -= adam.lr * mean / (1 - adam.beta1**step) / corrected
            # The average's decay rises: (1 + update) / (10 + update), of update number `step`.
            decay = min(config.ema_decay or 0.0, (1 + step) / (10 + step))
            averages[name] = decay * checkpoint["ema_state_dict"][name].to(dtype) + (1 - decay) * parameter
    return {name: parameter.detach() for name, parameter in named.items()}, averages


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Over all arrays."""
    assert one.keys() == other.keys()
    return max(float((value.double() - other[name].double()).abs().max()) for name, value in one.items())
