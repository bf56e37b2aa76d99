"""The model in training: losses, metrics, optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from evodsp import metrics
from evodsp.config import FeatureConfig, KernelsConfig
from evodsp.losses.permutation import with_fitting_labels
from evodsp.losses.total import RecordedLoss, total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.kernels.operators import choose, summary
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.printing import show
from evodsp.rng import Draws
from evodsp.training.bad_samples import BadSamples, NotFiniteWeightsError, Suspect, all_finite, merged
from evodsp.training.config import TrainingConfig
from evodsp.training.gradients import Gradients, freeze, learning_rate, trained
from evodsp.training.logs import LogRows
from evodsp.training.run_end import Request
from evodsp.training.run_folder import KEY, recount_batches, rename_callbacks, use_settings
from evodsp.training.scores import ca_atoms, known_scores, mean_by_chain, mean_scores, residue_counts, score
from evodsp.training.world import World
from evodsp.weights.checkpoint import checkpoint_entries
from evodsp.weights.parameter_file import upgrade

MOST_CHAINS_LOGGED = 16
"""Up to this many validation chains get their own column in the learning curve."""


@dataclass(frozen=True)
class TrainedBatch:
    """One batch of an optimizer step, as far as the host needs it after the backward pass."""

    numbers: dict[str, Tensor]
    """Losses and metrics, on the device."""
    samples: list[int]
    """Indices of its samples."""
    recycles: int
    """The number of its recycling iterations after the first."""


@dataclass(frozen=True)
class ReducedStep:
    """An optimizer step whose gradient is reduced, in numbers that the host has read."""

    means: dict[str, float]
    """Losses, metrics, norm of the gradient and share of clipped ones: over the passes that count, of all ranks."""
    counted: float
    """Number of passes that count, as a mean over ranks."""
    passes: int
    """Number of passes of each rank."""
    asked: list[float]
    """Share of ranks that ask, by request."""
    own_numbers: Float[Tensor, "passes n"]
    """Losses and metrics of this rank's passes."""
    own_counted: Float[Tensor, " passes"]
    """1 for this rank's passes that count."""


