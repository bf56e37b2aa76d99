"""Predict structures from FASTA, alignments and a checkpoint. One model is loaded for all targets and seeds.

All inputs and settings are checked before the model runs and before anything is written.
"""

from __future__ import annotations

import resource
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from evodsp.config import FeatureConfig
from evodsp.data.chain_folder import read_alignment_dir
from evodsp.data.dataset import collate, prediction_sample
from evodsp.data.records import Alignment
from evodsp.data.templates.features import TemplateFeatures
from evodsp.errors import UserError
from evodsp.files import whole_folder
from evodsp.inference.config import PredictConfig
from evodsp.inference.provenance import check_target_fits_ranks, feature_config, result_settings, seeds, sizes_line
from evodsp.inference.results import TIMINGS, PredictionResult, finished, write_json, write_results
from evodsp.inference.target_templates import find_templates, takes_no_templates, template_source
from evodsp.inference.targets import Target, digest, find_targets
from evodsp.inference.writers import AlignedError, PredictedStructure
from evodsp.launch.consensus import all_of, check_same, from_first, on_first, tensors_from_first
from evodsp.model.alphafold import AlphaFold
from evodsp.model.confidence import compute_pae, compute_plddt, compute_ptm, highest_pae
from evodsp.model.in_place import use_memory
from evodsp.model.kernels.registry import choose, summary
from evodsp.model.matmul import float32_matmul
from evodsp.model.outputs import ModelOutput
from evodsp.model.primitives import use_exchange, use_kernels
from evodsp.output import check_output_folder
from evodsp.parallel.exchange import ShardedExchange
from evodsp.parallel.group import Group
from evodsp.ranges import memory_size
from evodsp.weights.checkpoint import load_features, load_model
from evodsp.weights.deepspeed import parameter_file

Report = Callable[[str], None]


@dataclass(frozen=True)
class _SeedRun:
    """Times of one seed, and its last change."""

    features: float
    """Seconds spent on features."""
    passes: tuple[float, ...]
    """Seconds of each pass through the model."""
    ca_change: float | None
    """Change of CA-CA distances in the last pass (Å); None without a tolerance, or after a single pass."""

    @property
    def timings(self) -> dict[str, Any]:
        """The entry of timings.json."""
        timings: dict[str, Any] = {
            "features_seconds": round(self.features, 3),
            "pass_seconds": [round(p, 3) for p in self.passes],
        }
        return timings if self.ca_change is None else {**timings, "ca_change": round(self.ca_change, 3)}

    def model_line(self, most: int) -> str:
        """For the log, for example '12.0 s (3 of 4 passes, 4.0 s each; CA distances changed by 0.31 Å in the last)'."""
        number = len(self.passes)
        passes = f"{number} of {most} passes" if number < most else f"{most} pass{'es' * (most > 1)}"
        change = "" if self.ca_change is None else f"; CA distances changed by {self.ca_change:.2f} Å in the last"
        return f"{sum(self.passes):.1f} s ({passes}, {sum(self.passes) / number:.1f} s each{change})"


@dataclass(frozen=True)
class _Job:
    """One target, with everything that its prediction needs besides the alignments and the model."""

    target: Target
    templates: TemplateFeatures
    """The templates in use, best first."""
    templates_line: str
    templates_seconds: float
    """Seconds spent on finding the templates."""
    settings: dict[str, Any]
    """The settings that its files depend on."""
    earlier: PredictionResult | None
    """A complete result of an earlier run with the same settings."""


@dataclass(frozen=True)
class _Work:
    """What rank 0 reads and checks before the model runs."""

    jobs: list[_Job]
    features: FeatureConfig
    trained: FeatureConfig
    """The checkpoint's feature sizes."""
    model: AlphaFold | None
    """None if every result exists already."""


