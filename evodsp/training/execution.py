"""The execution of the stacks of a training run: compiled, recorded as CUDA graphs, or with fewer blocks recomputed.

Each of the three is a setting (`compile`, `cuda_graphs`, and `checkpoint: auto` of a stack). None changes the numbers by more
than rounding.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn

from evodsp.errors import UserError
from evodsp.launch.consensus import check_same, on_every
from evodsp.launch.watch import watch_of_this_process
from evodsp.model.alphafold import AlphaFold
from evodsp.model.dropout import DropoutKeys, block_streams, draw_blocks
from evodsp.model.evoformer import EvoformerBlock, Stack
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.precision import CastParameters, activation_dtype
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.model.recomputation import Recomputed
from evodsp.model.recordings import OF_PARAMETER, CudaRecorder, Recorder, difference, upstream, versions
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import ParallelConfig
from evodsp.printing import show, tell
from evodsp.rng import Draws
from evodsp.training.config import DataConfig, RunConfig
from evodsp.training.module import TrainingModule

_GRAPHS = 64
"""The most graphs that torch may make: Evoformer, extra-MSA and template blocks have their own, with and without gradients.
torch's limit is 8 for all modules together."""


_SHARDED = (
    "parallel.parameters is fsdp2, which gathers parameters inside of blocks",
    "parallel.parameters to replicate or zero1",
)
"""Why blocks of sharded parameters can be neither compiled nor recorded, and what to set."""


def check_compilation(
    run: RunConfig, parallel: ParallelConfig, plan: CommunicationPlan, data: DataConfig, on_gpu: bool
) -> None:
    """Raise UserError if the run cannot be compiled as `run.compile` asks."""
    if run.compile == "none":
        return
    recomputes = "plan.stream_bias is true, which recomputes inside of blocks", "plan.stream_bias to false"
    anew = "data.train.crop_size is null, and each new length would be compiled anew", "data.train.crop_size"
    for found, (why, remedy) in (
        (parallel.parameters == "fsdp2", _SHARDED),
        (plan.stream_bias, recomputes),
        (data.train.crop_size is None, anew),
    ):
        if found:
            raise UserError(f"compile is blocks, but {why}; set {remedy}, or compile to none")
    compiler = os.environ.get("CXX", "g++")
    if not on_gpu and shutil.which(compiler) is None:
        raise UserError(
            f"compile is blocks, which needs a C++ compiler on a CPU, but {compiler} is not found; install g++ (or name "
            "another compiler in the environment variable CXX), or set compile to none"
        )
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise UserError(
            "compile is blocks, which needs Triton on a GPU, but it is not installed; pip install 'evodsp[triton]', or set "
            "compile to none"
        )


