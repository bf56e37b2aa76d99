"""Settings of `evodsp data doctor`. Importing this costs nothing (no torch, no NumPy)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from evodsp.errors import COUNT, FRACTION, check_numbers


@dataclass(frozen=True)
class DoctorConfig:
    """The data to examine, the number of chains to read, and the folder of the report."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = MappingProxyType({"train_chains": "chains"})
    """Other names of options, those that other commands have for the same thing, each with its option."""
    output: Path
    """Folder for doctor.html and doctor.json."""
    config: Path | None = None
    """YAML file of `evodsp fit`: its `data` block names folders, index and chains. Options on this command line
    override the file."""
    alignment_dir: str | None = None
    """Folder of alignments."""
    structure_dir: str | None = None
    """Folder of structures."""
    complexes: bool = False
    """Examine complexes, as a config whose model.arrangement is multimer does."""
    index: str | None = None
    """Index of both folders, made by `evodsp data index`."""
    chains: str | list[str] | None = None
    """Training chains, as data.train_chains; null takes those of the config, or all others that have alignments."""
    validation_chains: str | list[str] | None = None
    """Chains to validate on, as data.validation_chains; null takes those of the config."""
    test_chains: str | list[str] | None = None
    """Chains to test on, as data.test_chains; null takes those of the config."""
    exclude_like: str | list[str] | None = None
    """Chains whose likes are not trained on, as data.exclude_like; null takes those of the config."""
    exclude_identity: float | None = None
    """The largest share of identical residues with one of them, as data.exclude_identity; null takes that of the config."""
    sample: int = 200
    """Training chains that are read completely, drawn at random; 0 reads all. Validation chains are all read."""
    max_bad: float = 0.05
    """Largest share of the training chains read that may be bad; with more, training should not start."""
    seed: int = 0
    """Seed of the draw."""
    workers: int | None = None
    """Processes that read; null takes one per core, 0 reads in the main process."""

    def __post_init__(self) -> None:
        check_numbers(
            self,
            {"sample": COUNT, "seed": COUNT, "workers": COUNT, "max_bad": FRACTION, "exclude_identity": FRACTION},
            "--",
        )