def predict(config: PredictConfig, report: Report = print, group: Group | None = None) -> list[PredictionResult]:
    """Predict every record of `config.fasta`; the results are in the file's order.

    `report` gets one line per stage. Raises UserError if an input is wrong: then no model has run and nothing has been written.
    A target's folder appears only when it is complete.

    `group`: the ranks that share each structure. All of them call this function with the same `config`. Rank 0 reads and
    writes all files, so the other ranks need no access to them. A UserError is raised on every rank.
    """
    device = device_of(config.device)
    check_same("settings", repr(config), group)
    work = from_first(lambda: _prepare(config, 1 if group is None else group.size), group)
    model, features = work.model, work.features
    if model is not None:
        model = model.to(device).eval()
        if group is not None:
            use_exchange(model, ShardedExchange(group), config.plan)
        kernels, choices = choose(
            config.kernels, device, _dtype(config), gradients=False, on_all_ranks=lambda value: all_of(value, group)
        )
        use_kernels(model, kernels)
        use_memory(model, _working_memory(config.working_memory, device))
        for line in summary(choices, device):
            report(line)

    report(sizes_line(features, work.trained, config.ensembles))
    complete: list[PredictionResult] = []
    for number, job in enumerate(work.jobs, start=1):
        report(f"[{number}/{len(work.jobs)}] {job.target.query.name}: {len(job.target.query)} residues")
        result = job.earlier
        if result is not None:
            report(f"  kept: {result.folder} is complete and has the same inputs (--overwrite predicts again)")
        else:
            assert model is not None
            result = _predict_target(job, model, config, features, report, group)
        complete.append(result)
    return complete


def check_launch(config: PredictConfig) -> None:
    """Raise UserError if an input is missing or a target cannot be spread over `parallel.sequence` ranks.

    For the process that starts the ranks: many processes that all end with the same mistake would load the machine for nothing.
    """
    targets, features, _ = _targets_and_sizes(config)
    try:
        for target in targets:
            check_target_fits_ranks(config.parallel.sequence, features, target)
    except UserError:
        for job in _jobs(config, features, targets):  # slower: finds out which results exist already and are kept
            if job.earlier is None:
                check_target_fits_ranks(config.parallel.sequence, features, job.target)


def _targets_and_sizes(config: PredictConfig) -> tuple[list[Target], FeatureConfig, FeatureConfig]:
    """The targets, their feature sizes, and the checkpoint's feature sizes."""
    targets = find_targets(config.fasta, config.alignments)
    check_output_folder(config.output)
    if not config.checkpoint.exists():
        raise UserError(f"{config.checkpoint}: no such checkpoint; check --checkpoint")
    trained = load_features(config.checkpoint, config.preset)
    return targets, feature_config(config, trained), trained


def _prepare(config: PredictConfig, ranks: int) -> _Work:
    """Check all inputs and read the checkpoint."""
    targets, features, trained = _targets_and_sizes(config)
    jobs = _jobs(config, features, targets)
    open_targets = [job.target for job in jobs if job.earlier is None]
    for target in open_targets:
        read_alignment_dir(target.alignments, target.query)
        check_target_fits_ranks(ranks, features, target)
    model = None
    if open_targets:
        model = load_model(config.checkpoint, config.raw, config.preset)
        if config.templates is not None and not model.config.templates.enabled:
            raise takes_no_templates(config)
        features = _with_template_row(features, model)
    return _Work(jobs, features, trained, model)


def _jobs(config: PredictConfig, features: FeatureConfig, targets: list[Target]) -> list[_Job]:
    """One job per target, with its templates and its earlier result."""
    checkpoint = digest(parameter_file(config.checkpoint))
    source = template_source(config, features)
    jobs = []
    for target in targets:
        start = time.perf_counter()
        templates, line = find_templates(source, target, features.max_templates)
        seconds = time.perf_counter() - start
        settings = result_settings(config, features, target, checkpoint, templates)
        earlier = finished(config.output / target.query.name, settings, config.overwrite)
        jobs.append(_Job(target, templates, line, seconds, settings, earlier))
    return jobs


