"""What a resumed run does with settings that differ from those of the run that wrote the checkpoint.

A checkpoint holds the settings that its run's numbers depend on. One that differs is applied from the next sample on and named
in a line, or it is refused: no setting keeps its former value without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evodsp.argument_parser import leaves
from evodsp.errors import UserError
from evodsp.training.config import DataConfig, OptimizerConfig, RunConfig, TrainingConfig

KEY = "settings"
"""The entry of a checkpoint."""
REFUSED = {
    "seed": "all of a run's samples and dropout masks are drawn from one seed",
    "data.samples_per_epoch": "the position within the epoch would be lost",
}
"""Settings that a resumed run may not change, and why."""
_TRAINER = ("max_steps", "precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")


def recorded(
    run: RunConfig, model: TrainingConfig, data: DataConfig, trainer: Mapping[str, Any]
) -> dict[str, str | int | float | bool | list[Any] | None]:
    """The settings that a run's numbers depend on, by their dotted names. The mesh is not one of them."""
    own = {"seed": run.seed, "matmul_precision": run.matmul_precision, "max_samples": run.max_samples}
    options = {f"trainer.{name}": trainer[name] for name in _TRAINER}
    return {**own, **dict(leaves(model, "model")), **dict(leaves(data, "data")), **options}


def changes(path: Path, checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """A line for each of `settings` that differs from the checkpoint's; none for a checkpoint of an earlier version.

    Raises UserError for one that may not differ.
    """
    saved = checkpoint.get(KEY, {})
    lines = []
    for name, value in settings.items():
        if name not in saved or saved[name] == value:
            continue
        if name in REFUSED:
            raise UserError(
                f"{path}: {name} was {saved[name]} and is {value} now, but {REFUSED[name]}; set {name} to {saved[name]}, or "
                f"begin a new run with --init_from {path}"
            )
        lines.append(f"{name} was {saved[name]} and is {value} from the next sample on")
    return lines


def use_settings(optimizer: Optimizer, scheduler: LambdaLR, config: OptimizerConfig) -> None:
    """Give an optimizer and its schedule, restored from a checkpoint, the settings of this run.

    Both would keep those of the checkpoint. If nothing was changed, every number stays the same, bit for bit.
    """
    scheduler.base_lrs = [config.lr] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = config.lr
        group["lr"] = config.lr * factor(scheduler.last_epoch)
        group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps
