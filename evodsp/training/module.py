"""The model in training: losses, metrics, optimizer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from evodsp import metrics
from evodsp.config import FeatureConfig
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_ORDER
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.outputs import ModelOutput
from evodsp.rng import Draws
from evodsp.training.config import TrainingConfig
from evodsp.training.lr_schedule import learning_rate
from evodsp.weights.checkpoint import checkpoint_entries

MOST_CHAINS_LOGGED = 16
"""Up to this many validation chains have a column each in the learning curve."""

_CA = ATOM_ORDER["CA"]


def _ca_atoms(output: ModelOutput, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted CA, true CA [B, R, 3] in Å, and the mask of the true ones [B, R]."""
    positions, truth, mask = output.structure.positions, batch["all_atom_positions"], batch["all_atom_mask"]
    return positions[:, :, _CA], truth[:, :, _CA], mask[:, :, _CA]


def score(output: ModelOutput, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Metrics of the predicted CA atoms against the true ones, each [batch]: lDDT and TM-score in 0..1, RMSD in Å."""
    atoms = _ca_atoms(output, batch)
    return {
        "lddt_ca": metrics.lddt_ca(*atoms),
        "gdt_ts": metrics.gdt_ts(*atoms),
        "tm_score": metrics.tm_score(*atoms),
        "rmsd": metrics.rmsd(*atoms),
    }


class TrainingModule(LightningModule):
    """Lightning's view of `AlphaFold`.

    Dropout of sample i is drawn from (seed, i), so that it does not depend on ranks, resumes or recomputation. `features`,
    those of validation, go into the checkpoints: prediction takes its sizes from there.
    """

    def __init__(self, config: TrainingConfig, seed: int = 0, features: FeatureConfig | None = None) -> None:
        super().__init__()
        self.config, self.features = config, features
        self.model = AlphaFold(config.model_config())
        self.chain_names: dict[str, list[str]] = {}
        """Names of the validation ("val") and test chains by sample index, where known."""
        self.scores: dict[str, dict[str, float]] = {}
        """Metrics by chain of the last validation or test."""
        self._dropout = Draws.root(seed).at("dropout")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        draws = [self._dropout.at(index) for index in batch["sample_index"].tolist()]
        output = self.model(batch, draws)
        loss, terms = total_loss(output, batch, self.config.loss, self.config.heads)
        if not torch.isfinite(loss):
            where = f"step {self.global_step}, sample {int(batch['sample_index'][0])}"
            raise UserError(
                f"the loss is {loss.item()} at {where}; lower model.optimizer.lr, lengthen its warm-up, or resume from an "
                "earlier checkpoint"
            )
        size = len(batch["aatype"])
        self.log("train/loss", loss.detach(), prog_bar=True, batch_size=size, sync_dist=True)
        self.log_dict(
            {f"train/{name}": term for name, term in terms.items() if name != "total"}, batch_size=size, sync_dist=True
        )
        self.log("train/lddt_ca", metrics.lddt_ca(*_ca_atoms(output, batch)).mean(), batch_size=size, sync_dist=True)
        self.log("train/lr", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the norm of the gradient before it is clipped."""
        norms = torch._foreach_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        self.log("train/gradient_norm", torch.stack(norms).norm())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_start(self) -> None:
        self.scores = {}

    def on_test_epoch_start(self) -> None:
        self.scores = {}

    def on_validation_epoch_end(self) -> None:
        self._collect("val")

    def on_test_epoch_end(self) -> None:
        self._collect("test")

    def configure_optimizers(self) -> Any:
        config = self.config.optimizer
        total = config.total_steps or int(self.trainer.estimated_stepping_batches)
        # One kernel for all parameters; in mixed precision Lightning refuses to clip gradients for it.
        fused = not str(self.trainer.precision).endswith("mixed")
        optimizer = torch.optim.Adam(
            self.model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(step, config, total) / config.lr
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(checkpoint_entries(self.model.config, self.features))

    def _evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        output = self.model(batch)
        loss, _ = total_loss(output, batch, self.config.loss, self.config.heads)
        found = score(output, batch)
        size = len(batch["aatype"])
        self.log(f"{stage}/loss", loss, batch_size=size, sync_dist=True)
        for name, values in found.items():
            self.log(f"{stage}/{name}", values.mean(), prog_bar=name == "lddt_ca", batch_size=size, sync_dist=True)
        names = self.chain_names.get(stage, [])
        for row, index in enumerate(batch["sample_index"].tolist()):
            chain = names[index] if index < len(names) else str(index)
            self.scores[chain] = {name: float(values[row]) for name, values in found.items()}

    def _collect(self, stage: str) -> None:
        """Bring all ranks' scores together, in the order of the chains; log each chain's lDDT-CA where they are few."""
        if self.trainer.world_size > 1:
            parts: list[dict[str, dict[str, float]]] = [{}] * self.trainer.world_size
            torch.distributed.all_gather_object(parts, self.scores)
            self.scores = {chain: values for part in parts for chain, values in part.items()}
        order = {chain: place for place, chain in enumerate(self.chain_names.get(stage, []))}
        self.scores = dict(sorted(self.scores.items(), key=lambda item: order.get(item[0], 0)))
        if len(self.scores) <= MOST_CHAINS_LOGGED:
            found = {f"{stage}/lddt_ca/{chain}": values["lddt_ca"] for chain, values in self.scores.items()}
            self.log_dict(found, sync_dist=True)
