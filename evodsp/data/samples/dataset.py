"""Samples for training and validation: a chain's alignments and structure as tensors.

A sample is a dictionary of tensors without a batch axis. It holds the data from which the device makes the MSA's features
(`raw_features`). The other features (`feature_axes.FEATURE_AXES`) have a leading axis of 1 for the recycling iterations,
labels (`geometry.frames.structure_labels`, in Å) have the residue axis first. `collate` adds the batch axis.

Everything random about sample i is a function of (seed, i), whatever the worker, the rank, the epoch or a resume.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int32
from torch import Tensor
from torch.utils.data import Dataset

from evodsp.config import FeatureConfig
from evodsp.data.records import Chain, ProteinSequence
from evodsp.data.samples.crop import Crop, centre_crop, training_crop
from evodsp.data.samples.distillation import DistillationSet, sampled_rows
from evodsp.data.samples.feature_axes import FEATURE_AXES, check_config
from evodsp.data.samples.raw_features import RAGGED, raw_features
from evodsp.data.samples.sampling import DISTILLED, ChainChoice, ChainDraws
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.parsed_chain import ChainSource
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import FoundTemplates, TemplateSource
from evodsp.errors import UserError
from evodsp.geometry.alphabet import encode_sequence
from evodsp.geometry.frames import structure_labels
from evodsp.printing import logger
from evodsp.rng import Draws

Sample = dict[str, Tensor]

SCALAR_LABELS = ("resolution", "use_clamped_fape")
"""Labels without a residue axis."""


@dataclass(frozen=True)
class Drawing:
    """How a sample is made of a record: its random stream, its recycling iterations, and whether it is for training."""

    config: FeatureConfig
    draws: Draws
    cycles: int
    training: bool


@runtime_checkable
class Record(Protocol):
    """Parsed data that is cached between samples."""

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""

    def sample(self, drawing: Drawing) -> Sample:
        """A sample. Everything random about it depends on `drawing.draws` alone."""


@dataclass(frozen=True)
class ChainRecord:
    """The parsed data of a chain: features before sampling, labels of the whole chain.

    `max_rows`: at most this many rows of the MSA are used, a new random sample of them each time; None: all.
    """

    aatype: Int32[np.ndarray, " L"]
    msa: MsaFeatures
    labels: dict[str, Tensor]
    templates: FoundTemplates | None = None
    max_rows: int | None = None

    @property
    def nbytes(self) -> int:
        templates = 0 if self.templates is None else self.templates.features.nbytes
        return self.msa.nbytes + sum(label.nbytes for label in self.labels.values()) + templates

    def sample(self, drawing: Drawing) -> Sample:
        """A random crop of the chain with random templates in training; otherwise its middle, and the best templates."""
        config, draws, msa = drawing.config, drawing.draws, self.msa
        if self.max_rows is not None:
            msa = sampled_rows(msa, self.max_rows, draws.at("distillation_rows"))
        length, crop_size = len(self.aatype), config.crop_size
        # Not clamped in validation: a clamped error hides how far a prediction is off.
        clamped, crop = False, centre_crop(length, crop_size)
        if drawing.training:
            clamped = bool(draws.at("clamp").uniform(1)[0] < config.clamp_fape_fraction)
            crop = training_crop(length, crop_size, clamped, draws)
        templates = None if self.templates is None else self.templates.features
        if templates is not None and drawing.training:
            templates = draw_templates(templates, config.max_templates, draws)
        features = raw_features(self.aatype, msa, config, draws, drawing.cycles, crop, templates)
        sample = {name: torch.from_numpy(values) for name, values in features.items()}
        sample |= cropped(self.labels, crop, crop_size or len(crop))
        sample["use_clamped_fape"] = torch.tensor(float(clamped))
        return sample


def chain_labels(
    chain: Chain, aatype: Int32[np.ndarray, " L"], assumed_resolution: float | None = None
) -> dict[str, Tensor]:
    """Labels of a whole chain under AF2's names, float32 (Å) and int32.

    A chain without a resolution has the assumed one, or 0.
    """
    positions, mask = torch.from_numpy(chain.positions), torch.from_numpy(chain.mask)
    labels = structure_labels(torch.from_numpy(aatype), positions, mask)
    resolution = torch.tensor(chain.resolution or assumed_resolution or 0.0)
    labels |= {"all_atom_positions": positions, "all_atom_mask": mask, "resolution": resolution}
    # `atom14_atom_exists` is a feature too; the label would overwrite it.
    return {name: _narrow(label) for name, label in labels.items() if name not in FEATURE_AXES}


def _narrow(values: Tensor) -> Tensor:
    return values.to(torch.float32 if values.is_floating_point() else torch.int32)


def load_record(
    source: ChainSource,
    key: str,
    templates: TemplateSource | None = None,
    assumed_resolution: float | None = None,
    max_rows: int | None = None,
) -> ChainRecord:
    """The chain `key`, and its templates if their source is given. No template is of its own entry or released after it.

    `assumed_resolution`: the resolution in Å that a structure without one is given; None gives 0, which the losses of the
    confidence heads do not count. `max_rows`: see `ChainRecord`.
    Raises UserError if its structure, its alignments and its template searches have different sequences.
    """
    parsed = source.parsed(key, with_hits=templates is not None and templates.reads_hits)
    chain, found = parsed.chain, None
    if templates is not None:
        query = ProteinSequence(key, chain.sequence)
        found = templates.find(list(parsed.hits), query, chain.release_date, chain.pdb_id)
        logger(__name__).info("templates of %s", found.log_line)
    aatype = encode_sequence(chain.sequence)
    return ChainRecord(aatype, parsed.msa, chain_labels(chain, aatype, assumed_resolution), found, max_rows)


def draw_templates(templates: TemplateFeatures, most: int, draws: Draws) -> TemplateFeatures:
    """The templates of a training sample: min(k, `most`) of the n, in random order, with k uniform in 0..n (supplement 1.2.3).

    The model thus sees bad templates, or none, and cannot rely on copying the best one.
    """
    number = min(draws.at("template_number").integer(0, len(templates) + 1), most)
    return templates.select(draws.at("template_order").permutation(len(templates))[:number])


class RecordDataset(Dataset[Sample], ABC):
    """Samples of records, addressed by GLOBAL sample index.

    Training: sample i is a random crop of record `key_of(i)`, which `choice` decides; by default each epoch of `len(self)`
    samples is a permutation of the keys. Indices continue into further epochs without limit. The number of recycling
    iterations is drawn once per `batch_group` consecutive indices, so that all samples of a batch have the same number.
    Validation (`training` False): sample i is the i-th key, always with `recycles` + 1 iterations and, if
    `crop_size` is set, the same crop in every epoch. The masked-MSA noise stays on, as in AF2; `masked_msa_fraction` 0 turns it
    off.

    A sample holds its MSA as it is before sampling (`raw_features`); `evodsp.features` makes the features of a batch. Its other
    entries are padded with zeros to `crop_size` residues; without one they have the sizes of the data. Records are cached up to
    `cache_bytes`.
    """

    def __init__(
        self,
        keys: Sequence[str],
        config: FeatureConfig,
        seed: int,
        training: bool,
        batch_group: int = 1,
        cache_bytes: int = 1 << 30,
        choice: ChainChoice | None = None,
    ) -> None:
        check_config(config)
        if not keys:
            raise UserError("no chains to make samples from; check the folders and the list of chains")
        if batch_group < 1:
            raise ValueError(f"batch_group must be at least 1, not {batch_group}")
        self.keys, self.config = tuple(keys), config
        self.training, self.batch_group, self.cache_bytes = training, batch_group, cache_bytes
        self._draws = Draws.root(seed).at("data")
        self._cache: OrderedDict[str, Record] = OrderedDict()
        self._cached_bytes = 0
        self._choice: ChainChoice = ChainDraws(self._draws, self.keys) if choice is None else choice

    def __getstate__(self) -> dict[str, Any]:
        """Workers start with an empty cache: sending records costs more than reading the ones they need."""
        return {**self.__dict__, "_cache": OrderedDict(), "_cached_bytes": 0}

    def __len__(self) -> int:
        return len(self.keys)

    def key_of(self, index: int, left_out: Container[str] = frozenset()) -> str:
        """The key of sample `index`, in training none of `left_out`.

        Raises IndexError for a negative index and, unless training, for one beyond the end.
        """
        if index < 0 or (index >= len(self.keys) and not self.training):
            raise IndexError(f"sample {index} of {len(self.keys)}")
        return self._choice.choose(index, left_out) if self.training else self.keys[index]

    def cycles_of(self, index: int) -> int:
        """Number of recycling iterations (passes through the model) of sample `index`."""
        most = self.config.recycles + 1
        if not (self.training and self.config.uniform_recycling):
            return most
        return self._draws.at("recycles", index // self.batch_group).integer(1, most + 1)

    def __getitem__(self, index: int) -> Sample:
        return self.make(index, self.key_of(index))

    def without_keys(self) -> RecordDataset:
        """A copy for worker processes, which makes samples of given keys and does not carry a million names."""
        other = copy(self)
        other.keys, other._choice = (), ChainDraws(self._draws, ())
        return other

    def make(self, index: int, key: str) -> Sample:
        """Sample `index`, made of the record `key`. Everything random about it depends on the index alone."""
        draws = self._draws.at("sample", index)
        return self._record(key).sample(Drawing(self.config, draws, self.cycles_of(index), self.training))

    @abstractmethod
    def _load(self, key: str) -> Record:
        """Read and parse the record."""

    def _record(self, key: str) -> Record:
        """The record, cached. The least recently used ones are dropped when the cache is full."""
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        record = self._load(key)
        self._cache[key] = record
        self._cached_bytes += record.nbytes
        while self._cached_bytes > self.cache_bytes and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return record


class ChainDataset(RecordDataset):
    """Samples of protein chains.

    If `max_templates` is above 0, samples have template features: a random number of random templates in training, otherwise
    the best. `templates` finds them; without it they are all masked. `assumed_resolution`: see `load_record`.
    """

    def __init__(
        self,
        source: ChainSource,
        keys: Sequence[str],
        config: FeatureConfig,
        seed: int,
        training: bool,
        batch_group: int = 1,
        cache_bytes: int = 1 << 30,
        templates: TemplateSource | None = None,
        choice: ChainChoice | None = None,
        distillation: DistillationSet | None = None,
        assumed_resolution: float | None = None,
    ) -> None:
        super().__init__(keys, config, seed, training, batch_group, cache_bytes, choice)
        self.source, self.templates = source, templates if config.max_templates else None
        self.distillation, self.assumed_resolution = distillation, assumed_resolution

    def _load(self, key: str) -> Record:
        if self.distillation is None or not key.startswith(DISTILLED):
            return load_record(self.source, key, self.templates, self.assumed_resolution)
        others = self.distillation
        templates = others.templates if self.config.max_templates else None
        key = key.removeprefix(DISTILLED)
        return load_record(others.source, key, templates, others.assumed_resolution, others.max_rows)


def cropped(labels: dict[str, Tensor], crop: Crop, size: int) -> dict[str, Tensor]:
    """The labels of the crop, padded with zeros to `size` residues. Copies: cached labels must not change with the sample."""
    return {
        name: label.clone() if name in SCALAR_LABELS else _crop_label(label, crop, size)
        for name, label in labels.items()
    }


def _crop_label(label: Tensor, crop: Crop, size: int) -> Tensor:
    """The residues of the crop, padded with zeros to `size`. A copy: the cached label must not change with the sample."""
    cropped = label.new_zeros(size, *label.shape[1:])
    cropped[: len(crop)] = label[crop.index]
    return cropped


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Stack samples along a new batch axis, padding residues and MSA rows with zeros to the largest sample.

    Batches with labels also list the parts of their structures that exist, so that losses need not search for them on the
    device, which would make the host wait: `observed_frames` (of R x 8 rigid groups), `observed_atoms` (of R x 14, under
    either naming of symmetric atoms), `existing_atoms` (of R x 14, observed or not) and `ambiguous_residues` (of R). Each is
    int64 [batch, n] and ends in entries that do not exist, which the masks leave out. n follows from R (`listed_sizes`), and so
    is the same for all batches of a crop size; only where a sample has more of them, all are listed.

    Raises ValueError unless all have the same entries and the same number of recycling iterations.
    """
    names = list(samples[0])
    if any(set(sample) != set(names) for sample in samples):
        raise ValueError("samples of one batch have different entries")
    cycles = sorted({len(sample.get("msa_keys", sample["aatype"])) for sample in samples})
    if len(cycles) > 1:
        raise ValueError(f"samples of {cycles} recycling iterations in one batch: it must lie within one batch_group")
    batch = {
        name: _joined([sample[name] for sample in samples])
        if name in RAGGED
        else _stack_padded([sample[name] for sample in samples])
        for name in names
    }
    listed = existing_entries(batch)
    return {name: values for name, values in batch.items() if not name.endswith("_of_any_copy")} | listed


