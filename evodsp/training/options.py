"""Options of `evodsp fit`, `validate` and `test`, defined once: for the quick help here, for the run in `command.py`.

Importing Lightning takes seconds, so help lists our own options in full (no torch needed) and of Lightning's Trainer those
that people use most; `--trainer.help` imports Lightning and lists them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jsonargparse import ActionConfigFile

from evodsp.argument_parser import OneLineErrors
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import ParallelConfig
from evodsp.training.config import DataConfig, RunConfig, TrainingConfig

Command = Literal["fit", "validate", "test"]

SUMMARY: dict[Command, str] = {
    "fit": "train a model",
    "validate": "score a checkpoint on the validation chains",
    "test": "score a checkpoint on the test chains",
}

EXAMPLES: dict[Command, tuple[str, ...]] = {
    "fit": (
        "evodsp fit --config configs/quickstart.yaml",
        "evodsp fit --config configs/quickstart.yaml --model.evoformer.blocks 8 --trainer.max_steps 100",
        "evodsp fit --config configs/quickstart.yaml --ckpt_path last",
        "evodsp fit --config configs/quickstart.yaml --parallel.sequence 2",
        "evodsp fit --config configs/quickstart.yaml --print_config",
    ),
    "validate": ("evodsp validate --config configs/quickstart.yaml --ckpt_path best",),
    "test": ("evodsp test --config configs/quickstart.yaml --ckpt_path runs/quickstart/checkpoints/last.ckpt",),
}


@dataclass(frozen=True)
class TrainerOptions:
    """Lightning's Trainer: the options used most (all of them: --trainer.help)."""

    max_steps: int = 75_000
    """Optimizer steps to train for."""
    max_epochs: int | None = -1
    """Epochs (of data.samples_per_epoch samples) to train for; -1 for no limit."""
    max_time: str | None = None
    """Stop after this time, as DD:HH:MM:SS."""
    accelerator: str = "auto"
    """cpu, gpu, …; auto takes a GPU if there is one."""
    devices: str | int | list[int] = "auto"
    """Number of devices, or their indices."""
    num_nodes: int = 1
    """Number of machines."""
    precision: str | int | None = "32-true"
    """Arithmetic: 32-true, bf16-mixed, …"""
    accumulate_grad_batches: int = 1
    """Batches whose gradients are added up before each optimizer step."""
    gradient_clip_val: float | None = 0.1
    """Largest norm of a gradient (whose: model.optimizer.clip); a larger one is scaled down to it."""
    log_every_n_steps: int = 10
    """Steps between two rows of the logs."""
    check_val_every_n_epoch: int | None = 1
    """Epochs between two validations."""
    limit_val_batches: int | float | None = None
    """Validate on this many batches only; 0 for no validation."""
    num_sanity_val_steps: int | None = 0
    """Validation batches to try before training starts."""
    enable_model_summary: bool | None = False
    """Print a table of the model's layers."""
    enable_progress_bar: bool | None = True
    """Show progress."""


def add_arguments(parser: Any) -> None:
    """Add everything but the Trainer's options and --config to a jsonargparse parser."""
    parser.add_class_arguments(RunConfig)
    parser.add_class_arguments(TrainingConfig, "model")
    parser.add_class_arguments(DataConfig, "data")
    parser.add_class_arguments(ParallelConfig, "parallel")
    parser.add_class_arguments(CommunicationPlan, "plan")


def print_help(command: Command) -> None:
    """The quick help of `command` on standard output."""
    parser = OneLineErrors(
        prog=f"evodsp {command}",
        usage=f"evodsp {command} --config FILE [--option value ...]",
        description="\n".join(
            (f"{SUMMARY[command].capitalize()}. Options come from YAML files and the command line; the last one wins.",)
        ),
        epilog="Examples:  " + "  |  ".join(EXAMPLES[command]),
        parser_mode="omegaconf+",
    )
    parser.add_argument(
        "-c", "--config", action=ActionConfigFile, help="YAML file of options; may be given more than once."
    )
    add_arguments(parser)
    parser.add_class_arguments(TrainerOptions, "trainer")
    parser.print_help()
