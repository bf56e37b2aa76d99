"""Settings of the families: where to write, sizes and the seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evodsp.errors import UserError
from evodsp.ranges import COUNT, SIZE, Range, check_numbers

MIN_LENGTH, MAX_LENGTH = 48, 128
FOLDS = ("helix_bundle", "beta_meander", "alpha_beta")


@dataclass(frozen=True)
class SynthesisConfig:
    """Seeded protein families. The same values give the same files, bit for bit, on one machine.

    Raises UserError, with the value and the bound, for sizes out of range.
    """

    output: Path
    """Folder to create; it must not exist or be empty."""
    families: int = 3
    """Number of families. Their folds are helix_bundle, beta_meander and alpha_beta in turn."""
    members: int = 4
    """Members of each family, listed in train.txt."""
    held_out: int = 1
    """Further members of each family, listed in validation.txt only."""
    min_length: int = 48
    """Residues of the shortest family. All members of a family have the same length."""
    max_length: int = 64
    """Residues of the longest family. Lengths are spaced evenly from the shortest to the longest."""
    sequences: int = 96
    """Sequences in each alignment file of a chain, the query included."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        ranges = {"families": SIZE, "members": SIZE, "held_out": COUNT, "sequences": Range(2), "seed": COUNT}
        check_numbers(self, ranges, "--")
        if self.families * (self.members + self.held_out) > 999:
            raise UserError(
                f"--families {self.families} with {self.members + self.held_out} chains each are more than the 999 names "
                "s001..s999; ask for fewer"
            )
        if not MIN_LENGTH <= self.min_length <= self.max_length <= MAX_LENGTH:
            raise UserError(
                f"--min_length and --max_length are {self.min_length}..{self.max_length}, but must lie within "
                f"{MIN_LENGTH}..{MAX_LENGTH} residues, the smaller one first"
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
