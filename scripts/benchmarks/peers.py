"""Other programs that compute the same, each in a process and an environment of its own, for `bench.py` to time in turns.

A peer holds one step of one case, warmed up, and runs it when it is asked to (`peer_side.py`). What is not installed, or fails,
is absent: its columns stay empty, and `Peer.absent` says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]


class Peer:
    """A process that runs one step of another program. A context: the process ends with the block."""

    def __init__(
        self,
        python: Path | None,
        module: str,
        missing: str,
        variables: dict[str, str],
        threads: int,
        case: tuple[str, int, int],
    ) -> None:
        """`python`: of the peer's environment; None if there is none, which `missing` explains. `case`: kind, first size, R."""
        self.absent, self.threads = "", threads
        self._process: subprocess.Popen[str] | None = None
        # A pipe that nobody reads could fill up.
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed when the context ends)
        if python is None or not python.exists():
            self.absent = missing
            return
        environment = {**os.environ, **variables, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        # Not resolved: a virtual environment's python is a link, and finds its packages by the link's place.
        self._process = subprocess.Popen(
            [str(python.absolute()), "-m", module], cwd=ROOT, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        kind, first, residues = case
        answer = self._ask({"prepare": kind, "first": first, "residues": residues})
        self.absent = answer.get("absent", "")

    def seconds(self, clock: str) -> float | None:
        """Run the step once; `clock`: wall or cpu. None if the peer is absent, also if it fails now."""
        if self.absent:
            return None
        answer = self._ask({"run": 1})
        self.absent = answer.get("absent", "")
        if not self.absent and answer["cpu_seconds"] > 1.2 * self.threads * answer["seconds"]:
            self.absent = f"it used more than {self.threads} threads"
        return None if self.absent else float(answer["seconds" if clock == "wall" else "cpu_seconds"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer; if the process has ended, why, as the answer of an absent peer."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["no message"])[-1]
        return {"absent": f"its process ended with code {code}: {last}"}

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._errors.close()


def openfold(
    python: Path | None,
    source: Path | None,
    threads: int,
    case: tuple[str, int, int],
    module: str = "scripts.benchmarks.peer_openfold",
) -> Peer:
    """OpenFold from a clone, run by `python`, an environment with its requirements (`make bench OPENFOLD=DIR` makes it).

    `module`: the program that holds its step.
    """
    missing = "OpenFold: no clone was given; `make bench OPENFOLD=DIR` compares with one"
    if source is not None and not (source / "openfold").is_dir():
        python, missing = None, f"OpenFold: {source} has no folder openfold"
    variables = {"OPENFOLD_SOURCE": str(source.resolve())} if source is not None else {}
    return Peer(python if source else None, module, missing, variables, threads, case)


def alphafold(python: Path | None, threads: int, case: tuple[str, int, int]) -> Peer:
    """DeepMind's JAX code, run by `python`, an environment with alphafold-colabfold (`make bench` uses .venv-parity)."""
    missing = "DeepMind's JAX code: no environment; `make .venv-parity/.ready` makes it (780 MB)"
    return Peer(python, "scripts.benchmarks.peer_alphafold", missing, {}, threads, case)
