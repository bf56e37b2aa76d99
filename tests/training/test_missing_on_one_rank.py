"""A folder that exists on one machine only, as where a file system is not mounted on a node."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from evodsp.training.chains import open_samples
from evodsp.training.config import DataConfig
from tests.builders.training import CommandPool


def _opened(config: DataConfig, *of_model: Any) -> Any:
    hidden = {"alignment_dir": "/not_mounted"} if os.environ["RANK"] == "1" else {}
    return open_samples(dataclasses.replace(config, **hidden), *of_model)


@contextmanager
def _rank_1_sees_no_folder() -> Iterator[None]:
    with mock.patch("evodsp.training.chains.open_samples", _opened):
        yield


def test_the_rank_and_its_host_are_named(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """Catches ranks that wait for the one which has stopped, and a message from which nobody learns on which machine."""
    words = ("fit", f"--config={chains}/tiny.yaml", "--parallel.sequence=2", f"--output={tmp_path}/run")
    outcomes = commands.evodsp(2, *words, around=_rank_1_sees_no_folder)
    for outcome in outcomes:
        assert outcome.code == 2
        line = f"evodsp: error: rank 1 on {socket.gethostname()} of 2 ranks: data.alignment_dir is /not_mounted, which is no"
        assert outcome.error.startswith(line)
        assert len(outcome.error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
