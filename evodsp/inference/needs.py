"""What a prediction needs of each rank, what there is, and what to change if it does not fit (`evodsp.planner.prediction`).

`evodsp predict` asks before a target runs, `evodsp estimate` without running it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.inference.config import PredictConfig
from evodsp.inference.devices import working_memory
from evodsp.inference.passes import layer_dtype
from evodsp.model.alphafold import AlphaFold
from evodsp.planner.device import Device, Links, free_memory, load_device, load_link, names, this_cpu
from evodsp.planner.prediction import Prediction, PredictionMemory, prediction_memory, prediction_times
from evodsp.planner.program import SampleSizes

GIB = 2**30
TINY = 1e12
"""Multiplications of a target that is so quick that nobody needs to be told."""
_SURE = 0.75
"""Share of the calculated memory that is needed for certain: it has been a fifth too high and a fifth too low
(scripts/benchmarks/results/estimate_check.csv). A target that needs more than is free even so is refused; one that may fit is
tried."""
_GRID = 1.04
"""Ratio of sizes that are calculated: targets in between share the larger one's result."""
_SMALL_WORKING = 64 << 20
_FEW_ROWS = SampleSizes(0, 128, 1024)


@dataclass(frozen=True)
class There:
    """A device, of which each rank has one; ranks on a CPU share it."""

    name: str
    free: int
    """Bytes that all its ranks together may take."""
    shared: bool
    """Whether all ranks take their memory from it."""
    device: Device | None
    """Its rates; None: of an unknown kind."""
    links: Links | None = None

    def fits(self, total: int, ranks: int) -> bool:
        return total * (ranks if self.shared else 1) <= self.free


def there(device: torch.device) -> There:
    """A device of this machine, with the memory that is free now."""
    if device.type != "cuda":
        return There("this machine", free_memory(), True, this_cpu())
    name = torch.cuda.get_device_name(device)
    free = torch.cuda.mem_get_info(device)[0]
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    known = next((own for own in names("device") if own.upper() in name.upper()), None)
    return There(name, free + cached, False, *_planned(known)) if known else There(name, free + cached, False, None)


def there_named(name: str) -> There:
    """A device by its name or by the path of its file. Raises UserError."""
    device, links = _planned(name)
    return There(device.name, device.usable, not device.on_gpu, device, links)


def _planned(name: str) -> tuple[Device, Links]:
    device = load_device(name)
    return device, Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)


def prediction_of(
    config: PredictConfig,
    model: ModelConfig,
    features: FeatureConfig,
    residues: int,
    memory: int | None,
    on: There,
) -> Prediction:
    """The prediction of a sequence with a deep alignment. `memory`: the working memory in bytes."""
    templates = max(1, features.max_templates) if model.templates.enabled else 0
    rows = features.msa_clusters - features.max_templates
    sizes = SampleSizes(residues, rows, features.extra_msa, templates)
    return _prediction(config, model, sizes, features.recycles + 1, memory, on)


def _prediction(
    config: PredictConfig, model: ModelConfig, sizes: SampleSizes, passes: int, memory: int | None, on: There
) -> Prediction:
    return Prediction(
        model,
        sizes,
        passes=passes,
        ensembles=config.ensembles,
        ranks=config.parallel.sequence,
        half=layer_dtype(config) == torch.bfloat16,
        tf32=config.matmul_precision == "high",
        on_gpu=not on.shared,
        memory=memory,
        plan=config.plan,
    )


def seconds(what: Prediction, on: There) -> float | None:
    """Of all passes of a seed; None on a device of an unknown kind."""
    return None if on.device is None else what.passes * prediction_times(what, on.device, on.links).total


def changes(what: Prediction, fits: Callable[[Prediction], bool]) -> list[str]:
    """Options with which it fits, each by itself; if there is none, those that fit together; empty if nothing helps."""
    single = list(_smaller(what))
    found = [option for option, changed in single if fits(changed)]
    more = _more_ranks(what, fits)
    if found or more:
        return [*found, *more]
    together = what
    for option, changed in single:
        if option == "--precision bf16":
            together = replace(together, half=True)
        elif option.startswith("--working_memory"):
            together = replace(together, memory=changed.memory)
        else:
            together = replace(together, sizes=changed.sizes)
    options = " ".join(option for option, _ in single)
    if options and fits(together):
        return [options]
    return [f"{options} {option}".strip() for option in _more_ranks(together, fits)]


