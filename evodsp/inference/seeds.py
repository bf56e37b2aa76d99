"""The seeds of one target, one after another, and when to write what is finished.

A seed of a long chain may take hours. So finished seeds are handed over to be written before the next one begins, as soon as
they have taken `WRITE_EVERY_S` seconds. Ctrl-C costs no more than that and the seed that is running; a seed that fails ends
its record and costs none of those before it.

The passes of the model for one seed of a target: their progress, their times, and the structure that comes out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int64, Integer

from evodsp.config import FeatureConfig
from evodsp.data.records import columns_of, entities_of
from evodsp.data.samples.dataset import collate
from evodsp.data.samples.raw_features import CHAIN_AXES, FEATURE_AXES, TEMPLATE_AXES
from evodsp.errors import UserError
from evodsp.inference.config import PassSettings, SaveSettings
from evodsp.inference.devices import memory_entries, memory_errors, working_memory
from evodsp.inference.estimate import check_needs
from evodsp.inference.interfaces import ComplexScores
from evodsp.inference.jobs import Job
from evodsp.inference.representations import Collector
from evodsp.inference.results import RecordFailure, Report
from evodsp.inference.structure_files import AlignedError, PredictedStructure
from evodsp.inference.target_msas import ComplexMsa, TargetMsa, Templates
from evodsp.inference.targets import Target
from evodsp.launch.consensus import from_first, on_first, tensors_from_first
from evodsp.model.alphafold import AlphaFold
from evodsp.model.graphs import Graphs, rounded_up, worth_recording
from evodsp.model.heads import (
    ModelOutput,
    compute_complex_confidence,
    compute_contact_weights,
    compute_contacts,
    compute_pae,
    compute_plddt,
    compute_ptm,
    highest_pae,
)
from evodsp.model.precision import CastParameters, float32_matmul
from evodsp.model.primitives import use_memory
from evodsp.model.recordings import CudaRecorder, Recorder
from evodsp.parallel.group import Group
from evodsp.printing import counted, progress
from evodsp.rng import Draws


@dataclass(frozen=True)
class SeedRun:
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
        passes = f"{number} of {counted(most, 'pass')}" if number < most else counted(most, "pass")
        change = "" if self.ca_change is None else f"; CA distances changed by {self.ca_change:.2f} Å in the last"
        return f"{sum(self.passes):.1f} s ({passes}, {sum(self.passes) / number:.1f} s each{change})"


def layer_dtype(settings: PassSettings) -> torch.dtype:
    """The dtype of the model's layers."""
    return torch.bfloat16 if settings.half else torch.float32


_PADDED = ("residues", "msa", "extra")
"""Axes that are padded."""
_RECORDINGS = 3
"""Recorded passes that are kept. The one that was used longest ago is freed for another."""


def recorder_of(device: torch.device) -> Recorder | None:
    """Recorder of passes on this device; None: they are launched."""
    return CudaRecorder() if device.type == "cuda" else None


