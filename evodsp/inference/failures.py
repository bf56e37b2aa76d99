"""Records that could not be predicted: each is named in one line, the others go on, and failures.json lists them at the end."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.inference.results import PredictionResult, write_json

FAILURES = "failures.json"


@dataclass(frozen=True)
class RecordFailure:
    """A record without a result, or without a part of it."""

    name: str
    reason: str
    """One line: where, what was found, and the fix."""
    some_written: bool = False
    """Whether some of its seeds are finished and written."""


@dataclass(frozen=True)
class Outcome:
    """The results and failures of all records."""

    results: list[PredictionResult]
    """The results in the order of the input."""
    failures: list[RecordFailure]

    @property
    def line(self) -> str:
        """For the log, for example '12 done, 3 kept, 1 failed'."""
        kept = sum(result.kept for result in self.results)
        return f"{len(self.results) - kept:,} done, {kept:,} kept, {len(self.failures):,} failed"


def none_usable(failures: Sequence[RecordFailure]) -> UserError:
    """The error of a run that has no result: the first record's, and how many there were."""
    records = len({failure.name for failure in failures})  # one fails once with each model
    others = f". None of the {records:,} records can be predicted" if records > 1 else ""
    return UserError(failures[0].reason + others)


def write_failures(output: Path, failures: Sequence[RecordFailure]) -> None:
    """Write <output>/failures.json; without failures, remove the file of an earlier run."""
    path = output / FAILURES
    if failures:
        with whole_file(path) as partial:
            write_json(partial, {"failures": [{"name": f.name, "reason": f.reason} for f in failures]})
    else:
        path.unlink(missing_ok=True)


def page_problem(page: str, make: Callable[[], object]) -> str | None:
    """Call `make`, which writes a page; None, or one line that says why it could not.

    A page shows results that are on disk already. Whatever goes wrong with it must not end the run and cost the next ones.
    """
    try:
        make()
    except Exception as error:
        code = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {Path(code.filename).name}, line {code.lineno}: {error}"
        if isinstance(error, OSError) and error.strerror:  # a full disk needs no place in the code
            what = error.strerror
        return f"{page} could not be written ({what}); the results themselves are complete"
    return None
