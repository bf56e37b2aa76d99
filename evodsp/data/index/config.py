"""Settings of `evodsp data index`. Importing this costs nothing (no torch, no NumPy)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evodsp.errors import COUNT, UserError, check_numbers

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
    assembly. Every structure is read completely, and has the sequences; caches go before it for the other facts."""
    assembly: str | None = "1"
    """For complexes: the biological assembly that is read, as data.assembly of `evodsp fit`; null: the asymmetric unit."""
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
