"""What a prediction has to do: the records and models that a user gives, and one job per record and model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evodsp.config import FeatureConfig
from evodsp.data.templates.features import TemplateFeatures
from evodsp.inference.failures import Failure
from evodsp.inference.models import NamedModel
from evodsp.inference.stored import Stored
from evodsp.inference.targets import Target
from evodsp.model.alphafold import AlphaFold


@dataclass(frozen=True)
class Job:
    """One target, with everything that its prediction needs besides the alignments and the model."""

    target: Target
    templates: TemplateFeatures
    """The templates in use, best first."""
    templates_line: str
    templates_seconds: float
    """Seconds spent on finding the templates."""
    settings: dict[str, Any]
    """The settings that its files depend on."""
    stored: Stored | None
    """The result of an earlier run with the same settings."""
    seeds: list[int]
    """The seeds that have to be predicted."""
    kept: bool
    """Whether all files are there already."""
    model: str | None
    """What the model is called in the target's folder; None if it is the only one."""


@dataclass(frozen=True)
class Inputs:
    """What the user gives."""

    targets: list[Target]
    failures: list[Failure]
    """The records that are no targets."""
    models: list[tuple[NamedModel, FeatureConfig]]
    """With the feature sizes of their checkpoints."""


@dataclass(frozen=True)
class Work:
    """What rank 0 reads and checks before a model runs."""

    jobs: list[Job]
    failures: list[Failure]
    """The targets that cannot be predicted."""
    features: FeatureConfig
    model: AlphaFold | None
    """None if every result exists already."""
