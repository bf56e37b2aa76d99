"""Command lines on several ranks, in processes that are kept: starting Python and Lightning takes seconds each time."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from evodsp.cli import main
from evodsp.training.checks import Settings
from tests.builders.kept_parsers import kept_parsers
from tests.builders.processes import free_port
from tests.ranks import RankPool, end_with_parent


@dataclass(frozen=True)
class Outcome:
    """How a command line ended on one rank."""

    code: int
    out: str
    error: str


Told = Callable[[int, int, int], dict[str, object]]
"""The variables of a rank's place, from its number, the number of ranks, and a free port."""


def by_torchrun(rank: int, ranks: int, port: int) -> dict[str, object]:
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


class CommandPool(RankPool):
    """Processes that wait for command lines. Each run creates its own process group, as under a launcher.

    Lightning communicates with all ranks of the default group. `RankPool`'s default group always has all of its
    processes, so it could not run Lightning on fewer ranks.
    """

    def evodsp(
        self,
        ranks: int,
        *words: str,
        own: dict[int, tuple[str, ...]] | None = None,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        told: Told = by_torchrun,
    ) -> list[Outcome]:
        """Run `evodsp *words` on `ranks` ranks, with `own[r]` appended on rank r, within the context that `around` makes.
        `told`: the variables that tell a rank its place.
        """
        return self.run(ranks, words, own or {}, (told, free_port()), around)  # type: ignore[arg-type]

    def _target(self) -> Any:
        return _serve


def _serve(rank: int, ranks: int, path: str, pipe: Connection) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    while True:
        try:
            ranks, words, (own, (told, port), around) = pipe.recv()
        except EOFError:
            return
        try:
            with kept_parsers(), around():
                outcome = _run([*words, *own.get(rank, ())], told(rank, ranks, port))
            pipe.send((True, outcome))
        except BaseException as error:
            pipe.send((False, repr(error)))


def _run(words: list[str], told: dict[str, object]) -> Outcome:
    out, error = io.StringIO(), io.StringIO()
    try:
        with (
            mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(error),
            mock.patch("evodsp.cli.RANK_0_FIRST_S", 0.0),  # no torchrun is here to end the others
        ):
            code = main(words)
    finally:
        _leave()
    return Outcome(code, out.getvalue(), error.getvalue())


def told(words: list[str]) -> Outcome:
    """How `evodsp *words` ends in this process."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(words)
    return Outcome(code, out.getvalue(), error.getvalue())


def words(chains: Path, output: Path, *options: str) -> list[str]:
    """The command line of a run on the folder `chains` of `tests.builders.training_chains.write_chains`."""
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", *options]


def fit(chains: Path, output: Path, *options: str) -> int:
    """The exit code of that run."""
    return main(words(chains, output, *options))


def changed(settings: Settings, options: str) -> Settings:
    """The settings with `options`, a YAML mapping of dotted names without its braces."""
    for name, value in yaml.safe_load(f"{{{options}}}").items():
        path = name.split(".")
        settings = _put(settings, path if hasattr(settings, path[0]) else ["run", *path], value)
    return settings


def _put(part: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    if isinstance(part, dict):
        return {**part, path[0]: _put(part[path[0]], path[1:], value)}
    return dataclasses.replace(part, **{path[0]: _put(getattr(part, path[0]), path[1:], value)})


NO_VALIDATION = "--trainer.limit_val_batches=0"


def _leave() -> None:
    """Leave the process group, which a failed run does not do itself."""
    import torch.distributed as dist

    from evodsp.launch.watch import watch_of_this_process

    if watch := watch_of_this_process():
        watch.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
