"""`evodsp estimate`, and the check before a target runs: what memory and time a prediction needs, and what to change if
it does not fit. `evodsp.planner.prediction` calculates both.

`evodsp estimate --gpus N` tells memory and time of a structure on 1, 2, 4, … ranks, and the structures that all devices make
in an hour.
"""

from __future__ import annotations

import gc
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.inference.config import EstimateConfig, PassSettings
from evodsp.inference.devices import device_of, working_memory
from evodsp.inference.jobs import check_ranks, feature_config
from evodsp.inference.representations import saved_bytes
from evodsp.inference.results import RecordFailure
from evodsp.inference.target_msas import MSAS
from evodsp.inference.targets import find_targets
from evodsp.model.alphafold import AlphaFold
from evodsp.planner.device import is_tight
from evodsp.planner.prediction import (
    FEWEST_CHAINS,
    GIB,
    Machine,
    PlannedPrediction,
    PredictionNeeds,
    changes,
    prediction_memory,
    prediction_needs,
    size,
    working_memory_of,
)
from evodsp.planner.program import SampleSizes
from evodsp.planner.report import TIGHT, add_memory, add_parts, aligned, by_ranks
from evodsp.planner.simulate import Times
from evodsp.printing import counted, show
from evodsp.report.page import Page, Series, lines
from evodsp.weights.checkpoint import load_model
from evodsp.weights.config import published_features
from evodsp.weights.parameter_file import located

_HEADINGS = (
    "ranks a structure", "GiB", "fits", "s a structure", "structures/h", "efficiency", "exposed", "collectives a pass",
)  # fmt: skip


@dataclass(frozen=True)
class PredictionPlan:
    """A prediction on several numbers of ranks."""

    devices: int
    machine: Machine
    shares: list[PredictionNeeds]
    """The needs of each rank, by the number of ranks. Efficiency is measured against the first."""

    def fits(self, share: PredictionNeeds) -> bool:
        """Whether a device has the memory."""
        return self.machine.fits(share.memory.total, share.what.ranks)

    def tight(self, share: PredictionNeeds) -> bool:
        """Whether it fits, but hardly."""
        return self.fits(share) and is_tight(share.memory.total, self.machine.free_for(share.what.ranks))

    def hourly(self, share: PredictionNeeds) -> float:
        """Structures that all devices make in an hour."""
        return 3600 / seconds(share) * (self.devices // share.what.ranks)

    @property
    def fitting(self) -> list[PredictionNeeds]:
        return [share for share in self.shares if self.fits(share)]

    @property
    def fastest(self) -> PredictionNeeds | None:
        """The share that gives one structure soonest; None if nothing fits."""
        return min(self.fitting, key=seconds, default=None)

    @property
    def most(self) -> PredictionNeeds | None:
        """The share that gives most structures an hour; None if nothing fits."""
        return max(self.fitting, key=self.hourly, default=None)


def one_pass(share: PredictionNeeds) -> Times:
    """The times of a pass."""
    assert share.one_pass is not None, "the rates of a planned device are known"
    return share.one_pass


def seconds(share: PredictionNeeds) -> float:
    """The time of a structure."""
    assert share.seconds is not None, "the rates of a planned device are known"
    return share.seconds


def plan_prediction(what: PlannedPrediction, devices: int, machine: Machine) -> PredictionPlan | None:
    """Plan the prediction on 1, 2, 4, … ranks, up to one a device, but for those whose pair representation alone does not fit;
    None if no number of ranks holds it. Raises UserError if the device's rates are not known.
    """
    if machine.device is None:
        raise UserError(
            f"--gpus compares times, but those of {machine.name} are not known; name a kind of device (--device)"
        )
    most = min(devices, what.sizes.residues, what.sizes.clusters + what.sizes.templates)
    planned = [replace(what, ranks=2**k) for k in range(most.bit_length())]
    planned = [one for one in planned if machine.fits(one.pair_share, one.ranks)]
    if not planned:
        return None
    with ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=gc.freeze) as pool:
        begun = [pool.submit(prediction_needs, one, machine.device, machine.links) for one in planned]
        return PredictionPlan(devices, machine, [future.result() for future in begun])


