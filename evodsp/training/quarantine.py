"""Chains that a training run leaves out, because they could not be read, took too long or killed the process that read them.

A run must not end because of a bad chain, and leaving one out must not change the others. So a chain is left out from the
sample on at which it failed: sample j takes another chain in its place if, and only if, the chain failed at a sample i <= j.
The list is therefore a function of the samples, not of the time at which a rank or a worker learned of a failure, and a run
that resumes before sample i takes the same samples again, whether the failure can be repeated (a broken file) or not (a time
limit, a killed worker).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evodsp.errors import FileFormatError, UserError
from evodsp.files import write_json_lines
from evodsp.printing import counted, logger
from evodsp.reading.text_files import check_text

_log = logger(__name__)


@dataclass(frozen=True)
class FailedChain:
    """A chain that could not be made into a sample, and the reason."""

    chain: str
    sample: int
    """Global index of the sample; the chain is left out from it on."""
    reason: str
    """One line."""
    time: str = ""
    """When the run learned of it, ISO 8601 in UTC."""


class QuarantineFull(UserError):
    """More chains failed than `data.max_quarantined` allows."""


class Quarantine:
    """The chains that a run leaves out, equal on all ranks. `limit`: the most chains that may be left out before the run stops.

    If `path` is given (on one rank), every change is written to that file before a batch is made of other chains: one JSON
    object per line, in the order of the samples.
    """

    def __init__(self, limit: int, path: Path | None = None) -> None:
        self.limit, self.path = limit, path
        self._failures: dict[str, FailedChain] = {}

    def __len__(self) -> int:
        return len(self._failures)

    @property
    def room(self) -> int:
        """The number of chains that may still fail."""
        return max(0, self.limit - len(self))

    @property
    def failures(self) -> list[FailedChain]:
        """The failed chains, in the order of the samples."""
        return sorted(self._failures.values(), key=lambda failure: (failure.sample, failure.chain))

    def chains_at(self, sample: int) -> set[str]:
        """The chains that `sample` leaves out."""
        return {failure.chain for failure in self._failures.values() if failure.sample <= sample}

    def add(self, failures: Iterable[FailedChain]) -> None:
        """Leave out the chains of `failures`, the same on all ranks and in any order; each is named once, at its first sample.

        Raises QuarantineFull, after the file is written, if there are now more than `limit`.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for failure in sorted(failures, key=lambda failure: (failure.sample, failure.chain, failure.reason)):
            known = self._failures.get(failure.chain)
            if known is None or failure.sample < known.sample:
                self._failures[failure.chain] = dataclasses.replace(failure, time=now)
                if self.path is not None:
                    _log.warning(
                        "chain %s is left out from sample %d on: %s", failure.chain, failure.sample, failure.reason
                    )
        self._write()
        self.check_limit()

    def check_limit(self) -> None:
        """Raise QuarantineFull if more than `limit` chains are left out."""
        if len(self) > self.limit:
            last = self.failures[-1]
            where = f"; {self.path} lists them" if self.path is not None else ""
            raise QuarantineFull(
                f"{counted(len(self), 'chain')} failed, the last {last.chain} ({last.reason}), but data.max_quarantined is "
                f"{self.limit}{where}; correct or remove these chains, or raise data.max_quarantined"
            )

    def state(self) -> list[dict[str, Any]]:
        """The list as a checkpoint stores it."""
        return [dataclasses.asdict(failure) for failure in self.failures]

    def restore(self, failures: Iterable[FailedChain]) -> None:
        """Replace the list, for a run that resumes. Raises QuarantineFull if it is longer than `limit`."""
        self._failures = {failure.chain: failure for failure in failures}
        self._write()
        self.check_limit()

    def _write(self) -> None:
        write_json_lines(self.path, self.failures)


def failures_of(state: Iterable[Mapping[str, Any]]) -> list[FailedChain]:
    """The inverse of `Quarantine.state`."""
    return [FailedChain(**entry) for entry in state]


def read_quarantine(path: Path) -> list[FailedChain] | None:
    """The list in a file that `Quarantine` wrote; None if there is no such file. A user may delete lines.

    Raises FileFormatError for a line that is no entry of such a list.
    """
    if not path.is_file():
        return None
    data = path.read_bytes()
    if not data.strip():
        return []
    failures = []
    for number, line in enumerate(check_text(path, data).decode().splitlines(), start=1):
        try:
            entry = json.loads(line)
            failure = FailedChain(**entry)
            if not (isinstance(failure.chain, str) and type(failure.sample) is int and failure.sample >= 0):
                raise ValueError
        except (ValueError, TypeError, RecursionError) as error:
            message = 'expected {"chain": name, "sample": number, "reason": …, "time": …}; delete the line'
            raise FileFormatError(path, message, number) from error
        failures.append(failure)
    return failures
