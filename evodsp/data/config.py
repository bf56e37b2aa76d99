"""Settings of the commands `evodsp data`. Importing this costs nothing (no torch, no NumPy)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal, get_args

from evodsp.errors import COUNT, FRACTION, SIZE, Range, SettingError, UserError, check_numbers, nearest


@dataclass(frozen=True)
class BuildConfig:
    """The contents of a feature store, and the processes that build it. Raises UserError for values out of range."""

    alignment_dir: Path
    """Folder with a sub-folder of alignments, or one, per chain: <pdbid>_<chain>, or ColabFold's <name>.a3m (docs/data.md); or
    OpenFold's alignment databases."""
    structure_dir: Path
    """Folder of structures, <pdbid>.cif or <pdbid>.pdb, gzipped or not."""
    output: Path
    """Folder of the store. A build that was stopped is continued."""
    chains: Path | None = None
    """Text file with one chain per line, for complexes one entry; null takes all of them with alignments."""
    complexes: bool = False
    """Build a store of complexes, for runs of model.arrangement multimer: a record for each entry, with the chains of its
    assembly and their rows for pairing."""
    assembly: str | None = "1"
    """Biological assembly of a complex, as data.assembly of `evodsp fit`; null: the asymmetric unit."""
    pairing: Literal["species", "entry"] = "species"
    """Pairing of rows of different chains of a complex, as data.pairing of `evodsp fit`."""
    template_structure_dir: Path | None = None
    """Folder of template structures. Template hits are read from the .hhr files and from hmm_output.sto,
    hmmsearch_output.sto or pdb_hits.sto in the chains' alignment folders. null builds a store without templates."""
    obsolete: Path | None = None
    """The PDB's obsolete.dat, which names the entries that replace withdrawn templates."""
    min_plddt: float | None = None
    """The pLDDT (0 to 100) below which atoms of residues are masked (AlphaFold2: 50). The structures are then predictions
    with the pLDDT as B-factors, and the store is for data.distillation.store. null: the structures are experiments."""
    workers: int | None = None
    """Worker processes; null takes one for each core."""
    scheduler: str | None = None
    """Address of a Dask scheduler whose workers build the store in place of local processes, such as tcp://node1:8786. They
    must see the same folders. `local`, or --scheduler alone, starts a Dask cluster of --workers processes on this machine.
    This needs the extra cluster."""
    share: str | None = None
    """The share I/N of the work, such as 0/8, for one of N tasks that build one store together: every N-th shard, starting
    with number I (see the documentation). null builds and completes the whole store."""
    chains_per_shard: int = 64
    """Chains in each file of the store. A stopped build repeats at most one such file for each worker."""

    def __post_init__(self) -> None:
        check_numbers(self, {"workers": SIZE, "chains_per_shard": SIZE, "min_plddt": Range(0, most=100)}, "--")
        if self.obsolete is not None and self.template_structure_dir is None:
            raise UserError(
                f"--obsolete is {self.obsolete}, but --template_structure_dir is not given; give it, or leave --obsolete out"
            )
        for name, value, default in (("assembly", self.assembly, "1"), ("pairing", self.pairing, "species")):
            if not self.complexes and value != default:
                raise UserError(
                    f"--{name} is {value}, but the store is of single chains; give --complexes true, or leave it out"
                )
        if self.share is not None and self.scheduler is not None:
            raise UserError("--share and --scheduler both divide the work; give one of them")
        _ = self.share_of_tasks

    @property
    def share_of_tasks(self) -> tuple[int, int]:
        """(I, N) of `share`; (0, 1) for the whole store."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.share or "0/1")
        if found is None or not int(found[1]) < int(found[2]):
            raise SettingError("--share", f"'{self.share}'", "I/N with I from 0 to N-1, such as 0/8")
        return int(found[1]), int(found[2])


@dataclass(frozen=True)
class DoctorConfig:
    """The data to examine, the number of chains to read, and the folder of the report."""

    OTHER_NAMES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "train_chains": "chains", "data.train_chains": "chains", "data.validation_chains": "validation_chains",
            "data.alignment_dir": "alignment_dir", "data.structure_dir": "structure_dir",
        }
    )  # fmt: skip
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
    """Chains whose relatives are left out of training, as data.exclude_like; null takes those of the config."""
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


FOLDERS = ("alignment_dir", "structure_dir")
FILES = ("chain_data_cache", "mmcif_cache", "cluster_file", "duplicates", "obsolete")


@dataclass(frozen=True)
class IndexConfig:
    """The folders and lists to scan, and the folder of the index."""

    alignment_dir: Path
    """Folder of alignments: a sub-folder or a file per chain, or OpenFold's alignment databases."""
    structure_dir: Path
    """Folder of structures."""
    output: Path
    """Folder of the index to write. A scan that was interrupted continues where it was."""
    complexes: bool = False
    """Make an index of complexes, for runs of model.arrangement multimer: a row for each entry, with the chains of its
    assembly. Every structure is read completely. Sequences come from it, other facts from the caches first."""
    assembly: str | None = "1"
    """Biological assembly of a complex, as data.assembly of `evodsp fit`; null: the asymmetric unit."""
    chain_data_cache: Path | None = None
    """OpenFold's chain_data_cache.json: sequences, release dates, resolutions, cluster sizes. Facts that it does not list are
    read from mmcif_cache, then from the structures."""
    mmcif_cache: Path | None = None
    """OpenFold's mmcif_cache.json: sequences, release dates, resolutions."""
    cluster_file: Path | None = None
    """Clusters of similar chains, the names of one cluster per line. It overrides the cluster sizes of chain_data_cache. If all
    names end in a number, as in the PDB's clusters-by-entity-40.txt, they are entities: the headers of all structures are read
    to find the chains of each, and the chains of the data set are counted."""
    duplicates: Path | None = None
    """OpenProteinSet's duplicate_pdb_chains.txt: identical chains, one set per line. A chain without alignments uses those of
    an identical one."""
    obsolete: Path | None = None
    """The PDB's obsolete.dat: withdrawn entries and their successors."""
    workers: int | None = None
    """Processes that scan; null takes one per core, 0 scans in the main process."""
    scheduler: str | None = None
    """Address of a Dask scheduler whose workers scan in place of local processes, such as tcp://node1:8786. They must see the
    same folders. `local`, or --scheduler alone, starts a Dask cluster of --workers processes on this machine. This needs the
    extra cluster."""
    overwrite: bool = False
    """Replace an existing index."""

    def __post_init__(self) -> None:
        check_numbers(self, {"workers": COUNT}, "--")
        if self.assembly != "1" and not self.complexes:
            raise UserError(
                f"--assembly is {self.assembly or 'null'}, but the index is of single chains; give --complexes true, or leave "
                "it out"
            )
        if self.scheduler is not None and self.workers == 0:
            raise UserError(
                "--workers 0 scans in the main process, but --scheduler gives the work to others; give one of them"
            )


