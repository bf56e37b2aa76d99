"""The parts of `evodsp selftest --scaling`: generators of rows, which all ranks run together.

A row is a dictionary of texts and numbers; `ok`: false says that something is wrong. Rank 0's rows are written into the report.
A part's groups of k ranks are those of the mesh (ranks / k, k), so no rank is idle.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evodsp.config import KernelsConfig, LossConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.launch.consensus import all_of, check_same, from_first
from evodsp.launch.process_group import own_address
from evodsp.losses.total import total_loss
from evodsp.model.alphafold import AlphaFold
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.kernels.operators import Kernels, choose
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_kernels
from evodsp.model.recordings import CudaRecorder, Recorder, Rerun, same_bits, versions
from evodsp.parallel.config import ParallelConfig, ParameterMode
from evodsp.parallel.exchange import LocalExchange, ShardedExchange
from evodsp.parallel.group import Group, own_group, whole_group
from evodsp.planner.device import Device, Links, load_device, load_link
from evodsp.planner.measure import crowded_block, link_of, measured, timed_collectives
from evodsp.planner.mesh import TracedPass, Training, estimate, traced
from evodsp.planner.program import SampleSizes, recomputed_of
from evodsp.rng import Draws
from evodsp.selftest import ranks
from evodsp.selftest.shared_device import both, compared, mean_of, random_features, subjects, with_labels
from evodsp.training.world import MeshWorld, World

Row = dict[str, Any]
STEPS, TIMED_STEPS = 10, 6
LOSSES = 1e-4
"""Largest difference of a loss in float32 from one rank's, as a fraction of it: Adam amplifies rounding with each step."""


@dataclass(frozen=True)
class ScalingSizes:
    """The sizes of everything that is computed."""

    model: ModelConfig
    equal: SampleSizes
    """The sample of the steps that are compared with one rank's."""
    crops: tuple[SampleSizes, ...]
    """The samples of the strong scaling."""
    recomputed: int
    """Residues from which on all blocks are computed again."""
    largest: int
    """Bytes of the largest message."""


_AF2 = ModelConfig.preset("model_1")
SIZES = {
    True: ScalingSizes(
        dataclasses.replace(
            _AF2,
            evoformer=dataclasses.replace(_AF2.evoformer, blocks=4, checkpoint=False),
            extra_msa=dataclasses.replace(_AF2.extra_msa, blocks=1, checkpoint=False),
            templates=dataclasses.replace(_AF2.templates, enabled=False),
        ),
        SampleSizes(127, 61, 250),
        (SampleSizes(256, 128, 1024), SampleSizes(384, 512, 5120), SampleSizes(1024, 512, 5120)),
        recomputed=1024,
        largest=1 << 30,
    ),
    False: ScalingSizes(
        ModelConfig.preset("test"),
        SampleSizes(13, 5, 7),
        (SampleSizes(16, 8, 9), SampleSizes(24, 8, 9)),
        recomputed=24,
        largest=1 << 18,
    ),
}
"""By whether the device is a GPU. There the model has AlphaFold2's widths, with four blocks and one of the extra MSA."""


class ScalingRun:
    """The ranks, and what they have made so far. All of them call its methods together."""

    def __init__(self, report: Path) -> None:
        self.report, self.group = report, whole_group()
        self.on_gpu = "nccl" in dist.get_backend()
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.on_gpu else torch.device("cpu")
        self.sizes = SIZES[self.on_gpu]
        hosts = Counter(all_of(socket.gethostname(), self.group))
        self.nodes, self.per_node = len(hosts), min(hosts.values())
        sizes = [2**k for k in range(self.group.size.bit_length()) if self.group.size % 2**k == 0]
        self.groups = sorted({*sizes, self.group.size})
        """Sizes of the groups that are compared: powers of two that divide all ranks, and all ranks."""
        self._worlds: dict[tuple[int, str], MeshWorld] = {}
        self._kernels: dict[torch.dtype, Kernels] = {}

    def world(self, sequence: int, parameters: ParameterMode = "replicate") -> MeshWorld:
        """The mesh (ranks / `sequence`, `sequence`)."""
        if (sequence, parameters) not in self._worlds:
            config = ParallelConfig(sequence=sequence, parameters=parameters)
            self._worlds[sequence, parameters] = MeshWorld(config, self.on_gpu)
        return self._worlds[sequence, parameters]

    def kernels(self, half: bool) -> Kernels:
        """The operators of training."""
        dtype = torch.bfloat16 if half else torch.float32
        if dtype not in self._kernels:
            gather = partial(all_of, group=self.group)
            self._kernels[dtype] = choose(KernelsConfig(), self.device, dtype, on_all_ranks=gather)[0]
        return self._kernels[dtype]

    def recorder(self) -> Recorder:
        """Recorder of stacks here."""
        return CudaRecorder() if self.on_gpu else Rerun()

    def sample(self, crop: SampleSizes, number: int = 0) -> dict[str, Tensor]:
        """Sample `number`, on the device."""
        features = random_features(crop.clusters, crop.extra, crop.residues, seed=number)
        return {name: x.to(self.device) for name, x in with_labels(features).items()}

    def free(self) -> None:
        """Let go of the meshes, whose process groups are about to end."""
        self._worlds.clear()


