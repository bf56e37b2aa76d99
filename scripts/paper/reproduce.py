"""Regenerate the tables and plots of the docs page "The paper, measured": under half an hour on two cores.

    python -m scripts.paper.reproduce [--only PART ...] [--output DIR] [--quick] [--overwrite]

The parts are counts, memory, time, modelled, plots and page.

counts: volumes and numbers of collectives at the paper's sizes, which must equal its tables 3, 8 and 9. memory: activations and
parameters of a rank at the paper's sizes, and real tensors on gloo ranks. time: a training step by every method, side by side.
modelled: the paper's section 5 as evodsp's planner calculates it. plots: PNG files from what the output folder holds. page: the
tables of docs/paper.md, from the default output folder only.

Each part writes CSV tables, and how it was made (NAME.json). A part that is there, made with the same
settings and the same source files, is kept, so an interrupted run goes on where it stopped. --quick: small sizes, a minute, to
try the program. The exit code is 1 if a count differs from the paper's formulas, and 2 for a mistake in the options.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evodsp.errors import UserError, nearest
from evodsp.files import check_output_folder, output_errors, write_text
from scripts.benchmarks.tables import write_csv

from . import counting, memory, modelled, modelled_tables, page, plots, timing
from .experiments import settings
from .part import Part, Tables, read_csv

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
PAGE = ROOT / "docs" / "paper.md"
DRAWN = ("plots", "page")
"""Parts that measure nothing and always run."""


def parts(quick: bool) -> list[Part]:
    """All parts that measure. `quick`: with sizes of seconds."""
    sizes = settings("quick" if quick else "cpu")
    modules = {"counts": counting, "memory": memory, "time": timing, "modelled": modelled}
    return [module.part(sizes[name]) for name, module in modules.items()]


def fingerprint(part: Part) -> str:
    """A checksum of the source files that decide a part's results."""
    files = [*ROOT.glob("evodsp/parallel/*.py"), *HERE.glob("methods/*.py"), *HERE.glob("configs/*.yaml")]
    files += [HERE / name for name in (*COMMON, *part.sources)]
    files += [ROOT / "scripts" / "benchmarks" / name for name in ("fake_ranks.py", "peak_memory.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


COMMON = ("config.py", "transformer.py", "workload.py")


def circumstances() -> dict[str, Any]:
    """When, where and from which commit."""
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "torch": torch.__version__,
        "load_before": round(os.getloadavg()[0], 2),
    }


def is_done(part: Part, folder: Path) -> bool:
    """Whether the folder holds this part, made with the same settings and source files."""
    try:
        made = json.loads((folder / f"{part.name}.json").read_text())
    except (OSError, ValueError):
        return False
    wanted = json.loads(json.dumps({"settings": part.settings, "fingerprint": fingerprint(part)}))
    tables_are_there = all((folder / f"{name}.csv").is_file() for name in made.get("tables", {}))
    return tables_are_there and all(made.get(name) == value for name, value in wanted.items())


def run(part: Part, folder: Path) -> list[str]:
    """Measure a part and write its files, the JSON last. Returns what contradicts the paper's formulas."""
    about, start = circumstances(), time.monotonic()
    tables = part.measure(lambda text: print(f"{part.name}: {text}", flush=True))
    about |= {"seconds": round(time.monotonic() - start), "load_after": round(os.getloadavg()[0], 2)}
    for name, rows in tables.items():
        write_csv(folder / f"{name}.csv", rows)
    wrong = part.wrong(tables)
    if not wrong:
        made = {
            "settings": part.settings,
            "fingerprint": fingerprint(part),
            "tables": {n: len(r) for n, r in tables.items()},
        }
        write_text(folder / f"{part.name}.json", json.dumps(about | made, indent=1) + "\n")
    return wrong


def tables_in(folder: Path) -> Tables:
    """All tables of the folder, by name, and `runs`: how each part was made."""
    runs = [{"part": path.stem} | json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return {path.stem: read_csv(path) for path in sorted(folder.glob("*.csv"))} | {"runs": runs}


def write_page(folder: Path) -> None:
    """Bring the tables of the docs page up to date. Its pictures are links to the results."""
    text = PAGE.read_text(encoding="utf-8")
    write_text(PAGE, page.updated(text, tables_in(folder)))


def chosen(only: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The parts to run. Raises UserError for a name that is none."""
    for name in only or ():
        if name not in known:
            raise UserError(f"--only {name}: is not a part; use one of {', '.join(known)}.{nearest(name, known)}")
    return [name for name in known if not only or name in only]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="PART", help="counts, memory, time, modelled, plots or page (default: all)"
    )
    parser.add_argument("--output", type=Path, help="folder for the results (default: scripts/paper/results)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the program; needs --output")
    parser.add_argument("--overwrite", action="store_true", help="measure again what the folder holds already")
    options = parser.parse_args(words)
    try:
        return reproduce(options)
    except UserError as error:
        print(f"reproduce: error: {error}", file=sys.stderr)
        return 2


def reproduce(options: argparse.Namespace) -> int:
    """Run the parts that the options ask for, and return the exit code."""
    if options.quick and options.output is None:
        raise UserError(
            "--quick measures small sizes, which must not replace the results of the page; give an --output"
        )
    folder: Path = options.output or RESULTS
    check_output_folder(folder)
    known = parts(options.quick)
    names = chosen(options.only, [*(part.name for part in known), *DRAWN])
    asked = [part for part in known if part.name in names]
    missing = [part for part in asked if options.overwrite or not is_done(part, folder)]
    for part in asked:
        if part not in missing:
            print(f"{part.name}: kept, made with the same settings and source files (--overwrite measures it again)")
    wrong = []
    with output_errors(folder):
        for part in missing:
            wrong += run(part, folder)
        if "plots" in names:
            tables = tables_in(folder)
            for path in (*plots.draw(tables, folder), *modelled_tables.draw(tables, folder)):
                print(f"plots: {path}")
        if "page" in names and folder == RESULTS:
            write_page(folder)
            print(f"page: {PAGE}")
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
