"""Settings of parallel runs. This module does not import torch, so that `--help` answers fast."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from evodsp.errors import UserError, nearest

ParameterMode = Literal["replicate", "zero1", "fsdp2"]
WirePrecision = Literal["same", "bf16"]
Axis = Literal["seq", "res", "i", "j", "channel"]
"""An axis along which a representation is sharded."""
WHEN_TO_RAISE = (
    "raise parallel.sequence above 1 only if a sample does not fit on one GPU, or if there are more GPUs than samples in a "
    "global batch; evodsp plan compares"
)
"""The advice of every page, config and example that starts several GPUs, in the same words."""


@dataclass(frozen=True)
class SequenceConfig:
    """The sharding of one sample over ranks. A rank is one GPU, or one CPU process. Raises UserError on a value out of
    range.
    """

    sequence: int = field(default=1, metadata={"resume": "same"})
    """Number of ranks that share one sample (Dynamic Sequence Parallelism). Any number up to the sample's residues and the rows
    of its clustered MSA; nothing needs to be divisible. evodsp starts them on this machine, unless torchrun, srun or mpirun has
    started them."""
    timeout: float = field(default=600.0, metadata={"resume": "free"})
    """Seconds without progress after which a rank counts as hung; the run then ends and names the rank."""

    def __post_init__(self) -> None:
        if self.sequence < 1:
            raise UserError(
                f"parallel.sequence is {self.sequence}, but must be at least 1; 1 keeps a sample on one rank"
            )
        if not 0 < self.timeout < math.inf:
            raise UserError(f"parallel.timeout is {self.timeout}, but must be a number of seconds above 0")


@dataclass(frozen=True)
class ParallelConfig(SequenceConfig):
    """The mesh of ranks and where parameters live on it. The number of data-parallel ranks is all ranks / `sequence`.

    Raises UserError on a value out of range.
    """

    parameters: ParameterMode = field(default="replicate", metadata={"resume": "same"})
    """Placement of parameters and optimizer state. `replicate`: whole on every rank. `zero1`: the optimizer state is
    sharded over all ranks. `fsdp2`: parameters and gradients are sharded as well (PyTorch's fully_shard)."""
    wire: WirePrecision = field(default="same", metadata={"resume": "applied"})
    """Precision in which ranks communicate activations and their gradients: `same` as computed, or `bf16`."""
    overlap: bool = field(default=True, metadata={"resume": "same"})
    """Compute while activations are communicated. false waits for each collective where it is launched, for measurements and
    debugging."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire not in get_args(WirePrecision):
            raise UserError(f"parallel.wire is '{self.wire}', but must be one of {', '.join(get_args(WirePrecision))}")
        modes = get_args(ParameterMode)
        if self.parameters not in modes:
            close = nearest(str(self.parameters), modes)
            raise UserError(
                f"parallel.parameters is '{self.parameters}', but must be one of {', '.join(modes)}.{close}"
            )
