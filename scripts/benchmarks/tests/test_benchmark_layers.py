"""The table of what each sub-layer costs."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evodsp.config import ALPHAFOLD2, ModelConfig
from evodsp.planner.device import Links, load_device, load_link
from evodsp.planner.program import SampleSizes
from scripts.benchmarks import layers


def test_a_removed_sub_layer_costs_nothing() -> None:
    """Catches a planner that does not follow the list of sub-layers."""
    device = load_device("h200")
    links = Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)
    sizes = SampleSizes(residues=24, clusters=12, extra=16)
    whole, few = (
        layers.counted(names, ModelConfig.preset("test"), sizes, device, links)
        for names in (ALPHAFOLD2, layers.without("attention_starting"))
    )
    assert all(few[name] < whole[name] for name in ("parameters", "launches", "calls_of_8_ranks"))


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches hours that are trained again, and a score of another step."""
    commands: list[list[str]] = []

    def trains(command: list[str], **_: Any) -> None:
        commands.append(command)
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        (tmp_path / "checkpoints" / "last.ckpt").touch()
        with (tmp_path / "curve.csv").open("w", newline="") as file:
            csv.writer(file).writerows(
                [["step", "val/lddt_ca"], *([4 * n, n / 10] for n in range(1, len(commands) + 1))]
            )

    monkeypatch.setattr(subprocess, "run", trains)
    assert layers.trained(ALPHAFOLD2, tmp_path, seed=1, steps=4) == 0.1
    assert layers.trained(ALPHAFOLD2, tmp_path, seed=1, steps=4) == 0.1
    assert layers.trained(ALPHAFOLD2, tmp_path, seed=1, steps=8) == 0.2
    assert ["--ckpt_path" in command for command in commands] == [False, True]
