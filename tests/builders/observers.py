"""Callbacks for `--trainer.callbacks` that print how a run was set up."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from evodsp.losses.total import total_loss
from evodsp.parallel.exchange import ShardedExchange
from evodsp.rng import Draws
from evodsp.training.module import TrainingModule
from evodsp.weights.checkpoint import load_model


class ReportSetup(Callback):
    """Gives each rank different initial weights, and prints the model's setup as JSON when `fit` starts."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.add_(0.01 * trainer.global_rank)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TrainingModule)
        exchange = pl_module.model.exchange
        found = {
            "weights": float(sum(parameter.detach().double().sum() for parameter in pl_module.parameters())),
            "fused": trainer.optimizers[0].defaults["fused"],
            "eps": [group["eps"] for group in trainer.optimizers[0].param_groups],
            "matmul": torch.get_float32_matmul_precision(),
            "plan": vars(pl_module.model.evoformer.plan),
            "kernels": {name: f.__module__ for name, f in vars(pl_module.model.evoformer.kernels).items()},
        }
        if isinstance(exchange, ShardedExchange):
            found |= {"overlap": exchange.overlap, "wire": str(exchange.dtype), "ranks": exchange.group.size}
        print("SETUP " + json.dumps(found))


class FirstLoss(Callback):
    """Prints the loss that the model in the file REFERENCE has on the first sample, computed without the run's model."""

    def __init__(self) -> None:
        self.reference = os.environ["REFERENCE"]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, TrainingModule)
        if trainer.global_step == 0:
            model = load_model(self.reference, raw=True).train()
            draws = [Draws.root(pl_module.seed).at("dropout").at(index) for index in batch["sample_index"].tolist()]
            config = pl_module.config
            with torch.no_grad():
                loss, _ = total_loss(model(batch, draws), batch, config.loss, model.config.heads, model.exchange)
            print(f"FIRST LOSS {float(loss)!r}")
