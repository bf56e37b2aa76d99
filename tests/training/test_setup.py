"""What `evodsp fit` builds from its options: the exchange, the plan, the optimizer, and the same weights on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evodsp.cli import main
from evodsp.report.runs import read_curve
from tests.builders.training import CommandPool, Outcome

OPTIONS = (
    "--parallel.sequence=2", "--parallel.overlap=false", "--parallel.wire=bf16", "--plan.triangle_outgoing=gather",
    "--plan.outer_product_mean=sum", "--plan.stream_bias=true", "--plan.keep_gathered=false", "--model.optimizer.eps=0.003",
    "--matmul_precision=high", "--kernels.backend=reference", "--kernels.transition=chunked",
    "--model.optimizer.warmup_samples=0", "--model.optimizer.drop_samples=1", "--model.optimizer.drop_factor=0.5",
)  # fmt: skip


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("setup") / "run"


@pytest.fixture(scope="module")
def found(commands: CommandPool, chains: Path, output: Path) -> list[dict[str, Any]]:
    """What `ReportSetup` prints on each of two ranks of a run with OPTIONS."""
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output)]
    words += [
        "--data.train_chains=[2abc_B]",
        "--trainer.max_steps=2",
        "--trainer.callbacks=tests.builders.observers.ReportSetup",
        *OPTIONS,
    ]
    outcomes: list[Outcome] = commands.evodsp(2, *words)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    lines = [[line for line in outcome.out.splitlines() if line.startswith("SETUP ")] for outcome in outcomes]
    assert [len(found) for found in lines] == [1, 1]
    return [json.loads(found[0].removeprefix("SETUP ")) for found in lines]


@pytest.mark.verify
def test_the_exchange_communicates_as_the_options_say(found: list[dict[str, Any]]) -> None:
    """parallel.overlap and parallel.wire ignored: every number stays the same, only slower or over a wider wire."""
    for rank in found:
        assert (rank["ranks"], rank["overlap"], rank["wire"]) == (2, False, "torch.bfloat16")


def test_the_bar_is_written(found: list[dict[str, Any]], output: Path) -> None:
    """Catches a bar that no rank writes where several train."""
    assert json.loads((output / "baseline.json").read_text())["copies"][0]["nearest"] == "2abc_B"


def test_the_plan_reaches_the_model(found: list[dict[str, Any]]) -> None:
    """plan.* ignored by fit."""
    expected = {"triangle_outgoing": "gather", "outer_product_mean": "sum", "stream_bias": True, "keep_gathered": False}
    for rank in found:
        assert rank["plan"] == {"triangle_incoming": "channel", "extra_msa_axis": "seq", **expected}


def test_matrix_products_have_the_precision_of_the_option(found: list[dict[str, Any]]) -> None:
    """TF32 asked for and not used, or used by the next run of the same process."""
    assert [rank["matmul"] for rank in found] == ["high", "high"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_kernels_reach_the_model(found: list[dict[str, Any]]) -> None:
    """kernels.* ignored by fit: every number stays the same up to rounding."""
    for rank in found:
        assert rank["kernels"].pop("transition").endswith(".by_chunks")  # of chunked
        assert {module.rpartition(".")[2] for module in rank["kernels"].values()} == {"reference"}


def test_a_backend_that_does_not_exist(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt name that is found only after the output folder has been made, or that ends in a traceback."""
    output = tmp_path / "run"
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), "--kernels.attention=chunkd"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "kernels.attention is 'chunkd', but must be one of auto, " in line
    assert not output.exists()


def test_weights_are_copied_from_rank_0(found: list[dict[str, Any]]) -> None:
    """The callback gave every rank other weights before the strategy was set up."""
    assert found[0]["weights"] == found[1]["weights"]


def test_adam_gets_its_epsilon(found: list[dict[str, Any]]) -> None:
    """PyTorch's default of 1e-8 instead of the option."""
    assert [rank["eps"] for rank in found] == [[0.003], [0.003]]


def test_the_learning_rate_drops_at_its_step(found: list[dict[str, Any]], output: Path) -> None:
    """A schedule that is computed but not applied, or applied a step late."""
    rates = [float(row["train/lr"]) for row in read_curve(output / "curve.csv").values()]
    assert rates == pytest.approx([0.01, 0.005])