def check_index_config(config: IndexConfig) -> None:
    """Raise UserError if an input is missing or the output is not free."""
    from evodsp.data.index.data_index import is_index

    for name in FOLDERS:
        path = getattr(config, name)
        if not path.is_dir():
            what = "a file" if path.exists() else "not there"
            raise UserError(f"--{name} {path}: is {what}, but must be a folder; check the path")
        # A root that holds its own index changes when the index is written, and would always seem newer than it.
        if config.output.absolute().resolve().parent == path.resolve() or config.output.resolve() == path.resolve():
            raise UserError(f"--output {config.output}: is inside of --{name}; give another --output")
    for name in FILES:
        path = getattr(config, name)
        if path is not None and not path.is_file():
            what = "a folder" if path.is_dir() else "not there"
            raise UserError(f"--{name} {path}: is {what}, but must be a file; check the path, or leave it out")
    output = config.output
    if not output.exists():
        return
    if not output.is_dir() or (any(output.iterdir()) and not is_index(output)):
        raise UserError(f"--output {output}: exists and is not an index; give another --output")
    if is_index(output) and not config.overwrite:
        raise UserError(
            f"--output {output}: there is an index already; replace it with --overwrite, or give another --output"
        )


What = Literal["alignments", "structures", "lists"]


@dataclass(frozen=True)
class DataFetchConfig:
    """The public data to fetch, and the folder that keeps them."""

    what: Sequence[str]
    """Kinds of data, one or more: alignments (OpenProteinSet), structures (the PDB), lists (identical chains, clusters,
    obsolete entries)."""
    output: Path
    """Folder to fill: alignments/, mmcif_files/, and the lists. missing.txt lists the files that could not be fetched."""
    chains: str | None = None
    """Text file with one chain per line, which alignments and structures need."""
    base: str | None = None
    """Address of a mirror, or a local folder with the same files, in place of the public addresses."""
    jobs: int = 8
    """Number of files that are fetched at a time."""

    def __post_init__(self) -> None:
        check_numbers(self, {"jobs": SIZE}, "--")
        for name in self.what:
            if name not in get_args(What):
                raise UserError(
                    f"nothing public is called '{name}'.{nearest(name, get_args(What))} There are {', '.join(get_args(What))}"
                )
        if self.chains is None and set(self.what) != {"lists"}:
            raise UserError(
                "alignments and structures need a list of chains; name them with --chains FILE, one per line"
            )
