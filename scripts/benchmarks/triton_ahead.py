"""Compile kernels ahead of time, without a GPU, and read what they need of one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evodsp.model.kernels.triton_kernels.launch import Launch, tiles

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one program may use."""
SHARED_TOTAL = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
TENSOR_CORE = re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\.?")

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """What one kernel needs on one architecture."""

    registers: int
    stack: int
    """Bytes of local memory per thread: registers that were spilled."""
    shared: int
    tensor_cores: tuple[str, ...]
    """Tensor-core instructions in the machine code."""
    warps_resident: int


@dataclass(frozen=True)
class Specialised:
    """A kernel for certain kinds of arguments, as Triton tells them apart before it compiles."""

    launch: Launch
    """One of the launches that the kernel serves."""
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]

    @property
    def key(self) -> str:
        """A key that is the same for all launches which one compiled kernel serves."""
        launch = self.launch
        kinds = self.signature, self.constants, self.attributes
        return f"{launch.kernel} {launch.warps} {launch.stages} {kinds}"


def specialised(launch: Launch) -> Specialised:
    """As Triton specialises the kernel for these arguments, if tensors without storage offset are aligned to 16 bytes."""
    found = Specialised(launch, {}, {}, {})
    for position, name in enumerate(launch.function.arg_names):
        if name in launch.constants:
            found.signature[name], found.constants[(position,)] = "constexpr", launch.constants[name]
        else:
            argument = launch.arguments[name]
            found.signature[name] = _specialised(argument, (position,), found.constants, found.attributes)
    return found


def compile_for(launch: Launch, architecture: int) -> Resources:
    """Compile the launch's kernel, specialised as Triton specialises it for these arguments, and read what it needs."""
    compiled = _compiled(specialised(launch), architecture)
    with _cubin(compiled) as file:
        usage = _tool("cuobjdump", "--dump-resource-usage", file)
        code = _tool("nvdisasm", file)
    found = dict(re.findall(r"\b(REG|STACK):(\d+)", usage))
    registers, shared = int(found["REG"]), compiled.metadata.shared
    by_registers = 65536 // (tiles(registers, 8) * 8 * 32 * launch.warps)
    programs = min(by_registers, SHARED_TOTAL[architecture] // (shared + 1024), 64 // launch.warps, 32)
    return Resources(
        registers, int(found["STACK"]), shared, tuple(sorted(set(TENSOR_CORE.findall(code)))), programs * launch.warps
    )


def spilled_and_shared(one: Specialised, architecture: int) -> tuple[int, int]:
    """Compile a kernel: bytes that a thread spills, and bytes of shared memory of a program. Quicker than `compile_for`."""
    compiled = _compiled(one, architecture)
    with _cubin(compiled) as file:
        usage = _tool("cuobjdump", "--dump-resource-usage", file)
    return int(re.findall(r"\bSTACK:(\d+)", usage)[0]), compiled.metadata.shared


def _compiled(one: Specialised, architecture: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch = one.launch
    return triton.compile(
        ASTSource(launch.function, one.signature, one.constants, one.attributes),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True},
    )


@contextmanager
def _cubin(compiled: Any) -> Iterator[str]:
    """A file with the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        yield file.name


def _specialised(
    value: Any, path: tuple[int, ...], constants: dict[tuple[int, ...], Any], attributes: dict[Any, Any]
) -> Any:
    """Triton's type of an argument. 1 and None become constants; addresses and numbers that 16 divides are marked as such."""
    if isinstance(value, Tensor):
        if value.storage_offset() * value.element_size() % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, tuple):
        return tuple(_specialised(item, (*path, i), constants, attributes) for i, item in enumerate(value))
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    if value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _tool(name: str, *words: str) -> str:
    return subprocess.run([str(_tools() / name), *words], capture_output=True, text=True, check=True).stdout


@cache
def _tools() -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
