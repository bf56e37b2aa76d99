"""The residues of chains in structure files that list no sequence (no SEQRES, no _entity_poly_seq).

A chain's residues are its amino acids in the order of the file. They are not sorted: numbers may run backwards (IMGT's 112A is
before 112) or jump (Kabat's). A residue that the file calls HETATM, or lists behind the chain's end, belongs to the chain only
if a peptide bond joins it: ligands such as a free glycine do not. Nothing stands for residues that are missing at a break.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import dist, floor

import gemmi
import numpy as np
from Bio.Data.PDBData import protein_letters_3to1_extended
from jaxtyping import Float64

_PEPTIDE_BOND = 2.0
"""Longest distance in Å between C and the next N, 1.33 in a good model. Where it is longer, residues are missing."""
_CA_TO_CA = 4.2
"""Longest distance in Å between neighbours' CA, 3.8 in a good model; it serves models that have no other atoms."""
_SAME_PLACE = 2.0
"""Longest distance in Å between the CA of two monomers at one place."""
_BACKBONE = ("N", "CA", "C")
_BEHIND_THE_END = (gemmi.EntityType.NonPolymer, gemmi.EntityType.Branched, gemmi.EntityType.Water)


@dataclass(frozen=True)
class Site:
    """One place of a chain: a residue, or several monomers that were seen there (microheterogeneity)."""

    residues: tuple[gemmi.Residue, ...]
    is_atom: bool
    """Whether it has an amino acid that the file does not call HETATM."""
    is_certain: bool
    """Whether it is not behind the chain's end either: it then needs no peptide bond to belong to the chain."""
    nitrogen: Float64[np.ndarray, "n 3"]
    alpha: Float64[np.ndarray, "a 3"]
    carbon: Float64[np.ndarray, "c 3"]

    @property
    def label(self) -> str:
        """The site's name in messages, such as GLY 201."""
        return f"{self.residues[0].name} {self.residues[0].seqid}"


@dataclass(frozen=True)
class FoundChain:
    """The sites of a chain, in its order, and its amino acids (all of N, CA and C) that do not belong to it."""

    sites: list[Site]
    left_out: list[Site]

    @property
    def breaks(self) -> tuple[int, ...]:
        """The indices of the sites behind which the chain breaks."""
        pairs = enumerate(pairwise(self.sites))
        return tuple(i for i, (a, b) in pairs if len(a.carbon) and len(b.nitrogen) and not bonded(a, b))


@lru_cache
def is_amino_acid(name: str) -> bool:
    """Whether a monomer is an amino acid, by gemmi's table."""
    residue = gemmi.find_tabulated_residue(name)
    return residue is not None and residue.is_amino_acid()


def find_chain(chain: gemmi.Chain, listed: Container[str] = ()) -> FoundChain:
    """The residues of one author chain that are its polymer's; none if it holds no protein. `listed`: the monomers of its
    sequence, if the file lists it; those that the file calls the polymer's need no peptide bond."""
    sites = list(_sites(chain, listed))
    pieces: list[list[Site]] = []
    for site in sites:
        if pieces and bonded(pieces[-1][-1], site):
            pieces[-1].append(site)
        else:
            pieces.append([site])
    own = [any(s.is_certain for s in piece) or (len(piece) > 1 and any(s.is_atom for s in piece)) for piece in pieces]
    if not any(own):  # some programs call all residues HETATM
        own = [len(piece) > 1 for piece in pieces]
    found = [site for piece, is_own in zip(pieces, own, strict=True) if is_own for site in piece]
    others = [piece for piece, is_own in zip(pieces, own, strict=True) if not is_own]
    found, others = _joined(found, others)
    return FoundChain(
        found, [s for piece in others for s in piece if len(s.nitrogen) and len(s.alpha) and len(s.carbon)]
    )


def _sites(chain: gemmi.Chain, listed: Container[str]) -> Iterator[Site]:
    """The places of the amino acids of a chain, and of residues that may be modified ones."""
    group: list[gemmi.Residue] = []
    for residue in chain:
        if not (
            is_known(residue.name)
            or _is_listed(residue, listed)
            or (_atoms(residue, "CA").size and _ends(residue)[0].size + _ends(residue)[1].size)
        ):
            continue
        if group and (residue.seqid != group[0].seqid or not _same_place(group[0], residue)):
            yield _site(group, listed)
            group = []
        group.append(residue)
    if group:
        yield _site(group, listed)


def _site(residues: list[gemmi.Residue], listed: Container[str]) -> Site:
    nitrogen, carbon = (np.concatenate(ends) for ends in zip(*map(_ends, residues), strict=True))
    atoms = [residue for residue in residues if residue.het_flag != "H" and is_known(residue.name)]
    certain = any(residue.entity_type not in _BEHIND_THE_END for residue in atoms)
    certain = certain or any(_is_listed(residue, listed) for residue in residues)
    alpha = np.concatenate([_atoms(residue, "CA") for residue in residues])
    return Site(tuple(residues), bool(atoms), certain, nitrogen, alpha, carbon)


def _is_listed(residue: gemmi.Residue, listed: Container[str]) -> bool:
    """Whether the file says that the residue is the listed polymer's."""
    is_polymer = residue.entity_type == gemmi.EntityType.Polymer or residue.label_seq is not None
    return is_polymer and residue.name in listed


def is_known(name: str) -> bool:
    """Whether a monomer is an amino acid or was one. AlphaFold2's table of letters cannot tell: it has bases too."""
    return is_amino_acid(name) or name in protein_letters_3to1_extended


