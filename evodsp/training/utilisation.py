"""Model FLOPs utilisation: the share of a device's peak that goes into the model's own matrix products.

    utilisation = FLOPs of the samples / (seconds x devices x peak)
    FLOPs of a sample = (recycling iterations + 3) x FLOPs of one forward pass

Iterations before the last one have no backward pass; the last one's counts as two forward passes (`evodsp.model.flops`).

Lightning's `get_available_flops` has a table of peaks too, but for H100 NVL and H200 it holds half precision's peak for sparse
matrices, twice what a model can use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from evodsp.config import MatmulPrecision, ModelConfig
from evodsp.model.flops import pass_flops, training_flops

TERA = 1e12

_PEAKS: dict[str, tuple[float, float, float]] = {
    "GH200": (67, 494, 989),
    "H200": (67, 494, 989),
    "H100 PCIe": (51, 378, 756),
    "H100 NVL": (60, 417, 835),
    "H100": (67, 494, 989),
    "A100": (19.5, 156, 312),
    "V100-SXM2": (15.7, 15.7, 125),
    "L40S": (91.6, 183, 362),
    "L4": (30.3, 60, 121),
    "A40": (37.4, 74.8, 149.7),
    "A10": (31.2, 62.5, 125),
    "RTX 4090": (82.6, 82.6, 165.2),
    "RTX 3090": (35.6, 35.6, 71),
}
"""Peaks in TFLOP/s, of dense matrices, by a part of the device's name: float32, TF32, and half precision with sums in float32.
From NVIDIA's data sheets. Of several parts that a name holds, the first counts."""


def peak_flops(device: str, precision: str, matmul: MatmulPrecision) -> float | None:
    """Peak of a device in FLOP/s; None if it is not known. `device`: its name. `precision`: `trainer.precision`."""
    kind = 2 if "16" in precision else 1 if matmul == "high" else 0
    if precision.startswith("64"):
        return None
    found = (peaks[kind] for part, peaks in _PEAKS.items() if re.search(rf"\b{part}\b", device))
    return next((peak * TERA for peak in found), None)


class Utilisation:
    """Counts the FLOPs of training batches that all have one size."""

    def __init__(self, model: ModelConfig, precision: str, matmul: MatmulPrecision, peak_tflops: float | None) -> None:
        """`peak_tflops`: of one device; None takes the known peak of the device."""
        self._model, self._precision, self._matmul, self._given = model, precision, matmul, peak_tflops
        self._peak: float | None = None
        self._of_a_pass: int | None = None
        self._flops = 0

    def start(self, device: torch.device) -> None:
        """Look up the peak of the run's device."""
        if self._given is not None:
            self._peak = self._given * TERA
        elif device.type == "cuda":
            self._peak = peak_flops(torch.cuda.get_device_name(device), self._precision, self._matmul)

    def prepare(self, batch: Mapping[str, Tensor]) -> None:
        """Count a pass of the first batch, which takes seconds for a large model."""
        if self._peak is not None and self._of_a_pass is None:
            self._of_a_pass = pass_flops(self._model, batch)

    def add(self, batch: Mapping[str, Tensor]) -> None:
        """One more batch has been trained on."""
        self._flops += training_flops(self._of_a_pass or 0, batch["aatype"].shape[1])

    def percent(self, seconds: float, devices: int) -> float | None:
        """The utilisation since the last call, if `devices` shared each batch; None if the peak is not known."""
        flops, self._flops = self._flops, 0
        return None if self._peak is None else 100 * flops / (seconds * devices * self._peak)
