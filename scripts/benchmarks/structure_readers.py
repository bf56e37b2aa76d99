"""Read all structure files of a folder with evodsp, gemmi and Biopython: what evodsp does not take must stand in a line.

    python -m scripts.benchmarks.structure_readers FOLDER

A file is compared by its coordinates, whatever chains and residues are called: each residue with a CA that gemmi or Biopython
read as an amino acid must be one of evodsp's, with its letter and its heavy atoms, and no atom of another one. Of several
monomers at one place, one is enough. A file that differs is `silent` unless evodsp warned about it. Prints a table of the
outcomes and the silent files; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gemmi
import numpy as np
from Bio.PDB import MMCIFParser, PDBParser
from Bio.PDB.Polypeptide import is_aa

from evodsp.data.formats.chains import AMINO_ACID_OF, is_heavy
from evodsp.data.formats.mmcif import read_structure
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_TYPES, monomer_letter
from evodsp.geometry.residues import CA as ORDER_OF_CA
from evodsp.reading.text_files import text_of

SUFFIXES = (".pdb", ".cif", ".ent", ".mmcif", ".pdb.gz", ".cif.gz", ".ent.gz")
OUTCOMES = ("agree", "differ with a line", "refused", "out of time", "silent", "no amino acids")
SECONDS = 200
"""Time limit of a file."""
Place = tuple[float, ...]
Atoms = dict[str, list[Place]]
"""The places of each atom, in all alternative locations."""
Residue = tuple[str, Atoms]
"""A residue's name and its atoms."""
Sites = list[list[Residue]]
"""The monomers of each place of a chain; most have one."""


def theirs(path: Path) -> Iterator[Sites]:
    """The amino acids of the first model, as gemmi and Biopython read them."""
    try:
        text = text_of(path).decode("utf-8", "replace")
    except UserError:
        return
    is_pdb = ".pdb" in path.name.lower() or ".ent" in path.name.lower()
    for read in (_gemmi, _biopython):
        with contextlib.suppress(Exception):  # neither reads all files
            sites: dict[str, list[Residue]] = {}
            for site, name, atoms in read(text, is_pdb):
                is_amino_acid = is_aa(name, standard=False) or name in AMINO_ACID_OF or {"N", "C"} <= atoms.keys()
                if "CA" in atoms and is_amino_acid:
                    sites.setdefault(site, []).append((name, atoms))
            yield list(sites.values())


def _gemmi(text: str, is_pdb: bool) -> Iterator[tuple[str, str, Atoms]]:
    structure = gemmi.read_pdb_string(text) if is_pdb else _of_cif(text)
    for number, chain in enumerate(structure[0]):
        for residue in chain:
            atoms: Atoms = {}
            for atom in residue:
                atoms.setdefault(atom.name, []).append(_rounded(atom.pos.tolist()))
            locations = "" if any(atom.has_altloc() for atom in residue) else f"{number} {residue.name}"
            yield f"{chain.name} {residue.seqid} {locations}", residue.name, atoms


def _of_cif(text: str) -> gemmi.Structure:
    blocks = gemmi.cif.read_string(text)
    return gemmi.make_structure_from_block(next(b for b in blocks if b.find_values("_atom_site.Cartn_x")))


def _biopython(text: str, is_pdb: bool) -> Iterator[tuple[str, str, Atoms]]:
    parser = PDBParser(QUIET=True) if is_pdb else MMCIFParser(QUIET=True)
    for residue in next(iter(parser.get_structure("x", io.StringIO(text)))).get_residues():
        for one in residue.disordered_get_list() if residue.is_disordered() == 2 else [residue]:
            atoms: Atoms = {}
            for atom in one.get_unpacked_list():
                atoms.setdefault(atom.name, []).append(_rounded(atom.coord.tolist()))
            yield f"{residue.parent.id} {residue.id[1:]}", one.resname, atoms


def _rounded(place: list[float]) -> Place:
    return tuple(round(x, 2) + 0.0 for x in place)


