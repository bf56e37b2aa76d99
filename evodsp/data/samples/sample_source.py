"""How samples are made of the keys of a store: of chains, or of complexes. The arrangement of the model decides once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from evodsp.config import FeatureConfig
from evodsp.data.complexes.source import ComplexFiles
from evodsp.data.complexes.store import ComplexStore
from evodsp.data.samples.complex_dataset import ComplexDataset, load_complex
from evodsp.data.samples.dataset import ChainDataset, RecordDataset, load_record
from evodsp.data.samples.distillation import DistillationSet
from evodsp.data.samples.sampling import ChainChoice
from evodsp.data.similarity.comparison import ComparedChains, ComparedComplexes, ComparedKeys
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore
from evodsp.data.sources.store import Store
from evodsp.data.templates.source import TemplateSource


@dataclass(frozen=True)
class DatasetSettings:
    """What data sets of all kinds of samples take. See `RecordDataset`, and `load_record` for `assumed_resolution`."""

    config: FeatureConfig
    seed: int
    training: bool
    batch_group: int
    cache_bytes: int
    choice: ChainChoice
    assumed_resolution: float | None


@runtime_checkable
class SampleSource(Protocol):
    """A store, and what samples are made of besides."""

    @property
    def store(self) -> Store:
        """The store of the keys."""

    @property
    def templates(self) -> TemplateSource | None:
        """The source of templates; None if samples have none."""

    @property
    def distillation(self) -> DistillationSet | None:
        """The self-distillation set; None if there is none."""

    def comparison(self, cache: str | None) -> ComparedKeys:
        """How keys are compared. `cache`: OpenFold's chain_data_cache.json, which has sequences of chains."""

    def first_look(self, key: str) -> tuple[float, list[str]]:
        """Read all files of a key: its resolution in Å, 0 without one, and lines about its templates.

        Raises UserError if one cannot be read.
        """

    def dataset(self, keys: Sequence[str], settings: DatasetSettings) -> RecordDataset:
        """The samples of some keys."""


@dataclass(frozen=True)
class ChainSamples:
    """Samples of single chains."""

    store: ChainFiles | FeatureStore
    templates: TemplateSource | None = None
    distillation: DistillationSet | None = None

    def comparison(self, cache: str | None) -> ComparedChains:
        """See `SampleSource`."""
        return ComparedChains(self.store, cache)

    def first_look(self, key: str) -> tuple[float, list[str]]:
        """See `SampleSource`."""
        record = load_record(self.store, key, self.templates)
        return float(record.labels["resolution"]), [] if record.templates is None else [record.templates.log_line]

    def dataset(self, keys: Sequence[str], settings: DatasetSettings) -> RecordDataset:
        """See `SampleSource`."""
        return ChainDataset(
            self.store, keys, **vars(settings), templates=self.templates, distillation=self.distillation
        )


@dataclass(frozen=True)
class ComplexSamples:
    """Samples of complexes. They have no self-distillation set."""

    store: ComplexFiles | ComplexStore
    templates: TemplateSource | None = None
    distillation: None = None

    def comparison(self, cache: str | None) -> ComparedComplexes:
        """See `SampleSource`."""
        return ComparedComplexes(self.store)

    def first_look(self, key: str) -> tuple[float, list[str]]:
        """See `SampleSource`."""
        record = load_complex(self.store, key, self.templates)
        return float(record.labels["resolution"]), [found.log_line for found in record.templates.values()]

    def dataset(self, keys: Sequence[str], settings: DatasetSettings) -> RecordDataset:
        """See `SampleSource`."""
        return ComplexDataset(self.store, keys, **vars(settings), templates=self.templates)
