"""The frozen baseline computes what evodsp's modules compute; the benchmark's command works."""

from __future__ import annotations

import csv
import dataclasses
import shlex
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.templates import TemplatePairStack
from evodsp.parallel.testing import dense
from scripts.benchmarks import bench, formulas, peers
from tests.builders.comparison import close

S, R = 5, 7


def masked(*shape: int) -> Tensor:
    """A mask with some zeros, and a one in every row and column."""
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.3).double()
    mask[..., 0], mask[..., 0, :] = 1, 1
    return mask


def results(model: nn.Module, inputs: list[Tensor], masks: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, and gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    outputs = model(*leaves, *masks)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    gradients = torch.autograd.grad(outputs, leaves, [torch.arange(x.numel()).view(x.shape).cos() for x in outputs])
    return dict(enumerate([*outputs, *gradients]))  # type: ignore[arg-type]


@pytest.mark.parametrize("extra", [False, True])
def test_a_block_of_formulas(extra: bool) -> None:
    """Catches a baseline that computes something else, such as the wrong edges, heads or masks, and so is no baseline."""
    config = ModelConfig.preset("test")
    c_m, c_z = 6, 8
    own = dense(EvoformerBlock(c_m, c_z, config.extra_msa if extra else config.evoformer, extra)).double()
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((2, S, R, c_m), (2, R, R, c_z))
    ]
    masks = [masked(2, S, R), masked(2, R, R)]
    found, expected = (results(model, inputs, masks) for model in (formulas.Block(own), own))
    for name, x in expected.items():
        close(found[name], x, f"result {name}")


def test_a_template_pair_stack_of_formulas() -> None:
    """Catches the sub-layers in the order of the Evoformer."""
    config = dataclasses.replace(ModelConfig.preset("test").templates, enabled=True, blocks=2, checkpoint=False)
    own = dense(TemplatePairStack(config)).double()
    t = torch.randn(3, R, R, config.channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, expected = (results(model, [t], [masked(3, R, R)]) for model in (formulas.TemplatePairStack(own), own))
    for name, x in expected.items():
        close(found[name], x, f"result {name}")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a table without a case, and a CSV file that does not say where its figures come from."""
    small = {"small": bench.Case(lambda: bench.block(5, 7), 0.78, 0.5)}
    monkeypatch.setattr(bench, "CASES", small)
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "1", "--output", str(tmp_path / "x.csv")])
    bench.main()
    with (tmp_path / "x.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["case"], row["clock"]) == ("small", "wall")
    assert row["command"].startswith("python -m scripts.benchmarks.bench --rounds 1")
    assert float(row["difference"]) < 1e-4
    assert "small" in capsys.readouterr().out


PEER = """
import sys, time
from scripts.benchmarks.peer_side import serve

def prepare(case, first, residues):
    if case == "other":
        return None
    print("a library's message")
    runs = []

    def run():
        runs.append(case)
        if len(runs) == 5:
            raise ValueError("a pass failed")
        time.sleep(first / 1000)

    return run

sys.exit(serve(prepare))
"""


@pytest.fixture
def peer_python(tmp_path: Path) -> Path:
    """Instead of a peer's environment: a Python that runs a peer of ours, whatever module it is asked for."""
    (tmp_path / "peer.py").write_text(PEER)
    stand_in = tmp_path / "python"
    words = shlex.join([sys.executable, str(tmp_path / "peer.py")])
    stand_in.write_text(f"#!/bin/sh\nPYTHONPATH=. exec {words}\n")
    stand_in.chmod(0o755)
    return stand_in


def test_a_peer_answers_in_turns(peer_python: Path) -> None:
    """Catches a peer that is not warmed up, whose messages are taken for answers, or whose failure ends the benchmark."""
    with peers.alphafold(peer_python, 1, ("evoformer", 20, 7)) as peer:
        assert peer.absent == ""
        assert 0.02 <= (peer.seconds("wall") or 0) < 2
        assert (peer.seconds("cpu") or 1) < 0.01  # it sleeps
        assert peer.seconds("wall") is None  # the fifth run, of which two were the warm-up
        assert peer.absent == "its process ended with code 1: ValueError: a pass failed"
        assert peer.seconds("wall") is None


def test_absent_peers(peer_python: Path, tmp_path: Path) -> None:
    """Catches a benchmark that fails where a peer is not installed, or that does not say so."""
    for peer, why in (
        (peers.alphafold(None, 1, ("evoformer", 5, 7)), "no environment"),
        (peers.alphafold(tmp_path / "nothing", 1, ("evoformer", 5, 7)), "no environment"),
        (peers.alphafold(peer_python, 1, ("other", 5, 7)), "no such step"),
        (peers.openfold(peer_python, None, 1, ("evoformer", 5, 7)), "no clone"),
        (peers.openfold(peer_python, tmp_path, 1, ("evoformer", 5, 7)), "no folder openfold"),
    ):
        with peer:
            assert why in peer.absent
            assert peer.seconds("wall") is None


def test_peers_in_the_table(peer_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a ratio that is upside down, and numbers of a peer that failed in some round."""
    case = bench.Case(lambda: bench.block(5, 7), 0.78, None, ("evoformer", 400, 7))
    monkeypatch.setattr(bench, "CASES", {"small": case})
    found = bench.measure("small", 2, bench.Pythons(alphafold=peer_python))
    assert found.alphafold_s == pytest.approx(0.4, rel=0.5)
    assert found.alphafold_ratio is not None
    assert found.alphafold_ratio < 1  # evodsp needs milliseconds
    assert found.openfold_ratio is None
    assert "no clone" in found.absent
    assert 100 < found.evodsp_operators < 2000
    assert 100 < found.formulas_operators < 2000
    failed = bench.measure("small", 3, bench.Pythons(alphafold=peer_python))
    assert (failed.alphafold_s, failed.alphafold_ratio) == (None, None)
    assert "a pass failed" in failed.absent