def _smaller(what: Prediction) -> Iterator[tuple[str, Prediction]]:
    """Options that need less memory, and the prediction with each."""
    if not what.half:
        yield "--precision bf16", replace(what, half=True)
    if what.memory is None or what.memory > _SMALL_WORKING:
        yield "--working_memory 64MiB", replace(what, memory=_SMALL_WORKING)
    n, few = what.sizes, _FEW_ROWS
    if n.extra > few.extra:
        yield f"--extra_msa {few.extra}", replace(what, sizes=replace(n, extra=few.extra))


def _more_ranks(what: Prediction, fits: Callable[[Prediction], bool]) -> list[str]:
    """The least power of two of ranks that fits."""
    most = min(64, what.sizes.residues, what.sizes.clusters)
    for ranks in (2**power for power in range(1, 7)):
        if what.ranks < ranks <= most and fits(replace(what, ranks=ranks)):
            return [f"--parallel.sequence {ranks}"]
    return []


def text(name: str, what: Prediction, memory: PredictionMemory, free: int, took: float | None) -> str:
    """One line: the memory of a rank, what there is, and the time of a seed."""
    each = f" on each of {what.ranks} ranks" if what.ranks > 1 else ""
    time = "" if took is None else f"; about {duration(took)} a seed"
    return f"{name}: needs {size(memory.total)}{each}, {size(free)} free{time}"


def duration(took: float) -> str:
    """Seconds, rounded as an estimate deserves."""
    if took < 90:
        return f"{took:.2g} s" if took < 9.5 else f"{took:.0f} s"
    return f"{took / 60:.0f} min" if took < 5400 else f"{took / 3600:.1f} h"


def size(count: int) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**20:.0f} MiB" if count < GIB else f"{count / GIB:.1f} GiB"


def check_needs(
    name: str, residues: int, batch: Mapping[str, torch.Tensor], model: AlphaFold, config: PredictConfig
) -> str | None:
    """The line of `text` for a target whose features are made; None for a tiny one. On rank 0.

    Raises UserError if it does not fit, unless `config.try_anyway`.
    """
    device = next(model.parameters()).device
    rows = [batch[key].shape[2] for key in ("msa_feat", "extra_msa")]
    templates = batch["template_mask"].shape[2] if model.config.templates.enabled else 0
    passes = batch["aatype"].shape[1] // config.ensembles
    if _multiplications(model.config, model, residues, rows, passes * config.ensembles) < TINY:
        return None
    sizes = SampleSizes(_rounded(residues), _rounded(rows[0]), _rounded(rows[1]), templates)
    on = there(device)
    what = _prediction(config, model.config, sizes, passes, working_memory(config.working_memory, device), on)
    memory = prediction_memory(what)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", what.ranks)) if on.shared else 1
    already = memory.weights + (0 if what.on_gpu else memory.features)
    free = on.free // here + already
    line = text("the model", what, memory, free, seconds(what, on))
    if memory.total <= free:
        return line
    if _SURE * memory.total <= free or config.try_anyway:
        return f"{line}; it may not fit"

    def fits(changed: Prediction) -> bool:
        return on.fits(prediction_memory(changed).total - memory.weights, changed.ranks)

    helps = changes(what, fits)
    each = f" on each of {what.ranks} ranks" if what.ranks > 1 else ""
    instead = f"change one of: {', '.join(helps)}" if helps else "no setting makes it fit: take a larger machine"
    raise UserError(
        f"{name}: {residues:,} residues need {size(memory.total)} of memory{each}, "
        f"and {size(free)} are free ({on.name}); {instead}. --try_anyway true runs it all the same"
    )


def _multiplications(config: ModelConfig, model: AlphaFold, residues: int, rows: list[int], sets: int) -> int:
    """About how many a target takes: each parameter meets each pair of residues or each residue of each row."""
    stacks = ((model.evoformer, rows[0]), (model.extra_msa_stack, rows[1]))
    return sets * sum(
        sum(p.numel() for p in stack.parameters()) * residues * max(residues, own) for stack, own in stacks
    )


def _rounded(number: int) -> int:
    """The next larger number of a grid, so that targets of similar sizes share a calculation."""
    if number <= 32:
        return number
    return math.ceil(_GRID ** math.ceil(math.log(number, _GRID) - 1e-9))
