"""A run is the same whichever program starts its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evodsp.weights.checkpoint import load_model
from tests.builders.training import CommandPool


def by_mpirun(rank: int, ranks: int, port: int) -> dict[str, object]:
    """As Open MPI 5.0 does on one machine."""
    name = "OMPI_COMM_WORLD"
    numbers = {f"{name}_RANK": rank, f"{name}_SIZE": ranks, f"{name}_LOCAL_RANK": rank, f"{name}_LOCAL_SIZE": ranks}
    return {**numbers, "PMIX_NAMESPACE": f"prterun-host-{port}@1", "PMIX_RANK": rank}


@pytest.mark.verify
def test_two_steps_under_mpirun_are_those_under_torchrun(commands: CommandPool, tmp_path: Path) -> None:
    """Catches ranks of mpirun that do not meet, that share a sample wrongly, or that all speak and write as the first."""
    words = [
        "fit",
        "--config=quickstart",
        "--parallel.sequence=2",
        "--trainer.max_steps=2",
        "--data.validation_chains=null",
    ]
    words += [f"--model.{stack}.blocks=1" for stack in ("extra_msa", "evoformer")]
    words += ["--data.train.crop_size=16", "--data.num_workers=0", "--trainer.enable_progress_bar=false"]
    theirs = commands.evodsp(2, *words, f"--output={tmp_path}/torchrun")
    ours = commands.evodsp(2, *words, f"--output={tmp_path}/mpirun", told=by_mpirun)
    assert [outcome.code for outcome in (*theirs, *ours)] == [0] * 4, ours
    assert ours[1].out == theirs[1].out == ""
    weights = [load_model(tmp_path / name / "checkpoints/last.ckpt").state_dict() for name in ("mpirun", "torchrun")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
