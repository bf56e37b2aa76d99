"""Constant tables as tensors. Each table is copied to a device once, because a copy makes the host wait for the GPU."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor


class Constant:
    """A table that never changes, such as those of `geometry.residues`, with one copy per device and dtype in use."""

    def __init__(self, table: Shaped[np.ndarray, "..."]) -> None:
        self._table = table
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> Shaped[Tensor, "..."]:
        """The whole table. Callers share this tensor and must not change it."""
        held = self._copies.get((device, dtype))
        if held is None:
            with torch.inference_mode(False):  # a tensor made in inference mode could not be used in training later
                held = torch.as_tensor(self._table).to(device, dtype)
            if type(held) is Tensor:  # a fake tensor can only be used in its own mode
                self._copies[device, dtype] = held
        return held

    def like(self, values: Tensor) -> Shaped[Tensor, "..."]:
        """The whole table on the device and in the dtype of `values`."""
        return self.on(values.device, values.dtype)

    def per_residue(self, aatype: Int[Tensor, "*b"], like: Tensor) -> Float[Tensor, "..."]:
        """The row of each residue's type, from a table [21, ...]: [*b, ...], in the dtype of `like`."""
        return self.like(like)[aatype.long()]
