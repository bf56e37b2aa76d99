"""Callbacks for `--trainer.callbacks` that print or keep how a run was set up, and loggers for `--trainer.logger`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
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
    """Prints the loss that the model in the file REFERENCE has on the first sample, computed without the run's model.

    Terms whose head that model lacks are left out. raw: with its raw weights instead of their moving average.
    """

    def __init__(self, raw: bool = True) -> None:
        self.reference, self.raw = os.environ["REFERENCE"], raw

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, TrainingModule)
        if trainer.global_step == 0:
            source = load_model(self.reference, raw=self.raw)
            # The run's dropout, and the source's heads.
            model = AlphaFold(dataclasses.replace(pl_module.model.config, heads=source.config.heads)).train()
            model.load_state_dict(source.state_dict())
            draws = [Draws.root(pl_module.seed).at("dropout").at(index) for index in batch["sample_index"].tolist()]
            with torch.no_grad():
                output = model(batch, draws)
                terms = {"pae": "predicted_aligned_error", "experimentally_resolved": "experimentally_resolved"}
                absent = {term: 0.0 for term, head in terms.items() if head not in output.logits}
                config = dataclasses.replace(pl_module.config.loss, **absent)
                loss, _ = total_loss(output, batch, config, model.config.heads, model.exchange)
            print(f"FIRST LOSS {float(loss)!r}")


class KeepBatches(Callback):
    """Writes the batch of each step to `folder`, as the module gets it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.folder.mkdir(exist_ok=True)
        torch.save(batch, self.folder / f"{trainer.global_step}.pt")


class Remembers(Callback):
    """Holds a date, which is not read from a checkpoint, in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"when": datetime.date(2026, 11, 25)}


class Validations(Callback):
    """Prints the step of each validation."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print(f"validation after step {trainer.global_step}")


class RecordingLogger(Logger):
    """Writes a line of JSON for each call to `file`."""

    def __init__(self, file: str) -> None:
        super().__init__()
        if not file:
            raise ModuleNotFoundError("no module named 'records'")
        self.file = Path(file)

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return "0"

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        self._write("settings", params)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._write("metrics", {"step": step, **metrics})

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._write("end", status)

    def _write(self, kind: str, content: Any) -> None:
        with self.file.open("a") as file:
            print(json.dumps([kind, content]), file=file)


class FixedRunLogger(RecordingLogger):
    """Refuses settings that differ from those of an earlier start, as MLflow does under a fixed `run_id`."""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        if any(kind == "settings" and content != params for kind, content in map(json.loads, lines)):
            raise RuntimeError("INVALID_PARAMETER_VALUE: Changing param values is not allowed.\nParam with key='lr'")
        super().log_hyperparams(params)
