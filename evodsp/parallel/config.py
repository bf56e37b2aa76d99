"""How a run is spread over ranks: settings without torch, so that help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from evodsp.errors import UserError, nearest

ParameterMode = Literal["replicate", "zero1", "fsdp2"]
WirePrecision = Literal["same", "bf16"]


@dataclass(frozen=True)
class SequenceConfig:
    """How one sample is spread over several ranks: a GPU each, or a CPU process each.

    Raises UserError on a number out of range.
    """

    sequence: int = 1
    """Ranks that share one sample (Dynamic Sequence Parallelism): at most its residues and the rows of its clustered MSA. They
    are started on this machine, unless torchrun or srun has started them."""
    timeout: float = 600.0
    """Seconds that a rank may stand still before the run is ended, and the rank named."""

    def __post_init__(self) -> None:
        if self.sequence < 1:
            raise UserError(
                f"parallel.sequence is {self.sequence}, but must be at least 1; 1 keeps a sample on one rank"
            )
        if not self.timeout > 0:
            raise UserError(f"parallel.timeout is {self.timeout}, but must be above 0 (seconds); give a larger number")


@dataclass(frozen=True)
class ParallelConfig(SequenceConfig):
    """The mesh of ranks, (data, sequence), and where parameters live on it. Data ranks = all ranks / `sequence`.

    Raises UserError on a value out of range.
    """

    parameters: ParameterMode = "replicate"
    """Where parameters and optimizer state live: `replicate`, whole on every rank; `zero1`, the optimizer's state spread over
    all ranks; `fsdp2`, parameters and gradients as well (PyTorch's fully_shard)."""
    wire: WirePrecision = "same"
    """What activations and their gradients travel as between the ranks of a sample: `same` as they are, or `bf16`."""
    overlap: bool = True
    """Compute while activations travel; false waits for each collective where it is launched (to measure, to find mistakes)."""

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
