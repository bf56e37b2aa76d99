"""How many ranks a run has, and who starts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evodsp.errors import UserError
from evodsp.launch import process_group
from evodsp.parallel.config import ParallelConfig
from evodsp.parallel.mesh import data_ranks
from evodsp.training.config import DataConfig, TrainingConfig


def count_ranks(trainer: Mapping[str, Any], parallel: ParallelConfig) -> int:
    """Ranks of this run: those that were started, or those that are to be started on this machine.

    `trainer`: Lightning's options. Raises UserError if they contradict the launcher, or do not form groups of
    `parallel.sequence`.
    """
    devices, nodes = _devices(trainer["devices"]), int(trainer["num_nodes"])
    if process_group.under_launcher():
        ranks = process_group.place().ranks
        if devices is not None and devices * nodes != ranks:
            raise UserError(
                f"trainer.devices {devices} x trainer.num_nodes {nodes} are {devices * nodes} ranks, but {ranks} were started; "
                "leave both out"
            )
    elif nodes > 1:
        raise UserError(
            f"trainer.num_nodes is {nodes}, but evodsp starts ranks on its own machine only; use torchrun or srun"
        )
    elif trainer["accelerator"] in ("cpu", "gpu", "cuda", "auto"):
        found = torch.cuda.device_count() if on_gpu(trainer) else parallel.sequence
        ranks = found if devices is None else devices
    else:
        ranks = devices or 1
    data_ranks(ranks, parallel.sequence)
    if ranks > 1:
        _check_options(trainer)
    return ranks


def on_gpu(trainer: Mapping[str, Any]) -> bool:
    """Whether ranks are GPUs."""
    name = trainer["accelerator"]
    return name in ("gpu", "cuda") or (name == "auto" and torch.cuda.is_available())


def is_first_rank() -> bool:
    """Whether this process writes files: rank 0, or the only one."""
    return not process_group.under_launcher() or process_group.place().rank == 0


def check_degree(parallel: ParallelConfig, data: DataConfig) -> None:
    """Raise UserError if a sample of the training features is too small for `parallel.sequence` ranks."""
    rows, residues = data.train.msa_clusters, data.train.crop_size
    for name, size in (("data.train.msa_clusters", rows), ("data.train.crop_size", residues)):
        if size is not None and parallel.sequence > size:
            raise UserError(
                f"parallel.sequence is {parallel.sequence}, but {name} is {size}; a sample is spread over at most "
                f"{min(rows, residues or rows)} ranks"
            )


def check_clipping(parallel: ParallelConfig, model: TrainingConfig, trainer: Mapping[str, Any]) -> None:
    """Raise UserError if gradients cannot be clipped as asked."""
    if not trainer["gradient_clip_val"] or model.optimizer.clip == "batch":
        return
    mend = "set model.optimizer.clip to batch"
    if parallel.parameters == "fsdp2":
        raise UserError(
            "parallel.parameters is fsdp2, which averages gradients over all ranks before the norm of a sample's can be "
            f"taken, but model.optimizer.clip is sample; {mend}, or use replicate or zero1"
        )
    if str(trainer["gradient_clip_algorithm"]) == "value":
        raise UserError(f"trainer.gradient_clip_algorithm is value, but model.optimizer.clip is sample; {mend}")
    if str(trainer["precision"]).startswith("16"):
        raise UserError(
            f"trainer.precision is {trainer['precision']}, whose gradients are scaled, but "
            f"model.optimizer.clip is sample; {mend}, or use bf16-mixed"
        )


def _devices(devices: Any) -> int | None:
    """Lightning's `devices` as a number; None for as many as there are."""
    if devices in ("auto", -1, "-1"):
        return None
    if isinstance(devices, str) and not devices.isdigit():
        devices = [index for index in devices.split(",") if index.strip()]
    if isinstance(devices, list | tuple):
        if len(devices) > 1:
            raise UserError(
                f"trainer.devices is {list(devices)}; to choose GPUs for several ranks set CUDA_VISIBLE_DEVICES="
                f"{','.join(str(index).strip() for index in devices)} and trainer.devices to {len(devices)}"
            )
        return 1
    return int(devices)


def _check_options(trainer: Mapping[str, Any]) -> None:
    """What one process allows and several ranks do not."""
    if trainer["strategy"] != "auto":
        raise UserError(
            f"trainer.strategy is {trainer['strategy']}, but several ranks are arranged by parallel.sequence and "
            "parallel.parameters; leave it out"
        )
    if str(trainer["precision"]).startswith("16"):
        raise UserError(
            f"trainer.precision is {trainer['precision']}, which several ranks cannot train in; use bf16-mixed or 32-true"
        )
    if trainer["accelerator"] not in ("cpu", "gpu", "cuda", "auto"):
        raise UserError(f"trainer.accelerator is {trainer['accelerator']}; several ranks need cpu or gpu")