def text(found: PredictionPlan) -> list[str]:
    """Lines for a terminal."""
    return [*aligned([_HEADINGS, *_rows(found)]), verdict(found)]


def verdict(found: PredictionPlan) -> str:
    """A sentence that names the number of ranks to take, or what is missing."""
    fastest, most = found.fastest, found.most
    if fastest is None or most is None:
        least = min(found.shares, key=lambda share: share.memory.total)
        need = "ranks need" if least.what.ranks > 1 else "rank needs"
        return (
            f"nothing fits: {least.what.ranks} {need} {least.memory.total / GIB:.1f} GiB each, "
            f"{(least.memory.total - found.machine.free_for(least.what.ranks)) / GIB:.1f} more than there are. Take more or "
            "larger devices, or fewer rows"
        )
    hardly = TIGHT * (found.tight(fastest) or found.tight(most))
    return (
        f"one structure soonest: --parallel.sequence {fastest.what.ranks}, {seconds(fastest):.3g} s; "
        f"many structures: --parallel.sequence {most.what.ranks}, {found.hourly(most):,.0f} an hour on "
        f"{counted(found.devices, 'device')}{hardly}"
    )


def add_plan(made: Page, found: PredictionPlan) -> None:
    """Add tables and charts to a page."""
    taken = [share for share in (found.fastest, found.most) if share is not None]
    made.verdict(verdict(found), bool(taken) and not any(map(found.tight, taken)))
    made.heading("Ranks that share a structure")
    made.table(_HEADINGS, _rows(found), set(_HEADINGS) - {"fits"})
    labels = [str(share.what.ranks) for share in found.shares]
    memory = {part: [share.memory.parts[part] / GIB for share in found.shares] for part in found.shares[0].memory.parts}
    add_memory(made, labels, memory, found.machine.free_for(1) / GIB)
    if len(found.shares) > 2:  # two points are no curve; the table has them
        x = [share.what.ranks for share in found.shares]
        hourly = [found.hourly(share) for share in found.shares]
        made.charts(
            {
                "Seconds of a structure": by_ranks(
                    x, "ranks of a structure", [seconds(share) for share in found.shares], "seconds"
                ),
                "Structures an hour on all devices": lines(
                    [Series("structures", x, hourly)], "ranks of a structure", "structures an hour", "zero"
                ),
            }
        )
    shown = found.fastest or found.shares[-1]
    add_parts(made, f"Where a pass goes on {shown.what.ranks} ranks", one_pass(shown))


def _rows(found: PredictionPlan) -> Sequence[tuple[str, ...]]:
    first = seconds(found.shares[0]) * found.shares[0].what.ranks
    return [
        (
            str(share.what.ranks),
            f"{share.memory.total / GIB:.1f}",
            "tight" if found.tight(share) else "yes" if found.fits(share) else "NO",
            f"{seconds(share):.3g}",
            f"{found.hourly(share):,.0f}",
            f"{first / (seconds(share) * share.what.ranks):.0%}",
            f"{one_pass(share).exposed / one_pass(share).total:.0%}",
            f"{one_pass(share).calls:,}",
        )
        for share in found.shares
    ]


TINY = 1e12
"""Multiplications of a target that is so quick that nobody needs to be told."""
_SURE = 0.75
"""Share of the calculated memory that is needed for certain: it has been a fifth too high and a fifth too low
(scripts/benchmarks/results/estimate_check.csv). A target that needs more than is free even so is refused; one that may fit is
tried."""
_GRID = 1.04
"""Ratio of the sizes that are calculated before a target runs: targets in between share the larger one's result."""


