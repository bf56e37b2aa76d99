"""What tests of training run in a process of its own, without the checks of shapes, which torch cannot trace.

Blocks are compiled, and a step runs on the meta device, which has shapes and no numbers: it does everything that a GPU would,
and nothing that reads a value.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.optim import Adam, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from evodsp.cli import main
from evodsp.config import HeadsConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.parallel.config import ParallelConfig
from evodsp.parallel.group import Group
from evodsp.report.runs import read_curve
from evodsp.training import command, execution
from evodsp.training.chains import ChainDataModule, find_chains
from evodsp.training.checkpoints import ExponentialMovingAverage
from evodsp.training.config import DataConfig, TrainingConfig
from evodsp.training.execution import CompiledBlocks
from evodsp.training.logs import CurveLogger, Throughput, TrainingProgress, Utilisation
from evodsp.training.module import TrainingModule
from evodsp.training.run_end import StopRequest
from evodsp.training.trainer import DSPStrategy
from evodsp.training.world import MeshWorld, World
from tests.builders.host_waits import HostWaits
from tests.builders.kept_parsers import kept_parsers
from tests.builders.labelled_batch import WEIGHTS


def right(graph: torch.fx.GraphModule, examples: Any) -> Any:
    return graph.forward


def wrong_result(graph: torch.fx.GraphModule, examples: Any) -> Any:
    return lambda *arguments: [1.1 * x for x in graph(*arguments)]


def wrong_gradient(graph: torch.fx.GraphModule, examples: Any) -> Any:
    """Results are right, and so are their shapes."""

    def half(x: Tensor) -> Tensor:
        return x.detach() + 0.5 * (x - x.detach())

    return lambda *arguments: [half(x) for x in graph(*arguments)]


def broken(graph: torch.fx.GraphModule, examples: Any) -> Any:
    raise OSError("no code\nfor you")


class _Module(nn.Module):
    """What the callback needs of a TrainingModule."""

    device, world = torch.device("cpu"), SimpleNamespace(group=None)

    def __init__(self) -> None:
        super().__init__()
        self.model = AlphaFold(ModelConfig.preset("test"))


def refusal(backend: str, half: bool) -> str:
    """What the callback says with one of these backends; '' if it compiles the blocks. `half`: with autocast to bf16.

    Raises AssertionError if random numbers of the run are used up.
    """
    torch.set_num_threads(1)
    module: Any = _Module()
    plugin = SimpleNamespace(forward_context=lambda: torch.autocast("cpu", torch.bfloat16) if half else nullcontext())
    state = torch.get_rng_state()
    callback = CompiledBlocks(backend=globals()[backend])
    try:
        callback.on_fit_start(SimpleNamespace(precision_plugin=plugin), module)
    except UserError as error:
        return str(error)
    finally:
        assert torch.equal(torch.get_rng_state(), state)
    return ""


def losses_and_names(chains: Path, output: Path, *options: str) -> dict[str, Any]:
    """The losses of a run, and the names in its checkpoint."""
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(output), *options]
    assert main([*words, "--trainer.enable_progress_bar", "false"]) == 0
    curve = read_curve(output / "curve.csv")
    checkpoint = torch.load(output / "checkpoints" / "last.ckpt", weights_only=True)
    return {
        "loss": [float(step["train/loss"]) for step in curve.values() if "train/loss" in step],
        "names": sorted(checkpoint["state_dict"]),
    }


def both(
    chains: Path, folder: Path, options: tuple[str, ...], quick: bool
) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What `run` finds uncompiled and compiled, and the number of graphs of the compiled run. `quick`: graphs run as they are
    traced, and small blocks are not compared at the start."""
    graphs = [0]

    def unasked(*_: Any) -> str:
        return ""

    def counted(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs[0] += 1
        return graph.forward if quick else aot_eager(graph, examples)

    with kept_parsers():
        with (
            mock.patch.object(command, "CompiledBlocks", functools.partial(CompiledBlocks, backend=counted)),
            mock.patch.object(execution, "problem_of_compiling", unasked if quick else execution.problem_of_compiling),
        ):
            compiled = losses_and_names(chains, folder / "compiled", "--compile", "blocks", *options)
        return losses_and_names(chains, folder / "plain", *options), compiled, graphs[0]


META = torch.device("meta")
STEPS = 3


def _adam(parameters: Any, **options: Any) -> Optimizer:
    """There is no fused Adam for the meta device. The one for GPUs keeps even its count of steps there."""
    return Adam(parameters, **{**options, "fused": False})


class OneProcess(World):
    def optimizer(self, parameters: Any, **options: Any) -> Optimizer:
        return _adam(parameters, **options)


class FirstOfTwo(MeshWorld):
    """Rank 0 of a sequence group of two, whose collectives go nowhere. (Batches are compared on the host, by gloo.)"""

    def __init__(self) -> None:
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        super().__init__(ParallelConfig(sequence=2))

    def _connected_hosts(self) -> Group:
        return self._readers

    def check_batches(self, found: Any, failures: Any = ()) -> list[Any]:
        return []

    def optimizer(self, parameters: Any, **options: Any) -> Optimizer:
        return _adam(parameters, **options)


class MetaStrategy(DSPStrategy):
    @property
    def root_device(self) -> torch.device:
        return META


class Boundaries(Callback):
    """Notes how many waits there were when a batch began."""

    def __init__(self, seen: HostWaits) -> None:
        self.seen, self.before = seen, list[int]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.before.append(len(self.seen.waits))


def waits(ranks: int, chains: Path, output: Path) -> list[list[str]]:
    """The waits of each step between the first and the last."""
    torch.set_num_threads(1)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ.update(rank if ranks == 2 else {})
    base = ModelConfig.preset("test")
    heads = HeadsConfig(predicted_aligned_error=True, experimentally_resolved=True)
    sizes = {item.name: getattr(base, item.name) for item in dataclasses.fields(ModelConfig) if item.name != "heads"}
    config = TrainingConfig(**sizes, heads=heads, loss=WEIGHTS, ema_decay=0.9)
    features = dataclasses.replace(DataConfig().train, crop_size=10, msa_clusters=4, extra_msa=4, recycles=1)
    data_config = DataConfig(
        str(chains / "alignments"), str(chains / "mmcif_files"), train=features, samples_per_epoch=8
    )
    world = OneProcess() if ranks == 1 else FirstOfTwo()
    data = ChainDataModule(data_config, find_chains(data_config), 0, world)
    module = TrainingModule(config, world=world, requests=(StopRequest(),))
    throughput = Throughput(module, data, world.waits, Utilisation(module.model.config, "32-true", "highest", 1.0))
    seen = HostWaits()
    boundaries = Boundaries(seen)
    if ranks == 1:
        strategy: Any = SingleDeviceStrategy(META)
    else:
        strategy = MetaStrategy(world)
    with (
        mock.patch.object(TrainingModule, "setup"),  # it compares kernels with their formulas, which needs numbers
        mock.patch.object(CPUAccelerator, "setup_device"),  # it refuses other devices
    ):
        trainer = Trainer(
            max_steps=STEPS, accelerator="cpu", devices=1, strategy=strategy, logger=CurveLogger(output), gradient_clip_val=0.1,
            callbacks=[ExponentialMovingAverage(0.9), TrainingProgress(), boundaries, module.rows, throughput],
            log_every_n_steps=1, limit_val_batches=0,
            enable_checkpointing=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        with seen:
            trainer.fit(module, datamodule=data)
    # The first batch copies constants to the device; after the last one the run ends.
    steps = zip(boundaries.before[1:], boundaries.before[2:], strict=False)
    return [[wait for wait in seen.waits[first:last] if not _moves_the_batch(wait)] for first, last in steps]


def _moves_the_batch(wait: str) -> bool:
    """The loader has pinned the batch's memory where there are GPUs, so its copies are asynchronous."""
    return wait.startswith("_to_copy lightning/fabric/utilities/apply_func.py")
