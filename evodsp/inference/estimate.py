"""`evodsp estimate`: says, before a prediction runs, what memory and time it needs, and what to change if it does not fit."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from typing import Any

import torch

from evodsp.config import FeatureConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.inference.devices import device_of, working_memory
from evodsp.inference.estimate_config import EstimateConfig
from evodsp.inference.inputs import read_inputs
from evodsp.inference.needs import There, changes, prediction_of, seconds, size, text, there, there_named
from evodsp.inference.provenance import feature_config
from evodsp.planner.prediction import WORKING_SHARE, Prediction, pair_share, prediction_memory, prediction_times
from evodsp.printing import show
from evodsp.ranges import memory_size
from evodsp.weights.checkpoint import load_features, load_model
from evodsp.weights.config import published_features


def run(settings: EstimateConfig, words: list[str]) -> int:
    """Print the estimate of each length, write the JSON file, and return the exit code: 1 if one does not fit."""
    on, memory = _place(settings)
    model, features = _model(settings)
    features = feature_config(settings.sizes, features)
    found = []
    for residues, of in sorted(_lengths(settings).items()):
        what = prediction_of(settings.passes, model, features, residues, memory, on)
        _check_ranks(what)
        found.append(_estimate(what, of, on))
    show(
        f"{on.name}, {settings.precision}, {features.recycles + 1} passes a seed, {features.msa_clusters} MSA rows, "
        f"{features.extra_msa} extra ones, {what.sizes.templates} templates. Times are a model's, not measured."
    )
    for one in found:
        show("\n".join(one["lines"]))
    if settings.output is not None:
        with whole_file(settings.output) as partial:
            rows = [{key: value for key, value in one.items() if key != "lines"} for one in found]
            partial.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(one["fits"] for one in found) else 1


def _estimate(what: Prediction, names: list[str], on: There) -> dict[str, Any]:
    """The numbers of a length, and the lines that say them."""
    label = f"{what.sizes.residues:,} residues" + (f" ({_some(names)})" if names else "")
    ranks = what.ranks
    free = on.free // ranks if on.shared else on.free
    if not on.fits(pair_share(what), ranks):
        return _hopeless(what, names, label, free)
    memory = prediction_memory(what)
    fits, took = on.fits(memory.total, ranks), seconds(what, on)
    parts = {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory) if field.name != "at"}
    lines = [
        text(label, what, memory, free, took),
        "  " + ", ".join(f"{name} {size(value)}" for name, value in parts.items() if value) + f"; most in: {memory.at}",
    ]
    entry = {
        "residues": what.sizes.residues,
        "names": names,
        "ranks": ranks,
        "bytes": parts,
        "total_bytes": memory.total,
    }
    entry |= {"at": memory.at, "free_bytes": free, "fits": fits, "seconds_a_seed": took}
    if ranks > 1 and on.device is not None:
        one = prediction_times(what, on.device, on.links)
        entry |= {"communicated_bytes_a_pass": one.bytes, "collectives_a_pass": one.calls}
        lines.append(f"  communication of a rank: {size(one.bytes)} in {one.calls:,} collectives a pass")
    if not fits:
        helps = changes(what, lambda changed: on.fits(prediction_memory(changed).total, changed.ranks))
        lines.append("  does not fit; it would with " + (", or ".join(helps) or "no setting: take a larger device"))
        entry["changes"] = helps
    return {**entry, "lines": lines}


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _place(settings: EstimateConfig) -> tuple[There, int | None]:
    """Where it would run, and the working memory in bytes."""
    kind = settings.device.partition(":")[0]
    if kind in ("auto", "cpu", "cuda"):
        device = device_of(settings.device)
        return there(device), working_memory(settings.working_memory, device)
    on = there_named(settings.device)
    if settings.working_memory != "auto":
        return on, working_memory(settings.working_memory, torch.device("cpu"))
    assert on.device is not None
    return on, int(on.device.memory_gib * 2**30) // WORKING_SHARE if on.device.on_gpu else memory_size("", "256MiB")


def _model(settings: EstimateConfig) -> tuple[ModelConfig, FeatureConfig]:
    if settings.checkpoint is None:
        name = settings.weights or settings.preset or "model_1_ptm"
        return ModelConfig.preset(name), published_features(name)
    if not settings.checkpoint.exists():
        raise UserError(f"{settings.checkpoint}: no such checkpoint; check --checkpoint")
    model = load_model(settings.checkpoint, preset=settings.preset)
    return model.config, load_features(settings.checkpoint, settings.preset)


def _hopeless(what: Prediction, names: list[str], label: str, free: int) -> dict[str, Any]:
    """`_estimate` of a chain whose pair representation alone does not fit. To follow its pass would take minutes."""
    share = pair_share(what)
    line = (
        f"{label}: does not fit; the pair representation alone takes {size(share)} on each rank, and {size(free)} are free; "
        "raise --parallel.sequence, take larger devices, or split the sequence into domains"
    )
    entry = {"residues": what.sizes.residues, "names": names, "ranks": what.ranks, "bytes": {"pair": share}}
    entry |= {
        "total_bytes": share,
        "at": "pair",
        "free_bytes": free,
        "fits": False,
        "seconds_a_seed": None,
        "changes": [],
    }
    return {**entry, "lines": [line]}


def _lengths(settings: EstimateConfig) -> dict[int, list[str]]:
    """The names of the records of each length."""
    if settings.residues is not None:
        return {settings.residues: []}
    records, failures = read_inputs(settings.sources)
    for failure in failures:
        show(f"left out: {failure.reason}")
    if not records:
        raise UserError("no record of the inputs can be predicted; see the lines above")
    found = defaultdict(list)
    for record in records:
        found[len(record.query)].append(record.query.name)
    return found


def _check_ranks(what: Prediction) -> None:
    most = min(what.sizes.residues, what.sizes.clusters)
    if what.ranks > most:
        raise UserError(
            f"--parallel.sequence is {what.ranks}, but with {what.sizes.residues} residues and {what.sizes.clusters} rows of "
            f"the clustered MSA it can be at most {most}; lower it"
        )
