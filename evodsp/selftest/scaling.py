"""`evodsp selftest --scaling`: what several GPUs, or several machines, do together, in one file.

Each rank that a launcher has started is two processes. The SUPERVISOR, which computes nothing, starts the WORKER. The
workers form one process group and go through the parts together. A part is a generator (`evodsp.selftest.scaling_parts`):
rank 0 writes each row that it yields into the report at once. After a part the workers tell each other through the store
what went wrong, so that an error that all of them meet costs one part only. A worker that hangs, dies, or waits for one that
did, is ended at the part's limit; then all supervisors start new workers, which go on with the next part. So does whatever a
part ends on purpose.

The report's JSON is also a file of a device and its links (`evodsp.planner.device`).

The page has every part's rows as tables, and charts of what was measured.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from markupsafe import Markup

from evodsp.errors import UserError
from evodsp.files import check_output, write_text
from evodsp.launch.consensus import all_of, from_first
from evodsp.launch.environment import (
    GIVEN_UP,
    LAUNCHER,
    RankAddress,
    end_with_launcher,
    launched_by_evodsp,
    place,
    under_launcher,
)
from evodsp.launch.launcher import launch
from evodsp.launch.process_group import guarded, lost_contact, open_store, start, stop
from evodsp.printing import one_line, show, tell
from evodsp.reading.text_files import read_json
from evodsp.report.page import Page, Series, lines
from evodsp.selftest.command import SCALING_PARTS, SelftestConfig
from evodsp.selftest.scaling_parts import FAULTS, PARTS, ScalingRun
from evodsp.version import __version__

Row = Mapping[str, Any]

_CHARTS = {
    "speed": (("between", "ranks"), "collective", "bytes", ("GB/s",)),
    "scaling": (("residues",), "how", "ranks", ("ms", "planned ms")),
}
"""By part: a chart for each value of the first columns, a line for each of the next one, x, and y; a second y is dashed."""


def page(report: Mapping[str, Any]) -> Page:
    """The page of a report, finished or not."""
    parts: Mapping[str, Any] = report["parts"]
    states = [part["state"] for part in parts.values()]
    made = Page(f"evodsp on {report['ranks']} ranks", f"evodsp {report['evodsp']}, begun {report['begun']}")
    text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    made.verdict(f"{len(states)} parts: {text}", set(states) == {"ok"})
    rows = [
        (name, one["state"], f"{one.get('seconds', 0):.0f}", "; ".join(one["problems"])) for name, one in parts.items()
    ]
    made.table(("part", "result", "seconds", "problems"), rows, {"seconds"})
    for name, part in parts.items():
        if part["rows"]:
            made.heading(name)
        if name in _CHARTS:
            per, by, x, (y, *planned) = _CHARTS[name]
            drawn = [row for row in part["rows"] if y in row]
            made.charts({title: _chart(own, by, x, (y, *planned)) for title, own in _grouped(drawn, per).items()})
            made.legend(list(_grouped(drawn, (by,))))
        for columns, own in _grouped_by_columns(part["rows"]).items():
            numbers = [column for column in columns if not isinstance(own[0][column], str | bool)]
            made.table(columns, ([_cell(row[column]) for column in columns] for row in own), numbers)
    return made


def _chart(rows: Sequence[Row], by: str, x: str, ys: Sequence[str]) -> Markup:
    """Lines of the first of `ys`, and dashed ones of the second."""
    powers = x == "bytes"
    series = [
        Series(
            name, [math.log2(row[x]) if powers else row[x] for row in own], [row[y] for row in own], colour, number > 0
        )
        for number, y in enumerate(ys)
        for colour, (name, own) in enumerate(_grouped(sorted(rows, key=lambda row: row[x]), (by,)).items())
    ]
    dashed = f" (dashed: {ys[1]})" if len(ys) > 1 else ""
    return lines(series, f"log2 of {x}" if powers else x, ys[0] + dashed)


def _cell(value: object) -> str | int:
    return value if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _grouped(rows: Iterable[Row], keys: Sequence[str]) -> dict[str, list[Row]]:
    """Rows by what these columns say."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        named = (f"{row[key]:,} {key}" if isinstance(row[key], int) else str(row[key]) for key in keys)
        groups.setdefault(", ".join(named), []).append(row)
    return groups


