"""The sequence that a structure file lists of a chain (SEQRES, _entity_poly_seq), and the place in it of residues with atoms.

Residues are placed by their numbers and by their parents' one-letter codes, never by their names: programs rename residues
(CYX, HIE), and people change them and keep the list. Residues that the list does not have are put into it, where they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gemmi
import numpy as np
from gemmi import cif
from jaxtyping import Int64

from evodsp.data.formats.cif_values import rows_of
from evodsp.data.formats.forcefield_names import letters_of, listed_name
from evodsp.data.formats.unlisted_chains import FoundChain, Site, is_amino_acid
from evodsp.errors import FileFormatError
from evodsp.geometry.residues import monomer_letter
from evodsp.printing import shown

MOST_DIFFERENT = 0.1
"""Largest share of a chain's residues that may differ from its list. Beyond it the list is another protein's."""
_MOST_DIGITS = 9
_NO_GAP = -60
"""Score of leaving out listed residues between two that a peptide bond joins, in units of which a match is 10."""


def sequences_of_chains(path: str | Path, block: cif.Block) -> dict[str, dict[int, list[str]]]:
    """SEQRES of every protein polymer: label_asym_id -> sequence number -> monomers (several: microheterogeneity)."""
    of_entity = sequences_of_entities(path, block)
    asyms = rows_of(block, "_struct_asym.id", "_struct_asym.entity_id")
    asyms = asyms or list(dict.fromkeys(rows_of(block, "_atom_site.label_asym_id", "_atom_site.label_entity_id")))
    return {asym: of_entity[entity] for asym, entity in asyms if entity in of_entity}


def sequences_of_entities(path: str | Path, block: cif.Block) -> dict[str, dict[int, list[str]]]:
    """SEQRES of every protein entity: entity -> sequence number -> monomers."""
    types = {entity: kind.lower() for entity, kind in rows_of(block, "_entity_poly.entity_id", "_entity_poly.type")}
    of_entity: dict[str, dict[int, list[str]]] = {}
    for entity, number, monomer in rows_of(
        block, "_entity_poly_seq.entity_id", "_entity_poly_seq.num", "_entity_poly_seq.mon_id"
    ):
        kind = types.get(entity, "polypeptide")
        if "polypeptide" not in kind and kind != "other":
            continue
        if len(number) > _MOST_DIGITS or not re.fullmatch(r"-?\d+", number):
            raise FileFormatError(
                path, f"_entity_poly_seq.num is {shown(number)} but must be a number; correct the file"
            )
        of_entity.setdefault(entity, {}).setdefault(int(number), []).append(listed_name(monomer))
    if not types:
        return {entity: listed for entity, listed in of_entity.items() if any(_are_amino_acids(listed))}
    # python-modelcif, with which programs write predictions, calls a chain of glycine alone, which has no hand, `other`.
    return {
        entity: listed
        for entity, listed in of_entity.items()
        if types.get(entity) != "other" or all(_are_amino_acids(listed))
    }


def _are_amino_acids(listed: Mapping[int, list[str]]) -> Iterator[bool]:
    """Whether each monomer of an entity is an amino acid."""
    return (is_amino_acid(name) for names in listed.values() for name in names)


def placed(found: FoundChain, listed: Sequence[list[str]]) -> tuple[list[list[str]], list[int], list[Site]]:
    """The sites of a chain, in their order, in its listed sequence: by their numbers, or by an alignment of one-letter codes
    where that fits better.

    The monomers of each residue; each site's residue; and the sites that the list does not have, which are among the residues.
    """
    sites = found.sites
    own = [set().union(*(letters_of(residue.name) for residue in site.residues)) for site in sites]
    letters = [{monomer_letter(name) for name in names} for names in listed]
    ways = [way for way in (_by_number(sites, own, letters), _by_letter(found, own, letters)) if way is not None]
    index = min(ways, key=lambda way: _differences(way, own, letters))
    sequence: list[list[str]] = []
    numbers: list[int] = []
    done = 0
    for site, at in zip(sites, index, strict=True):
        if at is None:
            sequence.append(list(dict.fromkeys(residue.name for residue in site.residues)))
        else:
            sequence += listed[done : at + 1]
            done = at + 1
        numbers.append(len(sequence) - 1)
    sequence += listed[done:]
    return sequence, numbers, [site for site, at in zip(sites, index, strict=True) if at is None]


Way = Sequence[int | None]
"""The listed residue of each site, in ascending order; None for a site that is not listed."""


def _differences(way: Way, own: list[set[str]], letters: list[set[str]]) -> int:
    return sum(
        at is None or (one.isdisjoint(letters[at]) and "X" not in one | letters[at])
        for at, one in zip(way, own, strict=True)
    )


def _by_number(sites: list[Site], own: list[set[str]], letters: list[set[str]]) -> list[int | None] | None:
    """The place of each site if its number is its place in the list, but for a constant; None if no constant will do."""
    numbers = _numbers(sites)
    if (np.diff(numbers) < 1).any() or numbers[-1] - numbers[0] >= len(letters):
        return None
    first = numbers - numbers[0]
    codes = np.array([ord(next(iter(letter))) for letter in letters])
    mine = np.array([ord(next(iter(letter))) for letter in own])
    starts = np.arange(len(letters) - first[-1])
    equal = np.zeros(len(starts), np.int64)
    for offset, code in zip(first.tolist(), mine.tolist(), strict=True):
        equal += codes[starts + offset] == code
    best = np.flatnonzero(equal == equal.max())
    start = int(numbers[0]) - 1 if int(numbers[0]) - 1 in best else int(best[0])
    return (start + first).tolist()


def _numbers(sites: list[Site]) -> Int64[np.ndarray, " L"]:
    """The number of each site: its label_seq_id if it has one, else as far from the neighbour's as the author says."""
    found: list[int] = []
    listed = [site.residues[0].label_seq for site in sites]
    author = [site.residues[0].seqid.num or 0 for site in sites]
    offset = next((label - one for label, one in zip(listed, author, strict=True) if label is not None), 0)
    for label, one in zip(listed, author, strict=True):
        offset = offset if label is None else label - one
        found.append(one + offset)
    return np.array(found, np.int64)


def _by_letter(found: FoundChain, own: list[set[str]], letters: list[set[str]]) -> list[int | None]:
    """The place of each site by a global alignment: residues may be missing where the chain breaks or numbers jump, and at its
    ends."""
    scoring = gemmi.AlignmentScoring()
    scoring.match, scoring.mismatch, scoring.gapo, scoring.gape = 10, -5, -30, -1
    open_at = {*found.breaks, *np.flatnonzero(np.diff(_numbers(found.sites)) > 1).tolist()}
    gaps = [0, *(0 if i in open_at else _NO_GAP for i in range(len(own) - 1)), 0]
    listed = [min(one) for one in letters]
    mine = [min(one) for one in own]
    cigar = gemmi.align_string_sequences(listed, mine, gaps, scoring).cigar_str()
    way: list[int | None] = []
    at = 0
    for count, kind in re.findall(r"(\d+)([MID])", cigar):
        if kind == "M":
            way += range(at, at + int(count))
        elif kind == "D":
            way += [None] * int(count)
        at += int(count) * (kind != "D")
    return way
