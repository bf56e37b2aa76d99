"""Training on (data, sequence) meshes gives the same run on each. Real chains, with all noise on.

The runs compute in double precision: Adam turns the rounding errors of parameters whose gradient is zero into steps of full
size, which after ten steps in single precision had moved a loss by 2e-5, in double precision by less than the curve's eight
digits. Losses and norms are compared, not weights, for the same reason.
Runs are whole command lines in a pool of waiting processes (`tests.builders.training`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from evodsp.cli import main
from evodsp.model.alphafold import AlphaFold
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import Linear
from evodsp.parallel.config import ParallelConfig
from evodsp.parallel.testing import dense
from evodsp.report.runs import read_curve
from evodsp.rng import Draws
from evodsp.training.world import MeshWorld, shard_parameters
from evodsp.weights.checkpoint import load_model, read_checkpoint
from tests.builders.small_model import config, features, tensors
from tests.builders.training import NO_VALIDATION, CommandPool
from tests.ranks import RankPool

RUN = """
seed: 3
global_batch: 2
model:
  channels: {msa: 12, pair: 10, extra_msa: 6, single: 14}
  extra_msa: {blocks: 1, msa_heads: 2, msa_head_width: 3, pair_heads: 2, pair_head_width: 3, triangle_channels: 5,
    outer_product_channels: 3, transition_factor: 2}
  evoformer: {blocks: 1, msa_heads: 2, msa_head_width: 3, pair_heads: 2, pair_head_width: 3, triangle_channels: 5,
    outer_product_channels: 3, transition_factor: 2}
  structure_module: {iterations: 1, heads: 2, query_points: 2, value_points: 2, angle_channels: 6}
  heads: {plddt_channels: 6, predicted_aligned_error: true}
  loss: {pae: 0.1, violation: 0.1}
  optimizer: {warmup_samples: 12, lr: 1.0e-3}
  ema_decay: 0.9
data:
  train_chains: [102m_A, 1k1a_A, 2q2k_A]
  validation_chains: [102m_A, 1k1a_A, 2q2k_A]
  batch_size: 1
  samples_per_epoch: 4
  train: {crop_size: 23, msa_clusters: 7, extra_msa: 9, recycles: 1, block_delete: true}
  validation: {crop_size: 29, msa_clusters: 5, extra_msa: 6, recycles: 0, uniform_recycling: false}
trainer: {max_steps: 3, accelerator: cpu, log_every_n_steps: 1, gradient_clip_val: 0.1, precision: 64-true}
"""
BY_BATCH = ("--model.optimizer.clip", "batch")
TEN = (
    "--trainer.max_steps=10",
    "--global_batch=4",
    "--data.batch_size=2",
    "--data.samples_per_epoch=8",
    "--data.validation.recycles=1",
    "--model.evoformer.blocks=2",
    "--model.structure_module.iterations=2",
    "--data.train.recycles=2",
)

Fit = Callable[..., Path]


@pytest.fixture(scope="module")
def fit(commands: CommandPool, real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """`fit(mesh, *options, output=None)`: a run of one config on any mesh, which accumulates what `global_batch` needs; its
    folder."""
    folder = tmp_path_factory.mktemp("mesh")
    folders = f"  alignment_dir: {real_data}/alignments\n  structure_dir: {real_data}/mmcif_files\n"
    (folder / "run.yaml").write_text(RUN.replace("data:\n", "data:\n" + folders))

    def run(mesh: tuple[int, int], *options: str, output: Path | None = None) -> Path:
        output = output or Path(tmp_path_factory.mktemp("runs")) / "run"
        data, sequence = mesh
        words = ["fit", "--config", str(folder / "run.yaml"), "--output", str(output)]
        words += ["--parallel.sequence", str(sequence), *options]
        if mesh == (1, 1):
            assert main(words) == 0
        else:
            outcomes = commands.evodsp(data * sequence, *words)
            assert [outcome.code for outcome in outcomes] == [0] * data * sequence, outcomes
        return output

    return run


@pytest.fixture(scope="module")
def serial(fit: Fit) -> Path:
    """The run of one process."""
    return fit((1, 1))


def losses(output: Path, column: str = "train/loss") -> dict[int, float]:
    return {step: float(row[column]) for step, row in read_curve(output / "curve.csv").items() if column in row}


def assert_same_run(found: Path, expected: Path, ended_at: int | None = None) -> None:
    """`ended_at`: the last step of a run that `found` resumes, whose weights were validated as those of every end of a run."""
    # The curve holds eight digits.
    for column in ("train/loss", "val/loss", "train/gradient_norm", "train/lr"):
        own = losses(found, column)
        if column == "val/loss" and ended_at is not None:
            del own[ended_at]
        assert own == pytest.approx(losses(expected, column), rel=5e-7)


@pytest.mark.verify
def test_a_sample_over_two_ranks_trains_as_on_one(fit: Fit, serial: Path) -> None:
    """Sequence ranks that read different samples, a gradient summed instead of averaged or clipped at the wrong stage, dropout
    or recycling drawn by rank."""
    assert len(losses(serial)) == 3
    assert len(losses(serial, "val/loss")) == 2
    assert_same_run(fit((1, 2)), serial)


@pytest.mark.verify
def test_adapters_are_trained_alike_and_a_run_resumes_on_another_mesh(fit: Fit) -> None:
    """Adapters that each rank draws for itself, gradients of adapters that are not summed over ranks, and adapters of which a
    checkpoint of another mesh knows nothing."""
    adapters = ("--model.adapters.rank=2", "--model.train_only=[heads]")
    expected = fit((1, 1), *adapters)
    output = fit((1, 2), *adapters, "--parallel.parameters=zero1", "--trainer.max_steps=1")
    fit((2, 1), *adapters, "--ckpt_path=last", output=output)
    assert_same_run(output, expected, ended_at=0)


def test_a_run_resumes_on_another_mesh(fit: Fit, serial: Path) -> None:
    """Batches counted on the old mesh, samples repeated or skipped, half of Adam's state lost; within an epoch."""
    output = fit((1, 2), "--parallel.parameters", "zero1", "--trainer.max_steps", "1", NO_VALIDATION)
    fit((2, 1), "--ckpt_path", "last", output=output)
    assert_same_run(output, serial)


