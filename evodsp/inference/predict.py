"""FASTA + alignments + checkpoint -> structures. One model serves all targets and seeds.

Everything a user can get wrong is checked before the model runs and before anything is written.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from evodsp.config import FeatureConfig, HeadsConfig
from evodsp.data.dataset import collate, empty_templates, prediction_sample
from evodsp.data.store import read_alignment_dir
from evodsp.data.transforms import check_config
from evodsp.data.types import Alignment
from evodsp.errors import UserError
from evodsp.inference.config import PredictConfig
from evodsp.inference.results import TIMINGS, PredictionResult, finished, whole_folder, write_json, write_results
from evodsp.inference.targets import Target, alignment_files, digest, find_targets
from evodsp.inference.writers import AlignedError, PredictedStructure
from evodsp.losses.confidence import compute_pae, compute_plddt, compute_ptm, highest_pae
from evodsp.model.alphafold import AlphaFold
from evodsp.model.outputs import ModelOutput
from evodsp.weights.checkpoint import load_features, load_model

Report = Callable[[str], None]

_SIZES = ("recycles", "msa_clusters", "extra_msa")
"""Options that, where not given, are as in training."""


@dataclass(frozen=True)
class _SeedTimes:
    """Seconds spent on one seed."""

    features: float
    passes: tuple[float, ...]


def predict(config: PredictConfig, report: Report = print) -> list[PredictionResult]:
    """Predict every record of `config.fasta`; results in its order.

    `report` gets a line per stage. Raises UserError for anything wrong with the inputs: then no model has run and nothing has
    been written. A target's folder appears only when it is complete.
    """
    targets = find_targets(config.fasta, config.alignments)
    device = _device(config.device)
    _check_output(config.output)
    if not config.checkpoint.is_file():
        raise UserError(f"{config.checkpoint}: no such checkpoint; check --checkpoint")
    trained = load_features(config.checkpoint)
    features = _feature_config(config, trained)
    checkpoint = digest(config.checkpoint)
    settings = [_settings(config, features, target, checkpoint) for target in targets]
    results = {
        target.query.name: finished(config.output / target.query.name, made_with, config.overwrite)
        for target, made_with in zip(targets, settings, strict=True)
    }
    open_targets = [target for target in targets if results[target.query.name] is None]
    for target in open_targets:
        read_alignment_dir(target.alignments, target.query)
    if open_targets:
        model = load_model(config.checkpoint, config.raw).to(device).eval()

    report(_sizes_line(features, trained))
    complete: list[PredictionResult] = []
    for number, (target, made_with) in enumerate(zip(targets, settings, strict=True), start=1):
        report(f"[{number}/{len(targets)}] {target.query.name}: {len(target.query)} residues")
        result = results[target.query.name]
        if result is not None:
            report(f"  kept: {result.folder} is complete and made with the same inputs (--overwrite predicts again)")
        else:
            result = _predict_target(target, model, config, features, made_with, report)
        complete.append(result)
    return complete


def _predict_target(
    target: Target,
    model: AlphaFold,
    config: PredictConfig,
    features: FeatureConfig,
    settings: dict[str, Any],
    report: Report,
) -> PredictionResult:
    """All seeds of one target: features, model, files."""
    start = time.perf_counter()
    alignments = read_alignment_dir(target.alignments, target.query)
    reading = time.perf_counter() - start
    rows = sum(map(len, alignments))
    report(f"  read {rows:,} sequences in {len(alignments)} alignments, {reading:.1f} s")
    if model.config.templates.enabled:
        report("  templates: none")

    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    structures: dict[int, PredictedStructure] = {}
    times: dict[int, _SeedTimes] = {}
    for seed in _seeds(config):
        structures[seed], times[seed] = _predict_seed(target, alignments, model, features, seed, report)

    start = time.perf_counter()
    folder = config.output / target.query.name
    with whole_folder(folder) as work:
        result = write_results(work, structures, config.format, settings)
        timings = {
            "name": target.query.name,
            "residues": len(target.query),
            "alignment_rows": rows,
            "device": str(device),
            "features_seconds": round(reading + sum(t.features for t in times.values()), 3),
            "model_seconds": round(sum(sum(t.passes) for t in times.values()), 3),
            "writing_seconds": round(time.perf_counter() - start, 3),
            "seeds": [
                {"seed": s, "features_seconds": round(t.features, 3), "pass_seconds": [round(p, 3) for p in t.passes]}
                for s, t in times.items()
            ],
            **_peak_memory(device),
        }
        write_json(work / TIMINGS, timings)
    result = PredictionResult(result.name, folder, result.format, result.mean_plddt, kept=False)
    best = result.mean_plddt[result.best]
    report(f"  wrote {folder}, {time.perf_counter() - start:.1f} s; best: {result.structure().name}, pLDDT {best:.1f}")
    return result


def _predict_seed(
    target: Target, alignments: list[Alignment], model: AlphaFold, config: FeatureConfig, seed: int, report: Report
) -> tuple[PredictedStructure, _SeedTimes]:
    start = time.perf_counter()
    sample = prediction_sample(target.query, alignments, config, seed)
    if model.config.templates.enabled:
        # A model made for templates reads their features even where there are none: one that is masked changes nothing.
        empty = empty_templates(len(target.query), len(sample["aatype"]), 1)
        sample |= {name: torch.from_numpy(values) for name, values in empty.items()}
    batch = collate([sample])
    features = time.perf_counter() - start
    report(f"  seed {seed}: features, {features:.1f} s")
    try:
        output, passes = _run(model, batch)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{target.query.name}: {len(target.query)} residues do not fit into the memory of this GPU; "
            "lower --msa_clusters and --extra_msa, or use --device cpu"
        ) from error
    structure = _structure(target, batch, output, model.config.heads)
    ptm = "" if structure.aligned_error is None else f", pTM {structure.aligned_error.ptm:.2f}"
    report(
        f"  seed {seed}: model, {sum(passes):.1f} s ({len(passes)} passes, {sum(passes) / len(passes):.1f} s each); "
        f"mean pLDDT {structure.mean_plddt:.1f}{ptm}"
    )
    return structure, _SeedTimes(features, passes)


def _run(model: AlphaFold, batch: dict[str, torch.Tensor]) -> tuple[ModelOutput, tuple[float, ...]]:
    """The model on one batch, and the seconds of each pass (the structure module ends a pass)."""
    device = next(model.parameters()).device
    marks = [time.perf_counter()]

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    hook = model.structure_module.register_forward_hook(mark)
    try:
        with torch.inference_mode():
            output = model({name: value.to(device) for name, value in batch.items()})
    finally:
        hook.remove()
    return output, tuple(after - before for before, after in pairwise(marks))


def _structure(
    target: Target, batch: dict[str, torch.Tensor], output: ModelOutput, heads: HeadsConfig
) -> PredictedStructure:
    length = len(target.query)  # padding, if any, follows
    return PredictedStructure(
        name=target.query.name,
        aatype=batch["aatype"][0, 0, :length].cpu().numpy(),
        positions=output.structure.positions[0, :length].float().cpu().numpy(),
        mask=output.structure.mask[0, :length].float().cpu().numpy(),
        plddt=compute_plddt(output.plddt_logits.float())[0, :length].cpu().numpy(),
        aligned_error=_aligned_error(length, batch, output, heads),
    )


def _aligned_error(
    length: int, batch: dict[str, torch.Tensor], output: ModelOutput, heads: HeadsConfig
) -> AlignedError | None:
    """What the PAE head says of the first `length` residues; None without that head."""
    if output.pae_logits is None:
        return None
    logits = output.pae_logits[0, :length, :length].float()
    mask = batch["seq_mask"][0, -1, :length].to(logits)
    return AlignedError(
        pae=compute_pae(logits, heads.pae_max_error).cpu().numpy(),
        highest=highest_pae(heads.pae_bins, heads.pae_max_error),
        ptm=float(compute_ptm(logits, mask, heads.pae_max_error)),
    )


def _feature_config(config: PredictConfig, trained: FeatureConfig) -> FeatureConfig:
    """The checkpoint's features of the whole chain, with the sizes that the user gave in place of its own."""
    given = {name: value for name in _SIZES if (value := getattr(config, name)) is not None}
    features = replace(trained, crop_size=None, uniform_recycling=False, **given)
    check_config(features)
    return features


