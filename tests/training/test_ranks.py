"""Ranks of a run: options reach each of them, and what does not fit together is one line on every rank, without a hang."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.parallel.config import ParallelConfig
from evodsp.report.runs import read_curve
from evodsp.training.chains import open_samples
from evodsp.training.config import DataConfig
from evodsp.training.run_folder import recount_batches
from evodsp.training.scores import mean_by_chain
from evodsp.training.world import MeshWorld
from tests.builders.forked_command import run_forked
from tests.builders.training import CommandPool, words
from tests.ranks import RankPool

OPTIONS = (
    "--parallel.sequence=2", "--parallel.overlap=false", "--parallel.wire=bf16", "--plan.triangle_outgoing=gather",
    "--plan.outer_product_mean=sum", "--plan.stream_bias=true", "--plan.keep_gathered=false", "--model.optimizer.eps=0.003",
    "--matmul_precision=high", "--kernels.backend=reference", "--kernels.transition=chunked",
    "--model.optimizer.warmup_samples=0", "--model.optimizer.drop_samples=1", "--model.optimizer.drop_factor=0.5",
)  # fmt: skip


def test_options_reach_the_run_on_every_rank(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """An option of the exchange, the plan, the kernels or Adam that is ignored: every number stays the same, only slower, over
    a wider wire, or up to rounding; TF32 asked for and not used, or used by the next run of the same process; ranks that begin
    with other weights; a schedule that is computed but not applied, or a step late; a bar that no rank writes where several
    train."""
    report = "--trainer.callbacks=tests.builders.observers.ReportSetup"
    options = ("--data.train_chains=[2abc_B]", "--trainer.max_steps=2", report, *OPTIONS)
    outcomes = commands.evodsp(2, *words(chains, tmp_path / "run", *options))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    lines = [[line for line in outcome.out.splitlines() if line.startswith("SETUP ")] for outcome in outcomes]
    found = [json.loads(line.removeprefix("SETUP ")) for (line,) in lines]
    plan = {"triangle_outgoing": "gather", "outer_product_mean": "sum", "stream_bias": True, "keep_gathered": False}
    for rank in found:
        assert (rank["ranks"], rank["overlap"], rank["wire"]) == (2, False, "torch.bfloat16")
        assert rank["plan"] == {"triangle_incoming": "channel", "extra_msa_axis": "seq", **plan}
        assert rank["kernels"].pop("transition").endswith(".by_chunks")  # of chunked
        assert {module.rpartition(".")[2] for module in rank["kernels"].values()} == {"reference"}
        assert (rank["eps"], rank["matmul"]) == ([0.003], "high")
    assert torch.get_float32_matmul_precision() == "highest"
    assert found[0]["weights"] == found[1]["weights"], "the callback gave every rank other weights"
    rates = [float(row["train/lr"]) for row in read_curve(tmp_path / "run" / "curve.csv").values()]
    assert rates == pytest.approx([0.01, 0.005])
    assert json.loads((tmp_path / "run" / "baseline.json").read_text())["copies"][0]["nearest"] == "2abc_B"


@pytest.fixture(scope="module")
def one_step(chains: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output of a run of one step."""
    output = tmp_path_factory.mktemp("one") / "run"
    assert main(words(chains, output, "--trainer.max_steps=1", "--trainer.limit_val_batches=0")) == 0
    return output


