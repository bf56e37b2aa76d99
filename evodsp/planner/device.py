"""Speed and memory of a device and a link: numbers of a data file, and the times that follow from them.

Files are below `devices/` and `links/`; a user's own file has the same keys. `evodsp plan --measure` writes one, and the report
of `evodsp selftest --scaling` holds a device and its links.
"""

from __future__ import annotations

import bisect
import math
import os
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from evodsp.errors import UserError, nearest
from evodsp.parallel.group import Kind
from evodsp.printing import quoted, shown
from evodsp.reading.text_files import read_json, read_yaml

if TYPE_CHECKING:
    from evodsp.planner.trace import Operation

_CALLED = {"str": "text", "int": "a whole number", "bool": "true or false"}


MARGIN = 0.03
"""The share of a device's memory that a plan leaves free where it can: a count of bytes is no measurement."""


SMALL_S = 10e-6
"""A kernel whose products and memory traffic take less than this at a device's peaks is small."""


def is_tight(counted: int, usable: int) -> bool:
    """Whether so many bytes leave less than `MARGIN` of those that a device has."""
    return counted > (1 - MARGIN) * usable


@dataclass(frozen=True)
class Device:
    """A GPU, or one process on a CPU."""

    name: str
    memory_gib: float
    reserved_gib: float
    """GiB that the driver and libraries take."""
    fragmentation: float
    """Share of the memory that the allocator cannot use."""
    tflops_half: float
    tflops_single: float
    tflops_tf32: float
    """Peaks of matrix products."""
    memory_gbps: float
    """Bandwidth of the device's memory."""
    products_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    """Shares of these peaks that are reached."""
    kernel_us: float
    """Time of a launch in which the device is not full: until its first programs work, and while its last ones end. On a
    CPU, of calling an operator."""
    launch_us: float
    """The host's time for an operator of torch, with autocast and autograd."""
    gpus_per_node: int
    inside: str
    """Link between the devices of a node."""
    across: str
    """Link between nodes."""
    overlaps: bool = True
    """Whether communication hides behind computation."""
    on_gpu: bool = True
    """Whether it is a GPU: the model takes other paths on a CPU."""
    attention_tlogits: float = 0.0
    """Logits of the GPU kernels' attention a second, in 10^12, forward: their time hardly depends on the width of a head. 0:
    `attention_efficiency` tells, as for every other product."""
    own_us: float = 0.0
    """The host's time for a launch of evodsp's own kernels. 0: as for an operator of torch."""
    small_efficiency: float = 1.0
    """The part of these shares, and of `attention_tlogits`, that small kernels reach (`SMALL_S`)."""
    crowding: float = 1.0
    """Slowdown of an operator when all devices of the node work: processes share cores, caches and memory,
    GPUs share power."""

    def crowded(self, busy: int) -> float:
        """Slowdown of an operator when `busy` devices work, in proportion to those of a node."""
        if self.gpus_per_node == 1:
            return 1.0
        return 1.0 + (self.crowding - 1.0) * (min(busy, self.gpus_per_node) - 1) / (self.gpus_per_node - 1)

    def seconds(self, work: Operation, tf32: bool = False) -> float:
        """Time of an operator on the device: the longest of its products, its logits and its memory traffic, and what its
        launches take in which the device is not full. `tf32`: whether products of float32 are in TF32.
        """
        if work.launches == 0:
            return 0.0
        peak = self.tflops_half if work.half else self.tflops_tf32 if tf32 else self.tflops_single
        share = self.attention_efficiency if "attention" in work.name else self.products_efficiency
        computing = work.flops / (peak * share * 1e12)
        if work.logits and work.half and self.attention_tlogits:
            computing = work.logits / (self.attention_tlogits * 1e12)
        moving = work.bytes / (self.memory_gbps * self.memory_efficiency * 1e9)
        small = max(work.flops / (peak * 1e12), work.bytes / (self.memory_gbps * 1e9)) < SMALL_S * work.launches
        full = max(computing, moving) / (self.small_efficiency if small else 1.0)
        return full + work.launches * self.kernel_us * 1e-6

    def operators(self, work: Operation) -> float:
        """The host's time for an operator, in units of `launch_us`."""
        if self.own_us and self.launch_us and work.name.startswith("evodsp::"):
            return work.launches * self.own_us / self.launch_us
        return 1.0

    @property
    def usable(self) -> int:
        """Bytes that a program may hold."""
        return int((self.memory_gib * (1 - self.fragmentation) - self.reserved_gib) * 2**30)


