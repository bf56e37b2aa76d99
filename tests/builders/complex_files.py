"""A small complex on disk, made of the bundled proteins."""

from __future__ import annotations

from pathlib import Path

import gemmi

from evodsp.data.formats.mmcif import read_structure

STRUCTURES = Path(__file__).resolve().parents[2] / "data" / "mmcif_files"


def write_complex(folder: Path, places: str = "ABC", apart: float = 40.0) -> tuple[Path, Path]:
    """Folders of alignments and structures with the entry 1abc: chains A, B, C, of which A and B have one sequence, and
    alignments of A and C. `places`: the chains in the order in which they lie, `apart` Å from each other.
    """
    whole = gemmi.Structure()
    whole.name = "1abc"
    whole.add_model(gemmi.Model(1))
    for name, source in (("A", "s001"), ("B", "s001"), ("C", "s006")):
        chain = gemmi.read_structure(str(STRUCTURES / f"{source}.cif"))[0][0]
        chain.name = name
        for residue in chain:
            residue.subchain = name
            for atom in residue:
                atom.pos += gemmi.Position(apart * places.index(name), 0, 0)
        whole[0].add_chain(chain)
    whole.setup_entities()
    whole.assign_label_seq_id()
    structures, alignments = folder / "mmcif_files", folder / "alignments"
    structures.mkdir()
    whole.make_mmcif_document().write_file(str(structures / "1abc.cif"))
    chains = read_structure(structures / "1abc.cif").chains
    for name, rows in (("A", "sp|P12345|RNAS1_BOVIN"), ("C", "sp|P54321|XYZ_BOVIN")):
        own = alignments / f"1abc_{name}"
        own.mkdir(parents=True)
        letters = chains[name].sequence
        changed = "W" + letters[1:]
        (own / "family.a3m").write_text(
            f">1abc_{name}\n{letters}\n>2xyz_{name}\n{changed}\n>alone{name}\n{letters[:-1]}-\n"
        )
        (own / "uniprot_hits.a3m").write_text(f">1abc_{name}\n{letters}\n>{rows}\n{letters[:-1]}W\n")
    return alignments, structures


def write_shortened(folder: Path, entry: str, left_out: int) -> None:
    """Write the structure 1abc as another entry, without this number of residues at the beginning of each chain."""
    structure = gemmi.read_structure(str(folder / "1abc.cif"))
    for chain in structure[0]:
        for _ in range(left_out):
            del chain[0]
    for entity in structure.entities:
        entity.full_sequence = entity.full_sequence[left_out:]
    structure.assign_label_seq_id(True)
    structure.make_mmcif_document().write_file(str(folder / f"{entry}.cif"))