def run(settings: EstimateConfig, words: list[str]) -> int:
    """Print the estimate of each length, write the JSON file, and return the exit code: 1 if one does not fit."""
    machine, memory = _place(settings)
    model, trained = _model(settings)
    features = feature_config(settings.sizes, trained)
    rows, templates = features.msa_clusters - features.max_templates, features.max_templates
    templates = max(1, templates) if model.templates.enabled else 0
    records = _records(settings, model)
    depths = {depth for *_, depth in records}
    assumed = " Alignments are assumed to be as deep as the model takes (--alignments counts theirs)." * (
        None in depths
    )
    devices = f"{settings.gpus} x " * (settings.gpus > 1) + machine.name
    title = (
        f"{devices}, {settings.passes.precision}, {counted(features.recycles + 1, 'pass')} a seed, "
        f"{features.msa_clusters} MSA rows, {features.extra_msa} extra ones, {counted(templates, 'template')}. "
        f"Times are a model's, not measured.{assumed}"
    )
    show(title)
    page, entries, fit = Page(f"Prediction on {devices}", title), [], True
    for (residues, chains, depth), names in sorted(
        records.items(), key=lambda one: (*one[0][:2], one[0][2] or math.inf)
    ):
        own = rows if depth is None else min(rows, depth)
        extra = features.extra_msa if depth is None else min(features.extra_msa, max(1, depth - own))
        check_ranks(settings.parallel.sequence, residues, own)
        sizes = SampleSizes(residues, own, extra, templates, chains)
        what = _planned(settings.passes, model, sizes, features.recycles + 1, memory, machine)
        compared = plan_prediction(what, settings.gpus, machine) if settings.gpus > 1 else None
        if compared is not None:
            page.heading(_label(what, names))
            add_plan(page, compared)
            lines = [_label(what, names), *text(compared)]
            of_length = [_entry(needs, names, machine) for needs in compared.shares]
        else:  # of a chain that is too long for all of them, too
            lines, one = _estimate(what, names, machine, depth)
            of_length = [one]
        if settings.saved is not None:
            sizes_of_seed = saved_bytes(settings.saved, model, own, residues, features.recycles + 1)
            lines.append(
                f"  saved of a seed: {', '.join(f'{name} {size(number)}' for name, number in sizes_of_seed.items())}"
            )
            of_length = [{**entry, "saved_bytes": sizes_of_seed} for entry in of_length]
        show("\n".join(lines))
        entries += of_length
        fit = fit and any(entry["fits"] for entry in of_length)
    if settings.output is not None:
        write_text(settings.output.with_suffix(".json"), json.dumps(entries, indent=1) + "\n")
        if settings.output.suffix == ".html":
            write_text(settings.output, page.html())
            show(f"page: {settings.output}, numbers: {settings.output.with_suffix('.json')}")
    return 0 if fit else 1


