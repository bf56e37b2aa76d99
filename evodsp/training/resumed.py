"""What a resumed run does with settings that differ from those of the run that wrote the checkpoint.

A checkpoint holds the settings that its run's numbers depend on. One that differs is applied from the next sample on and named
in a line, or it is refused: no setting keeps its former value without a word. Its field says which (`resume_rules.py`).
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evodsp.errors import UserError
from evodsp.training.chains import Chains
from evodsp.training.config import OptimizerConfig, RunConfig
from evodsp.training.resume_rules import RULES

KEY = "settings"
"""The entry of a checkpoint."""
_WHY = {
    "seed": "all of a run's samples and dropout masks are drawn from one seed",
    "init_from": "the run has begun with the weights of the former file",
    "raw": "the run has begun with the other weights of that file",
}
_EPOCH = "the position within the epoch would be lost"
"""Why the other refused settings may not change that are no sizes of the model, which `check_same_model` compares."""
_ADDED = {"ranks": "same", "training set": "applied"}
"""What a checkpoint holds besides settings, and the rule for it."""
_GROUPS = {"parallel": "mesh", "ranks": "mesh", "plan": "plan", "kernels": "kernels"}
"""What a setting that leaves the numbers the same belongs to, by the first part of its name; else: how they are computed."""


def recorded(settings: Mapping[str, Any], ranks: int, chains: Chains) -> dict[str, Any]:
    """What a checkpoint keeps of `settings`, all of them by their dotted names, and of what they stand for.

    `chains`: lists of chains are files or folders, whose content may change although the setting does not.
    """
    kept = {name: _plain(value) for name, value in settings.items() if RULES[name] != "free"}
    if kept["init_from"] is None:
        kept["raw"] = False  # it says which weights of that file
    return {**kept, "ranks": ranks, "training set": _training_set(chains)}


def began_with(run: RunConfig, checkpoint: Mapping[str, Any]) -> RunConfig:
    """`run` with the weights that the checkpoint's run began with, unless it names others: that stays true of a resumed run."""
    saved = checkpoint.get(KEY, {})
    if run.init_from is not None or saved.get("init_from") is None:
        return run
    return dataclasses.replace(run, init_from=saved["init_from"], raw=saved["raw"])


def changes(path: Path, checkpoint: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """A line for each of `settings`, as `recorded`, that differs from the checkpoint's and is applied, and one for each group
    of those that leave the numbers the same. None for what a checkpoint of an earlier version does not hold.

    Raises UserError for one that may not differ.
    """
    saved = checkpoint.get(KEY, {})
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
    """As a config has it."""
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
