"""What a resumed run does with each setting of `evodsp fit` that is not what it was.

A setting's rule stands at its field, as `metadata={"resume": RULE}`, or at its class, as `RESUME`, for all fields that say
nothing. A test compares the rules with the settings that exist, so that a new one needs a rule. Those of Lightning's Trainer
are here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from evodsp.training.options import SETTINGS

Rule = Literal["refused", "applied", "same", "free"]
"""refused: the run does not start. applied: from the next sample on. same: the run computes the same, with sums rounded in
another order. free: decides nothing about the weights (files, logs, validation's times, names of machines)."""

_TRAINER: dict[Rule, str] = {
    "refused": "limit_train_batches overfit_batches",
    "applied": "max_steps max_epochs min_steps min_epochs precision gradient_clip_val gradient_clip_algorithm",
    "same": "accelerator accumulate_grad_batches deterministic benchmark",
    "free": (
        "strategy devices num_nodes logger callbacks fast_dev_run max_time limit_val_batches limit_test_batches "
        "limit_predict_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps "
        "enable_checkpointing enable_progress_bar enable_model_summary inference_mode use_distributed_sampler profiler "
        "detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir "
        "enable_autolog_hparams model_registry"
    ),
}


def _stated(settings: Any, where: str) -> Iterator[tuple[str, Rule]]:
    """Dotted names and rules of all single settings of nested dataclasses."""
    for item in dataclasses.fields(settings):
        value, key = getattr(settings, item.name), f"{where}.{item.name}".lstrip(".")
        if dataclasses.is_dataclass(value):
            yield from _stated(value, key)
        else:
            yield key, item.metadata.get("resume") or settings.RESUME


RULES: dict[str, Rule] = {
    **{key: rule for settings, group in SETTINGS for key, rule in _stated(settings(), group)},
    **{f"trainer.{name}": rule for rule, names in _TRAINER.items() for name in names.split()},
}
"""Each setting's rule, by its dotted name."""
