"""Samples for training and validation: alignments and structures as tensors.

A sample is a dictionary of tensors without a batch axis (`chain_record`, `complex_record`). `collate` adds the batch axis.
Everything random about sample i is a function of (seed, i), whatever the worker, the rank, the epoch or a resume.

Samples are made by the calling process, or by a pool of processes that hand them over in shared memory. A sample or a batch
is packed into one piece of memory, to be handed to other processes or other ranks at once.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.multiprocessing  # teaches pipes to send tensors
from jaxtyping import UInt8
from torch import Tensor
from torch.utils.data import Dataset

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import find_templates
from evodsp.data.pool import Pool
from evodsp.data.records import CHAINS, COMPLEXES, Kind
from evodsp.data.samples.raw_features import RAGGED, check_config
from evodsp.data.samples.sample_records import ChainRecord, ComplexRecord, Drawing, Sample, observed_atoms
from evodsp.data.samples.selection import DISTILLED, ChainChoice, ChainDraws, DistillationSet
from evodsp.data.sources.parsed import Parsed, RecordSource
from evodsp.data.templates.source import FoundTemplates, TemplateSource
from evodsp.errors import MachineError, UserError
from evodsp.printing import logger
from evodsp.rng import Draws

Record = ChainRecord | ComplexRecord
"""Parsed data that is cached between samples."""
AddedEntries = Callable[[str, Sample], Sample]
"""Makes entries of one's own for the sample of a key; it is sent to the processes that make samples."""
RECIPES: dict[Kind, type[Record]] = {CHAINS: ChainRecord, COMPLEXES: ComplexRecord}
"""Classes of records: as in AlphaFold2 of single chains, as in AlphaFold-Multimer of complexes."""


def load_record(
    source: RecordSource,
    key: str,
    templates: TemplateSource | None = None,
    assumed_resolution: float | None = None,
    max_rows: int | None = None,
) -> Record:
    """The record `key`, with the templates of its chains if their source is given. No template is of its own entry or released
    after it. Other arguments: see `ChainRecord.of`.

    Raises UserError if its structure, its alignments and its template searches have different sequences.
    """
    parsed, found = parsed_with_templates(source, key, templates)
    for of_sequence in found.values():
        logger(__name__).info("templates of %s", of_sequence.log_line)
    return RECIPES[source.kind].of(parsed, found, assumed_resolution, max_rows)


def parsed_with_templates(
    source: RecordSource, key: str, templates: TemplateSource | None
) -> tuple[Parsed, dict[str, FoundTemplates]]:
    """Parsed data of `key`, and the templates of each sequence if their source is given. Raises UserError as `load_record`
    does."""
    parsed = source.parsed(key, with_hits=templates is not None and templates.reads_hits)
    return parsed, {} if templates is None else find_templates(templates, parsed)


def first_look(source: RecordSource, key: str, templates: TemplateSource | None) -> tuple[float, list[str]]:
    """Read all files of a key: its resolution in Å, 0 without one, and lines about its templates. Raises UserError as
    `load_record` does."""
    parsed, found = parsed_with_templates(source, key, templates)
    return parsed.assembly.chains[0].resolution or 0.0, [of_sequence.log_line for of_sequence in found.values()]


class SampleDataset(Dataset[Sample]):
    """Samples of the records of a source, addressed by GLOBAL sample index.

    Training: sample i is a random crop of record `key_of(i)`, which `choice` decides; by default each epoch of `len(self)`
    samples is a permutation of the keys. Indices continue into further epochs without limit. The number of recycling
    iterations is drawn once per `batch_group` consecutive indices, so that all samples of a batch have the same number.
    Validation (`training` False): sample i is the i-th key, always with `recycles` + 1 iterations and, if
    `crop_size` is set, the same crop in every epoch. The masked-MSA noise stays on, as in AF2; `masked_msa_fraction` 0 turns it
    off.

    A sample holds its MSA as it is before sampling (`raw_features`); `evodsp.features` makes the features of a batch. Its other
    entries are padded with zeros to `crop_size` residues; without one they have the sizes of the data. Records are cached up to
    `cache_bytes`.

    If `max_templates` is above 0, samples have template features: a random number of random templates in training, otherwise
    the best. `templates` finds them; without it they are all masked. `assumed_resolution`: see `ChainRecord.of`.

    `added(key, sample)` returns entries of one's own, with the axes of features, of which the first has the iterations. The
    sample's `residue_index` and `seq_mask` say which residues it keeps.
    """

    def __init__(
        self,
        source: RecordSource,
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
        added: AddedEntries | None = None,
    ) -> None:
        check_config(config)
        if not keys:
            raise UserError("no chains to make samples from; check the folders and the list of chains")
        if batch_group < 1:
            raise ValueError(f"batch_group must be at least 1, not {batch_group}")
        self.source, self.templates = source, templates if config.max_templates else None
        self.distillation, self.assumed_resolution, self.added = distillation, assumed_resolution, added
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

    def without_keys(self) -> SampleDataset:
        """A copy for worker processes, which makes samples of given keys and does not carry a million names."""
        other = copy(self)
        other.keys, other._choice = (), ChainDraws(self._draws, ())
        return other

    def make(self, index: int, key: str) -> Sample:
        """Sample `index`, made of the record `key`. Everything random about it depends on the index alone."""
        draws = self._draws.at("sample", index)
        sample = self._record(key).sample(Drawing(self.config, draws, self.cycles_of(index), self.training))
        return sample if self.added is None else sample | self.added(key, sample)

    def _load(self, key: str) -> Record:
        """Read and parse the record."""
        if self.distillation is None or not key.startswith(DISTILLED):
            return load_record(self.source, key, self.templates, self.assumed_resolution)
        others, key = self.distillation, key.removeprefix(DISTILLED)
        templates = others.templates if self.config.max_templates else None
        return load_record(others.source, key, templates, others.assumed_resolution, others.max_rows)

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