def _grouped_by_columns(rows: Iterable[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows that have the same columns are one table."""
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        tables.setdefault(tuple(row), []).append(row)
    return tables


_MEETING_S = 120.0
_GRACE_S = 10.0
"""A worker ends itself at a part's limit; one that cannot is ended this much later."""
_PATIENCE_S = 10.0
"""Seconds that a rank whose part failed waits for the others: they may wait for it in a collective."""
_TIMEOUT_S, _FAULT_TIMEOUT_S = 600.0, 15.0
"""Time-outs of the process group: longer than any part, and short where a rank is stopped on purpose."""
_CPU_FACTOR = 3.0
"""Limits are so many times as long on CPUs, whose ranks share cores with each other and with other programs."""


class ScalingReport:
    """The report, which rank 0 writes. Whoever reads it finds what is known so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = read_json(path, "run evodsp selftest --scaling again")

    @classmethod
    def begin(cls, path: Path, ranks: int, names: Iterable[str]) -> ScalingReport:
        """A report of parts that wait."""
        parts = {name: {"state": "waits", "problems": [], "rows": []} for name in names}
        begun = datetime.now(UTC).isoformat(timespec="seconds")
        write_text(path, json.dumps({"evodsp": __version__, "begun": begun, "ranks": ranks, "parts": parts}))
        return cls(path)

    def write(self, with_page: bool = True) -> None:
        """The JSON, and the page beside it, which takes longer."""
        write_text(self.path, json.dumps(self.content, indent=1) + "\n")
        if with_page:
            write_text(self.path.with_suffix(".html"), page(self.content).html())

    def next(self) -> str | None:
        """The part that begins now; None if none waits."""
        name = next((name for name, part in self.content["parts"].items() if part["state"] == "waits"), None)
        if name is not None:
            self.content["parts"][name] |= {"state": "runs", "begun": time.time()}
            self.write()
        return name

    def add(self, name: str, row: dict[str, Any]) -> None:
        """One row of a part's results. A device and its `links` are the report's own."""
        if "links" in row:
            self.content |= row
        else:
            self.content["parts"][name]["rows"].append(row)
        self.write(with_page=False)

    def end(self, name: str, problems: list[str]) -> None:
        """Outcome of a part."""
        part = self.content["parts"][name]
        part |= {"state": "FAILED" if problems else "ok", "problems": problems}
        part["seconds"] = round(time.time() - part["begun"], 1)
        self.write()
        show("\n".join([f"{part['state']:<6} {part['seconds']:>8.0f}  {name}", *problems]), flush=True)

    def ended(self, workers: list[dict[str, Any]]) -> None:
        """Outcome of the part that ran when the workers ended. `workers`: of each rank how its worker has ended."""
        name = next((name for name, part in self.content["parts"].items() if part["state"] == "runs"), None)
        if name is None:
            return
        if name not in FAULTS:
            said = ((n, w) for n, w in enumerate(workers) if w["code"] != GIVEN_UP)  # those only lost the others
            self.end(name, [f"rank {n} on {w['host']}: {_how(w)}" for n, w in said] or ["the ranks lost each other"])
            return
        part = self.content["parts"][name]
        (begun,) = part["rows"]
        for rank, worker in enumerate(workers):
            after = round(worker["time"] - begun["begun"], 1)
            part["rows"].append({"rank": rank, "seconds": after, "code": worker["code"], "said": worker["said"]})
        others = [(rank, worker) for rank, worker in enumerate(workers) if rank != begun["victim"]]
        noticed = (GIVEN_UP, -signal.SIGABRT)  # the latter by NCCL's own watchdog
        self.end(name, [f"rank {n} did not notice: {_how(w)}" for n, w in others if w["code"] not in noticed])

    @property
    def failed(self) -> bool:
        """Whether a part did not succeed."""
        return any(part["state"] != "ok" for part in self.content["parts"].values())


def _how(worker: dict[str, Any]) -> str:
    late = f"it did not end within {worker['limit']:g} s; " if worker["late"] else ""
    return f"{late}exit code {worker['code']}; its last words: {worker['said']}"


def run(settings: SelftestConfig, words: list[str]) -> int:
    """Start the ranks, or be one of them. Returns 0 if every part succeeded, otherwise 1."""
    check_output(settings.report)
    if under_launcher():
        return _supervise(settings, place())
    ranks = settings.cpu or torch.cuda.device_count()
    if ranks < 1:
        raise UserError("this machine has no GPU that PyTorch finds; give --cpu 2 to try it with two CPU processes")
    return launch(ranks, words) or int(ScalingReport(settings.report).failed)


def _supervise(settings: SelftestConfig, here: RankAddress) -> int:
    """Have workers go through all parts. The store lives here: it outlives the workers."""
    store = open_store(here.host, here.port, _MEETING_S, True) if here.hosts_store else None
    if here.rank == 0:
        ScalingReport.begin(settings.report, here.ranks, settings.chosen)
        show(f"{'result':<6} {'seconds':>8}  part", flush=True)
    told: dict[str, Any] = {"path": str(settings.report.absolute()), "cpu": bool(settings.cpu), "ended": None}
    for _ in range(len(settings.chosen) + 1):  # each time a part is over
        told["ended"] = ended = _worker(told)
        if ended["code"] in (0, 2) or (ended["part"] == "start" and ended["code"] != GIVEN_UP):
            break
    del store
    if ended["code"] != 0:
        if ended["code"] != 2:  # it has said why
            tell(
                f"evodsp: error: rank {here.rank}, {ended['part']}: {_how(ended)}; the report so far is {settings.report}"
            )
        return 2 if ended["code"] == 2 else 1
    if here.rank > 0:
        return 0
    report = ScalingReport(settings.report)
    show(f"report: {report.path}, page: {report.path.with_suffix('.html')}; send the first one")
    return 0 if launched_by_evodsp() else int(report.failed)  # there the launcher gives the exit code


def _worker(told: dict[str, Any]) -> dict[str, Any]:
    """Run a worker, and say how it ended."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
        progress = Path(folder) / "progress"
        _tell_progress(progress, "start", _MEETING_S)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps({**told, "progress": str(progress)})],
            env={**os.environ, LAUNCHER: str(os.getpid()), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            stderr=errors,
        )  # fmt: skip
        running = True
        try:
            while running:
                time.sleep(0.1)
                running = process.poll() is None
                part, deadline, limit = json.loads(progress.read_text())
                if time.time() > deadline + _GRACE_S:
                    process.kill()
        finally:
            process.kill()  # a worker that is stopped on purpose does not notice that this process ends
            process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if said:
        tell(said)
    return {
        "part": part, "code": process.returncode, "time": time.time(), "late": time.time() > deadline,
        "limit": limit, "host": socket.gethostname(), "said": one_line(" | ".join(said.splitlines()[-12:])),
    }  # fmt: skip


def _tell_progress(path: Path, part: str, limit: float) -> None:
    """For the supervisor: the part that runs, when it has to be over, and its limit."""
    write_text(path, json.dumps([part, time.time() + limit, limit]))


def work(told: dict[str, Any]) -> None:
    """Go through the parts that wait, together with the other workers."""
    end_with_launcher()
    backend, path = "gloo" if told["cpu"] else None, Path(told["path"])
    if told["cpu"]:
        torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*FSDP2-wrapped module .* returned a view")  # nothing modifies it
    with guarded():
        start(backend, _TIMEOUT_S, _MEETING_S)
        scaling_run = ScalingRun(path)
        ended = all_of(told["ended"], scaling_run.group)
        report = ScalingReport(path) if scaling_run.group.rank == 0 else None
        if report is not None and None not in ended:
            report.ended(ended)
        while name := from_first(lambda: report and report.next(), scaling_run.group):
            limit = SCALING_PARTS[name] * (_CPU_FACTOR if told["cpu"] and name not in FAULTS else 1.0)
            faulthandler.dump_traceback_later(limit, exit=True)
            _tell_progress(Path(told["progress"]), name, limit)
            if name in FAULTS:
                scaling_run.free()
                stop()
                start(backend, _FAULT_TIMEOUT_S, _MEETING_S)
                scaling_run = ScalingRun(path)
            problems = _done(name, scaling_run, report)
            faulthandler.cancel_dump_traceback_later()
            if report is not None:
                report.end(name, problems)
        scaling_run.free()
        stop()


def _done(name: str, scaling_run: ScalingRun, report: ScalingReport | None) -> list[str]:
    """Run a part, and give what went wrong on any rank. Ends this process if the others do not come to the part's end."""
    problems = []
    try:
        for row in PARTS[name](scaling_run):
            if row.get("ok") is False:
                problems.append(", ".join(f"{key}: {value}" for key, value in row.items() if key != "ok"))
            if report is not None:
                report.add(name, row)
    except Exception as error:
        if lost_contact(error) or "CUDA error" in str(error):  # this process can do nothing more
            raise
        problems.append(one_line(f"{type(error).__name__}: {error}"))
    store, rank, ranks = dist.distributed_c10d._get_default_store(), scaling_run.group.rank, scaling_run.group.size
    keys = [f"part/{name}/{number}" for number in range(ranks)]
    store.set(keys[rank], "; ".join(problems))
    try:
        store.wait(keys, timedelta(seconds=_PATIENCE_S if problems else SCALING_PARTS[name] * _CPU_FACTOR))
    except dist.DistStoreError:
        tell("; ".join(problems) or "other ranks do not end this part")
        os._exit(1)
    return [f"rank {n}: {text.decode()}" for n, text in enumerate(store.multi_get(keys)) if text]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends this process
    try:
        work(json.loads(sys.argv[1]))
    except UserError as error:
        tell(f"evodsp: error: {error}")
        sys.exit(2)
