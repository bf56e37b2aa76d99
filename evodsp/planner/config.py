"""Settings of `evodsp plan`. Importing this costs nothing (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evodsp.config import LayerPrecision, check_preset
from evodsp.errors import COUNT, SIZE, UserError, check_numbers
from evodsp.parallel.config import ParameterMode


@dataclass(frozen=True)
class PlanConfig:
    """Training to plan, and its devices. Raises UserError if a value is out of range."""

    gpus: int | None = None
    """Number of devices. With --measure: of those that communicate; null: all GPUs of this machine, or two processes."""
    measure: bool = False
    """Measure this machine in place of planning, which takes a minute. --output is then the file of its device, which --device
    takes, and must end in .yaml; the file of the link between several devices is written beside it."""
    device: str = "h100"
    """Kind of device: a100, h100, h200, b200, or the path of your own file."""
    config: Path | None = None
    """YAML file of `evodsp fit`: model, losses, sizes and batch are taken from it. Options on this command line override the
    file."""
    preset: str | None = None
    """Model, such as model_1_ptm; null takes that of the config, or model_1."""
    residues: int | None = None
    """Residues of a crop; null takes data.train.crop_size of the config, or 256."""
    msa: int | None = None
    """Rows of the clustered MSA, those of templates included; null: data.train.msa_clusters, or 128."""
    extra_msa: int | None = None
    """Rows of the extra MSA; null: data.train.extra_msa, or 1024."""
    templates: int | None = None
    """Templates of a sample; null: data.train.max_templates, or 4 for a model with templates."""
    recycles: int | None = None
    """Largest number of recycling iterations, drawn uniformly; null: data.train.recycles, or 3."""
    global_batch: int | None = None
    """Samples of an optimizer step on all devices; null: that of the config, or 128."""
    samples: int | None = None
    """Samples of the whole training, for days and GPU-hours; null: max_samples of the config, or 10 million."""
    sequence: int | None = None
    """Ranks that share a sample; null compares all that are possible."""
    parameters: ParameterMode | None = None
    """Place of the parameters, as parallel.parameters of a run: replicate, zero1 or fsdp2; null takes that of the config, or
    replicate."""
    precision: LayerPrecision | None = None
    """Precision, as trainer.precision of a run; bf16 and fp32 are the same two, as predict calls them. null takes that of the
    config, which is 32-true where it says nothing, or bf16-mixed without a config."""
    wire: Literal["same", "bf16"] | None = None
    """Precision in which ranks communicate, as parallel.wire of a run; null takes that of the config, or same."""
    recomputation: Literal["auto", "all", "none"] = "auto"
    """Evoformer blocks that are computed again in the backward pass: all, none, or only as many as the memory demands."""
    cuda_graphs: bool | None = None
    """Plan for a run whose stacks of blocks are CUDA graphs, whose launches take no time of the host; null: with and without,
    and the faster is taken, unless the config has cuda_graphs: true or false."""
    inside: str | None = None
    """Link between the devices of a node: nvlink3, nvlink4, nvlink5, nvl72, pcie, or the path of your own file; null: the
    device's usual one."""
    across: str | None = None
    """Link between nodes; null: the device's usual one, infiniband."""
    gpus_per_node: int | None = None
    """Devices of a node; null: the usual number."""
    output: Path | None = None
    """Page with tables and charts, and beside it the numbers as JSON; null: no file. With --measure, the device's file."""

    def __post_init__(self) -> None:
        sizes = ("gpus", "residues", "msa", "extra_msa", "global_batch", "samples", "sequence", "gpus_per_node")
        check_numbers(self, {**dict.fromkeys(sizes, SIZE), "templates": COUNT, "recycles": COUNT}, "--")
        check_preset(self.preset)
        if self.gpus is None and not self.measure:
            raise UserError("--gpus is missing; give the number of devices to plan for")
        if self.measure and self.output is None:
            raise UserError("--measure needs --output FILE.yaml, the file of this machine's device")
        suffix, what = (".yaml", "file of a device") if self.measure else (".html", "page")
        if self.output is not None and self.output.suffix != suffix:
            raise UserError(f"--output is {self.output}, but the {what} needs a name that ends in {suffix}")
