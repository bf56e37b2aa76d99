"""Compare how evodsp, gemmi and Biopython read structure files, chain by chain and residue by residue.

    .venv/bin/python -m scripts.parity.structures FILE… > scripts/benchmarks/results/structures.txt

Of each file, mmCIF or PDB, up to four forms are read: the file, its atoms alone, without a listed sequence, and what gemmi and
Biopython write of it as PDB. Compared are the residues with coordinates: which they are, in which order, their numbers and
insertion codes, their monomers, which of the 37 atoms they have, and where these are (the alternative location that is chosen).
gemmi's residues are those of its polymers that are peptides, Biopython's those whose names are amino acids. Each difference
has a kind; `KINDS` explains those that are meant. The exit code is 1 if there is another one.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path

import gemmi
import numpy as np
from Bio.PDB import PDBIO, MMCIFParser, PDBParser
from Bio.PDB.Polypeptide import is_aa

from evodsp.data.formats.mmcif import read_structure
from evodsp.errors import UserError
from evodsp.geometry.residues import ATOM_TYPES, monomer_letter

KINDS = {
    "NH1 and NH2 exchanged": "evodsp calls that nitrogen of arginine NH1 that is nearer to CD, as AlphaFold2 does.",
    "only evodsp's, not Biopython's": "Biopython's names of amino acids lack them: D-amino acids, rare modified ones, caps.",
    "only evodsp's, not gemmi's": "gemmi ends the polymer of a PDB file without TER at the first HETATM, and takes one "
    "label_asym_id of a chain that has several.",
    "only theirs: cap": "NH2 and ACE at the ends are no amino acids. Where SEQRES lists them they are X, as in AlphaFold2.",
    "only theirs: HETATM": "Ligands and ions, which gemmi counts to a chain without TER; no peptide bond joins them to it.",
    "chain of one residue": "A single HETATM amino acid is a ligand: no peptide bond makes it a chain.",
}
"""Differences that are meant, and why."""
_CAPS = ("ACE", "NH2", "NME")
_SAME_PLACE = 2e-3
"""Å: files have three decimals."""


@dataclass(frozen=True)
class Residue:
    """A residue with coordinates."""

    number: str
    """The residue's number, with its insertion code."""
    letter: str
    """The residue's letter in AlphaFold2's table, whichever program has read it."""
    atoms: dict[str, tuple[float, ...]]
    name: str = ""
    is_het: bool = False


Chains = dict[str, list[Residue]]


def own_chains(path: Path) -> Chains | str:
    """The chains as evodsp reads them, or evodsp's message."""
    try:
        chains = read_structure(path).chains
    except UserError as error:
        return str(error).removeprefix(f"{path}")
    found: Chains = {}
    for name, chain in chains.items():
        places = {
            i: {ATOM_TYPES[k]: tuple(chain.positions[i, k].tolist()) for k in np.flatnonzero(chain.mask[i])}
            for i in np.flatnonzero(~chain.is_missing)
        }
        found[name] = [
            Residue(f"{chain.residue_number[i]}{chain.insertion_code[i]}", chain.sequence[i], atoms)
            for i, atoms in places.items()
        ]
    return found


def gemmi_chains(path: Path) -> Chains:
    """gemmi's polymers that are peptides."""
    structure = gemmi.read_structure(str(path), format=_format(path))
    structure.setup_entities()
    found: Chains = {}
    for chain in structure[0]:
        polymer = chain.get_polymer()
        if polymer.check_polymer_type() not in (gemmi.PolymerType.PeptideL, gemmi.PolymerType.PeptideD):
            continue
        groups: dict[str, list[gemmi.Residue]] = {}
        for residue in polymer:
            groups.setdefault(str(residue.seqid), []).append(residue)
        found[chain.name.strip()] = [
            _residue(number, [(r.name, r.het_flag == "H", [(a.name, a.occ, a.pos.tolist()) for a in r]) for r in group])
            for number, group in groups.items()
        ]
    return {name: residues for name, residues in found.items() if residues}


def biopython_chains(path: Path) -> Chains:
    """Biopython's residues whose names are amino acids, HETATM or not."""
    parser = PDBParser(QUIET=True) if _format(path) == gemmi.CoorFormat.Pdb else MMCIFParser(QUIET=True)
    with io.StringIO(_text(path)) as file:
        model = next(iter(parser.get_structure("x", file)))
    found: Chains = {}
    for chain in model:
        residues = []
        for residue in chain:
            het, number, code = residue.id
            several = residue.disordered_get_list() if residue.is_disordered() == 2 else [residue]
            monomers = [
                (r.resname, bool(het.strip()), [(a.name, a.occupancy, a.coord.tolist()) for a in r.get_unpacked_list()])
                for r in several
                if is_aa(r.get_resname(), standard=False)
            ]  # fmt: skip
            if monomers:
                residues.append(_residue(f"{number}{code.strip()}", monomers))
        found[chain.id.strip()] = residues
    return {name: residues for name, residues in found.items() if residues}


