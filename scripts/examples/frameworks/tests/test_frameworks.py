"""DSP with training frameworks: each program of this room trains what one process trains, on (data, sequence) meshes.

docs/frameworks.md shows these programs. Where every process computes in double precision, losses and parameters agree to 1e-10.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.parallel.group import Group
from scripts.examples.frameworks import one_process
from tests.builders.comparison import TOLERANCE
from tests.builders.pages import ROOT, blocks
from tests.ranks import RankPool

CASES: list[tuple[str, dict[str, Any]]] = [
    *(("data_parallel", {"framework": name}) for name in ("ddp", "zero1", "fsdp2", "fsdp2-zero2")),
    ("accelerate_ddp", {}),
    ("deepspeed_zero", {"stage": 1}),
    ("deepspeed_zero", {"stage": 2}),
    ("megatron_tensor", {}),
    ("pipeline", {}),
]
"""Programs, and options of their function `train`."""

PROGRAMS = sorted({program for program, _ in CASES})

PACKAGES = {"accelerate_ddp": "accelerate", "deepspeed_zero": "deepspeed", "megatron_tensor": "megatron"}
"""What programs import beside torch: the extra `compat`."""

DIVIDED = ("megatron_tensor", "pipeline")
"""Programs in which ranks hold different parameters. They do not clip: it would take the norm over all parts, for which torch's
pipelining has no function and Megatron-core's needs CUDA. With them a sample takes twice `sequence` ranks."""

SINGLE = 1e-6
"""Tolerance for DeepSpeed: it updates a copy of the parameters in single precision, which rounds by up to 6e-8 in each of three
steps. Measured: 1.4e-7."""


def need(program: str) -> None:
    """Skip a test whose framework is not installed."""
    if program in PACKAGES and find_spec(PACKAGES[program]) is None:
        pytest.skip("the extra `compat` is not installed; `make test` installs it")


