"""The frozen baseline computes what evodsp's modules compute; the benchmark's command works."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evodsp.config import ModelConfig
from evodsp.model.evoformer import EvoformerBlock
from evodsp.model.templates import TemplatePairStack
from evodsp.parallel.testing import dense
from scripts.benchmarks import bench, formulas
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
