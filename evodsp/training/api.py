"""`evodsp.fit`: training from Python, with the options of the command `evodsp fit`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evodsp.argument_parser import checks_names
from evodsp.errors import UserError
from evodsp.launch.environment import STOPPED, same_handlers
from evodsp.report.runs import read_curve
from evodsp.training.command import trained
from evodsp.training.options import checked_words, names_of

Options = Mapping[str, Any]


@dataclass(frozen=True)
class TrainedRun:
    """The files of a run of `evodsp.fit`, and its last scores."""

    folder: Path
    """The output folder: checkpoints/, curve.csv, config.yaml."""
    last: Path | None
    """The newest checkpoint, which a run resumes from; None if none was written."""
    best: Path | None
    """The checkpoint with the highest lDDT-CA of the validation chains; None without any."""
    scores: Mapping[str, float]
    """Means of the last validation: lddt_ca, rmsd (Å), tm_score, …; empty without one."""
    stopped: bool
    """Whether the run was asked to stop before its end, and has saved: the same call with resume=True goes on."""

    @classmethod
    def of(cls, folder: Path, stopped: bool = False) -> TrainedRun:
        """The run whose output folder this is."""
        last, best = (folder / "checkpoints" / f"{name}.ckpt" for name in ("last", "best"))
        rows = [row for _, row in sorted(read_curve(folder / "curve.csv").items()) if "val/lddt_ca" in row]
        means = {name: cell for name, cell in (rows or [{}])[-1].items() if name[:4] == "val/" and name.count("/") == 1}
        scores = {name[4:]: float(cell) for name, cell in means.items()}
        return cls(folder, last if last.is_file() else None, best if best.is_file() else None, scores, stopped)


@checks_names(also=names_of("fit").known - {"help", "print_config", "trainer.help"} | {"plan", "kernels"})
def fit(
    config: str | Path | Sequence[str | Path] = (),
    output: str | Path | None = None,
    *,
    max_steps: int | None = None,
    init_from: str | Path | None = None,
    resume: bool | str | Path = False,
    overwrite: bool = False,
    dry_run: bool = False,
    early_stop: int | None = None,
    seed: int | None = None,
    model: Options | None = None,
    data: Options | None = None,
    trainer: Options | None = None,
    parallel: Options | None = None,
    **options: Any,
) -> TrainedRun:
    """Train a model, as the command `evodsp fit` does, and return its files and scores.

    config: a YAML file of options, or the name of one that comes with evodsp, such as quickstart; or several, of which the last
        one counts.
    output, init_from, overwrite, dry_run, early_stop, seed: the options of these names; None and False: as the config says.
    max_steps: the option trainer.max_steps.
    resume: True goes on from the last checkpoint of the output folder, if there is one; or the path of a checkpoint.
    model, data, trainer, parallel: groups of options, such as data={"batch_size": 2, "train": {"crop_size": 64}}.
    options: all other options, as **{"data.batch_size": 2} or in groups, plan and kernels too. None is written as null.

    Several ranks, such as parallel={"sequence": 2} or a machine of several GPUs, are processes that this one starts and waits
    for, as the command does. Raises UserError if an option is wrong, and RuntimeError if a rank fails.

        run = evodsp.fit("quickstart", "runs/mine", max_steps=200)
        evodsp.predict("MKTAYIAKQR", checkpoint=run.best)
    """
    given = {
        "output": output,
        "init_from": init_from,
        "ckpt_path": "auto" if resume is True else resume or None,
        "overwrite": overwrite or None,
        "dry_run": dry_run or None,
        "early_stop": early_stop,
        "seed": seed,
        "trainer.max_steps": max_steps,
        "model": model,
        "data": data,
        "trainer": trainer,
        "parallel": parallel,
    }
    words = [f"--config={one}" for one in ([config] if isinstance(config, str | Path) else config)]
    for name, value in [*((name, value) for name, value in given.items() if value is not None), *options.items()]:
        words += _words(name, value)
    if not words:
        raise UserError("evodsp.fit: nothing to train; give a config, such as 'quickstart', which comes with evodsp")
    with same_handlers():
        code, folder = trained("fit", checked_words("fit", words))
    if code == 130:
        raise KeyboardInterrupt("the ranks were ended; resume=True goes on from the last checkpoint")
    if code not in (0, STOPPED):
        error = UserError if code == 2 else RuntimeError
        raise error(f"evodsp.fit: a rank ended with exit code {code}; its message is printed above")
    return TrainedRun.of(folder.path, code == STOPPED)


def _words(name: str, value: Any) -> Iterator[str]:
    """An option of the command line, or those of a group."""
    if isinstance(value, Mapping) and names_of("fit").below(name):
        for key, below in value.items():
            yield from _words(f"{name}.{key}", below)
    else:
        is_text = isinstance(value, str | Path) or not isinstance(value, bool | None | Sequence | Mapping)
        yield f"--{name}={value if is_text else json.dumps(value, default=str)}"
