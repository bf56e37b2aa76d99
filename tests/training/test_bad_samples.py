"""Samples whose loss or gradient is not finite: the run goes on without them, and says which they are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.data.samples.dataset import Sample, SampleDataset
from evodsp.parallel.dtensor import local
from evodsp.report.runs import read_curve
from evodsp.training.bad_samples import BadSample, BadSamples, NotFiniteWeightsError, Suspect, merged
from evodsp.training.config import TrainingConfig
from evodsp.training.module import TrainingModule
from evodsp.weights.checkpoint import read_checkpoint
from tests.builders.training import CommandPool

BAD = 3
"""The sample that is bad."""


@contextmanager
def in_a_label() -> Iterator[None]:
    """The frames of its first residue."""
    make = SampleDataset.make

    def planted(self: SampleDataset, index: int, key: str) -> Sample:
        sample = make(self, index, key)
        if index == BAD and self.training:
            sample["rigidgroups_gt_frames"][0] = torch.nan
        return sample

    with mock.patch.object(SampleDataset, "make", planted):
        yield


@contextmanager
def in_the_loss() -> Iterator[None]:
    """Of rank 1 alone, which is the loss of a shard."""
    step = TrainingModule.training_step

    def planted(self: TrainingModule, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = step(self, batch, batch_idx)
        if _is_here(self):
            loss = loss + torch.inf
            self._passes[-1].numbers["loss"] = loss.detach()
        return loss

    with mock.patch.object(TrainingModule, "training_step", planted):
        yield


@contextmanager
def in_a_gradient() -> Iterator[None]:
    """One number of one parameter's gradient, on rank 1 alone, with a finite loss."""
    reduce = TrainingModule.on_after_backward

    def planted(self: TrainingModule) -> None:
        if _is_here(self):
            gradient = self.model.get_parameter(PARAMETER).grad
            assert gradient is not None
            local(gradient).view(-1)[1] = torch.nan
        reduce(self)

    with mock.patch.object(TrainingModule, "on_after_backward", planted):
        yield


PARAMETER = "heads.masked_msa.logits.weight"


def _is_here(module: TrainingModule) -> bool:
    return BAD in module._passes[-1].samples and os.environ.get("RANK", "1") == "1"


def words(chains: Path, output: Path, *options: str, steps: int = 4) -> list[str]:
    return ["fit", f"--config={chains}/tiny.yaml", f"--output={output}", f"--trainer.max_steps={steps}",
            "--trainer.limit_val_batches=0", *options]  # fmt: skip


def listed(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "bad_samples.jsonl").read_text().splitlines()]


def assert_same_weights(one: Path, other: Path) -> None:
    found, expected = (read_checkpoint(output / "checkpoints/last.ckpt") for output in (one, other))
    for kind in ("state_dict", "ema_state_dict"):
        for name, value in found[kind].items():
            assert value.isfinite().all(), name
            assert torch.equal(value, expected[kind][name]), name