def _sizes_line(features: FeatureConfig, trained: FeatureConfig) -> str:
    """The sizes in use, and beside those that the user changed the checkpoint's own."""
    sizes = []
    for name in _SIZES:
        used, default = getattr(features, name), getattr(trained, name)
        sizes.append(f"{name} {used}" if used == default else f"{name} {used} (default {default})")
    return f"sizes: {', '.join(sizes)}"


def _seeds(config: PredictConfig) -> list[int]:
    return list(range(config.first_seed, config.first_seed + config.seeds))


def _settings(config: PredictConfig, features: FeatureConfig, target: Target, checkpoint: str) -> dict[str, Any]:
    """All that the files depend on: an earlier result is kept only if every item agrees."""
    return {
        "sequence": target.query.letters,
        "alignments": digest(*alignment_files(target.alignments)),
        "checkpoint": checkpoint,
        "raw": config.raw,
        "seeds": _seeds(config),
        **{name: getattr(features, name) for name in _SIZES},
        "format": config.format,
    }


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device is '{name}', which PyTorch cannot use here; use cpu or auto") from error
    return device


def _check_output(output: Path) -> None:
    """The output folder is not made yet, but it must be possible to make it."""
    there = next(folder for folder in (output, *output.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UserError(f"{there}: is a file, so no results can be put into {output}; choose another --output")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{there}: no permission to write results here; choose another --output")


def _peak_memory(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"peak_memory_mib": torch.cuda.max_memory_allocated(device) >> 20, "peak_memory_of": "GPU, this target"}
    # kilobytes on Linux, bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
    return {"peak_memory_mib": peak, "peak_memory_of": "process, so far"}