_Monomer = tuple[str, bool, list[tuple[str, float | None, list[float]]]]


def _residue(number: str, monomers: list[_Monomer]) -> Residue:
    """By evodsp's rules: of monomers, and of an atom's locations, that of highest occupancy, the first among equals."""
    name, is_het, atoms = max(monomers, key=lambda monomer: max((_occupancy(a) for a in monomer[2]), default=0.0))
    best: dict[str, tuple[float, tuple[float, ...]]] = {}
    for atom in atoms:
        called = "SD" if name == "MSE" and atom[0] == "SE" else atom[0]
        if called in ATOM_TYPES and (called not in best or _occupancy(atom) > best[called][0]):
            best[called] = _occupancy(atom), tuple(atom[2])
    places = {called: place for called, (_, place) in best.items()}
    return Residue(number, monomer_letter(name), places, name, is_het)


def _occupancy(atom: tuple[str, float | None, list[float]]) -> float:
    return 1.0 if atom[1] is None else atom[1]


def differences(side: str, theirs: list[Residue], own: list[Residue]) -> Iterator[tuple[str, str]]:
    """The kinds of differences of a chain, each with a place."""
    if not own:
        kind = "chain of one residue" if len(theirs) == 1 and theirs[0].is_het else "chain that evodsp has not"
        yield kind, f"{len(theirs)} residues, such as {theirs[0].name} {theirs[0].number}"
        return
    if not theirs:
        yield "chain that only evodsp has", f"{len(own)} residues: {''.join(r.letter for r in own)[:30]}"
        return
    before, now = ([(residue.number, residue.letter) for residue in residues] for residues in (theirs, own))
    for tag, a, b, c, d in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if tag == "equal":
            for one, other in zip(theirs[a:b], own[c:d], strict=True):
                yield from _atoms(one, other)
        elif tag == "replace":
            yield "other residues", f"{theirs[a].name} {theirs[a].number}: {own[c].letter} {own[c].number}"
        else:
            for residue in theirs[a:b]:
                yield _kind_of_lost(residue), f"{residue.name} {residue.number}"
            for residue in own[c:d]:
                yield f"only evodsp's, not {side}'s", f"{residue.letter} {residue.number}"


def _kind_of_lost(residue: Residue) -> str:
    if residue.name in _CAPS or (not residue.name and residue.letter == "X"):  # evodsp's own residues have no names
        return "only theirs: cap"
    return f"only theirs: {'HETATM' if residue.is_het else 'ATOM'}"


def _atoms(theirs: Residue, own: Residue) -> Iterator[tuple[str, str]]:
    where = f"{theirs.name} {theirs.number}"
    if theirs.atoms.keys() != own.atoms.keys():
        lacking, more = sorted(theirs.atoms.keys() - own.atoms), sorted(own.atoms.keys() - theirs.atoms)
        yield "atoms", f"{where}: without {lacking}, with {more}"
        return
    moved = [n for n, place in theirs.atoms.items() if np.abs(np.subtract(place, own.atoms[n])).max() > _SAME_PLACE]
    if moved == ["NH1", "NH2"] and np.allclose(theirs.atoms["NH1"], own.atoms["NH2"], atol=_SAME_PLACE):
        yield "NH1 and NH2 exchanged", where
    elif moved:
        yield "location", f"{where}: {moved}"


def without_sequences(path: Path, folder: Path) -> dict[str, Path]:
    """The file's atoms alone, and the PDB files that gemmi and Biopython write of it, as far as their format allows."""
    forms = {}
    if _format(path) == gemmi.CoorFormat.Pdb:
        lines = _text(path).splitlines(keepends=True)
        forms["atoms"] = _written(
            folder / "atoms.pdb", "".join(line for line in lines if not line.startswith("SEQRES"))
        )
    else:
        blocks = gemmi.cif.read_string(_text(path))
        block = next((b for b in blocks if b.find_values("_atom_site.Cartn_x")), None)
        if block is None:
            return {}
        kept = gemmi.cif.Document()
        atoms = block.find_mmcif_category("_atom_site.")
        kept.add_new_block("x").init_loop("", list(atoms.tags)).set_all_values(
            [list(c) for c in zip(*atoms, strict=True)]
        )
        forms["atoms"] = _written(folder / "atoms.cif", kept.as_string())
    with contextlib.suppress(Exception):  # names of chains may be too long for PDB files, and so on
        structure = gemmi.read_structure(str(path), format=_format(path))
        structure.setup_entities()
        forms["gemmi's PDB"] = _written(
            folder / "gemmi.pdb", structure.make_pdb_string(gemmi.PdbWriteOptions(seqres_records=False))
        )
    with contextlib.suppress(Exception):
        parser = PDBParser(QUIET=True) if _format(path) == gemmi.CoorFormat.Pdb else MMCIFParser(QUIET=True)
        writer, text = PDBIO(), io.StringIO()
        writer.set_structure(parser.get_structure("x", io.StringIO(_text(path))))
        writer.save(text)
        forms["Biopython's PDB"] = _written(folder / "biopython.pdb", text.getvalue())
    return forms


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def _format(path: Path) -> gemmi.CoorFormat:
    return (
        gemmi.CoorFormat.Pdb
        if Path(path.name.removesuffix(".gz")).suffix in (".pdb", ".ent")
        else gemmi.CoorFormat.Mmcif
    )


