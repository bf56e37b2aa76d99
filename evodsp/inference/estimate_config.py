"""Settings of `evodsp estimate`. Importing this costs nothing (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from evodsp.config import MatmulPrecision, check_matmul, check_preset
from evodsp.errors import UserError
from evodsp.inference.config import PassSettings, SizeSettings, sources_of
from evodsp.model.schedule import CommunicationPlan
from evodsp.parallel.config import SequenceConfig
from evodsp.ranges import COUNT, SIZE, check_numbers, memory_size
from evodsp.weights.by_name import check_name


@dataclass(frozen=True)
class EstimateConfig:
    """What would be predicted, and where. Raises UserError if a value is out of range."""

    inputs: Sequence[Path] = ()
    """What `evodsp predict` would be given: FASTA or A3M files, folders of either, or - for standard input. Every
    record is estimated with an alignment as deep as the model takes."""
    fasta: Path | None = None
    """A FASTA file, as in earlier versions. The same as giving it without an option."""
    residues: int | None = None
    """Length of a sequence, instead of inputs."""
    checkpoint: Path | None = None
    """Model: a checkpoint, or another program's parameters, as of `evodsp predict`."""
    weights: str | None = None
    """Model: AlphaFold2's published parameters by name, such as model_1_ptm. Their file is not needed."""
    preset: str | None = None
    """Model of this name, such as model_1_ptm; beside --checkpoint the one that the parameters belong to. null: model_1_ptm."""
    device: str = "auto"
    """auto: the GPU of this machine, or its processor. cpu or cuda. Or a kind of GPU: a100, h100, h200, b200, or the path of
    your own file (see `evodsp plan`)."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """As of `evodsp predict`, like the settings below."""
    matmul_precision: MatmulPrecision = "highest"
    """Products of float32 matrices on a GPU: highest or high."""
    recycles: int | None = None
    """Recycling iterations after the first pass; null: as in training."""
    ensembles: int = 1
    """Feature sets drawn for each pass."""
    msa_clusters: int | None = None
    """Rows of the clustered MSA; null: as in training."""
    extra_msa: int | None = None
    """Rows of the extra MSA; null: as in training."""
    working_memory: str = "auto"
    """Memory of each rank for what a layer computes beside the representations. auto: 1/32 of the GPU's memory, 256MiB on a
    CPU."""
    parallel: SequenceConfig = field(default_factory=SequenceConfig)
    """Ranks that share one structure."""
    plan: CommunicationPlan = field(default_factory=CommunicationPlan)
    """How the ranks communicate."""
    output: Path | None = None
    """JSON file for the numbers; null: they are only printed."""

    def __post_init__(self) -> None:
        sizes = ("residues", "ensembles", "msa_clusters", "extra_msa")
        check_numbers(self, {**dict.fromkeys(sizes, SIZE), "recycles": COUNT}, "--")
        check_preset(self.preset)
        check_matmul("--matmul_precision", self.matmul_precision)
        if (self.residues is None) != bool(self.sources):
            given = "neither is given" if self.residues is None else "both are given"
            raise UserError(f"evodsp estimate takes INPUT... or --residues N, but {given}; give one of them")
        if self.weights is not None:
            check_name(self.weights)
            for name in ("checkpoint", "preset"):
                if (other := getattr(self, name)) is not None:
                    raise UserError(f"--weights {self.weights} and --{name} {other} are both given; give one model")
        if self.working_memory not in ("auto", "all"):
            memory_size("--working_memory", self.working_memory)

    @property
    def sources(self) -> Sequence[Path]:
        """The inputs."""
        return sources_of(self.inputs, self.fasta)

    @property
    def passes(self) -> PassSettings:
        """How the model would run."""
        return PassSettings(
            self.precision,
            self.matmul_precision,
            self.ensembles,
            working_memory=self.working_memory,
            ranks=self.parallel.sequence,
            plan=self.plan,
        )

    @property
    def sizes(self) -> SizeSettings:
        """The feature sizes that the user gave."""
        return SizeSettings(self.recycles, self.msa_clusters, self.extra_msa)