def _with_template_row(features: FeatureConfig, model: AlphaFold) -> FeatureConfig:
    """`features` with at least one template if the model reads templates: it needs the features' arrays, even if the sizes
    allow no template. The added template is always masked and changes nothing."""
    if features.max_templates or not model.config.templates.enabled:
        return features
    return replace(features, max_templates=1, msa_clusters=features.msa_clusters + 1)


def _predict_target(
    job: _Job, model: AlphaFold, config: PredictConfig, features: FeatureConfig, report: Report, group: Group | None
) -> PredictionResult:
    """Predict one target with all seeds, and write its files."""
    target = job.target
    start = time.perf_counter()
    alignments = on_first(lambda: read_alignment_dir(target.alignments, target.query), group) or []
    reading = time.perf_counter() - start
    rows = sum(map(len, alignments))
    report(f"  read {_count(rows, 'sequence')} in {_count(len(alignments), 'alignment')}, {reading:.1f} s")
    if model.config.templates.enabled:
        report(f"  {job.templates_line}")

    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    structures: dict[int, PredictedStructure] = {}
    runs: dict[int, _SeedRun] = {}
    for seed in seeds(config):
        start = time.perf_counter()
        make = partial(_features, target, alignments, features, seed, job.templates, config.ensembles)
        batch = tensors_from_first(make, device, group)
        seconds = time.perf_counter() - start
        report(f"  seed {seed}: features, {seconds:.1f} s")
        structures[seed], passes, change = _predict_seed(target, batch, model, config)
        runs[seed] = _SeedRun(seconds, passes, change)
        report(
            f"  seed {seed}: model, {runs[seed].model_line(features.recycles + 1)}; {structures[seed].confidence_line}"
        )

    features_seconds = job.templates_seconds + reading + sum(run.features for run in runs.values())
    timings = {
        "name": target.query.name,
        "residues": len(target.query),
        "alignment_rows": rows,
        "device": str(device),
        "features_seconds": round(features_seconds, 3),
        "model_seconds": round(sum(sum(run.passes) for run in runs.values()), 3),
    }
    each = {"seeds": [{"seed": seed, **run.timings} for seed, run in runs.items()], **_memory(device, group)}
    folder = config.output / target.query.name
    start = time.perf_counter()

    def write() -> PredictionResult:
        try:
            with whole_folder(folder) as partial_folder:
                result = write_results(partial_folder, structures, config.format, job.settings)
                seconds = {"writing_seconds": round(time.perf_counter() - start, 3)}
                write_json(partial_folder / TIMINGS, {**timings, **seconds, **each})
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be written ({error.strerror}); make room, or choose another --output"
            ) from error
        return PredictionResult(result.name, folder, result.format, result.mean_plddt, kept=False)

    result = from_first(write, group)
    best = result.mean_plddt[result.best]
    report(f"  wrote {folder}, {time.perf_counter() - start:.1f} s; best: {result.structure().name}, pLDDT {best:.1f}")
    return result


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _features(
    target: Target,
    alignments: list[Alignment],
    features: FeatureConfig,
    seed: int,
    templates: TemplateFeatures,
    ensembles: int,
) -> dict[str, torch.Tensor]:
    return collate([prediction_sample(target.query, alignments, features, seed, templates, ensembles)])


def _predict_seed(
    target: Target, batch: dict[str, torch.Tensor], model: AlphaFold, config: PredictConfig
) -> tuple[PredictedStructure, tuple[float, ...], float | None]:
    """The structure, the seconds of each pass, and the change of CA-CA distances in the last one (`_SeedRun`)."""
    try:
        output, passes = _run(model, batch, config)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{target.query.name}: {len(target.query)} residues do not fit into the memory of this GPU; "
            "lower --working_memory, --msa_clusters and --extra_msa, raise --parallel.sequence, or use --device cpu"
        ) from error
    change = None if output.ca_change is None else float(output.ca_change[0])
    return _structure(target, batch, output, model), passes, change


def _dtype(config: PredictConfig) -> torch.dtype:
    """The dtype of the model's layers."""
    return torch.bfloat16 if config.precision == "bf16" else torch.float32


