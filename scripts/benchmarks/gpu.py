"""Measure everything about evodsp on one GPU, in less than ten minutes and without a network: `gpu.sh` starts this.

    python -m scripts.benchmarks.gpu [--output DIR] [--minutes 9] [--only PART ...] [--cases TEXT ...]
        [--backends triton ...] [--memory-gib 79] [--cpu] [--dry-run]

Each part (`PARTS`) runs in a process of its own, which is ended when the part's time is over: a kernel that hangs or
that spoils the GPU's context costs its part only, and what was measured before it is kept. A part that needs less time leaves
the rest to those after it. DIR gets gpu.csv, a line a number, and gpu.md, the same as tables; both are written anew every five
seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from evodsp.errors import UserError
from evodsp.files import check_output_folder, output_errors, write_text
from evodsp.model.kernels import BACKENDS

from . import gpu_anchors, gpu_peers
from .gpu_blocks import blocks, machine, operators, profile
from .gpu_cases import FULL, TINY
from .gpu_model import longest, whole_model
from .gpu_operators import checks
from .gpu_rows import Part, Row, Setup, cleaned, out_of_memory
from .tables import write_csv

PARTS = (
    Part("machine", "The machine, and the speeds that it reaches", 15, machine),
    Part("checks", "Operators against their formulas", 90, checks, processes=14),
    Part("blocks", "One block, forward and backward", 60, blocks),
    Part("profile", "Where a block's time goes", 20, profile),
    Part("model", "The whole model", 120, whole_model),
    Part("peers", "Blocks beside other programs'", 60, gpu_peers.cases),
    Part("anchors", "Operators at published sizes", 60, gpu_anchors.cases),
    Part("operators", "Operators against the roofline", 60, operators),
    Part("longest", "The longest protein", 80, longest),
    Part("compiled", "Blocks of formulas, compiled by torch", 120, gpu_peers.compiled_cases),
)
"""The parts, in the order in which they run: what answers most comes first. A case measures one thing by itself. If it fails,
or there is no time for it, the others go on."""

HERE = Path(__file__).resolve().parent
FAILED, LEFT_OUT, OUT_OF_MEMORY = "failed", "left out", "out of memory"
"""Quantities of rows without a number: what became of the case. The reason is in the note."""
WRITTEN_EVERY = 5.0
"""Seconds after which the report is written again while a part runs."""
GRACE = 5.0
"""Seconds after its deadline at which a part is ended: its last case may be nearly done."""


def run_part(
    part: Part, setup: Setup, file: Path, begin: float, share: int = 0, of: int = 1, texts: Sequence[str] = ()
) -> None:
    """In a process of its own: measure the cases of a part, and append each result to `file` when it is there.

    `share`, `of`: of `of` processes this one takes every case whose number leaves the remainder `share`. `texts`: only cases
    whose names contain one of them; none: all.
    """
    if setup.device.type == "cpu":
        torch.set_num_threads(1)  # the threads of the process that was forked are not here
    elif setup.memory_gib is not None:
        whole = torch.cuda.get_device_properties(setup.device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, setup.memory_gib / whole), setup.device)
    with file.open("a", encoding="utf-8") as stream:

        def note(row: Row) -> None:
            stream.write(json.dumps(dataclasses.asdict(row)) + "\n")
            stream.flush()

        cases = (case for case in part.cases(setup) if not texts or any(text in case.name for text in texts))
        for case in itertools.islice(cases, share, None, of):
            found: dict[str, Any] = {
                "part": part.name,
                "case": case.name,
                "backend": case.backend,
                "precision": case.precision,
            }
            label = " ".join(word for word in (case.name, case.backend, case.precision) if word)
            if of == 1:  # many processes would say too much
                print(f"  {time.monotonic() - begin:5.0f} s, {setup.left:4.0f} s left  {label}", flush=True)
            if setup.left <= 0:
                note(Row(LEFT_OUT, None, note="no time", **found))
                continue
            try:
                for measured in case.measure():
                    note(Row(**dataclasses.asdict(measured), **found))
            except Exception as error:
                what = OUT_OF_MEMORY if out_of_memory(error) else FAILED
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
                print(f"        {what}: {label}: {reason}", flush=True)
                note(Row(what, None, note=reason, **found))
            cleaned(setup.device)


def run(parts: Sequence[Part], options: argparse.Namespace, output: Path, words: Sequence[str]) -> int:
    """Run the parts one after another, writing the report after each. Returns the exit code."""
    # Only `fork` makes processes quickly enough; this process never touches the GPU, so that its children can.
    processes = multiprocessing.get_context("fork")
    device, sizes = (torch.device("cpu"), TINY) if options.cpu else (torch.device("cuda", 0), FULL)
    begin = time.monotonic()
    end = begin + 60 * options.minutes
    rows: list[Row] = []
    for number, part in enumerate(parts):
        left, wanted = end - time.monotonic(), sum(p.seconds for p in parts[number:])
        allowed = left * part.seconds / wanted
        print(f"{number + 1}/{len(parts)} {part.name}: {part.title}; {allowed:.0f} of {left:.0f} s", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            setup = Setup(
                device, sizes, time.monotonic() + allowed, tuple(options.backends), tuple(rows), options.memory_gib
            )
            of = min(part.processes, os.cpu_count() or 1)
            files = [Path(folder) / str(share) for share in range(of)]
            started = []
            texts = () if part.name == "machine" else tuple(options.cases)
            for share, file in enumerate(files):
                file.touch()
                process = processes.Process(target=run_part, args=(part, setup, file, begin, share, of, texts))
                process.start()
                started.append(process)
            while (at_work := [process for process in started if process.is_alive()]) and setup.left + GRACE > 0:
                at_work[0].join(min(WRITTEN_EVERY, setup.left + GRACE))
                with output_errors(output):  # whoever ends this program loses nothing that was measured
                    write(output, [*rows, *_rows_of(files)], parts, words)
            problems = [_ended(process) for process in started]
            rows += _rows_of(files)
        for why in filter(None, problems):
            print(f"        {FAILED}: {why}", flush=True)
            rows.append(Row(FAILED, None, note=why, part=part.name))
        with output_errors(output):
            write(output, rows, parts, words)
    # Last: the end of the output is what a caller far away sees.
    print((output / "gpu.md").read_text(encoding="utf-8"))
    print(f"{output / 'gpu.md'} and gpu.csv, after {time.monotonic() - begin:.0f} s")
    bad = [row for row in rows if row.quantity in (FAILED, LEFT_OUT)]
    for row in bad:
        print(f"{row.quantity}: {row.part} {row.case} {row.backend} {row.precision}: {row.note}")
    return 1 if bad or not rows else 0


def _rows_of(files: Sequence[Path]) -> list[Row]:
    """What processes have measured so far. A line that is being written has no end yet."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines(keepends=True)]
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]