def check_needs(
    name: str,
    residues: int,
    batch: Mapping[str, torch.Tensor],
    model: AlphaFold,
    settings: PassSettings,
    try_anyway: bool,
) -> str | None:
    """A line that says what a target needs whose features are made; None for a tiny one. Called on rank 0.

    Raises UserError if the target does not fit, unless `try_anyway`.
    """
    device = next(model.parameters()).device
    rows = [batch[key].shape[2] for key in ("msa_feat", "extra_msa")]
    templates = batch["template_mask"].shape[2] if model.config.templates.enabled else 0
    sets = batch["aatype"].shape[1]
    if sets * _multiplications(model, residues, rows) < TINY:
        return None
    chains = int(batch["asym_id"].max()) if "asym_id" in batch else 1
    recorded = model.graphs is not None  # of other sizes than those of the grid
    of_set = (residues, *rows) if recorded else (_rounded(residues), *map(_rounded, rows))
    sizes = SampleSizes(of_set[0], of_set[1], of_set[2], templates, chains)
    machine, memory = Machine.here(device), working_memory(settings.working_memory, device)
    what = _planned(settings, model.config, sizes, sets // settings.ensembles, memory, machine)
    what = replace(what, graphs=recorded)
    needs = prediction_needs(what, machine.device, machine.links)
    total, weights = needs.memory.total, needs.memory.weights
    there = weights + (0 if what.on_gpu else needs.memory.features)  # the model and the features are in memory already
    free = machine.free_for(int(os.environ.get("LOCAL_WORLD_SIZE", what.ranks))) + there
    line = needs.line("the model", free)
    if total <= free:
        return line
    launched = total - needs.memory.recorded  # a pass that cannot be recorded for want of memory is launched
    if _SURE * launched <= free or try_anyway:
        return f"{line}; it may not fit"

    def fits(changed: PlannedPrediction) -> bool:
        return machine.fits(prediction_memory(changed).total - weights, changed.ranks)

    helps = changes(what, fits)
    each = f" on each of {what.ranks} ranks" if what.ranks > 1 else ""
    instead = f"change one of: {', '.join(helps)}" if helps else "no setting makes it fit: take a larger machine"
    raise UserError(
        f"{name}: {residues:,} residues need {size(total)} of memory{each}, "
        f"and {size(free)} are free ({machine.name}); {instead}. --try_anyway true runs it all the same"
    )


def _planned(
    settings: PassSettings, model: ModelConfig, sizes: SampleSizes, passes: int, memory: int | None, machine: Machine
) -> PlannedPrediction:
    """The prediction as the planner takes it. `passes`: their number for a seed. `memory`: the working memory in bytes."""
    return PlannedPrediction(
        model,
        sizes,
        passes=passes,
        ensembles=settings.ensembles,
        ranks=settings.ranks,
        half=settings.half,
        tf32=settings.matmul_precision == "high",
        on_gpu=not machine.shared,
        memory=memory,
        plan=settings.plan,
        graphs=settings.cuda_graphs,
    )


def _label(what: PlannedPrediction, names: list[str]) -> str:
    return f"{what.sizes.length}" + (f" ({_some(names)})" if names else "")


def _head(what: PlannedPrediction, names: list[str]) -> dict[str, Any]:
    sizes = what.sizes
    head = {"residues": sizes.residues, "chains": sizes.chains, "names": names, "ranks": what.ranks}
    return head | {"msa_rows": sizes.clusters, "extra_rows": sizes.extra}


def _entry(needs: PredictionNeeds, names: list[str], machine: Machine) -> dict[str, Any]:
    """The entry of the JSON file, in bytes and seconds."""
    what, memory = needs.what, needs.memory
    entry = {**_head(what, names), "bytes": memory.parts, "total_bytes": memory.total, "at": memory.at}
    entry |= {"free_bytes": machine.free_for(what.ranks), "fits": machine.fits(memory.total, what.ranks)}
    entry["seconds_a_seed"] = needs.seconds
    if what.ranks > 1 and (one := needs.one_pass) is not None:
        entry |= {
            "communicated_bytes_a_pass": one.bytes,
            "collectives_a_pass": one.calls,
            "exposed_seconds": one.exposed,
        }
    return entry


def _estimate(
    what: PlannedPrediction, names: list[str], machine: Machine, depth: int | None
) -> tuple[list[str], dict[str, Any]]:
    """The lines that tell the needs of a length, and the entry of the JSON file. `names`: the records of this length. `depth`:
    the rows of their alignments; None: as many as the model takes."""
    label, free = _label(what, names), machine.free_for(what.ranks)
    if not machine.fits(what.pair_share, what.ranks):  # to follow the pass of such a chain would take minutes
        pair = what.pair_share
        line = (
            f"{label}: does not fit; the pair representation alone takes {size(pair)} on each rank, and {size(free)} are "
            "free; raise --parallel.sequence, take larger devices, or split the sequence into domains"
        )
        entry = {**_head(what, names), "bytes": {"pair": pair}, "total_bytes": pair, "at": "pair", "free_bytes": free}
        return [line], {**entry, "fits": False, "seconds_a_seed": None, "changes": []}
    needs = prediction_needs(what, machine.device, machine.links)
    entry, memory = _entry(needs, names, machine), needs.memory
    lines = [
        needs.line(label, free),
        ("  " if depth is None else f"  alignments of at most {counted(depth, 'row')}: ")
        + ", ".join(f"{name} {size(value)}" for name, value in memory.parts.items() if value)
        + f"; most in: {memory.at}",
    ]
    if what.ranks > 1 and (one := needs.one_pass) is not None:
        lines.append(f"  communication of a rank: {size(one.bytes)} in {one.calls:,} collectives a pass")
    if not entry["fits"]:
        helps = changes(what, lambda changed: machine.fits(prediction_memory(changed).total, changed.ranks))
        lines.append("  does not fit; it would with " + (", or ".join(helps) or "no setting: take a larger device"))
        entry["changes"] = helps
    return lines, entry


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _place(settings: EstimateConfig) -> tuple[Machine, int | None]:
    """The machine of the prediction, and the working memory in bytes."""
    if settings.device.partition(":")[0] in ("auto", "cpu", "cuda"):
        device = device_of(settings.device)
        return Machine.here(device), working_memory(settings.working_memory, device)
    machine = Machine.named(settings.device)
    if settings.working_memory != "auto":
        return machine, working_memory(settings.working_memory, torch.device("cpu"))
    assert machine.device is not None, "a named device has rates"
    return machine, working_memory_of(machine.device)


def _model(settings: EstimateConfig) -> tuple[ModelConfig, FeatureConfig]:
    if settings.checkpoint is None:
        name = _name(settings)
        return ModelConfig.preset(name), published_features(name)
    checkpoint = located(settings.checkpoint)
    if not checkpoint.exists():
        raise UserError(f"{checkpoint}: no such checkpoint; check --checkpoint")
    model = load_model(checkpoint, preset=settings.preset, layers=settings.layers)
    return model.config, model.trained_features or FeatureConfig()


def _name(settings: EstimateConfig) -> str:
    """The name of the model if no checkpoint is given."""
    return settings.weights or settings.preset or "model_1_ptm"


def _records(settings: EstimateConfig, model: ModelConfig) -> dict[tuple[int, int, int | None], list[str]]:
    """The names of the records of each length, number of chains and depth: the rows of their alignments, rounded up; None: not
    known."""
    if settings.residues is not None:
        return {(settings.residues, FEWEST_CHAINS[model.arrangement], None): []}
    targets, failures = find_targets(settings.sources, settings.alignments)
    reader, shown = MSAS[model.arrangement], Path(settings.checkpoint or _name(settings))
    found = defaultdict(list)
    for target in targets:
        known = settings.alignments is not None or target.alignments is not None
        try:
            reader.check(target, shown)
            depth = _rounded(reader.read(target).rows) if known else None
        except UserError as error:
            failures.append(RecordFailure(target.query.name, str(error)))
            continue
        found[len(target.query), len(target.parts), depth].append(target.query.name)
    for failure in failures:
        show(f"left out: {failure.reason}")
    if not found:
        raise UserError("no record of the inputs can be predicted; see the lines above")
    return found


def _multiplications(model: AlphaFold, residues: int, rows: list[int]) -> int:
    """About how many a pass takes: each parameter meets each pair of residues, or each residue of each row."""
    stacks = ((model.evoformer, rows[0]), (model.extra_msa_stack, rows[1]))
    return sum(sum(p.numel() for p in stack.parameters()) * residues * max(residues, own) for stack, own in stacks)


def _rounded(number: int) -> int:
    """The next larger number of a grid, so that targets of similar sizes share a calculation."""
    if number <= 32:
        return number
    return math.ceil(_GRID ** math.ceil(math.log(number, _GRID) - 1e-9))