def _working_memory(setting: str, device: torch.device) -> int | None:
    """The bytes of `PredictConfig.working_memory`; None: no limit.

    `auto` is the same in every run on a kind of device, because products of other sizes are rounded differently.
    """
    if setting == "all":
        return None
    if setting != "auto":
        return memory_size("--working_memory", setting)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // 32
    return 256 << 20


def _run(
    model: AlphaFold, batch: dict[str, torch.Tensor], config: PredictConfig
) -> tuple[ModelOutput, tuple[float, ...]]:
    """Run the model on one batch; its output and the seconds of each pass. A pass ends with the structure module."""
    device = next(model.parameters()).device
    marks = [time.perf_counter()]

    def mark(*_: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    hook = model.structure_module.register_forward_hook(mark)
    try:
        half = torch.autocast(device.type, torch.bfloat16, enabled=_dtype(config) == torch.bfloat16)
        with torch.inference_mode(), float32_matmul(config.matmul_precision), half:
            output = model(batch, ensembles=config.ensembles, stop_tolerance=config.stop_tolerance or 0.0)
    finally:
        hook.remove()
    return output, tuple(after - before for before, after in pairwise(marks))


def _structure(
    target: Target, batch: dict[str, torch.Tensor], output: ModelOutput, model: AlphaFold
) -> PredictedStructure:
    length = len(target.query)  # residues after these are padding
    return PredictedStructure(
        name=target.query.name,
        aatype=batch["aatype"][0, 0, :length].cpu().numpy(),
        positions=output.structure.positions[0, :length].float().cpu().numpy(),
        mask=output.structure.mask[0, :length].float().cpu().numpy(),
        plddt=compute_plddt(output.logits["plddt"].float())[0, :length].cpu().numpy(),
        aligned_error=_aligned_error(length, batch, output, model),
    )


def _aligned_error(
    length: int, batch: dict[str, torch.Tensor], output: ModelOutput, model: AlphaFold
) -> AlignedError | None:
    """The predicted aligned error of the first `length` residues; None without the head. Every rank must call this: each holds
    its own rows."""
    if "predicted_aligned_error" not in output.logits:
        return None
    heads, exchange = model.config.heads, model.exchange
    logits = output.logits["predicted_aligned_error"][:1].float()
    mask = batch["seq_mask"][:1, -1].to(logits)
    pae = exchange.gather(compute_pae(logits, heads.pae_max_error), "i", whole=mask.shape[1])
    return AlignedError(
        pae=pae[0, :length, :length].cpu().numpy(),
        highest=highest_pae(heads.pae_bins, heads.pae_max_error),
        ptm=float(compute_ptm(logits, mask, heads.pae_max_error, exchange)[0]),
    )


def device_of(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU if there is one. Raises UserError if there is no such device here.

    The device is only named, not touched: touching `cuda` before a rank has taken its own GPU would cost each rank some hundred
    MiB of GPU 0, for a context there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wrong = UserError(f"--device is '{name}', which PyTorch cannot use here; use cpu or auto")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise wrong from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise wrong
    if device.type != "cuda":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise wrong from error
    return device


def _memory(device: torch.device, group: Group | None) -> dict[str, Any]:
    """The memory entries of timings.json: the highest peak of all ranks, and on several ranks each one's."""
    local = _peak_memory(device)
    if group is None:
        return local
    ranks = all_of({"host": socket.gethostname(), "device": str(device), **local}, group)
    highest = max(ranks, key=lambda rank: rank["peak_memory_mib"])
    names = ("peak_memory_mib", "peak_memory_of")
    return {
        **{name: highest[name] for name in names},
        "ranks": [{"rank": number, **rank} for number, rank in enumerate(ranks)],
    }


def _peak_memory(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"peak_memory_mib": torch.cuda.max_memory_allocated(device) >> 20, "peak_memory_of": "GPU, this target"}
    # kilobytes on Linux, bytes on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
    return {"peak_memory_mib": peak, "peak_memory_of": "process, so far"}