def regions(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that are compiled, each as one graph."""
    stacks = (module for module in model.modules() if isinstance(module, Stack))
    return (part for stack in stacks for block in stack.blocks for part in block.parts)


class CompiledBlocks(Callback):
    """Compiles each half of a block into one graph when training starts. Validation, where every chain has its own length, runs
    uncompiled.

    Blocks are compiled and not the whole model, because one graph then serves all 48 of them: the parameters, and the masks of
    dropout or the keys that they are drawn from, are inputs of the graph. Collectives are operators inside of the graph.
    Recomputation, the switch between blocks, and recycling stay ordinary Python.

    The modules stay the same objects, so checkpoints and the moving average see the same names.
    """

    def __init__(self, backend: str = "inductor") -> None:
        """`backend`: the backend that torch.compile uses."""
        self.backend = backend

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Raises UserError, on every rank, if a small compiled block and the same block uncompiled give different numbers."""
        torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
        # As uncompiled: autocast acts on the forward pass only. Backward passes of our operators choose each precision.
        torch._functorch.config.backward_pass_autocast = "off"
        on_every(lambda: self._check(trainer, pl_module), cast(TrainingModule, pl_module).world.group)
        for region in regions(pl_module):
            region.compile(fullgraph=True, dynamic=False, backend=self.backend)

    def _check(self, trainer: Any, pl_module: LightningModule) -> None:
        model = cast(TrainingModule, pl_module).model
        precision = trainer.precision_plugin.forward_context
        if problem := problem_of_compiling(model, pl_module.device, precision, self.backend):
            raise UserError(
                f"compile is blocks, but torch {torch.__version__} does not compile the blocks right here ({problem}); set "
                "compile to none, or install another version of torch"
            )

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        torch.compiler.set_stance("default")

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        torch.compiler.set_stance("default")


_SEQUENCES, _RESIDUES = 8, 16


def problem_of_compiling(
    model: AlphaFold, device: torch.device, precision: Callable[[], AbstractContextManager[Any]], backend: Any
) -> str:
    """The first difference between small compiled blocks and the same blocks uncompiled, in words; '' if there is none.

    A compiler may be wrong without a word: torch 2.11 made gradients 0 that are not. A run that trains on such numbers looks
    like one that learns slowly. Therefore each kind of block is compiled once at a small size before the first step.

    `precision`: a function that makes the context of a forward pass, such as autocast. `backend`: the backend that
    torch.compile uses. All ranks of a sequence group call this together. The random numbers of the run stay as they are.
    """
    for name, region, inputs, fixed in _cases(model, device, precision):
        try:
            expected = _results(region, region, inputs, fixed, precision)
            compiled = torch.compile(region, fullgraph=True, dynamic=False, backend=backend)
            found = _results(region, compiled, inputs, fixed, precision)
        except Exception as error:  # whatever it is, a run cannot be compiled so
            said = " ".join(str(error).split("\n")[:2])  # torch's first line may only name the backend
            return f"{name}: {type(error).__name__}: {said.strip()}"
        finally:
            torch.compiler.reset()  # graphs of small sizes would be asked first whether they fit, at each call
        if different := difference(found, expected):
            return f"{name}: {different}"
    return ""


def _cases(
    model: AlphaFold, device: torch.device, precision: Callable[[], AbstractContextManager[Any]]
) -> Iterator[tuple[str, nn.Module, list[Tensor], tuple[Any, ...]]]:
    """Yields a name, a half of a block, its inputs that get gradients, and its other inputs."""
    config, channels = model.config, model.config.channels
    exchange, kernels, dtype = model.exchange, model.evoformer.kernels, next(model.parameters()).dtype
    sequences, residues = max(_SEQUENCES, exchange.ranks), max(_RESIDUES, exchange.ranks)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for extra, c_m, settings in (
        (False, channels.msa, config.evoformer),
        (True, channels.extra_msa, config.extra_msa),
    ):
        with torch.random.fork_rng(devices=[]):
            block = EvoformerBlock(c_m, channels.pair, config.in_order(settings), extra).to(device, dtype)
        with torch.no_grad():
            for parameter in block.parameters():  # with the zeros that a model begins with, most gradients would be 0
                parameter.add_(0.1 * random(*parameter.shape))
        use_exchange(block, exchange, model.plan)
        use_kernels(block, kernels)
        keys = DropoutKeys.of(block_streams([block], [Draws.root(0)]), device)
        (dropout,) = draw_blocks([block], keys, residues, kernels)
        with precision():
            activations = activation_dtype(next(block.parameters()))
        msa, pair = random(1, sequences, residues, c_m), random(1, residues, residues, channels.pair)
        m, z = exchange.shard(msa, block.enters).to(activations), exchange.shard(pair, "j").to(activations)
        msa_mask, pair_mask = ((random(1, n, residues) > -1).to(dtype) for n in (sequences, residues))
        part = "MSA stack" if block.in_parts else "sub-layers"
        name = f"an extra block's {part}" if extra else f"a block's {part}"
        yield name, block.parts[0], [m, z], (msa_mask, pair_mask, dropout)
        if block.in_parts and not extra:  # the other stack's differs in sizes only
            yield "a block's pair stack", block.pair_stack, [z], (pair_mask, dropout)


def _results(
    region: nn.Module,
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    fixed: Sequence[Any],
    precision: Callable[[], AbstractContextManager[Any]],
) -> dict[str, Tensor]:
    """All results and gradients of `function`, by name. `function` is `region`, or its compiled form."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with precision(), CastParameters(region):
        results = function(*leaves, *fixed)
    results = results if isinstance(results, tuple) else (results,)
    parameters = dict(region.named_parameters())
    arriving = [upstream(x) for x in results]
    gradients = torch.autograd.grad(results, [*leaves, *parameters.values()], arriving, materialize_grads=True)
    names = [f"result {n + 1}" for n in range(len(results))]
    names += [f"the gradient of input {n + 1}" for n in range(len(leaves))]
    names += [OF_PARAMETER + name for name in parameters]
    return dict(zip(names, [x.detach() for x in (*results, *gradients)], strict=True))


def obstacle_to_graphs(
    run: RunConfig, parallel: ParallelConfig, data: DataConfig, on_gpu: bool
) -> tuple[str, str] | None:
    """Why the stacks of a run cannot be recorded, and what to set so that they can; None if they can."""
    if not on_gpu:
        return "this run is on a CPU", "trainer.accelerator to gpu"
    if run.compile != "none":
        return f"compile is {run.compile}, and compiled blocks are not recorded", "compile to none"
    if parallel.parameters == "fsdp2":
        return _SHARDED
    if data.train.crop_size is None:
        return "data.train.crop_size is null, and each length would be recorded by itself", "data.train.crop_size"
    return None


def check_graphs(run: RunConfig, parallel: ParallelConfig, data: DataConfig, on_gpu: bool) -> None:
    """Raise UserError if the run demands CUDA graphs and cannot have them."""
    if run.cuda_graphs is True and (obstacle := obstacle_to_graphs(run, parallel, data, on_gpu)):
        why, remedy = obstacle
        raise UserError(f"cuda_graphs is true, but {why}; set {remedy}, or cuda_graphs to auto or false")


class RecordedStacks(Callback):
    """Has the stacks recorded in the second training step, and replayed from then on. Validation, where every chain has its own
    length, runs as usual.
    """

    def __init__(self, required: bool = True, recorder: Recorder | None = None) -> None:
        """`required`: whether a stack that cannot be recorded ends the run; otherwise the run goes on without graphs.
        `recorder`: the recorder of calls; None records CUDA graphs.
        """
        self._required, self._recorder = required, recorder
        self._graphs: Graphs | None = None
        self._told = False

    @property
    def replays(self) -> int:
        """Calls of a stack that were replayed."""
        return 0 if self._graphs is None else self._graphs.replays

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        module = cast(TrainingModule, pl_module)
        check_same("versions of PyTorch, CUDA, NCCL and Triton", versions(), module.world.group)
        self._graphs = Graphs(self._recorder or CudaRecorder(), agree=module.world.of_sample, required=self._required)
        use_graphs(module, self._graphs)
        if watch := watch_of_this_process():
            exchange = module.model.exchange
            watch.count(lambda: exchange.repeats)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: Any) -> None:
        why = "" if self._graphs is None else self._graphs.given_up
        if why and not self._told and cast(TrainingModule, pl_module).world.reads:
            tell(f"evodsp: {why}; the run goes on without CUDA graphs")
        self._told = bool(why)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._graphs is not None:
            self._graphs.enabled = False

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if self._graphs is not None:
            self._graphs.enabled = True

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        self._free(pl_module)

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        self._free(pl_module)

    def _free(self, module: LightningModule) -> None:
        """Free the recordings before the ranks part: NCCL ends no communicator whose collectives a graph holds."""
        use_graphs(module, None)
        if self._graphs is not None:
            self._graphs.free()


_SHARE = 0.9
"""The share of a rank's memory that is used; the rest is for fragments, and for batches that need a little more."""


_STEPS = 2
"""Optimizer steps before the decision. The first one allocates Adam's state, so the second one's peak is that of every step."""


@dataclass(frozen=True)
class Measured:
    """One rank's measurements."""

    room: float
    """Bytes that are free at the peak of a step in which each stack keeps one block."""
    bytes_of_blocks: tuple[int, ...]
    """Bytes of activations that one block of each stack keeps."""
    bytes_of_projections: tuple[int, ...]
    """Bytes among them that are projections of attention and can be computed again by themselves."""


def least_recomputed(ranks: Sequence[Measured], blocks: Sequence[int]) -> list[Recomputed]:
    """Least recomputation of each stack with which its other activations fit into memory on every rank, from measurements
    with one block kept.

    A byte of projections takes a quarter of a whole block's time to compute again (`evodsp plan`). So memory goes first to
    blocks without their projections, then to the projections of these. `blocks`: the number of blocks in each stack. Earlier
    stacks get memory first. Without room not even the one block is kept.
    """
    room = min(rank.room for rank in ranks)
    stacks = range(len(blocks))
    part = [max(rank.bytes_of_projections[stack] for rank in ranks) for stack in stacks]
    rest = [max(rank.bytes_of_blocks[stack] - rank.bytes_of_projections[stack] for rank in ranks) for stack in stacks]

    def given(each: int, most: int) -> int:
        """The number of `most` blocks that get `each` more bytes, with the one that has them already."""
        nonlocal room
        number = max(0, min(most, 1 + (math.floor(room / each) if each else 0)))
        room -= (number - 1) * each
        return number

    kept = [given(rest[stack], blocks[stack]) for stack in stacks]
    complete = [given(part[stack], kept[stack]) if part[stack] else kept[stack] for stack in stacks]
    return [Recomputed(blocks[stack] - kept[stack], kept[stack] - complete[stack]) for stack in stacks]


class AutomaticRecomputation(Callback):
    """Sets once what is recomputed. All ranks measure, and take what fits on each of them."""

    def __init__(self, projections: bool = True) -> None:
        """`projections`: whether projections may be computed again by themselves. What a compiled block would keep without
        them is not known.
        """
        self._undecided: list[Stack] = []
        """The stack with most blocks comes first."""
        self._projections = projections

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        stacks = (module for module in pl_module.modules() if isinstance(module, Stack) and module.recomputation.auto)
        self._undecided = sorted(stacks, key=lambda stack: -len(stack.blocks))
        if pl_module.device.type != "cuda":
            for stack in self._undecided:
                stack.recompute(Recomputed(len(stack.blocks)))
            self._undecided = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *_: object) -> None:
        stacks = self._undecided
        if not stacks or trainer.global_step < _STEPS:
            return
        self._undecided = []
        free, _total = torch.cuda.mem_get_info(pl_module.device)
        possible = free + torch.cuda.memory_reserved(pl_module.device)
        peak = torch.cuda.max_memory_allocated(pl_module.device)
        counted = [stack.recomputation for stack in stacks]
        own = Measured(
            _SHARE * possible - peak,
            tuple(one.bytes_of_block for one in counted),
            tuple(one.bytes_of_projections * self._projections for one in counted),
        )
        ranks = cast(TrainingModule, pl_module).world.gather(own)
        chosen = least_recomputed(ranks, [one.blocks for one in counted])
        for stack, own_choice in zip(stacks, chosen, strict=True):
            stack.recompute(own_choice)
        if trainer.is_global_zero:
            numbers = ", ".join(
                f"{one.blocks - whole} of {one.blocks}, {projections} of them without projections"
                for one, (whole, projections) in zip(counted, chosen, strict=True)
            )
            show(f"checkpoint auto: blocks that keep their activations: {numbers}")