def _ended(process: BaseProcess) -> str:
    """End a process that still runs. What went wrong; '' if nothing did."""
    if process.exitcode is None:
        process.kill()
        process.join()
        return f"was not over {GRACE:.0f} s after its time, and was ended"
    return "" if process.exitcode == 0 else f"its process ended with code {process.exitcode}"


def about(rows: Sequence[Row], words: Sequence[str]) -> dict[str, str]:
    """Machine, versions and command."""
    device = next((row.note for row in rows if row.quantity == "device"), "unknown")
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "device": device,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["scripts/benchmarks/gpu.sh", *words]),
    }


def _commit() -> str:
    """The checkout's commit, or what EVODSP_COMMIT says: a machine without git, or a copy without its history, cannot tell."""
    if named := os.environ.get("EVODSP_COMMIT"):
        return named
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def write(output: Path, rows: Sequence[Row], parts: Sequence[Part], words: Sequence[str]) -> None:
    """gpu.csv and gpu.md, of what was measured so far."""
    facts = about(rows, words)
    columns = ["part", "case", "backend", "precision", "of", "quantity", "value", "unit", "note"]
    numbers = [dataclasses.asdict(row) | {"value": "" if row.value is None else f"{row.value:.6g}"} for row in rows]
    write_csv(output / "gpu.csv", [{name: row[name] for name in columns} | facts for row in numbers])
    write_text(output / "gpu.md", "\n".join(report(rows, parts, facts)) + "\n")


# ---- The tables of gpu.md ----

_MOST_KERNELS = 16
"""Kernels of a stage that the report lists; gpu.csv has them all."""


def report(rows: Sequence[Row], parts: Sequence[Part], facts: dict[str, str]) -> list[str]:
    """The lines of gpu.md: a table a part."""
    lines = ["# Measured on one GPU", "", *(f"- {name}: {value}" for name, value in facts.items())]
    for part in parts:
        own = [row for row in rows if row.part == part.name]
        if own:
            table = {"checks": _worst, "profile": _kernels}.get(part.name, _by_case)
            lines += ["", f"## {part.title}", "", *table(own)]
    return lines


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [list(heads), ["---"] * len(heads), *([cell.replace("|", "/") for cell in row] for row in body)]
    return ["|" + "|".join(row) + "|" for row in rows]


