"""Counts what a pass on a GPU would launch, move, keep and send, without a GPU.

A child process (`fake_cuda_process.py`, with `fake_cuda_program.py`) runs the project's modules on tensors that say they are on
a GPU and hold no numbers, with the real autograd, the real CUDA autocast and the real ledger. `../shared/fake_cuda` makes that
possible; it must be loaded before torch, hence the process.

    counts = measure(Case(what="evoformer", sequences=128, residues=256, ranks=4))
    assert counts.wire_bytes("forward") <= 44 * 2**20

This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.shared import SHARED

ROOT = Path(__file__).resolve().parents[2]

Phase = Literal["forward", "backward", "recompute"]


@dataclass(frozen=True)
class Case:
    """What to run. Widths are the preset's."""

    what: Literal["evoformer", "extra_msa", "model"] = "evoformer"
    """A stack of blocks, or the whole model, whose loss is the sum of its outputs."""
    sequences: int = 128
    """Rows of the stack's MSA; of the whole model's clustered MSA."""
    residues: int = 256
    extra_sequences: int = 16
    """Rows of the whole model's extra MSA."""
    templates: int = 0
    """Templates of the whole model."""
    blocks: int = 1
    """Blocks of the stack; of each stack of the whole model."""
    iterations: int | None = None
    """Of the whole model: iterations of the structure module, and blocks of the template stack. None: the preset's."""
    ranks: int = 1
    """Ranks that share the sample. What is counted is what rank 0 does."""
    dropout: bool = False
    recompute: bool = False
    """Whether blocks are recomputed in the backward pass."""
    projections: bool = False
    """Whether the blocks of a stack compute the projections of attention again in the backward pass."""
    autocast: bool = True
    """bf16-mixed; False: fp32."""
    inputs: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision in which m and z enter a stack."""
    cast_once: bool = False
    """Whether parameters are cast once a step, as training does (`evodsp.model.precision`)."""
    kernels: Literal["chunked", "triton"] = "chunked"
    """Backend of the operators that it has; the others are chunked."""


@dataclass(frozen=True)
class Pass:
    """What one pass does."""

    launches: int
    """Operators that would launch at least one kernel, casts of parameters and of their gradients aside. An operator on a
    list of tensors counts once a tensor. Own kernels count what they report."""
    parameter_casts: int
    """Casts of parameters, and of gradients to the precision of a parameter."""
    bytes: int
    """Bytes that operators read and write."""
    operators: dict[str, int]
    """Launches by operator."""
    host: dict[str, int]
    """Copies between host and GPU, and operators that make the host wait: "operator at file:line" and how often."""


@dataclass(frozen=True)
class Sent:
    """One collective."""

    kind: str
    phase: str
    bytes: int
    element_size: int


@dataclass(frozen=True)
class Counts:
    """What a forward and a backward pass do."""

    forward: Pass
    backward: Pass
    kept: int
    """Bytes that operators of the forward pass made and that something still holds at its end, results aside."""
    saved: list[tuple[int, str]]
    """Tensors among them that autograd saved for the backward pass: bytes and "shape dtype at file:line", largest first."""
    sent: list[Sent]
    dtypes: dict[str, list[str]] = field(default_factory=dict)
    """Precision of the results of each part of the model, by the part's name: of a block, those of m and z."""

    def of(self, phase: Phase) -> list[Sent]:
        """The collectives of one phase, in order."""
        return [entry for entry in self.sent if entry.phase == phase]

    def wire_bytes(self, phase: Phase) -> int:
        """The ledger's bytes of one phase."""
        return sum(entry.bytes for entry in self.of(phase))


@functools.cache
def measure(case: Case) -> Counts:
    """Run `case`."""
    return _counts(_answer("pass", dataclasses.asdict(case)))


@functools.cache
def measure_features(rows: int, columns: int, crop: int, cycles: int, clusters: int, extra: int) -> Pass:
    """What making the MSA features of one sample does, without a backward pass."""
    sizes = {"rows": rows, "columns": columns, "crop": crop, "cycles": cycles, "clusters": clusters, "extra": extra}
    return Pass(**_answer("features", sizes))


def _answer(program: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a program on GPU-less tensors finds. Without `../shared` the test is skipped; without its fake_cuda it fails."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared/fake_cuda beside this checkout")
    process = _process()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([program, arguments]) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline() or '{"failed": "the process has ended"}')
    assert "failed" not in answer, f"{arguments}\n{answer['failed'][-4000:]}"
    return answer


@functools.cache
def _process() -> subprocess.Popen[str]:
    """It ends with this one, when its standard input does."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SHARED / "fake_cuda"), str(ROOT)]),
        # The guard is built once for all environments of a machine, and looks for PyTorch where that one was: it may be gone.
        "LD_LIBRARY_PATH": str(Path(str(found.origin)).with_name("lib")),
    }
    words = [sys.executable, "-m", "tests.builders.fake_cuda_process"]
    return subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _counts(found: dict[str, Any]) -> Counts:
    return Counts(
        forward=Pass(**found["forward"]),
        backward=Pass(**found["backward"]),
        kept=found["kept"],
        saved=[(size, what) for size, what in found["saved"]],
        sent=[Sent(**entry) for entry in found["sent"]],
        dtypes=found["dtypes"],
    )
