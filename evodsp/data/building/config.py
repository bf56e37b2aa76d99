"""Settings of `evodsp data build`. Importing this costs nothing (no torch, no numpy)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from evodsp.errors import SIZE, Range, SettingError, UserError, check_numbers


@dataclass(frozen=True)
class BuildConfig:
    """The contents of a feature store, and the processes that build it. Raises UserError for values out of range."""

    alignment_dir: Path
    """Folder with a sub-folder of .a3m and .sto files, or one file, per chain: <pdbid>_<chain>, or ColabFold's <name>.a3m; or
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
    """For complexes: the biological assembly that is read, as data.assembly of `evodsp fit`; null: the asymmetric unit."""
    pairing: Literal["species", "entry"] = "species"
    """For complexes: which rows of different chains are paired, as data.pairing of `evodsp fit`."""
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