def trained(
    handle: Any, program: str, sequence: int, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], int]:
    """What a program returns on this rank of the pool, and how many all-to-alls it ran."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    told_by_torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    all_to_all = mock.patch.object(Group, "all_to_all", autospec=True, side_effect=Group.all_to_all)
    with mock.patch.dict(os.environ, told_by_torchrun), all_to_all as switches:
        module = importlib.import_module(f"scripts.examples.frameworks.{program}")
        if program == "deepspeed_zero":
            module.without_compiler()
        losses, parameters = module.train(sequence, **options)
    return losses, {name: parameter.detach().clone() for name, parameter in parameters.items()}, switches.call_count


def check(pool: RankPool, program: str, sequence: int, options: dict[str, Any]) -> None:
    """Compare the training of a program on all ranks of the pool with that of one process."""
    losses, whole = one_process.train(clip=program not in DIVIDED)
    tolerance = SINGLE if program == "deepspeed_zero" else TOLERANCE
    seen: set[str] = set()
    results = pool.run(pool.ranks, trained, program, sequence, options)
    for rank, (found, parameters, switches) in enumerate(results):
        first_stage = program == "pipeline" and rank < pool.ranks // 2
        assert found == ([] if first_stage else pytest.approx(losses, rel=tolerance)), f"rank {rank}"
        assert switches > 0 or sequence == 1, "nothing was sharded"
        for name, parameter in parameters.items():
            expected = part(whole[name], parameter, rank) if program == "megatron_tensor" else whole[name]
            torch.testing.assert_close(parameter, expected.detach(), rtol=0, atol=tolerance, msg=f"rank {rank}, {name}")
        seen |= parameters.keys()
    assert seen == whole.keys()


def part(whole: Tensor, shaped: Tensor, rank: int) -> Tensor:
    """The half of a tensor that a rank of a tensor parallel group of two holds; all of it if it has the same shape."""
    for dim, size in enumerate(whole.shape):
        if shaped.shape[dim] < size:
            return whole.chunk(2, dim)[rank % 2]
    return whole


@pytest.mark.parametrize(("program", "options"), CASES, ids=str)
def test_training_equals_one_process(pool: RankPool, program: str, options: dict[str, Any]) -> None:
    """Two data ranks (or tensor, or pipeline ranks) of two sequence ranks each. Catches gradients that are summed, or averaged
    over the wrong ranks; other samples within a sequence group; a norm that is clipped before the mean."""
    need(program)
    check(pool, program, 2, options)


@pytest.mark.verify
@pytest.mark.parametrize(("ranks", "sequences"), [(2, (1, 2)), (3, (3,)), (4, (1, 4))])
def test_training_on_other_meshes_equals_one_process(ranks: int, sequences: tuple[int, ...]) -> None:
    """Catches what holds for two ranks only: shards of unequal sizes, groups of one rank."""
    pool = RankPool(ranks)
    try:
        for program, options in CASES:
            for sequence in sequences:
                fits = {"pipeline": 2 * sequence == ranks, "megatron_tensor": ranks % (2 * sequence) == 0}
                if fits.get(program, True):
                    need(program)
                    check(pool, program, sequence, options)
    finally:
        pool.stop()


@pytest.mark.verify
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_command_of_the_page_prints_the_losses_of_one_process(program: str) -> None:
    """Catches a program that works in the tests' processes only, where a process group and torch's modules exist already."""
    need(program)
    losses, _ = one_process.train(clip=program not in DIVIDED)
    tolerance = SINGLE if program == "deepspeed_zero" else TOLERANCE
    for command in (line.split() for line in commands() if f"scripts.examples.frameworks.{program} " in line):
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command[1:]]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed = re.search(r"^losses (.*)$", done.stdout, re.MULTILINE)
        assert printed, done.stdout
        assert [float(loss) for loss in printed[1].split()] == pytest.approx(losses, rel=tolerance)


def commands() -> list[str]:
    """The lines of docs/frameworks.md that start ranks."""
    lines = [line for block in blocks("docs/frameworks.md") if block.language == "bash" for line in block.commands()]
    return [line for line in lines if line.startswith("torchrun ")]


def test_the_page_shows_each_program_and_its_command() -> None:
    """Catches a program that nobody reads or tests, and a page that shows one which these tests do not run."""
    files = {path.stem for path in (ROOT / "scripts" / "examples" / "frameworks").glob("*.py")}
    assert files == {*PROGRAMS, "__init__", "model", "ranks", "one_process"}
    shown = {block.included for block in blocks("docs/frameworks.md") if block.included}
    assert shown == {f"scripts/examples/frameworks/{name}.py" for name in (*PROGRAMS, "model", "one_process")}
    started = [re.search(r"-m scripts\.examples\.frameworks\.(\w+) ", line)[1] for line in commands()]
    assert sorted(set(started)) == PROGRAMS
    named = re.findall(r"--framework (\S+)", "\n".join(commands()))
    assert named == [options["framework"] for _, options in CASES if "framework" in options]


def megatron_facts(handle: Any) -> tuple[str, float]:
    """Why Megatron-core's own DDP does not run here, and the factor of its schedules for a loss with three ranks a sample."""
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    try:
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True)
        DistributedDataParallel(config, DistributedDataParallelConfig(), torch.nn.Linear(2, 2))
        reason = ""
    except AssertionError as error:
        reason = str(error)
    finally:
        parallel_state.destroy_model_parallel()
    loss, _ = forward_step_calc_loss(
        *(None, torch.ones(()), lambda y: (y, {}), ModelParallelConfig(), None, False, 1, []),
        cp_group_size=3,
        is_last_stage=True,
    )
    return reason, loss.item()


def test_what_the_page_says_of_megatron(pool: RankPool) -> None:
    """Megatron-core's own DDP needs CUDA: torch's DDP over the same group stands in for it. Its schedules multiply the loss by
    the number of context parallel ranks. Catches a version in which either has changed."""
    need("megatron_tensor")
    for reason, factor in pool.run(4, megatron_facts):
        assert torch.backends.cuda.is_built() or "CUDA" in reason
        assert factor == 3