def environment(run: ScalingRun) -> Iterator[Row]:
    """Where each rank is, the versions, the variables of NCCL and gloo, the topology, and how long groups take to make."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [os.cpu_count() or 1]
    own = {"host": socket.gethostname(), "address": own_address(), "cores": f"{len(cores)}: {cores[0]} to {cores[-1]}"}
    if run.on_gpu:
        found = torch.cuda.get_device_properties(run.device)
        own |= {"gpu": found.name, "uuid": str(found.uuid), "GiB": f"{found.total_memory / 2**30:.1f}"}
    for rank, row in enumerate(all_of(own, run.group)):
        yield {"rank": rank, **row}
    check_same("versions of PyTorch, CUDA, NCCL and Triton", versions(), run.group)
    yield {"what": "versions", "value": versions()}
    prefixes = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_", "OMP_", "FI_", "UCX_", "PYTORCH_", "TRITON_")
    for name in sorted(name for name in os.environ if name.startswith(prefixes)):
        yield {"what": name, "value": os.environ[name]}
    if run.on_gpu and run.group.rank == 0 and shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "topo", "-m"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        yield {"what": "topology", "value": done.stdout or done.stderr}
    for size in run.groups:
        begun = time.perf_counter()
        run.world(size).mesh.sequence_group().all_reduce(torch.ones(1, device=run.device)).wait()
        yield {"what": f"seconds to make groups of {size}", "value": f"{_now(run) - begun:.2f}"}


def collectives(run: ScalingRun) -> Iterator[Row]:
    """Every collective brings the right numbers, and its backward pass is its transpose."""
    for size in run.groups:
        yield {"ranks": size, "checked": ranks.collectives(run.world(size).mesh.sequence_group(), run.device)}


def speed(run: ScalingRun) -> Iterator[Row]:
    """The time of every collective in groups of each size; then the device and its links, which `evodsp plan` reads."""
    free = torch.cuda.mem_get_info()[0] // 8 if run.on_gpu else run.sizes.largest
    largest = min(run.sizes.largest, *all_of(free, run.group))
    sizes = [1 << power for power in range(12, 31, 2) if 1 << power <= largest]
    links: dict[str, Row] = {}
    for between, group in _speed_groups(run):
        found: dict[str, list[tuple[float, float]]] = {}
        for kind, moved, taken in timed_collectives(group, run.on_gpu, sizes):
            found.setdefault(kind, []).append((moved, taken))
            row = {"between": between, "ranks": group.size, "collective": kind, "bytes": int(moved)}
            yield {**row, "us": round(taken * 1e6, 1), "GB/s": round(moved / taken / 1e9, 3)}
        links[between] = link_of(f"{'NCCL' if run.on_gpu else 'gloo'}, {group.size} ranks, {between}", found)
    content = from_first(lambda: measured(run.on_gpu, run.per_node), run.group)
    if links:
        crowding = crowded_block(run.group.rank, run.on_gpu)
        content["crowding"] = from_first(lambda: round(crowding, 4), run.group)
        content |= {"inside": "inside", "across": "across"}
    inside, across = links.get("a node"), links.get("nodes")
    yield {"device": content, "links": {"inside": inside or across, "across": across or inside} if links else {}}


def _speed_groups(run: ScalingRun) -> Iterator[tuple[str, Group]]:
    """Groups within a node, from small ones to large ones, and those of one rank of each node, which share no adapter."""
    for size in run.groups:
        if 1 < size <= run.per_node:
            yield "a node", run.world(size).mesh.sequence_group()
    if run.nodes > 1 and run.group.size == run.nodes * run.per_node:
        yield "nodes", Group(own_group(torch.arange(run.group.size).view(run.nodes, run.per_node).T))


def blocks(run: ScalingRun) -> Iterator[Row]:
    """Stacks with dropout and the whole model, forward and backward, against one rank: launched, replayed, without overlap."""
    for subject in subjects(run.device):
        alone = both(subject, LocalExchange(), run.device)
        for size in run.groups[1:]:
            world = run.world(size)
            group = world.mesh.sequence_group()

            def graphs(world: MeshWorld = world) -> Graphs:
                return Graphs(run.recorder(), calls_before=0, agree=world.of_sample)

            launched = both(subject, ShardedExchange(group), run.device)
            apart = both(subject, ShardedExchange(group, overlap=False), run.device)
            replayed = both(subject, ShardedExchange(group), run.device, graphs)
            row = {"what": subject.name, "ranks": size}
            equal = all(same_bits(one, other) for one, other in zip(launched, apart, strict=True))
            yield {**row, "how": "overlap on and off", "found": "the same bits" if equal else "other bits", "ok": equal}
            for how, found in (("launched", launched), ("replayed", replayed)):
                whole = [mean_of(results, group) for results in found]
                try:
                    yield {**row, "how": how, "found": compared(whole, alone, subject.tolerance), "ok": True}
                except AssertionError as error:
                    yield {**row, "how": how, "found": str(error), "ok": False}


@dataclass(frozen=True)
class TimedSteps:
    """Some optimizer steps."""

    losses: list[float]
    seconds: float
    """Median of the last half of them."""
    exposed: float
    """Seconds in which the last step waited for collectives."""
    peak: int
    """The most bytes that the last step held; with recordings those that the allocator has taken. 0 on a CPU."""


def train(
    run: ScalingRun,
    world: World,
    config: ModelConfig,
    samples: Mapping[int, dict[str, Tensor]],
    steps: int,
    half: bool = False,
    recorder: Recorder | None = None,
) -> TimedSteps:
    """Make optimizer steps, each on all `samples` of this data rank, from AlphaFold2's initial weights. `recorder`: records the
    stacks; None launches them."""
    torch.manual_seed(0)
    if run.on_gpu:
        torch.cuda.empty_cache()
    model = AlphaFold(config).to(run.device)
    use_kernels(model, run.kernels(half))
    if isinstance(world, MeshWorld):
        world.place(model, None, half=torch.bfloat16 if half else None)
    graphs = None if recorder is None else Graphs(recorder, agree=world.of_sample)
    use_graphs(model, graphs)
    gradients = world.gradients(model.parameters(), 0.1, False, len(samples))
    adam, casts = world.optimizer(model.parameters(), lr=1e-4, eps=1e-6), CastParameters(model)
    waits = world.waits if recorder is None else None  # of replays nobody can measure them
    losses, seconds, exposed, peak = list[Tensor](), list[float](), 0.0, 0
    try:
        for step in range(steps):
            last = step == steps - 1
            if run.on_gpu and last:
                torch.cuda.reset_peak_memory_stats()
            begun = _now(run)
            if waits is not None and last:
                waits.begin()
            gradients.begin()
            total = torch.zeros((), device=run.device)
            for number, batch in samples.items():
                with torch.autocast(run.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
                    casts.make()
                    output = model(batch, [Draws.root(step).at(number)])
                    loss, _ = total_loss(output, batch, LossConfig(), config.heads, model.exchange)
                (loss / len(samples)).backward()
                casts.drop()
                gradients.add(len(samples), loss.detach())
                total += loss.detach() / len(samples)
                del output, loss
            gradients.finish()
            adam.step()
            exposed = waits.end() if waits is not None and last else 0.0
            seconds.append(_now(run) - begun)
            losses.append(world.mean(total))
        if run.on_gpu:
            peak = torch.cuda.max_memory_allocated() if recorder is None else torch.cuda.memory_reserved()
    finally:
        world.release()
        use_graphs(model, None)
        if graphs is not None:
            graphs.free()
    if graphs is not None and (graphs.given_up or not graphs.replays):
        raise AssertionError(graphs.given_up or "no stack was replayed")
    return TimedSteps([float(x) for x in losses], statistics.median(seconds[steps // 2 :]), exposed, peak)


def _now(run: ScalingRun) -> float:
    if run.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def training(run: ScalingRun) -> Iterator[Row]:
    """Ten optimizer steps on as many samples as there are ranks, on every mesh: losses equal one rank's."""
    config, total = run.sizes.model, run.group.size
    samples = {number: run.sample(run.sizes.equal, number) for number in range(total)}
    alone = train(run, World(), config, samples, STEPS)
    yield {"data": 1, "sequence": 1, "parameters": "replicate", **_step_row(run, alone, "launched")}
    cases: list[tuple[int, ParameterMode]] = [(size, "replicate") for size in run.groups]
    middle = run.groups[len(run.groups) // 2]
    for size, parameters in (*cases, (middle, "zero1"), (middle, "fsdp2")):
        world = run.world(size, parameters)
        own = {n: sample for n, sample in samples.items() if n % world.data_ranks == world.data_rank}
        for recorder in (None, run.recorder()):
            if recorder is not None and parameters == "fsdp2":  # which is refused
                continue
            found = train(run, world, config, own, STEPS, recorder=recorder)
            off = [abs(x - y) / abs(y) for x, y in zip(found.losses, alone.losses, strict=True)]
            how = "launched" if recorder is None else "replayed"
            row = {"data": world.data_ranks, "sequence": size, "parameters": parameters, **_step_row(run, found, how)}
            yield {**row, "losses differ by": f"{max(off):.1e}", "ok": all(x <= LOSSES for x in off)}


def _step_row(run: ScalingRun, found: TimedSteps, how: str) -> Row:
    row = {"how": how, "ms": round(1e3 * found.seconds, 2), "last loss": f"{found.losses[-1]:.5f}"}
    memory = "peak GiB" if how == "launched" else "allocator's GiB"
    return row | ({memory: round(found.peak / 2**30, 3)} if run.on_gpu else {})


def scaling(run: ScalingRun) -> Iterator[Row]:
    """One sample on 1, 2, 4 … ranks: the time of a step in bf16 on a GPU, its waits and its memory, beside those planned."""
    cases = [(crop, size) for crop in run.sizes.crops for size in reversed(run.groups)]
    device, links = from_first(lambda: _planned_device(run), run.group)
    own = {
        n: _planned(run, crop, size, device, links)
        for n, (crop, size) in enumerate(cases)
        if n % run.group.size == run.group.rank
    }
    planned = {number: row for found in all_of(own, run.group) for number, row in found.items()}
    for number, (crop, size) in enumerate(cases):
        plan, world = planned[number], run.world(size)
        row = {"residues": crop.residues, "rows": crop.clusters, "extra rows": crop.extra, "ranks": size}
        memory = {"planned for": device.name, "planned GiB": plan["planned GiB"]}
        if plan["planned GiB"] > device.usable / 2**30:
            yield {**row, **memory, "how": "left out: too large"}
            continue
        sample = {world.data_rank: run.sample(crop)}
        for how, recorder in (("launched", None), ("replayed", run.recorder())):
            found = train(run, world, _recomputed(run.sizes, crop), sample, TIMED_STEPS, run.on_gpu, recorder)
            step = {**row, **_step_row(run, found, how), "planned ms": plan[how], **memory}
            waited = {"exposed ms": round(1e3 * found.exposed, 2), "planned exposed ms": plan["exposed"]}
            yield {**step, **(waited if recorder is None else {})}


def _recomputed(sizes: ScalingSizes, crop: SampleSizes) -> ModelConfig:
    """The model as a crop trains it."""
    stacks = {
        name: dataclasses.replace(getattr(sizes.model, name), checkpoint=crop.residues >= sizes.recomputed)
        for name in ("evoformer", "extra_msa")
    }
    return dataclasses.replace(sizes.model, **stacks)


def _planned_device(run: ScalingRun) -> tuple[Device, Links]:
    """The device that `speed` has measured, or an H100."""
    try:
        device = load_device(str(run.report))
    except UserError:
        device = load_device("h100")
    return device, Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)