@pytest.mark.verify_but("validate*")
@pytest.mark.parametrize(("command", "limit"), [("validate", "limit_val_batches"), ("test", "limit_test_batches")])
def test_a_limit_that_leaves_nothing_to_score(
    chains: Path, one_step: Path, capsys: pytest.CaptureFixture[str], command: str, limit: str
) -> None:
    """A command that scores nothing and succeeds; a traceback of Lightning's."""
    score = [command, *words(chains, one_step)[1:], "--ckpt_path", "last", f"--trainer.{limit}"]
    for value, said in (("0", "0, but must be above 0: nothing would be scored"), ("0.5", "share of 1 batch")):
        assert main([*score, value]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{limit} is {value}" in line
        assert said in line


@pytest.mark.verify_but("counted over epochs")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("check_val_every_n_epoch=null", "val_check_interval=5"), id="counted over epochs"),
        pytest.param(("limit_val_batches=0", "val_check_interval=5"), id="without validation"),
        pytest.param(("val_check_interval=00:00:10:00",), id="by time"),
    ],
)
def test_validations_that_are_far_apart(chains: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Refused, although they can be; a checkpoint that is not written because a validation might follow."""
    output = tmp_path / "run"
    given = [f"--trainer.{option}" for option in options]
    every = ("--checkpoint_every=2", "--keep_last=3", "--data.samples_per_epoch=2", "--trainer.max_steps=3")
    assert main(words(chains, output, *given, *every)) == 0
    assert (output / "checkpoints/last-1.ckpt").is_file()


@pytest.mark.parametrize(
    ("ranks", "options", "own", "said"),
    [
        (3, ("--parallel.sequence", "2"), {}, "the number of ranks, 3, is not a multiple of it"),
        (2, ("--trainer.devices", "4"), {}, "but 2 were started"),
        (2, ("--parallel.sequence", "2"), {1: ("--seed", "9")}, "different settings"),
        (2, (), {1: ("--parallel.sequence", "2")}, "different settings"),
    ],
)
def test_every_rank_reports_what_does_not_fit(
    commands: CommandPool, chains: Path, tmp_path: Path, ranks: int, options: Any, own: Any, said: str
) -> None:
    for outcome in commands.evodsp(ranks, *words(chains, tmp_path / "run", *options), own=own):
        assert outcome.code == 2
        assert said in outcome.error
        assert "Traceback" not in outcome.error
        assert outcome.error.splitlines()[-1].startswith("evodsp: error: ")


def test_fit_starts_its_ranks_itself(chains: Path, tmp_path: Path) -> None:
    """Catches ranks that do not find each other, and a line that each of them says."""
    output = tmp_path / "run"
    options = ("--parallel.sequence", "2", "--trainer.max_steps", "1", "--trainer.precision", "bf16-mixed")
    done = run_forked(list(words(chains, output, *options, "--trainer.limit_val_batches=0")))
    assert done.returncode == 0, done.stderr
    assert list(read_curve(output / "curve.csv")) == [0]
    assert done.stdout.count("checkpoint:") == 1


@pytest.mark.verify
def test_half_precision_trains_over_ranks(commands: CommandPool, chains: Path, tmp_path: Path) -> None:
    """The exchange returns gradients of another type than their tensors; copies of parameters in half precision that are not
    those of the step, or that FSDP2's sharded parameters cannot have."""
    runs = {}
    for ranks, parameters in ((1, "replicate"), (2, "zero1"), (2, "fsdp2")):
        output = tmp_path / parameters
        options = ["--trainer.precision", "bf16-mixed", "--trainer.max_steps", "2", "--model.optimizer.clip", "batch"]
        options += ["--trainer.limit_val_batches=0"]
        options += ["--parallel.sequence", str(ranks), "--parallel.parameters", parameters]
        outcomes = commands.evodsp(ranks, *words(chains, output, *options))
        assert {outcome.code for outcome in outcomes} == {0}, outcomes
        runs[parameters] = [float(row["train/loss"]) for row in read_curve(output / "curve.csv").values()]
    for parameters, losses in runs.items():
        assert losses == pytest.approx(runs["replicate"], rel=1e-2), parameters


@pytest.mark.verify
def test_validation_scores_each_chain_once(commands: CommandPool, chains: Path, one_step: Path) -> None:
    """Fewer chains than data ranks (a rank without batches would hang the others); a sequence group counted N times."""
    score = ("--config", str(chains / "tiny.yaml"), "--output", str(one_step), "--ckpt_path", "last")
    tables = []
    for ranks, options in ((1, ()), (2, ()), (4, ("--parallel.sequence", "2"))):
        all_chains = ("--data.test_chains", "[1abc_A]" if ranks == 2 else "[1abc_A, 2abc_B]")
        outcomes = commands.evodsp(ranks, "test", *score, *all_chains, *options)
        assert {outcome.code for outcome in outcomes} == {0}, outcomes
        assert all(not outcome.out for outcome in outcomes[1:]), "rank 0 alone shows results"
        tables.append(outcomes[0].out.splitlines())
        lines = (one_step / "test.csv").read_text().splitlines()[1:]
        keys = ["1abc_A"] if ranks == 2 else ["1abc_A", "2abc_B"]
        assert [line.split(",")[:4] for line in lines] == [[key, "test", "13", "13"] for key in keys]
    assert tables[0][:4] == tables[2][:4]
    assert tables[1][1] == tables[0][1]


def check(group: Any, sequence: int, batches: list[Any]) -> str:
    batch, world = batches[torch.distributed.get_rank(group)], MeshWorld(ParallelConfig(sequence=sequence))
    try:
        world.check_batches(UserError(batch) if isinstance(batch, str) else [batch])
    except UserError as error:
        return str(error)
    return ""


def sample(number: int, residues: int = 5) -> dict[str, torch.Tensor]:
    return {"aatype": torch.full((1, 2, residues), number), "sample_index": torch.tensor([number])}


def test_one_ranks_mistake_is_raised_on_all(pool: RankPool) -> None:
    """A broken file that one data rank reads, or a chain with fewer residues than ranks."""
    assert (
        pool.run(4, check, 2, [sample(1), sample(1), "x.a3m:3: broken", "x.a3m:3: broken"]) == ["x.a3m:3: broken"] * 4
    )
    for found in pool.run(4, check, 4, [sample(1, residues=3)] * 4):
        assert "has only 3 residues" in found


def test_scores_are_means_over_the_ranks_that_found_them() -> None:
    parts = [{"a": {"loss": 1.0}}, {"a": {"loss": 3.0}}, {"b": {"loss": 5.0}}]
    assert mean_by_chain(parts) == {"a": {"loss": 2.0}, "b": {"loss": 5.0}}


@pytest.mark.parametrize(
    ("former", "now", "counts", "expected"),
    [
        (4, 2, (8, 8, 8, 7), (4, 4, 4, 3)),  # written before the last batch counted as completed
        (2, 4, (6, 6, 6, 6), (12, 12, 12, 12)),
        (4, 4, (6, 6, 6, 5), (4, 4, 4, 4)),  # within a step: its gradients are not saved
        (4, 2, (7, 7, 7, 6), (2, 2, 2, 2)),  # within a step, on other ranks
    ],
)
def test_batches_are_recounted(former: int, now: int, counts: tuple[int, ...], expected: tuple[int, ...]) -> None:
    names = ("ready", "started", "processed", "completed")
    progress = {part: dict(zip(names, counts, strict=True)) for part in ("total", "current")}
    checkpoint = {"batches_per_step": former, "loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}
    recount_batches(checkpoint, now)
    for part in ("total", "current"):
        assert tuple(progress[part][name] for name in names) == expected


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


PROGRAM = """
import sys
from evodsp.cli import main
config, output = sys.argv[1:]
assert main(["fit", f"--config={config}", f"--output={output}", "--trainer.max_steps=1"]) == 0
assert main(["validate", f"--config={config}", f"--output={output}", "--ckpt_path=last"]) == 0
"""


@pytest.mark.verify
def test_files_are_written_in_the_output_folder_only(chains: Path, tmp_path: Path) -> None:
    """Catches `lightning_logs/` and `checkpoints/` in the working directory, caches in the home folder, temporary files that
    stay. (matplotlib, which torchmetrics imports where there is one, keeps a list of fonts in a folder of its own.)"""
    empty = {name: tmp_path / name.lower() for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")}
    working = tmp_path / "working"
    for folder in (*empty.values(), working):
        folder.mkdir()
    variables = {**os.environ, **{name: str(folder) for name, folder in empty.items()}, "OMP_NUM_THREADS": "1"}
    variables["MPLCONFIGDIR"] = str(tmp_path / "fonts")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"{chains}/tiny.yaml", f"{tmp_path}/run"],
        cwd=working, env={**variables, "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "baseline.json",
        "checkpoints",
        "config.yaml",
        "curve.csv",
        "tensorboard",
        "validate.csv",
    }
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} >= {"last.ckpt", "best.ckpt"}
    written = [path for folder in (working, *empty.values()) for path in folder.rglob("*")]
    assert not written, written