class PassRunner:
    """A model in use, and what its passes share: copies of its parameters in half precision, and recorded passes."""

    def __init__(self, model: AlphaFold, settings: PassSettings) -> None:
        self.model, self.settings = model, settings
        if settings.dropout:  # the structure module has none in predictions, as in AlphaFold's eval_dropout
            model.structure_module.config = replace(model.structure_module.config, dropout=0.0)
        self.device = next(model.parameters()).device
        self.memory = working_memory(settings.working_memory, self.device)
        self.casts = CastParameters(model)
        self._graphs = None
        if settings.cuda_graphs and (recorder := recorder_of(self.device)) is not None:
            self._graphs = Graphs(recorder, _RECORDINGS, calls_before=0, warm_ups=1, required=False, renews=True)

    def sized(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The batch, padded if its passes are to be recorded; otherwise it may need their memory, and recordings are freed."""
        sets, residues = batch["aatype"].shape[1:]
        worth = worth_recording(residues, sets // self.settings.ensembles, self.settings.ranks)
        self.model.graphs = self._graphs if worth and not self.given_up else None
        if self.model.graphs is None:
            self.free()
            return batch
        return padded(batch, self.model.features)

    @property
    def given_up(self) -> str:
        """Why passes are not recorded any more, in words; '' as long as they are."""
        return "" if self._graphs is None else self._graphs.given_up

    def limit(self, batch: dict[str, torch.Tensor]) -> int | None:
        """The bytes to which layers keep. None if they are small enough to be computed whole, or without a limit."""
        if self.settings.ranks > 1:
            return self.memory
        names = "msa_feat", "extra_msa", *(("template_aatype",) if self.model.config.templates.enabled else ())
        rows = [batch[name].shape[2] for name in names]
        number = layer_dtype(self.settings).itemsize
        return self.model.memory_limit(self.memory, number, batch["aatype"].shape[2], *rows)

    def free(self) -> None:
        """Give the memory of recorded passes back."""
        if self._graphs is not None:
            self._graphs.free()


def padded(batch: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[str, torch.Tensor]:
    """The features `names` of a batch, padded with zeros. Those that are the same in all feature sets stay so."""
    return {name: _padded(name, batch[name]) for name in names if name in batch}


def _padded(name: str, x: torch.Tensor) -> torch.Tensor:
    axes = {**FEATURE_AXES, **CHAIN_AXES, **TEMPLATE_AXES}[name]
    sizes = [rounded_up(size) if axis in _PADDED else size for axis, size in zip(axes, x.shape[2:], strict=True)]
    own = x if x.stride(1) else x[:, :1]
    room = own.new_zeros(*own.shape[:2], *sizes)
    room[(slice(None), slice(None), *(slice(size) for size in own.shape[2:]))] = own
    return room.expand(-1, x.shape[1], *sizes)


def run_passes(
    runner: PassRunner, batch: dict[str, torch.Tensor], ended: Callable[[ModelOutput], None], seed: int = 0
) -> tuple[ModelOutput, tuple[float, ...]]:
    """Run the model on one batch; its output and the seconds of each pass. `ended`: called with the output of each pass.
    `seed`: decides what is dropped, if the settings ask for dropout."""
    model, settings, device = runner.model, runner.settings, runner.device
    clock = PassClock(device)

    def mark(output: ModelOutput) -> None:
        clock.mark()
        ended(output)

    use_memory(model, runner.limit(batch))
    half = torch.autocast(device.type, torch.bfloat16, enabled=settings.half)
    tolerance = settings.stop_tolerance or 0.0
    try:
        with torch.inference_mode(), float32_matmul(settings.matmul_precision), half, runner.casts:
            draws = [Draws.root(seed).at("dropout", "prediction")] if settings.dropout else []
            output = model(batch, draws, settings.ensembles, tolerance, mark)
    except Exception:
        runner.free()  # the next target may need the memory
        raise
    return output, clock.seconds()


class PassClock:
    """Times the passes of a model. On a GPU events are read when all passes are over, so that the host waits once."""

    def __init__(self, device: torch.device) -> None:
        """The first pass begins."""
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """A pass ends, and the next one begins."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> tuple[float, ...]:
        """Seconds of each pass."""
        if self._on_gpu:
            self._marks[-1].synchronize()
            return tuple(before.elapsed_time(after) / 1000 for before, after in pairwise(self._marks))
        return tuple(after - before for before, after in pairwise(self._marks))


def structure_of(
    target: Target,
    batch: dict[str, torch.Tensor],
    output: ModelOutput,
    model: AlphaFold,
    arrays: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> PredictedStructure:
    """The first sample of `output`, without padding, on the host. Every rank must call this.

    The columns of the batch are those of `columns_of`; the residues and scores of a complex are in the order in which its
    chains were given. Contacts and aligned errors, which are residues squared numbers, are on the first rank only: it writes
    the files. `arrays`: those that are kept beside the structure.
    """
    length = len(target.query)  # residues after these are padding
    entities = entities_of([part.query for part in target.parts])
    columns = columns_of(entities)
    error, contacts = _aligned_error(length, batch, output, model), _contacts(length, batch, output, model)
    if target.chains:
        places = np.argsort([member for entity in entities for member in entity.members])
        scores = _complex_scores(places, batch, output, model)
        error = None if error is None else replace(error, pae=_reordered(error.pae, columns), of_chains=scores)
        contacts = None if contacts is None else _reordered(contacts, columns)
    return PredictedStructure(
        name=target.query.name,
        aatype=batch["aatype"][0, 0, :length].cpu().numpy()[columns],
        positions=output.structure.positions[0, :length].float().cpu().numpy()[columns],
        mask=output.structure.mask[0, :length].float().cpu().numpy()[columns],
        plddt=compute_plddt(output.logits["plddt"].float())[0, :length].cpu().numpy()[columns],
        lengths=tuple(len(chain.query) for chain in target.chains),
        aligned_error=error,
        contacts=contacts,
        arrays=arrays,
    )


def _reordered(pairs: Float32[np.ndarray, "L L"], columns: Int64[np.ndarray, " L"]) -> Float32[np.ndarray, "L L"]:
    return pairs[np.ix_(columns, columns)]


def _complex_scores(
    places: Integer[np.ndarray, " C"], batch: dict[str, torch.Tensor], output: ModelOutput, model: AlphaFold
) -> ComplexScores | None:
    """The scores of the C chains and their interfaces; None without a head for aligned errors. Every rank must call this.

    `places`: of each chain, in the order in which they were given, among the chains of the columns.
    """
    if "predicted_aligned_error" not in output.logits:
        return None
    heads, logits = model.config.heads, output.logits["predicted_aligned_error"][:1]
    distogram = output.logits["distogram"][:1]
    found = compute_complex_confidence(
        logits,
        compute_contact_weights(distogram, heads.distogram_min_distance, heads.distogram_max_distance),
        batch["seq_mask"][:1, -1].to(logits.device).float(),
        batch["asym_id"][:1, -1].to(logits.device),
        len(places),
        heads.pae_max_error,
        model.exchange,
    )
    pair_iptm, pair_actifptm = (
        x[0].cpu().numpy()[np.ix_(places, places)] for x in (found.pair_iptm, found.pair_actifptm)
    )
    chain_ptm = found.chain_ptm[0].cpu().numpy()[places]
    return ComplexScores(float(found.iptm[0]), float(found.actifptm[0]), chain_ptm, pair_iptm, pair_actifptm)


def _contacts(
    length: int, batch: dict[str, torch.Tensor], output: ModelOutput, model: AlphaFold
) -> Float32[np.ndarray, "R R"] | None:
    """The contact probabilities of the first `length` residues. Every rank must call this: each holds its own rows."""
    heads = model.config.heads
    edges = heads.distogram_min_distance, heads.distogram_max_distance
    return _collected(compute_contacts(output.logits["distogram"][:1], *edges), length, batch, model)


def _aligned_error(
    length: int, batch: dict[str, torch.Tensor], output: ModelOutput, model: AlphaFold
) -> AlignedError | None:
    """The predicted aligned error of the first `length` residues; None without the head. Every rank must call this: each holds
    its own rows."""
    if "predicted_aligned_error" not in output.logits:
        return None
    heads = model.config.heads
    logits = output.logits["predicted_aligned_error"][:1]
    mask = batch["seq_mask"][:1, -1].to(logits.device).float()
    pae = _collected(compute_pae(logits, heads.pae_max_error), length, batch, model)
    ptm = float(compute_ptm(logits, mask, heads.pae_max_error, model.exchange)[0])
    return None if pae is None else AlignedError(pae, highest_pae(heads.pae_bins, heads.pae_max_error), ptm)


def _collected(
    rows: Float[torch.Tensor, "1 i R"], length: int, batch: dict[str, torch.Tensor], model: AlphaFold
) -> Float32[np.ndarray, "L L"] | None:
    """The first `length` (L) rows and columns, on the first rank. `rows`: this rank's."""
    whole = model.exchange.collect(rows, "i", whole=batch["seq_mask"].shape[-1])
    return None if whole is None else whole[0, :length, :length].cpu().numpy()


@contextmanager
def block_progress(model: AlphaFold, what: str, passes: int, ensembles: int) -> Iterator[Callable[[], None]]:
    """Count the blocks of the extra-MSA stack and the Evoformer that the model runs within this context; of recorded passes,
    which run no blocks, the passes. Yields a function to call at the end of each pass.

    `passes`: how many passes there are at most. `ensembles`: feature sets of each. On a GPU the count runs ahead of the device:
    blocks are launched, not awaited.
    """
    if model.graphs is not None:
        with progress(f"{what}: {counted(passes, 'pass')}", total=passes) as advance:
            yield lambda: advance(1)
        return
    passes *= ensembles
    blocks = [*model.extra_msa_stack.blocks, *model.evoformer.blocks]
    with progress(f"{what}: blocks of {passes} pass{'es' * (passes > 1)}", total=passes * len(blocks)) as advance:
        hooks = [block.parts[-1].register_forward_hook(lambda *_: advance(1)) for block in blocks]
        try:
            yield lambda: None
        finally:
            for hook in hooks:
                hook.remove()


WRITE_EVERY_S = 30.0
"""Finished seeds are written at the latest when they have taken this long. Sooner, writing would cost short chains too much."""


@dataclass(frozen=True)
class Finished:
    """Seeds that are predicted, but not yet written."""

    structures: dict[int, PredictedStructure]
    """The structures by seed."""
    timings: dict[str, Any]
    """Entries of timings.json."""


def predict_seeds(
    job: Job,
    runner: PassRunner,
    features: FeatureConfig,
    try_anyway: bool,
    report: Report,
    detail: Report,
    group: Group | None,
    save: SaveSettings | None = None,
) -> Iterator[Finished | RecordFailure]:
    """Predict the seeds of `job`. Finished seeds come as soon as they are to be written. The failure of a seed comes last; no
    other seed is tried after it.

    `try_anyway`: whether a target runs also where the estimate says that it does not fit. `save`: the arrays that are kept.
    `detail`: takes the lines that say nothing but that all goes well.

    Raises RankOutOfMemoryError on a rank of several that has no memory left.
    """
    target, model, settings, device = job.target, runner.model, runner.settings, runner.device
    start = time.perf_counter()

    def read() -> TargetMsa:
        with memory_errors(target.query.name, len(target.query), device):
            return job.read()

    try:
        msa = on_first(read, group)
    except UserError as error:
        yield RecordFailure(target.query.name, str(error))
        return
    seconds_before = job.templates_seconds + time.perf_counter() - start
    rows = 0 if msa is None else sum(map(len, msa.alignments))  # the first rank alone reads, and writes the files
    detail(f"  {'' if msa is None else msa.line}, {time.perf_counter() - start:.1f} s")
    if model.config.templates.enabled:
        for said in job.templates_lines:
            detail(f"  {said}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    structures: dict[int, PredictedStructure] = {}
    runs: dict[int, SeedRun] = {}

    def finished() -> Finished:
        """The seeds that have been predicted since the last call."""
        nonlocal seconds_before
        named = {} if job.model.name is None else {"model": job.model.name}
        timings = {
            "name": target.query.name,
            "residues": len(target.query),
            "alignment_rows": rows,
            **({"paired_rows": msa.paired} if isinstance(msa, ComplexMsa) and len(target.distinct) > 1 else {}),
            "device": str(device),
            "features_seconds": round(seconds_before + sum(run.features for run in runs.values()), 3),
            "model_seconds": round(sum(sum(run.passes) for run in runs.values()), 3),
            "seeds": [{**named, "seed": seed, **run.timings} for seed, run in runs.items()],
            **memory_entries(device, group),
        }
        found = Finished(dict(structures), timings)
        seconds_before = 0.0
        structures.clear()
        runs.clear()
        return found

    since = time.perf_counter()
    for seed in job.seeds:
        try:
            batch, seconds = _batch(job, msa, features, seed, settings.ensembles, device, detail, group)
            batch, failed_before = runner.sized(batch), runner.given_up
            if seed == job.seeds[0]:
                ask = partial(check_needs, target.query.name, len(target.query), batch, model, settings, try_anyway)
                if line := from_first(ask, group):
                    report(f"  {line}")
            what = f"{target.query.name}, seed {seed}"
            shown = block_progress(model, what, features.recycles + 1, settings.ensembles)
            with shown if _is_rank_0() else nullcontext(_nothing) as ended:
                structure, passes, change = _predict_seed(target, seed, batch, runner, ended, group, save)
        except UserError as error:
            if structures:
                yield finished()
            yield RecordFailure(target.query.name, str(error))
            return
        if runner.given_up != failed_before:
            report(f"  {runner.given_up}; passes are launched instead, which is slower")
        structures[seed], runs[seed] = structure, SeedRun(seconds, passes, change)
        detail(f"  seed {seed}: model, {runs[seed].model_line(features.recycles + 1)}; {structure.confidence_line}")
        if seed == job.seeds[-1] or from_first(partial(_due, since), group):
            yield finished()
            since = time.perf_counter()


def _due(since: float) -> bool:
    """Whether seeds that began at `since` have taken so long that they are to be written."""
    return time.perf_counter() - since >= WRITE_EVERY_S


def _nothing() -> None:
    """The end of a pass that nobody watches."""


def _is_rank_0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _batch(
    job: Job,
    msa: TargetMsa | None,
    features: FeatureConfig,
    seed: int,
    ensembles: int,
    device: torch.device,
    report: Report,
    group: Group | None,
) -> tuple[dict[str, torch.Tensor], float]:
    """A seed's features, on every rank, and the seconds they took. Only the first rank of `group` has `msa`."""
    target = job.target
    start = time.perf_counter()
    make = partial(_features, target, msa, features, seed, job.templates, ensembles)
    with memory_errors(target.query.name, len(target.query), device, group):
        batch = tensors_from_first(make, device, group)
    seconds = time.perf_counter() - start
    report(f"  seed {seed}: features, {seconds:.1f} s")
    return batch, seconds


def _features(
    target: Target,
    msa: TargetMsa | None,
    features: FeatureConfig,
    seed: int,
    templates: Templates,
    ensembles: int,
) -> dict[str, torch.Tensor]:
    with memory_errors(target.query.name, len(target.query), torch.device("cpu")):
        assert msa is not None, "only the first rank makes features"
        return collate([msa.sample(features, seed, templates, ensembles)])


def _predict_seed(
    target: Target,
    seed: int,
    batch: dict[str, torch.Tensor],
    runner: PassRunner,
    ended: Callable[[], None],
    group: Group | None,
    save: SaveSettings | None,
) -> tuple[PredictedStructure, tuple[float, ...], float | None]:
    """The structure, the seconds of each pass, and the change of CA-CA distances in the last one (`SeedRun`)."""
    columns = columns_of(entities_of([part.query for part in target.parts]))
    collector = None if save is None else Collector(save, runner.model, batch, columns)

    def pass_ended(output: ModelOutput) -> None:
        ended()
        if collector is not None:
            collector.add(output, is_last=False)

    with memory_errors(target.query.name, len(target.query), runner.device, group):
        output, passes = run_passes(runner, batch, pass_ended, seed)
        if collector is not None:
            collector.add(output, is_last=True)
        structure = structure_of(target, batch, output, runner.model, {} if collector is None else collector.arrays)
    change = None if output.ca_change is None else float(output.ca_change[0])
    return structure, passes, change
