"""`compile: blocks`: what a run refuses, and a run compared with the same one uncompiled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from tests.builders.compiled_training_program import both
from tests.ranks import in_a_fork


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--compile", "model"), "compile"),
        (("--compile", "blocks", "--plan.stream_bias", "true"), "set plan.stream_bias to false"),
        (("--compile", "blocks", "--data.train.crop_size", "null"), "set data.train.crop_size"),
        (
            ("--compile", "blocks", "--parallel.parameters", "fsdp2", "--model.optimizer.clip", "batch"),
            "replicate or zero1",
        ),
    ],
)
def test_what_cannot_be_compiled_is_one_line(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    """Catches a setting that is silently ignored, and one that ends in a traceback of torch after minutes."""
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(tmp_path / "run"), *options]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_compiler_is_one_line(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches torch's traceback on a machine without a C++ compiler."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(tmp_path / "run"), "--compile", "blocks"]
    assert main(words) == 2
    assert "no-such-compiler is not found; install g++" in capsys.readouterr().err


@pytest.mark.verify
@pytest.mark.parametrize(
    ("options", "quick"),
    [
        (("--model.evoformer.blocks=2", "--data.train.recycles=0"), True),
        (("--model.evoformer.blocks=3",), False),
        (("--model.evoformer.blocks=2", "--data.train.recycles=0", "--model.evoformer.checkpoint_projections=true"), True),
        (("--model.evoformer.blocks=2", "--data.train.recycles=0",
             "--model.freeze=[evoformer.blocks.1.pair_stack, extra_msa_stack]"), True),
        (("--model.evoformer.blocks=3", "--trainer.precision", "bf16-mixed", "--model.evoformer.checkpoint", "true",
             "--model.extra_msa.checkpoint", "true"), False),
    ],
)  # fmt: skip
def test_a_compiled_run_is_the_run(chains: Path, tmp_path: Path, options: tuple[str, ...], quick: bool) -> None:
    """Catches a graph for each block or step, changed numbers, and other names in checkpoints.

    Several blocks of the Evoformer, one of the extra-MSA stack, recycling, dropout, the moving average. Each half of a block is
    one graph in passes with gradients, and one in recycled passes without; three more are those of the check at the start.
    `make test` runs the graphs as they are traced, without recycling and without that check, which has tests of its own.
    """
    plain, compiled, graphs = in_a_fork(both, chains, tmp_path, (*options, "--trainer.max_steps=3"), quick)
    assert len(plain["loss"]) == 3
    tolerance = 1e-2 if "bf16-mixed" in options else 1e-4
    torch.testing.assert_close(compiled["loss"], plain["loss"], rtol=tolerance, atol=0)
    assert compiled["names"] == plain["names"]
    assert graphs <= (4 if quick else 8 + 3)