class TrainingModule(LightningModule):
    """Lightning's view of `AlphaFold`.

    Dropout of sample i is drawn from (seed, i), so it does not depend on ranks, resumes or recomputation.
    """

    def __init__(
        self,
        config: TrainingConfig,
        seed: int = 0,
        features: FeatureConfig | None = None,
        world: World | None = None,
        kernels: KernelsConfig | None = None,
        model: AlphaFold | None = None,
        bad_samples: BadSamples | None = None,
        requests: Sequence[Request] = (),
        samples_per_step: int = 1,
    ) -> None:
        """`features`: sizes of the validation features, saved in checkpoints for prediction. `world`: None for one process.
        `kernels`: which implementations of the operators to use; None: the defaults. `model`: None for a new one.
        `bad_samples`: told of samples that are not finite, and knows those to leave out; None for one that only logs them.
        `requests`: requests that a rank may make of all ranks in a step, such as to stop. `samples_per_step`: samples of all
        devices in a step, on which the learning rate depends.
        """
        super().__init__()
        self.config, self.features, self.world = config, features, world or World()
        self.model = model or AlphaFold(config.model_config())
        freeze(self.model, config.freeze, config.train_only, config.adapters, seed)
        self.settings: dict[str, Any] = {}
        """The settings that checkpoints keep, for a run that resumes."""
        self.chain_names: dict[str, list[str]] = {}
        """Names of the validation ("val") and test chains by sample index, where known."""
        self.scores: dict[str, dict[str, float]] = {}
        """Metrics of the last validation or test, by chain."""
        self.scored_step = 0
        """The number of steps that the weights of that validation had been trained for."""
        self.seed, self.kernels = seed, kernels or KernelsConfig()
        self.bad_samples, self._requests = bad_samples or BadSamples(), requests
        self.samples_per_step = samples_per_step
        self.rows = LogRows()
        """The rows of the logs; a callback of the trainer, which keeps the steps of a row in checkpoints."""
        self._dropout = Draws.root(seed).at("dropout")
        self._casts = CastParameters(self.model)
        self._loss = RecordedLoss(config.loss, config.heads)
        self._gradients: Gradients | None = None
        self._passes: list[TrainedBatch] = []
        """Batches of the running optimizer step."""

    def setup(self, stage: str) -> None:
        """Choose the implementations of the operators for this run's device and precision."""
        device = self.trainer.strategy.root_device
        precision = str(self.trainer.precision)
        dtype = (
            torch.bfloat16 if "bf16" in precision else torch.float64 if precision.startswith("64") else torch.float32
        )
        kernels, choices = choose(self.kernels, device, dtype, on_all_ranks=self.world.gather)
        use_kernels(self.model, kernels)
        if self.trainer.is_global_zero:
            show("\n".join(summary(choices, device)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        draws = self._draws(batch)
        self._casts.make()  # dropped after the backward pass, which recomputes activations
        output = self.model(batch, draws)
        batch = with_fitting_labels(output.structure.positions, batch, draws, self.model.exchange)
        loss, terms = self._loss(output, batch)
        lddt_ca = metrics.lddt_ca(*ca_atoms(output, batch)).mean()
        residues = batch["seq_mask"][:, 0].sum() / len(batch["seq_mask"])
        numbers = {"loss": loss.detach(), **terms, "lddt_ca": lddt_ca.detach(), "residues": residues}
        self._passes.append(TrainedBatch(numbers, batch["sample_index"].tolist(), batch["aatype"].shape[1] - 1))
        return loss

    def _draws(self, batch: dict[str, Tensor]) -> list[Draws]:
        """The random stream of each sample."""
        return [self._dropout.at(index) for index in batch["sample_index"].tolist()]

    def on_fit_start(self) -> None:
        """Not in `setup`: the strategy has moved or sharded the parameters only now."""
        trainer, self._loss.exchange = self.trainer, self.model.exchange
        clip = trainer.gradient_clip_val if str(trainer.gradient_clip_algorithm or "norm") != "value" else None
        per_sample = self.config.optimizer.clip == "sample"
        self._gradients = self.world.gradients(trained(self.model), clip, per_sample, trainer.accumulate_grad_batches)
        self._passes = []

    def on_train_start(self) -> None:
        """Not in `on_fit_start`: a checkpoint's optimizer is restored only now."""
        (optimizer,), (schedule,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        use_settings(optimizer, cast(LambdaLR, schedule.scheduler), self.config.optimizer)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.begin()

    def on_after_backward(self) -> None:
        self._casts.drop()
        loss = self._passes[-1].numbers["loss"]
        if self.bad_samples.skips(self._passes[-1].samples):
            loss = torch.full_like(loss, math.nan)
        self.gradients.add(self.trainer.accumulate_grad_batches, loss)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce the gradient over batches and ranks, decide whether the optimizer gets it, and log the step."""
        step = self._reduce()
        if self._decide(step):
            self.rows.add_step({**step.means, "recycles": sum(one.recycles for one in self._passes) / step.passes})
        else:
            self.gradients.discard()
        self._log_interval(optimizer)
        self._passes = []

    def _reduce(self) -> ReducedStep:
        """Reduce the gradient, and the numbers of the step that the host must know.

        The host reads all of them in one copy, the only place of a step where it waits for the GPU. Lightning gets tensors on
        the CPU: it would read device tensors one by one, and copy numbers to the device first.
        """
        reduced = self.gradients.finish()
        names = list(self._passes[0].numbers)
        terms = torch.stack([torch.stack([one.numbers[name].float() for name in names]) for one in self._passes])
        number = reduced.counted.sum()
        asked = [torch.full_like(reduced.norm, float(request.asked), dtype=torch.float32) for request in self._requests]
        sums = [
            *terms.where(reduced.counted[:, None], 0).sum(0),
            reduced.norm.float() * number,
            reduced.clipped * number,
            number.float(),
        ]
        means = self.world.mean(torch.stack([*sums, *asked]))
        read = torch.cat([means, terms.flatten(), reduced.counted.float()]).cpu()
        means, shares, terms, counted = read.split([len(sums), len(asked), terms.numel(), len(self._passes)])
        named = zip([*names, "gradient_norm", "clipped_fraction"], (means[:-1] / means[-1]).tolist(), strict=True)
        return ReducedStep(
            dict(named), float(means[-1]), len(self._passes), shares.tolist(), terms.view(-1, len(names)), counted
        )

    def _decide(self, step: ReducedStep) -> bool:
        """Whether the optimizer gets the gradient. All ranks decide alike, because they all have the same means.

        Agrees to requests of ranks, and reports samples that are not finite.
        """
        for request, share in zip(self._requests, step.asked, strict=True):
            if share > 0:
                request.agree()
        kept = step.counted > 0
        if step.counted < step.passes or not math.isfinite(step.means["gradient_norm"]):
            kept = kept and self.gradients.drops_samples
            self._leave_out(step)
        if kept:
            self.bad_samples.kept = True
        return kept

    def _log_interval(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the means over the steps since the last row; nothing if all of them were left out."""
        means = self.rows.means()
        if self.at_row:
            self.rows.end_interval()
        if not means:
            return
        loss = means.pop("loss")
        self.log("train/loss", torch.tensor(loss), prog_bar=True, logger=False)
        # Lightning keeps a metric object for each name, which takes longer than many a layer.
        if self.at_row:
            if self.gradients.clip is None:
                del means["clipped_fraction"]
            row = {f"train/{name}": value for name, value in means.items() if name != "total"}
            self.rows.add({"train/loss": loss})
            self.log_row({**row, "train/lr": float(optimizer.param_groups[0]["lr"])})

    def log_row(self, numbers: Mapping[str, float]) -> None:
        """Log numbers of the row that belongs to the running step, for the loggers (`LogRows`) and for callbacks."""
        self.rows.add(numbers)
        self.log_dict({name: torch.tensor(value) for name, value in numbers.items()}, logger=False)

    @property
    def at_row(self) -> bool:
        """Whether the running optimizer step ends a row of the logs."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(every) and (self.trainer.global_step + 1) % every == 0

    def _leave_out(self, step: ReducedStep) -> None:
        """Find out which samples of this step are not finite, on which ranks, and report them. All ranks call this together."""
        known = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        parameters = [known[number] for number in self.gradients.not_finite()]
        found: list[Suspect] = []
        for one, values, counts in zip(self._passes, step.own_numbers, step.own_counted, strict=True):
            wrong = [name for name, value in zip(one.numbers, values, strict=True) if not value.isfinite()]
            if counts or (self.bad_samples.skips(one.samples) and not wrong):
                continue
            # The parameters are those of the first such sample.
            found += [Suspect(sample, wrong, () if found else parameters) for sample in one.samples]
        own = [sample for one in self._passes for sample in one.samples]
        suspects = merged(self.world.gather((found, own, parameters)), self.bad_samples.skip)
        self.bad_samples.add(suspects, self)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """`Gradients` clips by norm. Lightning's own function, for values too, refuses a fused optimizer in mixed precision."""
        if gradient_clip_val and str(gradient_clip_algorithm or "norm") == "value":
            torch.nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)

    @property
    def gradients(self) -> Gradients:
        """Accumulates, reduces and clips the gradients of an optimizer step."""
        if self._gradients is None:
            raise RuntimeError("gradients exist only during fit")
        return self._gradients

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_start(self) -> None:
        self.scores = {}

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_epoch_end(self) -> None:
        self._collect("val")

    def on_test_epoch_end(self) -> None:
        self._collect("test")

    def configure_optimizers(self) -> Any:
        config, batch = self.config.optimizer, self.samples_per_step
        steps = self.trainer.estimated_stepping_batches
        # Infinite without a limit, which `check_length` refuses for a cosine.
        total = config.total_samples or (int(steps) * batch if math.isfinite(steps) else 0)
        # `fused`: one kernel for all parameters. Under fp16's loss scaler such an optimizer removes the scale from the
        # gradients itself, too late for `Gradients`, which clips them before. bf16 has no scaler.
        fused = not str(self.trainer.precision).startswith("16")
        options = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "fused": fused}
        optimizer = self.world.optimizer(trained(self.model), **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(step * batch, batch, config, total) / config.lr
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if not all(self.world.gather(all_finite(self.model.parameters()))):
            raise NotFiniteWeightsError(self.trainer.global_step)
        checkpoint.update(checkpoint_entries(self.model.config, self.features))
        checkpoint[KEY] = self.settings
        checkpoint["batches_per_step"] = self.trainer.accumulate_grad_batches
        checkpoint["samples_per_step"] = self.samples_per_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        upgrade(checkpoint)  # Lightning calls this first, so callbacks see the upgraded checkpoint too
        if self.trainer.state.fn == TrainerFn.FITTING:
            recount_batches(checkpoint, self.trainer.accumulate_grad_batches)
            rename_callbacks(checkpoint)

    def _evaluate(self, batch: dict[str, Tensor], stage: str) -> None:
        with self._casts:
            output = self.model(batch)
        batch = with_fitting_labels(output.structure.positions, batch, self._draws(batch), self.model.exchange)
        loss, _ = total_loss(output, batch, self.config.loss, self.config.heads, self.model.exchange)
        found = {"loss": loss.expand(len(batch["aatype"])), **residue_counts(batch), **score(output, batch)}
        names = self.chain_names.get(stage, [])
        read = torch.stack([values.double() for values in found.values()], 1).tolist()  # one copy for all
        for index, values in zip(batch["sample_index"].tolist(), read, strict=True):
            chain = names[index] if index < len(names) else str(index)
            self.scores[chain] = known_scores(dict(zip(found, values, strict=True)))

    def _collect(self, stage: str) -> None:
        """Gather the scores of all ranks in the order of the chains; log their means, and each lDDT-CA if there are few."""
        parts = self.world.gather(self.scores)
        order = {chain: place for place, chain in enumerate(self.chain_names.get(stage, []))}
        scores = mean_by_chain(parts)
        scores = dict(sorted(scores.items(), key=lambda item: order.get(item[0], 0)))
        for name, mean in mean_scores(scores).items():
            self.log(f"{stage}/{name}", mean, prog_bar=name == "lddt_ca")
        if len(scores) <= MOST_CHAINS_LOGGED:
            self.log_dict({f"{stage}/lddt_ca/{chain}": values["lddt_ca"] for chain, values in scores.items()})
        self.scored_step = self.trainer.global_step
        self.scores = {
            chain: {name: value for name, value in values.items() if name != "loss"} for chain, values in scores.items()
        }
