"""Compare how evodsp, gemmi and Biopython read chains of structure files that list no sequence, chain by chain.

    .venv/bin/python -m scripts.parity.unlisted_chains FILE…

Of each file, mmCIF or PDB, three forms are read without its SEQRES: its atoms alone, and what gemmi and Biopython write as PDB.
A file that does list sequences is its own witness too: what is left of a chain must be the residues of SEQRES with coordinates.
Each difference is printed, with the residues that one side has and the other has not. The exit code is 1 if a file without its
SEQRES is read differently from the file with it.
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
from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path

import gemmi
from Bio.Data.PDBData import protein_letters_3to1_extended
from Bio.PDB import PDBIO, MMCIFParser, PDBParser
from Bio.PDB.Polypeptide import is_aa

from evodsp.data.mmcif import read_structure
from evodsp.errors import UserError

Chains = dict[str, str]


def own_chains(path: Path) -> Chains | str:
    """The residues with coordinates, as evodsp reads them, or its message."""
    try:
        chains = read_structure(path).chains
    except UserError as error:
        return str(error).removeprefix(f"{path}: ")
    return {
        name: "".join(letter for letter, missing in zip(chain.sequence, chain.is_missing, strict=True) if not missing)
        for name, chain in chains.items()
    }


def gemmi_chains(path: Path) -> Chains:
    """gemmi's polymers that are peptides."""
    structure = gemmi.read_structure(str(path), format=_format(path))
    structure.setup_entities()
    found = {}
    for chain in structure[0]:
        polymer = chain.get_polymer()
        if polymer.check_polymer_type() in (gemmi.PolymerType.PeptideL, gemmi.PolymerType.PeptideD):
            found[chain.name] = _letters(residue.name for residue in polymer.first_conformer())
    return {name: text for name, text in found.items() if text}


def biopython_chains(path: Path) -> Chains:
    """Biopython's residues whose names are amino acids, HETATM or not."""
    parser = PDBParser(QUIET=True) if _format(path) == gemmi.CoorFormat.Pdb else MMCIFParser(QUIET=True)
    with io.StringIO(_text(path)) as file:
        model = next(iter(parser.get_structure("x", file)))
    found = {c.id.strip(): _letters(r.get_resname() for r in c if is_aa(r, standard=False)) for c in model}
    return {name: text for name, text in found.items() if text}


def without_sequences(path: Path, folder: Path) -> dict[str, Path]:
    """The file's atoms alone, and the PDB files that gemmi and Biopython write of it, as far as their format allows."""
    forms = {}
    if _format(path) == gemmi.CoorFormat.Pdb:
        lines = _text(path).splitlines(keepends=True)
        forms["atoms"] = _written(
            folder / "atoms.pdb", "".join(line for line in lines if not line.startswith("SEQRES"))
        )
    else:
        block = gemmi.cif.read_string(_text(path)).sole_block()
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


def difference(first: str, second: str) -> str:
    """What to change in the first to have the second, such as `12: GSK -> -`."""
    changes = SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
    return ", ".join(
        f"{a}: {first[a:b] or '-'} -> {second[c:d] or '-'}" for tag, a, b, c, d in changes if tag != "equal"
    )


def _letters(names: Iterable[str]) -> str:
    return "".join(protein_letters_3to1_extended.get(name, "X") for name in names)


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


def main() -> int:
    """Compare and print; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    counts: Counter[str] = Counter()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for path in parser.parse_args().files:
        listed = own_chains(path)
        if isinstance(listed, str):
            print(f"{path}: {listed}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            for form, file in without_sequences(path, Path(folder)).items():
                own = own_chains(file)
                sides = {"the file": listed}
                for name, read in {"gemmi": gemmi_chains, "Biopython": biopython_chains}.items():
                    try:
                        sides[name] = read(file)
                    except Exception as error:  # their errors are of many kinds
                        print(f"{path}, {form}: {name} cannot read it: {error}")
                for side, theirs in sides.items():
                    for chain in sorted({*theirs, *own} if not isinstance(own, str) else theirs):
                        mine = own if isinstance(own, str) else own.get(chain, "")
                        same = mine == theirs.get(chain, "")
                        counts[f"{side}: {'same' if same else 'different'}"] += 1
                        if not same:
                            changes = difference(theirs.get(chain, ""), mine)
                            print(f"{path.name}, {form}, chain '{chain}': {side} -> evodsp: {changes}")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    return int(counts["the file: different"] > 0)


if __name__ == "__main__":
    sys.exit(main())
