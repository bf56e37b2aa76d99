"""Exponential moving average of the weights (supplement 1.11.7), used for validation and saved in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.parallel.dtensor import local, shard_like


def decay_at(update: int, decay: float) -> float:
    """Decay of update number `update` (from 1). It starts low, so that the average is close to a plain mean of the weights.

    With AF2's constant decay the random initial weights would dominate the average for the first thousand steps, which may be
    a whole run. From about 9 / (1 - decay) updates on, this is AF2's decay. Weights that a run took from a file are not random:
    their average has AF2's decay from the first update on.
    """
    return min(decay, (1 + update) / (10 + update))


class ExponentialMovingAverage(Callback):
    """Keeps the average of every parameter, swaps it in for validation, and writes it to checkpoints as `ema_state_dict`.

    The average of a parameter is on the same device and sharded in the same way; that of a frozen one is the parameter. AF2
    and OpenFold have one decay for all updates and parameters; here it rises first (`decay_at`), except for parameters that
    `begin_trained`.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"model.ema_decay is {decay}, but must be at least 0 and below 1 (or null for no average)")
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._trained: frozenset[str] = frozenset()
        self._rising: list[tuple[Tensor, Tensor]] = []
        """Each average and its parameter, where the decay rises."""
        self._steady: list[tuple[Tensor, Tensor]] = []
        """Each other average and its parameter."""
        self._loaded: Mapping[str, Tensor] | None = None
        self._updates = 0
        self._in_model = False

    def begin_trained(self, names: Iterable[str]) -> None:
        """Tell which parameters begin with trained weights: their average has the full decay from the first update on."""
        self._trained = frozenset(names)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("ema_state_dict")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._updates, self._trained = state_dict["updates"], frozenset(state_dict.get("trained", ()))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "trained": sorted(self._trained)}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not in `setup`: the weights are restored and on their device only now.
        source = self._loaded or {}
        with torch.no_grad():
            weights = dict(pl_module.named_parameters())
            self._average = {
                name: parameter.detach().clone().copy_(shard_like(source[name], parameter))
                if name in source
                else parameter.detach().clone()
                for name, parameter in weights.items()
            }
            # Listed once: walking through the modules takes longer than the update of a small model.
            pairs = {name: (self._average[name], weight) for name, weight in weights.items() if weight.requires_grad}
            self._steady = [pair for name, pair in pairs.items() if name in self._trained]
            self._rising = [pair for name, pair in pairs.items() if name not in self._trained]
        self._loaded = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > self._updates:  # only after an optimizer step, not after each accumulated batch
            self._updates = trainer.global_step
            self.update()

    @torch.no_grad()
    def update(self) -> None:
        """average <- decay * average + (1 - decay) * weights."""
        for pairs, decay in ((self._rising, decay_at(self._updates, self.decay)), (self._steady, self.decay)):
            if pairs:
                averages, weights = ([local(pair[part]) for pair in pairs] for part in (0, 1))
                torch._foreach_lerp_(averages, weights, 1 - decay)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        other = {**weights, **{name: average.detach() for name, average in self._average.items()}}
        raw, averaged = (other, weights) if self._in_model else (weights, other)
        checkpoint["state_dict"], checkpoint["ema_state_dict"] = raw, averaged

    @torch.no_grad()
    def _swap(self, module: nn.Module) -> None:
        """Exchange the weights of `module` with their average, in place."""
        if not self._average:
            return
        for name, parameter in module.named_parameters():
            held = parameter.detach().clone()
            parameter.copy_(self._average[name])
            self._average[name].copy_(held)
        self._in_model = not self._in_model
