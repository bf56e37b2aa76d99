"""The log of predictions as a file: <output>/predict.log holds what each run has said, one run after another."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from evodsp.errors import UserError
from evodsp.printing import write_line
from evodsp.version import __version__

LOG = "predict.log"
Report = Callable[[str], None]
"""Takes one line of the log."""
_TIME = "%Y-%m-%d %H:%M:%S"


@contextmanager
def run_log(output: Path, words: Sequence[str], show: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line and adds it to the log, with the time. `words`: the command line, for the head.

    The file begins, or goes on, with the first line. A run that ends with an error, and leaves nothing else in `output`, leaves
    no log either, nor the folders that were made for it.
    """
    path = output / LOG
    created = [place for place in (path, output, *output.parents) if not place.exists()]
    with ExitStack() as stack:
        lines: list[Callable[[str], None]] = []

        def add(line: str) -> None:
            if not lines:
                output.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
                lines.append(partial(write_line, file.write))
                lines[0](f"# {time.strftime(_TIME)} evodsp {__version__}: evodsp {shlex.join(words)}")
            lines[0](f"{time.strftime(_TIME)} {line}")

        def say(line: str) -> None:
            show(line)
            add(line)

        try:
            yield say
        except BaseException as error:
            if lines:
                add(f"error: {error}" if isinstance(error, UserError) else f"ended by {type(error).__name__}")
            stack.close()
            _remove_unless_used(created)
            raise


def _remove_unless_used(created: Sequence[Path]) -> None:
    """Remove the log, the first of `created`, if it is alone in its folder, and then the empty ones of the folders above it."""
    if not created or created[0].name != LOG or not created[0].exists() or len(list(created[0].parent.iterdir())) > 1:
        return
    created[0].unlink()
    for folder in created[1:]:
        if any(folder.iterdir()):
            return
        folder.rmdir()
