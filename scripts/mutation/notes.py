"""A pytest plugin for `draw_mutants.py`: which tests execute which of the marked expressions, in every worker of a run.

A marked expression makes an empty file, named by its number, in the folder MARKS of the environment. This plugin gives each
worker a folder of its own, below NOTES, and looks at it after every test.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process runs no test itself
    config.pluginmanager.register(
        Notes(Path(os.environ["NOTES"]) / os.environ.get("PYTEST_XDIST_WORKER", "main"), float(os.environ["SECONDS"]))
    )


class Notes:
    """Writes `found.json` when the tests end: those that passed, by the number of each expression that they execute."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds, self.marks = folder, seconds, folder / "marks"
        self.marks.mkdir(parents=True)
        os.environ["MARKS"] = str(self.marks)  # also of the processes that tests start
        self.found: defaultdict[str, list[str]] = defaultdict(list)
        self.by_fixtures: defaultdict[str, set[str]] = defaultdict(set)
        """Numbers by the file of tests whose fixtures execute them."""

    def _seen(self) -> set[str]:
        names = {path.name for path in self.marks.iterdir()}
        for name in names:
            (self.marks / name).unlink(missing_ok=True)
        return names

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session, self.always = session, self._seen()  # while modules are imported
        self.deadline = time.monotonic() + self.seconds

    def pytest_runtest_logreport(self, report: Any) -> None:
        seen, file = self._seen(), report.nodeid.split("::")[0]
        if report.when == "setup":
            self.by_fixtures[file] |= seen
        elif report.when == "call" and report.passed:
            for name in seen | self.always | self.by_fixtures[file]:
                self.found[name].append(report.nodeid)
        elif time.monotonic() > self.deadline:
            self.session.shouldstop = "enough"

    def pytest_sessionfinish(self) -> None:
        (self.folder / "found.json").write_text(json.dumps(self.found))
