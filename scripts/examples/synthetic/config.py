"""Settings of the families of chains or complexes: where to write, sizes and the seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evodsp.errors import COUNT, SIZE, Range, UserError, check_numbers

MIN_LENGTH, MAX_LENGTH = 48, 128
MIN_LENGTH_IN_COMPLEX = 28
"""Shorter chains have no core of their own, but with a partner they have."""
FOLDS = ("helix_bundle", "beta_meander", "alpha_beta")


@dataclass(frozen=True)
class SynthesisConfig:
    """Seeded protein families. The same values give the same files, bit for bit, on one machine.

    Raises UserError, with the value and the bound, for sizes out of range.
    """

    output: Path
    """Folder to create; it must not exist or be empty."""
    families: int = 3
    """Number of families of chains. Their folds are helix_bundle, beta_meander and alpha_beta in turn."""
    members: int = 4
    """Members of each family (of complexes, if there are any), listed in train.txt."""
    held_out: int = 1
    """Further members of each family, listed in validation.txt only."""
    min_length: int = 48
    """Residues of the shortest family. All members of a family have the same length."""
    max_length: int = 64
    """Residues of the longest family. Lengths are spaced evenly from the shortest to the longest."""
    sequences: int = 96
    """Sequences in each alignment file of a chain, the query included. The file `uniref90_hits` of a heterodimer's chain, whose
    rows are not paired, has a quarter of them."""
    complexes: int = 0
    """Number of families of complexes of two chains, which are written in place of single chains. Heterodimers have chains of
    two of the families, all pairs in turn; complexes of the same pair have different interfaces."""
    homodimers: int = 0
    """How many of the families of complexes are homodimers. They have two copies of a chain of each family in turn, and come
    last."""
    twins: bool = False
    """Write each heterodimer once with each of the interfaces that its two chains have: the sequences and the rows that could
    be paired are the same, and only the pairing tells which interface it is."""
    shuffled: bool = False
    """Give the rows of one chain of each heterodimer the species of other rows, so that what is paired does not belong
    together. A control: nothing else changes."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        ranges = {"families": SIZE, "members": SIZE, "held_out": COUNT, "sequences": Range(2), "seed": COUNT}
        check_numbers(self, ranges | {"complexes": COUNT, "homodimers": COUNT}, "--")
        option, count = ("complexes", self.complexes) if self.complexes else ("families", self.families)
        if count * (self.members + self.held_out) > 999:
            raise UserError(
                f"--{option} {count} with {self.members + self.held_out} members each are more than the 999 names "
                "from 001 to 999; ask for fewer"
            )
        shortest = MIN_LENGTH_IN_COMPLEX if self.complexes else MIN_LENGTH
        if not shortest <= self.min_length <= self.max_length <= MAX_LENGTH:
            raise UserError(
                f"--min_length and --max_length are {self.min_length}..{self.max_length}, but must lie within "
                f"{shortest}..{MAX_LENGTH} residues, the smaller one first"
            )
        if self.homodimers > self.complexes:
            raise UserError(
                f"--homodimers {self.homodimers} of --complexes {self.complexes}: homodimers are some of the complexes; ask "
                "for fewer homodimers, or more complexes"
            )
        if self.families == 1 and self.complexes > self.homodimers:
            raise UserError(
                f"--families 1 has no two families for the {self.complexes - self.homodimers} heterodimers of --complexes "
                f"{self.complexes}; ask for two families, or for --homodimers {self.complexes}"
            )

        heterodimers, pairs = self.complexes - self.homodimers, self.families * (self.families - 1) // 2
        if self.shuffled and not heterodimers:
            raise UserError("--shuffled true has no heterodimers, whose rows are paired; ask for --complexes 1 or more")
        if self.twins and heterodimers <= pairs:
            raise UserError(
                f"--twins true needs two heterodimers with the same chains, but each of the {heterodimers} has its own pair of "
                f"the --families {self.families}; ask for --complexes {pairs + 1 + self.homodimers} or more"
            )

    def length(self, family: int) -> int:
        """Number of residues of the chains of this family."""
        if self.families == 1:
            return self.max_length
        return self.min_length + round(family * (self.max_length - self.min_length) / (self.families - 1))


def check_new_folder(path: Path) -> None:
    """Raise UserError if `path` is not free for a new folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: exists and is not an empty folder; name a new one, or empty it first")
    if not path.parent.is_dir():
        raise UserError(f"{path}: its parent folder {path.parent} does not exist; create it first")