def _atoms(residue: gemmi.Residue, name: str) -> Float64[np.ndarray, "n 3"]:
    """Positions of an atom, in all its alternative locations."""
    found = np.array([atom.pos.tolist() for atom in residue if atom.name == name], float).reshape(-1, 3)
    return found[np.isfinite(found).all(axis=1)]


def _ends(residue: gemmi.Residue) -> tuple[Float64[np.ndarray, "n 3"], Float64[np.ndarray, "m 3"]]:
    """The atoms by which peptide bonds join a residue to the one before it and to the one behind it."""
    nitrogen, carbon = _atoms(residue, "N"), _atoms(residue, "C")
    if not nitrogen.size and not carbon.size and is_amino_acid(residue.name):
        # Atoms of chromophores, which were made of several residues, have names such as N1 and C3.
        nitrogen, carbon = (
            np.array([atom.pos.tolist() for atom in residue if atom.element.name == element]).reshape(-1, 3)
            for element in ("N", "C")
        )
        if len(carbon) == len(_atoms(residue, "CA")):  # a trace
            carbon = carbon[:0]
    return nitrogen, carbon


def _within(first: Float64[np.ndarray, "n 3"], second: Float64[np.ndarray, "m 3"], limit: float) -> bool:
    return bool((np.linalg.norm(first[:, None] - second, axis=-1) <= limit).any())


def _same_place(first: gemmi.Residue, second: gemmi.Residue) -> bool:
    """Whether two residues of one number are monomers at one place. Where insertion codes were dropped, they are neighbours."""
    places = _atoms(first, "CA"), _atoms(second, "CA")
    if not (places[0].size and places[1].size) or _within(*places, _SAME_PLACE):
        return True
    # gemmi splits a residue whose segment names differ.
    return first.name == second.name and not all(_atoms(r, name).size for r in (first, second) for name in _BACKBONE)


def bonded(first: Site, second: Site) -> bool:
    """Whether a peptide bond leads from the first to the second."""
    if len(first.carbon) and len(second.nitrogen):
        return _within(first.carbon, second.nitrogen, _PEPTIDE_BOND)
    return _within(first.alpha, second.alpha, _CA_TO_CA)


def _joined(found: list[Site], others: list[list[Site]]) -> tuple[list[Site], list[list[Site]]]:
    """The chain with those of the other pieces that peptide bonds join to it, in their places, and the rest of the pieces.

    Some programs list modified residues behind all others.
    """
    if not found or not others:
        return found, others
    sites = [*found, *(site for piece in others for site in piece)]
    carbons, nitrogens = _Cells([site.carbon for site in sites]), _Cells([site.nitrogen for site in sites])
    before = [carbons.near(piece[0].nitrogen) for piece in others]
    behind = [nitrogens.near(piece[-1].carbon) for piece in others]
    first_of, last_of, total = [], [], len(found)
    for piece in others:
        first_of.append(total)
        total += len(piece)
        last_of.append(total - 1)
    waiting: dict[int, list[int]] = {}  # site -> the pieces that it may join to the chain
    for number, partners in enumerate(zip(before, behind, strict=True)):
        for site in (*partners[0], *partners[1]):
            waiting.setdefault(site, []).append(number)
    following = {index: index + 1 for index in range(-1, len(found) - 1)} | {len(found) - 1: -1}
    preceding = {after: index for index, after in following.items()}
    queue = [number for number in range(len(others)) if any(s < len(found) for s in (*before[number], *behind[number]))]
    placed: set[int] = set()
    for number in queue:  # the queue grows
        slots = [s for s in before[number] if s in preceding] + [preceding[s] for s in behind[number] if s in preceding]
        free = (s for s in slots if s < 0 or following[s] < 0 or not bonded(sites[s], sites[following[s]]))
        if number in placed or (slot := next(free, None)) is None:
            continue
        placed.add(number)
        run, after = list(range(first_of[number], last_of[number] + 1)), following[slot]
        for left, right in pairwise([slot, *run, after]):
            following[left], preceding[right] = right, left
        queue.extend(n for end in {run[0], run[-1]} for n in waiting.get(end, []) if n not in placed)
    order, at = [], following[-1]
    while at >= 0:
        order.append(sites[at])
        at = following[at]
    return order, [piece for number, piece in enumerate(others) if number not in placed]


class _Cells:
    """Finds the sites with an atom a peptide bond away from a place, by cells of space: the time does not grow with the
    chain."""

    _MOST = 8
    """Most sites of a cell that are looked at: no molecule has more."""

    def __init__(self, atoms: list[Float64[np.ndarray, "_ 3"]]) -> None:
        self._cells: dict[tuple[int, ...], list[tuple[int, tuple[float, ...]]]] = {}
        for site, places in enumerate(atoms):
            for place in places.tolist():
                cell = self._cells.setdefault(_cell(place), [])
                if len(cell) < self._MOST:
                    cell.append((site, tuple(place)))

    def near(self, places: Float64[np.ndarray, "n 3"]) -> list[int]:
        """The sites near `places`, in their order."""
        found = set()
        for place in places[: self._MOST].tolist():
            x, y, z = _cell(place)
            for dx, dy, dz in product((-1, 0, 1), repeat=3):
                for site, other in self._cells.get((x + dx, y + dy, z + dz), ()):
                    if dist(place, other) <= _PEPTIDE_BOND:
                        found.add(site)
        return sorted(found)


def _cell(place: Sequence[float]) -> tuple[int, ...]:
    return tuple(floor(x / _PEPTIDE_BOND) for x in place)
