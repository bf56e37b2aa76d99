"""Settings of `evodsp data synthesize`: where to write, sizes and the seed. Importing this costs nothing (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evodsp.errors import UserError

MIN_LENGTH, MAX_LENGTH = 48, 128
FOLDS = ("helix_bundle", "beta_meander", "alpha_beta")


@dataclass(frozen=True)
class SynthesisConfig:
    """Seeded protein families. The same values give the same files, bit for bit, on one machine.

    Raises UserError, with the value and the bound, for sizes that cannot be made.
    """

    output: Path
    """Folder to create; it must not exist or be empty."""
    families: int = 3
    """Families; they take the folds helix_bundle, beta_meander and alpha_beta in turn."""
    members: int = 4
    """Members of each family that are listed in train.txt."""
    held_out: int = 1
    """Further members of each family, listed in validation.txt only."""
    min_length: int = 48
    """Shortest family, in residues. All members of one family have the same length."""
    max_length: int = 64
    """Longest family, in residues; lengths are spread evenly from the shortest to the longest."""
    sequences: int = 96
    """Sequences in each alignment file of a chain, the query included."""
    seed: int = 0
    """Seed of everything random."""

    def __post_init__(self) -> None:
        for name, low in (("families", 1), ("members", 1), ("held_out", 0), ("sequences", 2), ("seed", 0)):
            if getattr(self, name) < low:
                raise UserError(f"synthesize: {name} is {getattr(self, name)}, must be at least {low}")
        if self.families * (self.members + self.held_out) > 999:
            raise UserError(
                f"synthesize: {self.families} families of {self.members + self.held_out} chains are more than the 999 names "
                "s001..s999; make fewer"
            )
        if not MIN_LENGTH <= self.min_length <= self.max_length <= MAX_LENGTH:
            raise UserError(
                f"synthesize: lengths {self.min_length}..{self.max_length} must lie within {MIN_LENGTH}..{MAX_LENGTH} "
                "residues, the shortest first"
            )

    def length(self, family: int) -> int:
        """Residues of this family's chains."""
        if self.families == 1:
            return self.max_length
        return self.min_length + round(family * (self.max_length - self.min_length) / (self.families - 1))


def check_output(path: Path) -> None:
    """Raise UserError if `path` is not free for a new folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: exists and is not an empty folder; name a new one, or empty it first")
    if not path.parent.is_dir():
        raise UserError(f"{path}: its parent folder {path.parent} does not exist; create it first")
