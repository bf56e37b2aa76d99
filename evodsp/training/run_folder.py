"""The output folder of a run: the names of its files, the checkpoint that a run starts from, and what a resumed run takes
from it: the position, and the settings that differ from those of the former run.

A checkpoint holds the settings that its run's numbers depend on. One that differs is applied from the next sample on and
named in a line, or it is refused: no setting keeps its former value without a word. Which of these happens stands at the
setting's field, as `metadata={"resume": RULE}`, or at its class, as `RESUME`, for all fields that say nothing. A test
compares the rules with the settings that exist, so that a new one needs a rule.

Lightning counts the batches of one rank. On half the data ranks the same global batch takes twice as many batches, so the
counts in a checkpoint are rewritten when a run resumes on another mesh (`recount_batches`).
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evodsp.errors import UserError
from evodsp.files import output_errors, remove_partial, write_text
from evodsp.printing import printable, tell
from evodsp.training.chains import Chains
from evodsp.training.config import OptimizerConfig, RunConfig
from evodsp.training.options import OTHER_TRAINER_OPTIONS, SETTINGS, Rule, TrainerOptions
from evodsp.weights.parameter_file import archive_damage, first_sentence, located
from evodsp.weights.untrusted import load_checked, refuse_foreign


class RunFolder:
    """The files of a run below `path`. `keep_last`, `keep_best`: the numbers of newest and of best checkpoints to keep."""

    def __init__(self, path: Path, keep_last: int = 1, keep_best: int = 1) -> None:
        self.path, self.keep_last, self.keep_best = path, keep_last, keep_best
        self.checkpoints = path / "checkpoints"
        self.last = self.checkpoints / "last.ckpt"
        self.config = path / "config.yaml"
        self.curve = path / "curve.csv"
        self.baseline = path / "baseline.json"
        """The bar for the validation chains: what copies of their nearest training chains score."""
        self.missing = path / "missing_chains.tsv"
        """The list of training chains that the run leaves out, each with the file that it lacks."""
        self.quarantine = path / "quarantine.jsonl"
        """Chains that failed, and that the run leaves out from then on."""
        self.bad_samples = path / "bad_samples.jsonl"
        """Samples whose loss or gradient was not finite."""
        self.replays = path / "replays"
        """Some of these samples, for `evodsp replay`."""

    def former(self, path: Path) -> list[Path]:
        """The names that are one, two, … places after `path`, which its content gets when `path` is written anew: of earlier
        versions of `last`, newest first, or of the next best checkpoints; none for other files."""
        if path.parent.resolve() == self.checkpoints.resolve():  # Lightning resolves links
            for first, keep in (("last.ckpt", self.keep_last), ("best.ckpt", self.keep_best)):
                names = [path.with_name(first), *numbered(path.with_name(first), keep)]
                if path in names:
                    return names[names.index(path) + 1 :]
        return []

    def newest_intact(self) -> Path | None:
        """The newest of the last checkpoints that is not damaged; None if there are none. Warns of damaged ones.

        Raises UserError if all of them are damaged, or if one holds objects that are not read: those before it would too, and
        a run that went on from an older one would lose steps for nothing.
        """
        damaged = ""
        for path in (
            self.last,
            *sorted(self.checkpoints.glob("last-*.ckpt"), key=lambda path: (len(path.name), path.name)),
        ):
            if not path.is_file():
                continue
            problem = damage(path)
            if problem is None:
                if damaged:
                    tell(f"evodsp: warning: {damaged}; going on from {path}")
                return path
            damaged = f"{path} is damaged ({problem})"
        if damaged:
            raise UserError(
                f"{damaged}, and there is no other; resume from best.ckpt, or start anew with --overwrite true"
            )
        return None

    def scores(self, command: str) -> Path:
        """The scores of each chain, of `evodsp validate` or `test`."""
        return self.path / f"{command}.csv"

    def start(self, command: str, run: RunConfig, restarted: bool) -> Path | None:
        """The checkpoint to start from; None to start a new run. `restarted`: the launcher restarted this run after a failure.

        Raises UserError if a required checkpoint is missing, or if an existing one would be overwritten.
        """
        name = run.ckpt_path
        if command == "fit" and run.init_from is not None and name not in (None, "auto", "last"):
            raise UserError(
                f"--ckpt_path {name} resumes a run, and --init_from {run.init_from} begins one; leave one out, or give "
                "--ckpt_path auto, which begins with init_from and resumes if there is a last checkpoint"
            )
        if command == "fit" and (name in ("auto", "last") or restarted) and (newest := self.newest_intact()):
            return newest  # written by this very run, whatever it started from
        if name == "auto":
            name = None
        if name in ("last", "best"):
            path = self.checkpoints / f"{name}.ckpt"
            if not path.is_file():
                raise UserError(f"--ckpt_path {name}: no {path}; check --output, or train first with 'evodsp fit'")
            return path
        if name is not None:
            return located(name)
        if command != "fit":
            raise UserError(f"evodsp {command} needs --ckpt_path FILE (or last, or best)")
        found = sorted(self.checkpoints.glob("*.ckpt"))
        if found and not run.overwrite:
            raise UserError(
                f"{found[0]} belongs to an earlier run; resume it with --ckpt_path last, choose another --output, "
                "or replace it with --overwrite"
            )
        return None

    def prepare(
        self, config_text: str, replace: bool, resumes: bool = False, missing: Mapping[str, str] | None = None
    ) -> None:
        """Make the folder ready for `fit`: delete partial files, and with `replace` an earlier run; write config.yaml, and the
        chains that are left out if there are any (`missing`: the file that each chain lacks).

        Unless the run `resumes`, the list of chains that an earlier one left out is deleted: it would change the samples. So
        are the list of its bad samples, their files, and its bar.

        Only one process may call this, and no other run may be writing here. Raises UserError if the folder is not writable.
        """
        with output_errors(self.path):
            for folder in (self.path, self.checkpoints):
                remove_partial(folder)
            if not resumes:
                self.quarantine.unlink(missing_ok=True)
                self.bad_samples.unlink(missing_ok=True)
                self.baseline.unlink(missing_ok=True)
                shutil.rmtree(self.replays, ignore_errors=True)
            if replace:
                for path in (self.curve, self.scores("validate"), self.scores("test")):
                    path.unlink(missing_ok=True)
                for name in ("checkpoints", "tensorboard"):
                    shutil.rmtree(self.path / name, ignore_errors=True)
            write_text(self.config, config_text)
            self.missing.unlink(missing_ok=True)
            if missing:
                write_text(
                    self.missing, "".join(f"{printable(key)}\tno {lacking}\n" for key, lacking in missing.items())
                )


def numbered(first: Path, keep: int) -> list[Path]:
    """The names of the files after `first`, of `keep` in all: last.ckpt -> last-1.ckpt, last-2.ckpt, …"""
    return [first.with_name(f"{first.stem}-{number}{first.suffix}") for number in range(1, keep)]


def damage(path: Path) -> str | None:
    """The damage of a checkpoint in words, by the checksums that it contains; None if it is whole.

    Raises UserError if it is whole, but holds objects that are not read.
    """
    if (problem := archive_damage(path)) is not None:
        return problem
    try:
        load_checked(path)
    except Exception as error:  # of a directory that passes for whole, too
        refuse_foreign(path)
        return first_sentence(error)
    return None


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
    **dict.fromkeys(
        ("model.freeze", "model.train_only", "model.adapters.rank", "model.adapters.parts"),
        "the checkpoint holds the optimizer's state of the parameters that were trained",
    ),
}


_EPOCH = "the position within the epoch would be lost"
"""The reason for the other refused settings. (The model's sizes are compared by `check_same_model`.)"""


_ADDED = {"ranks": "same", "training set": "applied", "order of alignments": "applied"}
"""Entries of a checkpoint that are no settings, and their rules."""


_ORDER = "uniref90, bfd, mgnify, others"
"""The order in which a chain's alignments are joined (`evodsp.data.sources.layout`); stores have that of their day."""


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
    trained_all = {"model.freeze": [], "model.train_only": [], "model.adapters.rank": 0}
    saved = {**trained_all, "order of alignments": "by name", **checkpoint.get(KEY, {})}
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