@dataclass
class Account:
    """What was compared of one form with one side."""

    chains: int = 0
    equal: int = 0
    but_arginine: int = 0
    """Equal but for the names of arginine's nitrogens."""
    residues: int = 0
    kinds: dict[str, list[str]] = field(default_factory=dict)
    refused: dict[str, list[str]] = field(default_factory=dict)


Accounts = dict[tuple[str, str], Account]


def compare(path: Path, accounts: Accounts) -> None:
    """Add the chains of a file, and of its forms, to the accounts."""
    listed = own_chains(path)
    with tempfile.TemporaryDirectory() as folder:
        for form, file in {"the file": path, **without_sequences(path, Path(folder))}.items():
            own = listed if form == "the file" else own_chains(file)
            if isinstance(own, str):
                _account(accounts, form, "evodsp").refused.setdefault(own.lstrip(":0123456789 ")[:90], []).append(
                    path.name
                )
            for side, read in {"the whole file": None, "gemmi": gemmi_chains, "Biopython": biopython_chains}.items():
                if read is None and (form == "the file" or isinstance(listed, str)):
                    continue
                account = _account(accounts, form, side)
                try:
                    theirs = dict(listed) if read is None else read(file)  # type: ignore[arg-type]
                except Exception as error:  # their errors are of many kinds
                    reason = str(error).split(": /")[0][:60] or type(error).__name__
                    account.refused.setdefault(reason, []).append(path.name)
                    continue
                _add(account, side, path.name, theirs, {} if isinstance(own, str) else own)


def _account(accounts: Accounts, form: str, side: str) -> Account:
    return accounts.setdefault((form, side), Account())


def _add(account: Account, side: str, file: str, theirs: Chains, own: Chains) -> None:
    for chain in sorted({*theirs, *own}):
        found = list(differences(side, theirs.get(chain, []), own.get(chain, [])))
        kinds = {kind for kind, _ in found}
        account.chains += 1
        account.equal += not kinds
        account.but_arginine += kinds == {"NH1 and NH2 exchanged"}
        account.residues += len(own.get(chain, []))
        for kind, place in found:
            account.kinds.setdefault(kind, []).append(f"{file} {chain}: {place}")


def report(accounts: Accounts, files: int, examples: int) -> list[str]:
    """The tables, as lines of text."""
    lines = [
        f"{files:,} files. Chains of each form that evodsp reads as another program does, and residues that differ, by kind.",
        "",
    ]
    for (form, side), account in sorted(accounts.items()):
        if account.chains:
            counts = f"{account.equal:,} of {account.chains:,} chains equal"
            counts += f", {account.but_arginine:,} but for arginine's nitrogens"
            lines.append(f"{form}; {side}: {counts}; {account.residues:,} residues")
        for kind, places in sorted(account.kinds.items()):
            by_file = {place.split()[0]: place for place in reversed(places)}
            named = "; ".join(list(reversed(by_file.values()))[:examples])
            lines.append(f"    {kind}: {len(places):,} in {len(by_file):,} files ({named})")
        for reason, names in sorted(account.refused.items()):
            lines.append(f"    {side} refuses {len(names):,}: {reason} ({', '.join(names[:examples])})")
    return [*lines, "", "Kinds:", *(f"    {kind}: {why}" for kind, why in KINDS.items())]


def main() -> int:
    """Compare and print; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--examples", type=int, default=3, help="places that are named of each kind")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    accounts: Accounts = {}
    for path in given.files:
        compare(path, accounts)
    print("\n".join(report(accounts, len(given.files), given.examples)))
    return int(any(kind not in KINDS for account in accounts.values() for kind in account.kinds))


if __name__ == "__main__":
    sys.exit(main())
