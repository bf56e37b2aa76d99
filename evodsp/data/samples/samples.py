"""What the samples of a run are made of: a store of records, and how a record becomes a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evodsp.config import ArrangementName, FeatureConfig
from evodsp.data.records import CHAINS, COMPLEXES, Kind
from evodsp.data.samples.dataset import SampleDataset, parsed_with_templates
from evodsp.data.samples.distillation import DistillationSet
from evodsp.data.samples.sampling import ChainChoice
from evodsp.data.similarity.comparison import Compared
from evodsp.data.sources.opening import Records
from evodsp.data.templates.source import TemplateSource

KIND_OF: dict[ArrangementName, Kind] = {"monomer": CHAINS, "multimer": COMPLEXES}
"""What a sample of each arrangement of the model is of."""


@dataclass(frozen=True)
class DatasetSettings:
    """What data sets of all kinds of samples take. See `SampleDataset`, and `ChainRecord.of` for `assumed_resolution`."""

    config: FeatureConfig
    seed: int
    training: bool
    batch_group: int
    cache_bytes: int
    choice: ChainChoice
    assumed_resolution: float | None


@dataclass(frozen=True)
class Samples:
    """A store, and what samples are made of besides."""

    store: Records
    templates: TemplateSource | None = None
    """The source of templates; None if samples have none."""
    distillation: DistillationSet | None = None
    """The self-distillation set; None if there is none."""

    def comparison(self, cache: str | None) -> Compared:
        """How keys are compared. `cache`: OpenFold's chain_data_cache.json, which has sequences of chains."""
        return Compared(self.store, cache)

    def first_look(self, key: str) -> tuple[float, list[str]]:
        """Read all files of a key: its resolution in Å, 0 without one, and lines about its templates.

        Raises UserError if one cannot be read.
        """
        parsed, found = parsed_with_templates(self.store, key, self.templates)
        return parsed.assembly.chains[0].resolution or 0.0, [of_sequence.log_line for of_sequence in found.values()]

    def dataset(self, keys: Sequence[str], settings: DatasetSettings) -> SampleDataset:
        """The samples of some keys."""
        return SampleDataset(
            self.store,
            keys,
            **vars(settings),
            templates=self.templates,
            distillation=self.distillation,
        )