Layout = list[tuple[str, torch.dtype, tuple[int, ...]]]
"""Names, types and shapes of tensors, in the order in which they lie in the memory."""

_ALIGNMENT = 64
"""Bytes to which tensors are aligned, as torch aligns its own."""


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """The layout in which `pack` writes the tensors."""
    return [(name, value.dtype, tuple(value.shape)) for name, value in tensors.items()]


def packed_bytes(layout: Layout) -> int:
    """Bytes of memory that a layout needs."""
    return sum(_aligned(_bytes(dtype, shape)) for _, dtype, shape in layout)


def pack(tensors: Mapping[str, Tensor], memory: UInt8[Tensor, " n"]) -> None:
    """Copy the tensors into `memory`, which may be on another device."""
    for value, place in zip(tensors.values(), unpack(layout_of(tensors), memory).values(), strict=True):
        place.copy_(value)


def unpack(layout: Layout, memory: UInt8[Tensor, " n"]) -> dict[str, Tensor]:
    """The tensors in `memory`, as views."""
    tensors, start = {}, 0
    for name, dtype, shape in layout:
        size = _bytes(dtype, shape)
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += _aligned(size)
    return tensors


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@runtime_checkable
class SampleMaker(Protocol):
    """Makes samples of given chains."""

    def submit(self, index: int, key: str) -> Future[Sample]:
        """Sample `index` of the chain `key`. The future raises UserError if the chain cannot be made into a sample.

        Any other exception is a bug, of the data code or of the pool.
        """

    def close(self) -> None:
        """End all work in the background."""


class MadeHere:
    """Makes samples in the calling process, when they are asked for."""

    def __init__(self, samples: SampleDataset) -> None:
        self._samples = samples

    def submit(self, index: int, key: str) -> Future[Sample]:
        future: Future[Sample] = Future()
        try:
            future.set_result(self._samples.make(index, key))
        except UserError as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Nothing to end."""


class SamplePool:
    """A `Pool` of `workers` processes. A chain whose worker dies, or needs longer than `time_limit` seconds (None: no limit),
    is one that cannot be made into a sample. The lowest sample is begun first. On a machine with a GPU samples arrive in
    pinned memory.
    """

    def __init__(self, samples: SampleDataset, workers: int, time_limit: float | None = None) -> None:
        make = partial(_packed, samples.without_keys())
        self._pool: Pool[Sample] = Pool(make, workers, time_limit, "data.time_limit", _unpacked)

    def submit(self, index: int, key: str) -> Future[Sample]:
        """Submit a sample, as `SampleMaker.submit`. A future that is cancelled before its sample is begun costs nothing."""
        return self._pool.submit(index, key, number=index)

    def close(self) -> None:
        """End all workers, in the middle of a sample too."""
        self._pool.close()


def _packed(samples: SampleDataset, index: int, key: str) -> tuple[Any, torch.Tensor]:
    """A sample in one piece of shared memory: one open file instead of one for each of its sixty tensors."""
    torch.set_num_threads(1)
    sample = samples.make(index, key)
    layout = layout_of(sample)
    memory = torch.empty(size := packed_bytes(layout), dtype=torch.uint8)
    try:
        memory = memory.share_memory_()
    except RuntimeError as error:  # torch's words for no room
        raise MachineError(
            f"/dev/shm, the shared memory, has no room for a sample of {size / 2**20:,.1f} MiB; make room there (in "
            "a container: --ipc host or --shm-size 8g), or read samples without workers: --data.num_workers 0"
        ) from error
    pack(sample, memory)
    return layout, memory


def _unpacked(packed: tuple[Any, torch.Tensor]) -> Sample:
    layout, memory = packed
    return unpack(layout, memory.pin_memory() if torch.cuda.is_available() else memory)