@dataclass(frozen=True)
class Link:
    """A way between devices."""

    name: str
    start_us: dict[str, float]
    """Time of an empty collective, by its kind."""
    bandwidth: list[list[float]]
    """Pairs of bytes on the wire and GB/s of a device, ascending. Between them GB/s grow with the logarithm of the size;
    beyond them the first or the last one holds."""
    all_to_all_share: float
    """The part of that bandwidth that an all-to-all reaches."""

    def seconds(self, kind: Kind, wire_bytes: float) -> float:
        """Time of the bytes, without the start."""
        if wire_bytes <= 0:
            return 0.0
        share = self.all_to_all_share if kind == "all-to-all" else 1.0
        return wire_bytes / (self._gbps(wire_bytes) * share * 1e9)

    def start(self, kind: Kind) -> float:
        """Seconds before the first byte arrives."""
        return self.start_us[kind] * 1e-6

    def _gbps(self, wire_bytes: float) -> float:
        sizes = [size for size, _ in self.bandwidth]
        at = bisect.bisect_left(sizes, wire_bytes)
        if at == 0 or at == len(sizes):
            return self.bandwidth[min(at, len(sizes) - 1)][1]
        (s0, b0), (s1, b1) = self.bandwidth[at - 1], self.bandwidth[at]
        return b0 + (b1 - b0) * math.log(wire_bytes / s0) / math.log(s1 / s0)