def _planned(run: ScalingRun, crop: SampleSizes, size: int, device: Device, links: Links) -> Row:
    """Planned step on the mesh (ranks / `size`, `size`): ms and GiB."""
    config, data = _recomputed(run.sizes, crop), run.group.size // size
    plain = Training(
        config,
        LossConfig(),
        crop,
        recycles=0,
        global_batch=data,
        clip="batch",
        ema=False,
        half=run.on_gpu,
        on_gpu=run.on_gpu,
    )
    recomputed = recomputed_of(config.evoformer)
    passed = TracedPass.of(traced(plain, size, recomputed), plain, device, run.group.size)
    launched, replayed = (
        estimate(dataclasses.replace(plain, graphs=graphs), passed, recomputed, data, size, device, links)
        for graphs in (False, True)
    )
    ms = {"launched": launched.step_s, "replayed": replayed.step_s, "exposed": launched.one.exposed}
    return {**{k: round(1e3 * v, 2) for k, v in ms.items()}, "planned GiB": round(launched.memory.total / 2**30, 3)}


def _ended_rank(run: ScalingRun, number: int) -> Iterator[Row]:
    """Send a signal to the last rank while all communicate. The others have to notice, and end."""
    victim = run.group.size - 1
    yield {"victim": victim, "begun": time.time()}
    while victim > 0:
        run.group.all_reduce(torch.ones(1000, device=run.device)).wait()
        if run.group.rank == victim:
            os.kill(os.getpid(), number)
        _now(run)


FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
"""The parts that end the ranks, by what the last of them gets: one that is stopped neither computes nor ends."""
PARTS: dict[str, Callable[[ScalingRun], Iterator[Row]]] = {
    **{part.__name__: part for part in (environment, collectives, speed, blocks, training, scaling)},
    **{name: partial(_ended_rank, number=number) for name, number in FAULTS.items()},
}
