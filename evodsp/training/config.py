"""Typed settings of a training run: what `evodsp fit` takes besides Lightning's Trainer options. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from evodsp.config import FeatureConfig, LossConfig, ModelConfig
from evodsp.errors import UserError


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam and its learning rate (supplement 1.11.3). Steps are optimizer steps."""

    lr: float = 1e-3
    """Learning rate after the warm-up."""
    beta1: float = 0.9
    """Decay of Adam's mean of the gradients."""
    beta2: float = 0.999
    """Decay of Adam's mean of the squared gradients."""
    eps: float = 1e-6
    """Added to the root in Adam's denominator."""
    warmup_steps: int = 1000
    """The learning rate rises linearly from zero over this many steps (AF2: 128,000 samples, 1000 steps of 128)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: `constant` with one drop at `drop_step` (AF2), or `cosine` down to `final_lr` at `total_steps`."""
    drop_step: int = 50_000
    """Step from which a constant schedule is multiplied by `drop_factor` (AF2: after 6.4 million samples)."""
    drop_factor: float = 0.95
    """Factor of that drop."""
    total_steps: int | None = None
    """Length of the cosine; None takes trainer.max_steps."""
    final_lr: float = 0.0
    """Learning rate at the end of the cosine."""
    clip: Literal["sample", "batch"] = "sample"
    """Whose gradient trainer.gradient_clip_val bounds: each `sample`'s (AF2; backward passes are then of one sample each, and
    a larger data.batch_size is accumulated), or that of the whole `batch` of all devices."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.warmup_steps < 0:
            raise UserError(
                f"optimizer: lr is {self.lr} and warmup_steps {self.warmup_steps}; use lr > 0, warmup_steps >= 0"
            )
        if self.clip not in ("sample", "batch"):
            raise UserError(f"optimizer.clip is '{self.clip}', but must be sample or batch")


@dataclass(frozen=True)
class TrainingConfig(ModelConfig):
    """The model's sizes, its losses and its optimizer."""

    loss: LossConfig = field(default_factory=LossConfig)
    """Weights of the loss terms."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Adam and its learning rate."""
    ema_decay: float | None = 0.999
    """Decay of the exponential moving average of the weights that validation and prediction use; null turns it off."""

    def model_config(self) -> ModelConfig:
        """The sizes alone, as stored in checkpoints."""
        return ModelConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ModelConfig)})


@dataclass(frozen=True)
class DataConfig:
    """Training and validation chains and how samples are made from them. Layout: OpenFold's (see the README)."""

    alignment_dir: str = "data/alignments"
    """Folder with one sub-folder of .a3m and .sto files per chain, named <pdbid>_<chain>."""
    structure_dir: str = "data/mmcif_files"
    """Folder of structures, <pdbid>.cif or <pdbid>.cif.gz."""
    train_chains: str | list[str] | None = None
    """Chains to train on: a list of names, or a text file with one name per line; null takes every folder of alignments."""
    validation_chains: str | list[str] | None = None
    """Chains to validate on, likewise; null for none."""
    test_chains: str | list[str] | None = None
    """Chains of `evodsp test`, likewise; null takes the validation chains."""
    template_structure_dir: str | None = None
    """Folder of template structures, <pdbid>.cif or <pdbid>.cif.gz; the hits are the .hhr and hmm_output.sto files of the
    chains' alignment folders. null reads no templates."""
    max_template_date: str | None = None
    """Latest release date of a template, such as 2018-04-30; templates are 60 days older than their chain anyway."""
    obsolete: str | None = None
    """The PDB's obsolete.dat: which entries stand for withdrawn ones among the templates."""
    train: FeatureConfig = field(default_factory=FeatureConfig)
    """Features of training samples."""
    validation: FeatureConfig = field(default_factory=lambda: FeatureConfig(crop_size=None, uniform_recycling=False))
    """Features of validation samples."""
    batch_size: int = 1
    """Samples per device (or group of parallel.sequence devices) and step."""
    samples_per_epoch: int = 1000
    """Samples, over all devices, between two validations; rounded up to whole batches."""
    num_workers: int = 0
    """Processes that make samples ahead of time; 0 makes them in the training process."""

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("samples_per_epoch", 1), ("num_workers", 0)):
            if getattr(self, name) < least:
                raise UserError(f"data.{name} is {getattr(self, name)}, but must be at least {least}")


def check_templates(model: ModelConfig, data: DataConfig) -> None:
    """Raise UserError if the model uses templates and its samples have none, or the other way round."""
    for name, features in (("train", data.train), ("validation", data.validation)):
        where = f"model.templates.enabled is {str(model.templates.enabled).lower()}, but data.{name}.max_templates is"
        if model.templates.enabled and features.max_templates == 0:
            raise UserError(f"{where} 0; set it (AlphaFold2: 4), or model.templates.enabled to false")
        if not model.templates.enabled and features.max_templates > 0:
            raise UserError(f"{where} {features.max_templates}; set it to 0, or model.templates.enabled to true")


@dataclass(frozen=True)
class RunConfig:
    """Where a run leaves its files and how often."""

    seed: int = 0
    """Seed of the initial weights, the samples and dropout. The same seed gives the same run."""
    output: str = "runs/evodsp"
    """Folder of the run: checkpoints/, curve.csv, tensorboard/ and config.yaml."""
    overwrite: bool = False
    """Start anew in an output folder that already holds checkpoints; otherwise that is an error."""
    ckpt_path: str | None = None
    """Checkpoint to start from or to score; `last` and `best` are those of the output folder. fit: `auto` is `last` if there is
    one and otherwise the start, so that the same command line begins a run and goes on with it."""
    raw: bool = False
    """validate, test: score the raw weights instead of their moving average."""
    checkpoint_every: int = 500
    """Training steps between two writes of checkpoints/last.ckpt; it is written after every validation too."""
