"""The output folder of a run: the names of its files, the checkpoint that a run starts from, and preparing the folder for
it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from evodsp.errors import UserError
from evodsp.files import output_errors, remove_partial, write_text
from evodsp.printing import printable, tell
from evodsp.training.config import RunConfig
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
