"""`cuda_graphs`: the stacks of a training run are recorded as CUDA graphs and replayed (`evodsp.model.graphs`)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule

from evodsp.errors import UserError
from evodsp.model.graphs import Graphs, use_graphs
from evodsp.model.recorders import CudaRecorder, Recorder
from evodsp.parallel.config import ParallelConfig
from evodsp.training.config import DataConfig, RunConfig


def check_graphs(run: RunConfig, parallel: ParallelConfig, data: DataConfig, on_gpu: bool) -> None:
    """Raise UserError if the run asks for CUDA graphs and cannot have them."""
    if not run.cuda_graphs:
        return
    off = "or cuda_graphs to false"
    if not on_gpu:
        raise UserError(
            "cuda_graphs is true, but this run is on a CPU; set cuda_graphs to false, or trainer.accelerator to gpu"
        )
    if run.compile != "none":
        raise UserError(
            f"cuda_graphs is true, but compile is {run.compile}, and compiled blocks are not recorded; set compile to "
            f"none, {off}"
        )
    if parallel.sequence > 1:
        raise UserError(
            f"cuda_graphs is true, but parallel.sequence is {parallel.sequence}, and collectives within a sample are not "
            f"recorded; set parallel.sequence to 1, {off}"
        )
    if parallel.parameters == "fsdp2":
        raise UserError(
            "cuda_graphs is true, but parallel.parameters is fsdp2, which gathers parameters inside of blocks; set "
            f"parallel.parameters to replicate or zero1, {off}"
        )
    if data.train.crop_size is None:
        raise UserError(
            "cuda_graphs is true, but data.train.crop_size is null, and each length would be recorded by itself; set "
            f"data.train.crop_size, {off}"
        )


class RecordedStacks(Callback):
    """Has the stacks recorded in the second training step, and replayed from then on. Validation, where every chain has its own
    length, runs as usual.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        """`recorder`: None for CUDA graphs."""
        self._graphs = Graphs(recorder or CudaRecorder())

    @property
    def replays(self) -> int:
        """Calls of a stack that were replayed."""
        return self._graphs.replays

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        use_graphs(pl_module, self._graphs)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self._graphs.enabled = False

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._graphs.enabled = True

    def teardown(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        use_graphs(pl_module, None)
