"""`evodsp.embed`: representations of many sequences, by the trunk of a model alone, several sequences at a time."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from evodsp.argument_parser import checks_names
from evodsp.config import FeatureConfig, LayerPrecision, computes_in_half
from evodsp.data.records import columns_of, entities_of
from evodsp.data.samples.dataset import Sample, collate
from evodsp.errors import UserError, nearest
from evodsp.inference.api import Alignments, Inputs, as_given_files
from evodsp.inference.config import SavedArray, SizeSettings
from evodsp.inference.devices import device_of, memory_errors, working_memory
from evodsp.inference.jobs import feature_config, with_template_row
from evodsp.inference.representations import in_order
from evodsp.inference.target_msas import MSAS
from evodsp.inference.targets import Target, find_targets
from evodsp.model.alphafold import AlphaFold, Recycled
from evodsp.model.precision import CastParameters
from evodsp.model.primitives import use_memory
from evodsp.printing import progress, tell
from evodsp.weights.checkpoint import load_model

_OF_TRUNK = ("single", "pair", "msa")
Embedded = tuple[str, dict[str, Tensor]]


@checks_names()
def embed(
    inputs: Inputs,
    alignments: Alignments = None,
    checkpoint: str | Path | AlphaFold | None = None,
    arrays: Sequence[str] = ("single",),
    recycles: int | None = None,
    msa_clusters: int | None = None,
    extra_msa: int | None = None,
    seed: int = 0,
    device: str = "auto",
    precision: LayerPrecision = "fp32",
    pairs: int = 1 << 18,
) -> Iterator[Embedded]:
    """The name and the representations of each record, the shortest records first.

    inputs, alignments: as of `evodsp.predict`: a sequence, {name: sequence}, FASTA, A3M or CSV files; and their alignments.
    checkpoint: a model in memory, which stays as it is, or a path.
    arrays: which of single [R, c_s], pair [R, R, c_z] and msa [S, R, c_m]. Tensors on the host, float32 or, with precision
        bf16, bfloat16; the residues of a complex are in the order in which its chains were given.
    recycles: recycling iterations before the one whose representations are returned; None: as in training. 0 takes a quarter of
        the time of AlphaFold2's three.
    msa_clusters, extra_msa, seed, device, precision: as the options of `evodsp predict`.
    pairs: sequences are computed together as long as the sum of their lengths squared, padded to the longest one, is at most
        this. It bounds the memory.

    The numbers are those of `evodsp predict --save` without templates, up to rounding; the last pass has no structure module
    and no heads. Records that fail are told and left out. Raises UserError if an argument is wrong or no record can be read.

        for name, found in evodsp.embed("thousands.fasta", checkpoint=model, arrays=["pair"]):
            found["pair"].shape
    """
    if unknown := [name for name in arrays if name not in _OF_TRUNK]:
        known = unknown[0] in get_args(SavedArray)
        why = (
            " is not of the trunk; evodsp.predict(..., save=...) keeps it."
            if known
            else f".{nearest(unknown[0], _OF_TRUNK)}"
        )
        raise UserError(f"evodsp.embed: array '{unknown[0]}'{why} There are {', '.join(_OF_TRUNK)}")
    if not arrays:
        raise UserError(f"evodsp.embed: no array is asked for; name some of {', '.join(_OF_TRUNK)}")
    if checkpoint is None:
        raise UserError("evodsp.embed: no model is given; add checkpoint=, a model or a path")
    if pairs < 1:
        raise UserError(f"evodsp.embed: pairs is {pairs}, but must be at least 1")
    where = device_of(device)
    model = copy.deepcopy(checkpoint) if isinstance(checkpoint, AlphaFold) else load_model(checkpoint)
    trained = model.trained_features or FeatureConfig()
    features = feature_config(SizeSettings(recycles, msa_clusters, extra_msa), trained)
    features = with_template_row(features, model.config.templates.enabled)
    folder = tempfile.TemporaryDirectory(prefix="evodsp_")
    given = as_given_files(inputs, alignments, None, Path(folder.name))
    targets, failures = find_targets(given.inputs, given.alignments)
    for failure in failures:
        tell(f"evodsp: {failure.name}: {failure.reason}")
    if not targets:
        raise UserError("evodsp.embed: no record can be read; see the lines above")
    made = partial(_sample, model=model, shown=Path("the model"), features=features, seed=seed)
    return _embedded(targets, made, model.to(where).eval(), tuple(dict.fromkeys(arrays)), precision, pairs, folder)


def _embedded(
    targets: Sequence[Target],
    made: Callable[[Target], Sample],
    model: AlphaFold,
    arrays: Sequence[str],
    precision: LayerPrecision,
    pairs: int,
    holder: object,
) -> Iterator[Embedded]:
    """`holder`: keeps the folder of the inputs."""
    half, device = computes_in_half(precision), next(model.parameters()).device
    casts = CastParameters(model)
    use_memory(model, working_memory("auto", device))

    def of(group: Sequence[tuple[Target, Sample]]) -> Iterator[Embedded]:
        """The records of a group; where there is too little memory for all of them, of each half."""
        longest = group[-1][0].query
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)
        try:
            with torch.inference_mode(), autocast, casts, memory_errors(longest.name, len(longest), device):
                batch = collate([sample for _, sample in group])
                found = _last_trunk(model, batch)
                on_host = [{name: found[name][number].cpu() for name in arrays} for number in range(len(group))]
        except UserError as error:
            if len(group) == 1:
                tell(f"evodsp: {error}")
                return
            for part in (group[: len(group) // 2], group[len(group) // 2 :]):
                yield from of(part)
            return
        for number, ((target, _), own) in enumerate(zip(group, on_host, strict=True)):
            columns = torch.from_numpy(columns_of(entities_of([part.query for part in target.parts])))
            rows = batch["msa_mask"][number, -1].any(-1).nonzero()[:, 0]
            ordered = {name: in_order(name, x, rows, columns) for name, x in own.items()}
            if bad := [name for name, x in ordered.items() if not x.isfinite().all()]:
                tell(
                    f"evodsp: {target.query.name}: its {bad[0]} has numbers that are nan or infinite; the model's training has "
                    "diverged, use an earlier checkpoint"
                )
            else:
                yield target.query.name, ordered

    with progress("embedded", len(targets)) as advance:
        for group in _groups(sorted(targets, key=lambda one: len(one.query)), pairs):
            samples: list[tuple[Target, Sample]] = []
            for target in group:
                try:
                    samples.append((target, made(target)))
                except UserError as error:
                    tell(f"evodsp: {target.query.name}: {error}")
            if samples:
                yield from of(samples)
            advance(len(group))


def _sample(target: Target, model: AlphaFold, shown: Path, features: FeatureConfig, seed: int) -> Sample:
    """The features of a target without templates. Raises UserError if the model does not take it, or an alignment is broken."""
    taken = MSAS[model.config.arrangement]
    taken.check(target, shown)
    return taken.read(target).sample(features, seed, {}, 1)


def _groups(targets: Sequence[Target], pairs: int) -> Iterator[list[Target]]:
    """Targets of rising lengths in groups, each as large as `pairs` allows, and at least of one."""
    group: list[Target] = []
    for target in targets:
        if group and (len(group) + 1) * len(target.query) ** 2 > pairs:
            yield group
            group = []
        group.append(target)
    if group:
        yield group


def _last_trunk(model: AlphaFold, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The representations of the last pass: whole passes before it, and its trunk."""
    device, passes = next(model.parameters()).device, batch["aatype"].shape[1]
    of_passes = [{name: batch[name][:, number].to(device) for name in model.features} for number in range(passes)]
    recycled = model.first_inputs(of_passes[0])
    for features in of_passes[:-1]:
        recycled = Recycled.of(model.one_pass([features], recycled))
    return model.trunk([of_passes[-1]], recycled)
