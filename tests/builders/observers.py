"""Callbacks for `--trainer.callbacks` that print how a run was set up."""

from __future__ import annotations

import json

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from evodsp.parallel.exchange import ShardedExchange
from evodsp.training.module import TrainingModule


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