@dataclass(frozen=True)
class Links:
    """Links between `ranks` consecutive devices."""

    inside: Link
    across: Link
    per_node: int

    def seconds(self, kind: Kind, counted: int, ranks: int) -> float:
        """Time of a collective of `ranks` neighbours. `counted`: bytes as the ledger counts them."""
        if ranks == 1:
            return 0.0
        if ranks <= self.per_node:
            return self.inside.start(kind) + self.inside.seconds(kind, counted * (ranks - 1) / ranks)
        nodes = math.ceil(ranks / self.per_node)
        near = counted * (self.per_node - 1) / ranks
        if kind == "all-to-all":  # each device sends its own part to every other node, through its adapter
            far = counted * (ranks - self.per_node) / ranks
        else:  # a node receives what others hold once, through all of its adapters
            near, far = counted * (self.per_node - 1) / self.per_node, counted * (nodes - 1) / nodes / self.per_node
        moving = max(self.inside.seconds(kind, near), self.across.seconds(kind, far))
        return self.across.start(kind) * math.log2(2 * nodes) / 2 + moving

    def apart(self, kind: Kind, counted: int, ranks: int, stride: int) -> float:
        """Time of a collective of ranks that are `stride` devices apart, such as those of a data group."""
        here = max(1, self.per_node // stride)  # of this group in a node
        return Links(self.inside, self.across, here).seconds(kind, counted, ranks)


_SUFFIXES = (".yaml", ".yml")
_REPORT, _PART = ".json", "#"
"""The suffix of a report, and what separates its path from the name of a link in it."""


def load_device(name: str) -> Device:
    """A device by its name or by the path of its file. Raises UserError.

    Links that a file names by their own files are looked for beside it, those of a report within it.
    """
    device = _load(Device, "device", name)
    links = {link: getattr(device, link) for link in ("inside", "across")}
    if name.endswith(_REPORT):
        return replace(device, **{link: f"{name}{_PART}{own}" for link, own in links.items() if own == link})
    beside = {link: str(Path(name).parent / own) for link, own in links.items() if own.endswith(_SUFFIXES)}
    return replace(device, **beside)


def load_link(name: str) -> Link:
    """A link by its name or by the path of its file. Raises UserError."""
    return _load(Link, "link", name)


def names(kind: str) -> list[str]:
    """The names of the files that evodsp has. `kind`: device or link."""
    return sorted(p.name.removesuffix(".yaml") for p in _folder(kind).iterdir() if p.name.endswith(".yaml"))


def _folder(kind: str) -> Any:
    return resources.files("evodsp") / "planner" / f"{kind}s"


def _load(cls: type[Any], kind: str, name: str) -> Any:
    file, _, part = name.rpartition(_PART) if f"{_REPORT}{_PART}" in name else (name, "", "")
    own = file.endswith((*_SUFFIXES, _REPORT))
    if not own and name not in names(kind):
        known = names(kind)
        raise UserError(
            f"no {kind} '{name}': evodsp has {', '.join(known)}.{nearest(name, known)} Or give your own file, "
            "DEVICE.yaml, which evodsp plan --measure writes"
        )
    path = Path(file) if own else _folder(kind) / f"{name}.yaml"
    if file.endswith(_REPORT):
        report = read_json(path, "give the file that evodsp selftest --scaling has written")
        content = report.get("device") if isinstance(report, dict) else None
        if content is None:
            raise UserError(
                f"{path}: has no measured device; give a report of evodsp selftest --scaling with its part speed"
            )
        content = report.get("links", {}).get(part) if part else content
    else:
        content = read_yaml(path)
    try:
        return _checked(cls, kind, name, content)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise UserError(f"{kind} {name}: a value of another type ({quoted(error)}); see the files of evodsp") from error


def _checked(cls: type[Any], kind: str, name: str, content: Any) -> Any:
    """The file's numbers as `cls`. Raises UserError that names the key."""
    expected = {f.name for f in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING}
    found = set(content) if isinstance(content, dict) else set()
    if wrong := sorted((needed - found) | (found - expected)):
        raise UserError(
            f"{kind} {name}: missing or unknown keys {', '.join(wrong)}; it needs {', '.join(sorted(needed))}"
        )
    types = {f.name: str(f.type) for f in fields(cls)}
    for key, value in content.items():
        if types[key] in ("str", "int", "bool") and type(value).__name__ != types[key]:
            raise UserError(f"{kind} {name}: {key} is {shown(value)}, but must be {_CALLED[types[key]]}")
        if isinstance(value, int | float) and not isinstance(value, bool) and (value < 0 or not math.isfinite(value)):
            raise UserError(f"{kind} {name}: {key} is {value}, but must be at least 0")
    if cls is Link:
        if missing := sorted(set(get_args(Kind)) - set(content["start_us"])):
            raise UserError(f"{kind} {name}: start_us has no {', '.join(missing)}")
        sizes = [pair[0] for pair in content["bandwidth"]]
        if not sizes or sizes != sorted(set(sizes)) or min(pair[1] for pair in content["bandwidth"]) <= 0:
            raise UserError(
                f"{kind} {name}: bandwidth must list pairs [bytes, GB/s] with rising bytes and GB/s above 0"
            )
        content["start_us"] = {kind: float(value) for kind, value in content["start_us"].items()}
        content["bandwidth"] = [[float(value) for value in pair] for pair in content["bandwidth"]]
    return cls(**{key: float(value) if types[key] == "float" else value for key, value in content.items()})


_EDGE, _COPIED = 768, 1 << 24
"""Edge of the square matrices that are multiplied, and the numbers that are copied."""


@cache
def this_cpu() -> Device:
    """The processor of this machine, with as many threads as torch uses."""
    single, half = _products(torch.float32), _products(torch.bfloat16)
    x = torch.zeros(_COPIED)
    y = torch.empty_like(x)
    copying = _seconds(lambda: y.copy_(x))
    return Device(
        name="this CPU",
        memory_gib=free_memory() / 2**30,
        reserved_gib=0.0,
        fragmentation=0.0,
        tflops_half=half,
        tflops_single=single,
        tflops_tf32=single,
        memory_gbps=2 * x.nbytes / copying / 1e9,
        # Assumed: what AlphaFold2's layers reach of the large product and the copy that are timed.
        products_efficiency=0.8,
        attention_efficiency=0.4,
        memory_efficiency=0.3,
        kernel_us=5.0,
        launch_us=0.0,
        gpus_per_node=1,
        inside="pcie",
        across="infiniband",
        overlaps=False,
        on_gpu=False,
    )


def free_memory() -> int:
    """Bytes that programs of this machine can still take."""
    information = Path("/proc/meminfo")
    if not information.is_file():  # not Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = dict(line.split(":", 1) for line in information.read_text().splitlines())
    return min([int(lines["MemAvailable"].split()[0]) << 10, *_left_in_control_group()])


def _left_in_control_group(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Bytes that the control group leaves; empty without a limit."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        if (root / limit).is_file() and (root / used).is_file():
            most = (root / limit).read_text().strip()
            return [max(0, int(most) - int((root / used).read_text()))] if most.isdecimal() else []
    return []


def _products(dtype: torch.dtype) -> float:
    """TFLOP/s of a matrix product."""
    x = torch.ones(_EDGE, _EDGE, dtype=dtype)
    return 2 * _EDGE**3 / _seconds(lambda: x @ x) / 1e12


def _seconds(run: Callable[[], object]) -> float:
    """The shortest of three times, after a first call that is not counted."""
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times[1:])
