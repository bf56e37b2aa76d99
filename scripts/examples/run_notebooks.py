"""Execute notebooks and store what they show.

    python -m scripts.examples.run_notebooks notebooks/predict.ipynb notebooks/inside_dsp.ipynb

Needs `pip install -e '.[notebooks]'`. A view in a frame carries the whole viewer, 0.6 MB; its still picture is
stored in its place.
Exit code 1: a notebook failed, or an output names a path of this machine. Then its file is as it was.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATH_OF_A_MACHINE = re.compile(r"/(?:home|root|tmp|work|Users|opt|usr)/")


def stored(notebook: dict[str, Any]) -> dict[str, Any]:
    """An executed notebook without frames, times and the versions of this machine."""
    cells = []
    for cell in notebook["cells"]:
        tags = cell["metadata"].get("tags")
        cell = {**cell, "metadata": {"tags": tags} if tags else {}}
        if cell["cell_type"] == "code":
            cell["outputs"] = [_without_frame(output) for output in cell["outputs"]]
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {**notebook, "cells": cells, "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}}


def _without_frame(output: dict[str, Any]) -> dict[str, Any]:
    data = output.get("data", {})
    if "image/svg+xml" not in data or "<iframe" not in "".join(data.get("text/html", "")):
        return output
    return {**output, "data": {kind: value for kind, value in data.items() if kind != "text/html"}}


def run(path: Path) -> str | None:
    """Execute one notebook in its folder and store its outputs; what is wrong, or None."""
    with tempfile.TemporaryDirectory() as folder:
        executed = Path(folder) / path.name
        # The program `jupyter execute` starts the kernel. Jupyter is not imported: it is no dependency of development.
        command = [sys.executable, "-m", "jupyter", "execute", f"--output={executed}", str(path.resolve())]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode or not executed.is_file():
            return f"{path}: failed\n{done.stderr[-3000:]}"
        notebook = stored(json.loads(executed.read_text(encoding="utf-8")))
    for cell in notebook["cells"]:
        if found := PATH_OF_A_MACHINE.search(json.dumps(cell.get("outputs", []))):
            return f"{path}: the output of cell '{cell['id']}' names a path of this machine ({found.group()}…); do not print it"
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    failed = [message for path in parser.parse_args().notebooks if (message := run(path))]
    for message in failed:
        print(message, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