def test_a_bad_label_costs_one_sample(chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that ends, a mean or a curve that is nan, the wrong sample named, Adam or the average changed by a step that was
    left out (one sample a step, so the step has nothing else), and a file that does not show what was wrong."""
    bad, skipped = tmp_path / "bad", tmp_path / "skipped"
    with in_a_label():
        assert main(words(chains, bad)) == 0
    assert main(words(chains, skipped, f"--data.skip_samples=[{BAD}]")) == 0
    (entry,) = listed(bad)
    assert (entry["sample"], entry["step"], entry["one_of"]) == (BAD, BAD, 1)
    assert entry["chain"] in ("1abc_A", "2abc_B")
    assert {"backbone_fape", "sidechain_fape"} <= set(entry["terms"])
    assert "torsion" not in entry["terms"]
    assert not (skipped / "bad_samples.jsonl").exists()
    curve = read_curve(bad / "curve.csv")
    assert [step for step, row in curve.items() if "train/loss" in row] == [0, 1, 2]
    assert all(math.isfinite(float(cell)) for row in curve.values() for cell in row.values())
    assert_same_weights(bad, skipped)

    capsys.readouterr()
    assert main(["replay", str(bad / "replays" / f"sample_{BAD}.pt"), "--device=cpu"]) == 1
    said = capsys.readouterr().out
    assert "not finite in the sample itself: rigidgroups_gt_frames" in said
    assert "backward: Function" in said


@pytest.mark.verify_but("in_a_gradient-options0")
@pytest.mark.parametrize(
    ("plant", "options"),
    [
        (in_a_gradient, ("--trainer.accumulate_grad_batches=2",)),
        (in_the_loss, ()),
        (in_a_label, ("--parallel.parameters=zero1",)),
        (
            in_a_gradient,
            ("--parallel.parameters=fsdp2", "--model.optimizer.clip=batch", "--trainer.accumulate_grad_batches=2"),
        ),
    ],
)
def test_two_ranks_leave_the_same_sample_out(
    commands: CommandPool, chains: Path, tmp_path: Path, plant: Any, options: tuple[str, ...]
) -> None:
    """One rank counts a sample that the other leaves out; the next sample is blamed; with FSDP2, which has averaged before
    anyone could look, the optimizer takes the step."""
    bad, skipped = tmp_path / "bad", tmp_path / "skipped"
    options, steps = ("--parallel.sequence=2", *options), 2 if "--trainer.accumulate_grad_batches=2" in options else 4
    outcomes = commands.evodsp(2, *words(chains, bad, *options, steps=steps), around=plant)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    outcomes = commands.evodsp(2, *words(chains, skipped, *options, f"--data.skip_samples=[{BAD}]", steps=steps))
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes
    entries = listed(bad)
    assert BAD in [entry["sample"] for entry in entries]
    if plant is in_a_gradient:
        assert [entry["parameters"] for entry in entries if entry["sample"] == BAD] == [[f"model.{PARAMETER}"]]
    if "--parallel.parameters=fsdp2" not in options:
        assert len(entries) == 1
    assert_same_weights(bad, skipped)


@pytest.mark.verify
def test_too_many_bad_samples_end_the_run_after_a_checkpoint(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that skips for ever; one that loses what it has; a resume that forgets its list, or cannot go on."""
    output = tmp_path / "run"
    broken = ("--model.loss.torsion=1e39", "--max_bad_samples=1", "--replay_files=0", "--checkpoint_every=100")
    assert main(words(chains, output, *broken)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("evodsp: error: 2 samples were not finite, the last sample 1 (chain ")
    assert "but max_bad_samples is 1" in error
    assert read_checkpoint(output / "checkpoints/last.ckpt")["global_step"] == 2
    assert not (output / "replays").exists()
    assert main(words(chains, output, "--ckpt_path=last", "--max_bad_samples=1")) == 2, "the two of them still count"
    again = words(chains, output, "--ckpt_path=last", "--max_bad_samples=1", "--data.skip_samples=[1]")
    assert main(again) == 0
    assert [entry["sample"] for entry in listed(output)] == [0]


def test_a_run_that_learns_nothing_is_no_success(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches exit code 0 of a run, shorter than the limit, in which every loss was infinite."""
    assert main(words(chains, tmp_path / "run", "--model.loss.torsion=1e39", steps=2)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "no sample of this run was finite, the last sample 1 (chain " in error


def test_what_ranks_saw_is_put_together() -> None:
    """A sample named twice by the ranks that share it; nobody named where nobody could tell; a skipped sample named."""
    one, other = Suspect(4, ["pae"], ["w"]), Suspect(4, ["plddt"], ["w", "b"])
    parts = [([one], [4], ["w"]), ([other], [4], ["b"]), ([], [5], [])]
    assert merged(parts, ()) == [Suspect(4, ["pae", "plddt"], ["w", "b"])]
    assert merged([([], [4], ["w"]), ([], [5], [])], ()) == [Suspect(4, (), ["w"], 2), Suspect(5, (), ["w"], 2)]
    assert merged([([], [4], []), ([], [5], [])], {5}) == []


def test_samples_that_cannot_be_told_apart_count_as_one() -> None:
    """Catches a run that goes on beyond its limit, or stops before it, because samples of one step are counted otherwise."""
    bad = BadSamples()
    for sample, step, one_of in ((3, 1, 1), (4, 2, 2), (5, 2, 2), (8, 4, 2), (9, 4, 2), (10, 5, 1)):
        bad.samples.append(BadSample(sample, "1abc_A", step, ["total"], [], one_of, "2026-01-01T00:00:00+00:00"))
    assert bad.number == 4


def test_weights_that_are_not_finite_are_not_saved() -> None:
    """The only good checkpoint replaced by one that is lost."""
    module = TrainingModule(TrainingConfig(**vars(ModelConfig.preset("test"))), bad_samples=BadSamples())
    module.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with torch.no_grad():
        next(module.parameters()).view(-1)[0] = torch.inf
    with pytest.raises(NotFiniteWeightsError, match="not finite at step 0, so they are not saved"):
        module.on_save_checkpoint({})