def _value(row: Row) -> str:
    return (row.note or "yes") if row.value is None else f"{row.value:.4g}"


def _head(row: Row) -> str:
    return f"{row.quantity}, {row.unit}" if row.unit else row.quantity


def _by_case(rows: Sequence[Row]) -> list[str]:
    """A line a case, a column a quantity."""
    quantities = list(dict.fromkeys(_head(row) for row in rows))
    cases: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        name = f"{row.case}: {row.of}" if row.of else row.case
        cases.setdefault((name, row.backend, row.precision), {})[_head(row)] = _value(row)
    body = [[*key, *(cells.get(quantity, "") for quantity in quantities)] for key, cells in cases.items()]
    return _table(["case", "backend", "precision", *quantities], body)


def _worst(rows: Sequence[Row]) -> list[str]:
    """The lines of each operator's worst error over all sizes, of what failed, and of what is absent."""
    errors: dict[tuple[str, str], dict[str, float]] = {}
    passed = 0
    others = []
    for row in rows:
        if row.quantity == "error" and row.value is not None:
            cells = errors.setdefault((row.case.rpartition(": ")[2], row.backend), {})
            cells[row.precision] = max(row.value, cells.get(row.precision, 0.0))
        elif row.quantity == "self-check":
            passed += 1
        else:
            others.append([row.case, row.backend, row.precision, row.quantity, _value(row)])
    precisions = sorted({row.precision for row in rows if row.quantity == "error"})
    body = [[*key, *(f"{cells[p]:.1e}" if p in cells else "" for p in precisions)] for key, cells in errors.items()]
    lines = _table(["operator", "backend", *(f"worst error, {p}" for p in precisions)], body)
    lines += ["", f"{passed} self-checks passed."]
    return lines + (["", *_table(["case", "backend", "precision", "what", "why"], others)] if others else [])


def _kernels(rows: Sequence[Row]) -> list[str]:
    """The kernels that take longest, of each case and stage."""
    body, listed = [], dict[tuple[str, str], int]()
    for row in rows:
        key = (row.case, row.quantity)
        listed[key] = listed.get(key, -1) + (row.of != "" or row.value is None)
        if listed[key] <= _MOST_KERNELS:
            body.append([row.case, row.quantity, row.of[:60], _value(row), row.note if row.value is not None else ""])
    return _table(["case", "stage", "kernel", "us", "of it"], body)


def main(words: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else list(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output",
        type=Path,
        help="folder of the results (default: scripts/benchmarks/results; with --cpu runs/benchmark_cpu)",
    )
    parser.add_argument("--minutes", type=float, default=9, help="time limit of all parts together (default: 9)")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument(
        "--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS, metavar="BACKEND", help=", ".join(BACKENDS)
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="only cases whose names contain one of these (default: all)",
    )
    parser.add_argument(
        "--memory-gib", type=float, help="use no more of the GPU's memory, as if it had less (default: all)"
    )
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on the CPU, to try the program")
    parser.add_argument("--dry-run", action="store_true", help="list the parts and end")
    options = parser.parse_args(words)
    parts = [part for part in PARTS if part.name in options.only]
    if options.dry_run:
        for part in parts:
            share = part.seconds / sum(p.seconds for p in parts)
            print(f"{part.name:10}{60 * options.minutes * share:4.0f} s  {part.title}")
        return 0
    output = options.output or (Path("runs/benchmark_cpu") if options.cpu else HERE / "results")
    try:
        if options.minutes <= 0:
            raise UserError(f"--minutes {options.minutes}: must be more than 0")
        if options.memory_gib is not None and not options.memory_gib > 0:
            raise UserError(f"--memory-gib {options.memory_gib}: must be more than 0")
        if not options.cpu and not _has_gpu():
            raise UserError(
                "this machine has no GPU that torch can use; use one that has, or try the program with --cpu"
            )
        check_output_folder(output)
        return run(parts, options, output, words)
    except UserError as error:
        print(f"gpu: error: {error}", file=sys.stderr)
        return 2


def _has_gpu() -> bool:
    """Whether there is a GPU. Another process asks, because asking touches the GPU (see `run`)."""
    process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(not torch.cuda.is_available()))
    process.start()
    process.join()
    return process.exitcode == 0


if __name__ == "__main__":
    sys.exit(main())