def compare(path: Path) -> tuple[str, int, str]:
    """The outcome of a file, the number of its chains, and what differs."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("evodsp").addHandler(handler)
    try:
        chains = read_structure(path).chains.values()
    except UserError as error:
        is_protein = any(theirs(path))
        return ("refused" if is_protein else "no amino acids"), 0, str(error).removeprefix(f"{path}")
    finally:
        logging.getLogger("evodsp").removeHandler(handler)
    residues: dict[Place, list[tuple[str, list[Place]]]] = {}  # place of CA -> letter and places of all atoms
    for chain in chains:
        for at in np.flatnonzero(chain.mask[:, ORDER_OF_CA]):
            own = [_rounded(place) for place in chain.positions[at][chain.mask[at] > 0].astype(np.float64).tolist()]
            alpha = chain.positions[at, ORDER_OF_CA].astype(np.float64).tolist()
            for place in _near(alpha):
                residues.setdefault(place, []).append((chain.sequence[at], own))
    references = list(theirs(path))
    if not any(references):
        return "no amino acids", 0, ""
    wrong = []
    for number, sites in enumerate(references):
        for monomers in sites:
            said = [_difference(name, atoms, residues, number > 0) for name, atoms in monomers]
            wrong += said[:1] if all(said) else []
    if not wrong:
        return "agree", len(chains), ""
    return ("differ with a line" if heard else "silent"), len(chains), f"{len(wrong)} differences: {wrong[0]}"


def _difference(name: str, atoms: Atoms, residues: dict[Place, list[tuple[str, list[Place]]]], is_whole: bool) -> str:
    """What evodsp does not have of a residue, '' if it has it. `is_whole`: whether their reader keeps copies of residues
    apart."""
    letters = {monomer_letter(name), monomer_letter(AMINO_ACID_OF.get(name, name))} - {"X"}
    said = f"{name} at {atoms['CA'][0]} is lost"
    for letter, own in (one for place in atoms["CA"] for one in residues.get(place, [])):
        if letters and letter not in letters:
            said = f"{name} at {atoms['CA'][0]} is {letter}"
            continue
        places = {near for place in own for near in _near(list(place))}
        kept = [a for a in atoms if is_heavy(a) and (a in ATOM_TYPES or name in AMINO_ACID_OF)] if letters else []
        lost = [atom for atom in kept if places.isdisjoint(atoms[atom])]
        all_theirs = {near for several in atoms.values() for place in several for near in _near(list(place))}
        strange = [place for place in own if place not in all_theirs] if is_whole else []
        if not lost and not strange:
            return ""
        said = f"{name} at {atoms['CA'][0]}: {f'{lost[0]} is lost' if lost else 'it has an atom of another residue'}"
    return said


def _near(place: list[float]) -> list[Place]:
    """The place, rounded, and its neighbours: single precision may round to another one."""
    steps = (-0.01, 0.0, 0.01)
    x, y, z = _rounded(place)
    return [_rounded([x + a, y + b, z + c]) for a in steps for b in steps for c in steps]


def _stop(*_: object) -> None:
    raise TimeoutError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--all", action="store_true", help="name the files that differ or are refused, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("evodsp").propagate = False
    files, chains = Counter[str](), Counter[str]()
    signal.signal(signal.SIGALRM, _stop)
    for path in sorted(p for p in options.folder.rglob("*") if p.name.lower().endswith(SUFFIXES) and p.is_file()):
        signal.alarm(SECONDS)
        try:
            outcome, number, said = compare(path)
        except TimeoutError:
            outcome, number, said = "out of time", 0, f"more than {SECONDS} s"
        signal.alarm(0)
        files[outcome] += 1
        chains[outcome] += number
        if outcome == "silent" or (options.all and outcome != "agree"):
            print(f"{outcome}: {path.relative_to(options.folder)}: {said}")
    print("outcome,files,chains")
    for outcome in OUTCOMES:
        print(f"{outcome},{files[outcome]},{chains[outcome]}")
    return 1 if files["silent"] else 0


if __name__ == "__main__":
    sys.exit(main())