@pytest.mark.verify
@pytest.mark.parametrize("by_way_of", [(), (2, 1)])
def test_sharded_parameters_train_alike_and_resume_on_any_mesh(
    fit: Fit, serial: Path, by_way_of: tuple[int, int] | tuple[()], capsys: pytest.CaptureFixture[str]
) -> None:
    """FSDP2's average not in the file, a shard saved in place of the full tensor, a file that only the same mode can read; a
    mesh that changes without a word."""
    sharded, steps = (*BY_BATCH, "--parallel.parameters", "fsdp2"), ("--trainer.max_steps", "4" if by_way_of else "3")
    expected = fit((1, 1), *BY_BATCH, *steps)
    output = fit((1, 2), *sharded, "--trainer.max_steps", "2")
    assert_whole(output / "checkpoints" / "last.ckpt", serial / "checkpoints" / "last.ckpt")
    if by_way_of:
        fit(by_way_of, *sharded, "--trainer.max_steps", "3", "--ckpt_path", "last", output=output)
    capsys.readouterr()
    fit((1, 1), *BY_BATCH, *steps, "--ckpt_path", "last", output=output)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "mesh changed" in line]
    assert "parallel.parameters was fsdp2 and is replicate, ranks was 2 and is 1; the numbers stay the same" in line
    assert_same_run(output, expected, ended_at=2 if by_way_of else None)


def assert_whole(path: Path, usual: Path) -> None:
    """A checkpoint of sharded parameters holds full tensors, of the shapes in a checkpoint of one process."""
    found, expected = read_checkpoint(path), read_checkpoint(usual)
    for name in ("state_dict", "ema_state_dict"):
        assert {k: v.shape for k, v in found[name].items()} == {k: v.shape for k, v in expected[name].items()}
        assert all(type(value) is torch.Tensor for value in found[name].values())
    averaged, raw = load_model(path), load_model(path, raw=True)
    assert any(not torch.equal(a, b) for a, b in zip(averaged.parameters(), raw.parameters(), strict=True))


@pytest.mark.verify
@pytest.mark.parametrize("mesh", [(1, 2), (1, 3), (2, 1), (2, 2)])
def test_ten_steps_on_every_mesh(fit: Fit, ten_steps: Path, mesh: tuple[int, int]) -> None:
    assert len(losses(ten_steps)) == 10
    assert_same_run(fit(mesh, *TEN), ten_steps)


@pytest.mark.verify
@pytest.mark.parametrize("mode", ["zero1", "fsdp2"])
def test_ten_steps_with_sharded_state(fit: Fit, mode: str) -> None:
    ten = (*TEN, *BY_BATCH)
    assert_same_run(fit((2, 2), *ten, "--parallel.parameters", mode), fit((2, 2), *ten))


