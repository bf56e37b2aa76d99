"""`compile: blocks`: each half of a block becomes one compiled graph, for all blocks of a stack.

Blocks are compiled and not the whole model, because one graph then serves all 48 of them: the parameters, and the masks of
dropout or the keys that they are drawn from, are inputs of the graph. Collectives are operators inside of the graph.
What lies between (recomputation, the switch between blocks, recycling) stays ordinary Python.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from evodsp.errors import UserError
from evodsp.model.evoformer import MSAStack, PairStack
from evodsp.model.schedule import CommunicationPlan
from evodsp.model.templates import TemplatePairBlock
from evodsp.parallel.config import ParallelConfig
from evodsp.training.config import DataConfig, RunConfig

_GRAPHS = 64
"""Graphs that torch may make: of Evoformer, extra-MSA and template blocks, with and without gradients. torch's own limit is 8
for all modules together."""


def check_compilation(
    run: RunConfig, parallel: ParallelConfig, plan: CommunicationPlan, data: DataConfig, on_gpu: bool
) -> None:
    """Raise UserError if the run cannot be compiled as `run.compile` asks."""
    if run.compile == "none":
        return
    instead = "or compile to none"
    if parallel.parameters == "fsdp2":
        raise UserError(
            "compile is blocks, but parallel.parameters is fsdp2, which gathers parameters inside of blocks; set "
            f"parallel.parameters to replicate or zero1, {instead}"
        )
    if plan.stream_bias:
        raise UserError(
            "compile is blocks, but plan.stream_bias is true, which recomputes inside of blocks; set plan.stream_bias to "
            f"false, {instead}"
        )
    if data.train.crop_size is None:
        raise UserError(
            "compile is blocks, but data.train.crop_size is null, and each new length would be compiled anew; set "
            f"data.train.crop_size, {instead}"
        )
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
    return (module for module in model.modules() if isinstance(module, MSAStack | PairStack | TemplatePairBlock))


class CompiledBlocks(Callback):
    """Compiles the blocks when training starts. Validation, where every chain has its own length, runs uncompiled.

    The modules stay the same objects, so checkpoints and the moving average see the same names.
    """

    def __init__(self, backend: str = "inductor") -> None:
        """`backend`: of torch.compile."""
        self.backend = backend

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
        # As uncompiled: autocast acts on the forward pass only. Backward passes of our operators choose each precision.
        torch._functorch.config.backward_pass_autocast = "off"
        for region in regions(pl_module):
            region.compile(fullgraph=True, dynamic=False, backend=self.backend)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        torch.compiler.set_stance("force_eager")

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        torch.compiler.set_stance("default")

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        torch.compiler.set_stance("default")