def existing_entries(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The lists that `collate` adds to a batch; none without labels."""
    if "atom14_gt_exists" not in batch:
        return {}
    # Of complexes, those of any copy of a chain: which copy counts is not known yet.
    observed = batch.get("atoms_of_any_copy", observed_atoms(batch))
    marked = {
        "observed_frames": batch.get("frames_of_any_copy", batch["rigidgroups_gt_exists"]),
        "observed_atoms": observed,
        "existing_atoms": batch["atom14_atom_exists"][:, -1],
        "ambiguous_residues": (observed * batch["atom14_atom_is_ambiguous"]).amax(-1),
    }
    sizes = listed_sizes(marked["observed_frames"].shape[1])
    return {name: _marked(mask.flatten(1), sizes[name]) for name, mask in marked.items()}


def listed_sizes(residues: int) -> dict[str, int]:
    """The lengths of the lists, but for samples with more: a quarter more than natural sequences have on average, and twice as
    many ambiguous residues, because short crops vary.
    """
    of_residue = {"observed_frames": 4.5, "observed_atoms": 9.75, "existing_atoms": 9.75, "ambiguous_residues": 0.5}
    return {name: math.ceil(number * residues) for name, number in of_residue.items()}


def observed_atoms(labels: Mapping[str, Tensor]) -> Tensor:
    """Above 0 for the atoms14 that are resolved under either naming."""
    return labels["atom14_gt_exists"] + labels["atom14_alt_gt_exists"]


def _marked(mask: Tensor, size: int) -> Tensor:
    """The marked entries of each row [b, n], then others, `size` together; all n if a row has more that are marked."""
    marked = mask != 0
    listed = marked.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return listed if int(marked.sum(1).max()) > size else listed[:, :size]


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)  # no copy of a single sample


def _stack_padded(tensors: list[Tensor]) -> Tensor:
    shapes = torch.tensor([tensor.shape for tensor in tensors], dtype=torch.long)
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0)  # a sample for prediction has hundreds of megabytes: no copy
    if (shapes == shapes[0]).all():
        return torch.stack(tensors)
    batch = tensors[0].new_zeros(len(tensors), *shapes.amax(0).tolist())
    for row, tensor in zip(batch, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return batch
