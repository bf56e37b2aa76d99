"""The worked example of docs/parallelize.md, on several ranks. tests/test_documentation.py runs the page's blocks on one."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.builders.pages import Block, blocks
from tests.ranks import RankPool

PAGE = "docs/parallelize.md"


def example() -> Block:
    return next(block for block in blocks(PAGE) if "VideoTransformer" in block.text)


def for_one_device(text: str) -> str:
    """The program without the lines that make it parallel."""
    return "\n".join(line for line in text.splitlines() if "# +" not in line)


def printed(text: str) -> list[str]:
    """Lines that a program prints."""
    with contextlib.redirect_stdout(io.StringIO()) as found:
        exec(compile(text, PAGE, "exec"), {"__name__": "page"})
    return found.getvalue().splitlines()


def run_on_rank(handle: Any, text: str) -> list[str]:
    """What the program prints on one of the pool's ranks, which has a process group already."""
    with patch("torch.distributed.init_process_group"), patch("torch.distributed.destroy_process_group"):
        return printed(text)


def test_the_example_prints_the_losses_of_one_device_on_every_rank(pool: RankPool) -> None:
    """An example that does not run, trains something else, or changes more lines than the page says."""
    text = example().text
    added = [line for line in text.splitlines() if "# +" in line]
    assert len(added) == 9
    assert "You change nine lines of the program" in Path(PAGE).read_text()
    losses = printed(for_one_device(text))
    assert len(losses) == 3
    assert losses[0] > losses[-1].replace("step 2", "step 0")
    assert pool.run(4, run_on_rank, text) == [losses] * 4


@pytest.mark.verify
@pytest.mark.parametrize("number", range(2))
def test_the_programs_run_under_torchrun(number: int, tmp_path: Path) -> None:
    """A program that lacks something that torchrun's ranks need."""
    programs = [
        block.text for block in blocks(PAGE) if block.language == "python" and "init_process_group" in block.text
    ]
    program = tmp_path / "program.py"
    program.write_text(programs[number])
    for ranks in (2, 3):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", program]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        # The ranks' lines may run into one another.
        expected = printed(for_one_device(programs[0])) if number == 0 else ["True"]
        assert [done.stdout.count(line) for line in expected] == [ranks] * len(expected)
