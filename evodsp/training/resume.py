"""Resuming a run: the position that it takes from its checkpoint, and the settings that differ from those of the former run.

A checkpoint holds the settings that its run's numbers depend on. One that differs is applied from the next sample on and named
in a line, or it is refused: no setting keeps its former value without a word. Which of these happens stands at the setting's
field, as `metadata={"resume": RULE}`, or at its class, as `RESUME`, for all fields that say nothing. A test compares the rules
with the settings that exist, so that a new one needs a rule.

Lightning counts the batches of one rank. On half the data ranks the same global batch takes twice as many batches, so the
counts in a checkpoint are rewritten when a run resumes on another mesh (`recount_batches`).
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evodsp.errors import UserError
from evodsp.training.chains import Chains
from evodsp.training.config import OptimizerConfig, RunConfig
from evodsp.training.options import OTHER_TRAINER_OPTIONS, SETTINGS, Rule, TrainerOptions


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
    **dict(_stated(TrainerOptions(), "trainer")),
    **{f"trainer.{name}": rule for name, rule in OTHER_TRAINER_OPTIONS.items()},
}
"""Each setting's rule, by its dotted name."""


KEY = "settings"
"""The entry of a checkpoint."""


_WHY = {
    "seed": "all of a run's samples and dropout masks are drawn from one seed",
    "init_from": "the run has begun with the weights of the former file",
    "raw": "the run has begun with the other weights of that file",
    "model.freeze": "the checkpoint holds the optimizer's state of the parameters that were trained",
    "model.train_only": "the checkpoint holds the optimizer's state of the parameters that were trained",
}


_EPOCH = "the position within the epoch would be lost"
"""The reason for the other refused settings. (The model's sizes are compared by `check_same_model`.)"""


_ADDED = {"ranks": "same", "training set": "applied", "order of alignments": "applied"}
"""Entries of a checkpoint that are no settings, and their rules."""


_ORDER = "uniref90, bfd, mgnify, others"
"""The order in which a chain's alignments are joined (`evodsp.data.sources.chain_folder`); stores have that of their day."""


_GROUPS = {"parallel": "mesh", "ranks": "mesh", "plan": "plan", "kernels": "kernels"}
"""Names for groups of settings that leave the numbers the same, by the first part of a setting's name. All others are settings
of the computation."""


def recorded(settings: Mapping[str, Any], ranks: int, chains: Chains) -> dict[str, Any]:
    """The entries of a checkpoint for `settings` (all of them, by their dotted names) and for the chains that they stand for.

    `chains`: lists of chains are files or folders, whose content may change although the setting does not.
    """
    kept = {name: _plain(value) for name, value in settings.items() if RULES[name] != "free"}
    if kept["init_from"] is None:
        kept["raw"] = False  # it says which weights of that file
    if settings.get("data.store") is None:
        kept["order of alignments"] = _ORDER
    return {**kept, "ranks": ranks, "training set": _training_set(chains)}


def began_with(run: RunConfig, checkpoint: Mapping[str, Any]) -> RunConfig:
    """`run` with the weights that the checkpoint's run began with, unless it names others: that stays true of a resumed run."""
    saved = checkpoint.get(KEY, {})
    if run.init_from is not None or saved.get("init_from") is None:
        return run
    return dataclasses.replace(run, init_from=saved["init_from"], raw=saved["raw"])


def changes(path: Path, checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """A line for each of `settings`, as `recorded`, that differs from the checkpoint's and is applied, and one for each group
    of those that leave the numbers the same. A setting that a checkpoint of an earlier version does not hold gets no line.

    Raises UserError for one that may not differ.
    """
    # Earlier versions trained all parameters, and joined alignments in the order of their names.
    saved = {"model.freeze": [], "model.train_only": [], "order of alignments": "by name", **checkpoint.get(KEY, {})}
    lines: list[str] = []
    same: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in settings.items():
        if name not in saved or saved[name] == value:
            continue
        was = f"{name} was {_shown(saved[name])} and is {_shown(value)}"
        rule = _ADDED.get(name) or RULES[name]
        if rule == "refused":
            raise UserError(
                f"{path}: {was} now, but {_WHY.get(name, _EPOCH)}; set {name} to {_shown(saved[name])}, or begin a new run in "
                f"another --output, with --init_from {path}"
            )
        if rule == "applied":
            lines.append(f"{was} from the next sample on")
        else:
            same[_GROUPS.get(name.partition(".")[0], "computation")].append(was)
    return lines + [
        f"{group} changed: {', '.join(parts)}; the numbers stay the same, up to rounding"
        for group, parts in same.items()
    ]


def _plain(value: Any) -> Any:
    """A value that a checkpoint can hold and a later run can compare."""
    return value if value is None or isinstance(value, bool | int | float | str | list) else str(value)


def _shown(value: Any) -> str:
    """A value in the form of a config file."""
    return value if isinstance(value, str) else json.dumps(value)


def _training_set(chains: Chains) -> str:
    """The number of the training chains, and a checksum of their names and weights."""
    names = "\n".join([*chains.train, "", *chains.distilled]).encode()
    weights = b"".join(w.tobytes() for w in (chains.weights, chains.distilled_weights) if w is not None)
    return f"{len(chains.train) + len(chains.distilled)} chains (checksum {zlib.crc32(weights, zlib.crc32(names)):08x})"


def use_settings(optimizer: Optimizer, scheduler: LambdaLR, config: OptimizerConfig) -> None:
    """Give an optimizer and its schedule, restored from a checkpoint, the settings of this run.

    Both would keep those of the checkpoint. If nothing was changed, every number stays the same, bit for bit.
    """
    scheduler.base_lrs = [config.lr] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = config.lr
        group["lr"] = config.lr * factor(scheduler.last_epoch)
        group["betas"], group["eps"] = (config.beta1, config.beta2), config.eps


_COUNTS = ("ready", "started", "processed", "completed")


_FORMER_BEST = (
    "ModelCheckpoint{'monitor': 'val/lddt_ca', 'mode': 'max', 'every_n_train_steps': 0, 'every_n_epochs': 1, "
    "'train_time_interval': None}"
)
"""The name of `BestCheckpoint`'s scores in files up to version 0.2.0, when it was Lightning's class."""


def recount_batches(checkpoint: dict[str, Any], batches_per_step: int) -> None:
    """Rewrite the training loop's position in a checkpoint, in place, for `batches_per_step` batches per optimizer step.

    The position is rounded down to a whole step; the gradients of an interrupted step are not saved.
    """
    former = checkpoint.get("batches_per_step", batches_per_step)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        ready = counts["ready"]
        steps, within_step = divmod(ready, former)
        for name in _COUNTS:
            if name in counts:
                # A checkpoint may be written after a batch was processed and before it counts as completed: keep that lag.
                lag = 0 if within_step else counts[name] - ready
                counts[name] = steps * batches_per_step + lag


def rename_callbacks(checkpoint: dict[str, Any]) -> None:
    """Give the scores of the best checkpoints the name that they have now, in place, so that a resumed run still knows them."""
    states = checkpoint.get("callbacks", {})
    if _FORMER_BEST in states and "BestCheckpoint" not in states:
        states["BestCheckpoint"] = states.pop(_FORMER_BEST)