@pytest.fixture(scope="module")
def ten_steps(fit: Fit) -> Path:
    return fit((1, 1), *TEN)


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


def batch_of(number: int) -> dict[str, Tensor]:
    """Tensors of several types, whose bytes are no multiple of a type's; one is empty, one a scalar, one a view."""
    return {
        "letters": torch.arange(13, dtype=torch.int8) + number,
        "kept": torch.tensor([True, False, True]),
        "keys": torch.tensor([[-(1 << 62), number]]).expand(2, 2),
        "cells": torch.zeros(0, dtype=torch.int32),
        "positions": torch.linspace(0, number, 14, dtype=torch.float64).view(2, 7).T,
        "resolution": torch.tensor(float(number)),
    }


def shared(group: Any, sequence: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    world = MeshWorld(ParallelConfig(sequence=sequence))
    on_device = batch_of(10 + world.data_rank) if world.reads else {}
    return world.share(on_device, {"sample_index": torch.tensor([dist.get_rank(group)])}, torch.device("cpu"))


def texts(group: Any, sequence: int) -> list[str]:
    return MeshWorld(ParallelConfig(sequence=sequence)).of_sample(f"rank {dist.get_rank(group)}")


def test_ranks_of_a_sample_hear_each_other(pool: RankPool) -> None:
    """Catches texts of another sample's ranks, and texts in another order than the ranks."""
    for sequence in (1, 2, 4):
        for rank, found in enumerate(pool.run(4, texts, sequence)):
            first = rank - rank % sequence
            assert found == [f"rank {number}" for number in range(first, first + sequence)]


def test_all_ranks_of_a_group_hold_what_one_read(pool: RankPool) -> None:
    """A batch of another group, values at the wrong bytes, and a rank that keeps its own."""
    for sequence in (1, 2, 4):
        for rank, (found, host) in enumerate(pool.run(4, shared, sequence)):
            wanted = batch_of(10 + rank // sequence)
            assert found.keys() == wanted.keys()
            for name, values in wanted.items():
                assert found[name].dtype == values.dtype
                assert torch.equal(found[name], values), name
            assert host["sample_index"].tolist() == [rank - rank % sequence]


Measured = tuple[dict[str, Tensor], dict[str, Tensor], dict[str, torch.dtype]]


def measured(group: object, sharded: bool, recompute: bool) -> Measured:
    """Outputs of the same sample on every rank under bf16 autocast, gradients, and the precision in which each layer's weight
    was used. `recompute`: whole blocks; otherwise the projections of attention."""
    model = dense(AlphaFold(config(recompute, projections=not recompute))).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    names = [name for name, _ in model.named_parameters()]
    casts = CastParameters(model)
    if sharded:
        shard_parameters(model, torch.bfloat16)
    used: dict[str, torch.dtype] = {}

    def note(name: str, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(lambda module, _: used.__setitem__(name, module.weight.dtype))

    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            note(name, layer)
    batch = {name: x.float() if x.is_floating_point() else x for name, x in features(1).items()}
    with casts:  # in the backward pass too, which recomputes activations
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            found = tensors(model(batch, [Draws.root(0)]))
        torch.stack([value.float().square().mean() for value in found.values()]).sum().backward()
    gradients = {}
    for name, parameter in zip(names, model.parameters(), strict=True):
        gradient = parameter.grad
        assert gradient is not None, name
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return {name: value.detach() for name, value in found.items()}, gradients, used


@pytest.mark.verify_but("True")
@pytest.mark.parametrize("recompute", [True, False])
def test_blocks_gather_their_parameters_in_half_precision(pool: RankPool, recompute: bool) -> None:
    """Catches parameters that are gathered in float32 and cast at each use, gradients summed in half precision or scaled, a
    part that computes in float32 but gets cast parameters, and projections from parameters that have been freed."""
    expected, expected_gradients, _ = measured(None, False, True)
    for outputs, gradients, used in pool.run(4, measured, True, recompute):
        for name, value in outputs.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32, name
            assert (gradient - expected_gradients[name]).norm() <= 2**-7 * expected_gradients[name].norm(), name
        in_blocks = {used[name] for name in used if "msa_stack" in name or "pair_stack" in name}
        assert in_blocks == {torch.bfloat16}, used
        assert {used[name] for name in used if name.startswith("structure_module")} == {torch.float32}, used
