"""Compare the paired and merged MSAs of complexes, and their templates, live with DeepMind's code of AlphaFold-Multimer.

    .venv/bin/python -m scripts.parity.pairing --alphafold .venv-parity/bin/python [--seed 0]

Both sides get the same random MSAs of a few complexes (names of rows, letters, deletions) and the same templates of their
chains. Species, pairs, order of chains, letters, deletions, masks, numbers of residues and templates must be equal. Both read a
complex from files too, in AlphaFold's layout, with more rows than the order and the caps of the databases leave. The exit code
is 1 if something differs, and 2 if the other side could not run. `alphafold_pairing_side.py` lists the changes to DeepMind's
code.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evodsp.config import FeatureConfig
from evodsp.data.complexes.merging import MergedMsa, merge, side_by_side
from evodsp.data.complexes.pairing import PairingMsa, pair, uniprot_species
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.raw_features import complex_features, piece
from evodsp.data.sources.msa import MsaFeatures, letter_profile, merge_alignments
from evodsp.data.sources.parsed import ChainMsas
from evodsp.data.templates.features import TemplateFeatures
from evodsp.geometry.residues import GAP, LETTERS_WITH_GAP, decode
from evodsp.inference.target_msas import ComplexMsa
from evodsp.inference.targets import find_targets
from evodsp.rng import Draws

from .compare import deepminds_side, program
from .data import Results, compare
from .table import text

NAMES = (
    "sp|P{row:05}|CYC_{species}/3-104",
    "tr|A0A{row:07}|A0A{row:07}_{species}",
    "tr|Q{row:05}_1|Q{row:05}_{species}/1-9 a description",
    "tr|Q{row:05}|Q{row:05}_{species}_12",
)
TEMPLATES = {
    "template_aatype": "template_aatype",
    "template_all_atom_positions": "template_all_atom_positions",
    "template_all_atom_mask": "template_all_atom_masks",
}
"""Features of templates that are compared, by DeepMind's names."""
OTHER_NAMES = ("UniRef100_A0A{row:07}/1-50", "tr|A0A1|A0A1_HUMAN", "sp|P12345|NAME_TOOLONG", "MGYP{row}", "")

FILES = {
    "A": {"uniref90_hits.sto": 10_040, "bfd_uniref_hits.a3m": 700, "mgnify_hits.sto": 520, "uniprot_hits.sto": 90},
    "B": {"uniref90_hits.sto": 700, "bfd_uniref_hits.a3m": 300, "mgnify_hits.sto": 900, "uniprot_hits.sto": 60},
}
"""Rows of the files of two chains: of A the order decides what a complex keeps, of B the cap of MGnify."""


@dataclass(frozen=True)
class Protein:
    """How to draw the MSAs of one sequence. `species`: the number of rows of each species in the MSA for pairing."""

    species: dict[str, int]
    length: int = 12
    others: int = 5
    """Rows without species in the MSA for pairing."""
    unpaired: int = 20
    changed: float = 0.4
    """Fraction of changed letters."""
    query: str = "query"
    """Name of the query in the MSA for pairing."""
    templates: int = 0
    """Number of its templates."""


@dataclass(frozen=True)
class Case:
    """A complex: `chains` has a letter for each chain, the key of its protein."""

    name: str
    chains: str
    proteins: dict[str, Protein]
    most_rows: int = 2048


@dataclass(frozen=True)
class Drawn:
    """A complex with its MSAs, and the names of the rows for pairing of each chain."""

    case: Case
    chains: list[ChainMsas] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    templates: dict[str, TemplateFeatures] = field(default_factory=dict)
    """Those of each sequence."""


def species(count: int, rows: int, prefix: str = "S") -> dict[str, int]:
    """`count` species with 1 to `rows` rows."""
    return {f"{prefix}{k}": 1 + k % rows for k in range(count)}


CASES = (
    Case(
        "two chains",
        "AB",
        {"A": Protein(species(30, 4), templates=2), "B": Protein(species(40, 5), length=9, templates=6)},
    ),
    Case(
        "A, B, B",
        "ABB",
        {"A": Protein(species(20, 3)), "B": Protein(species(30, 4) | species(9, 2, "B"), length=7, templates=1)},
    ),
    Case("A, A", "AA", {"A": Protein(species(20, 3), templates=4)}),
    Case("one chain", "A", {"A": Protein(species(20, 3))}),
    Case("many rows of A, A", "AA", {"A": Protein(species(20, 3), unpaired=70)}, most_rows=32),
    Case("no shared species", "AB", {"A": Protein(species(9, 3, "A")), "B": Protein(species(9, 3, "B"))}),
    Case("chains without hits", "AB", {"A": Protein({}, others=0), "B": Protein({}, others=0)}),
    Case(
        "600 and 601 rows of a species",
        "AB",
        {"A": Protein({"FULL": 600, "OVER": 601, "HUMAN": 2}), "B": Protein({"FULL": 605, "OVER": 2, "HUMAN": 600})},
    ),
    Case(
        "600 rows of a species",
        "AB",
        {"A": Protein({"FULL": 600, "HUMAN": 3}), "B": Protein({"FULL": 600, "HUMAN": 2})},
    ),
    Case("ties", "AB", {"A": Protein(species(40, 20), length=3), "B": Protein(species(40, 20), length=3)}),
    Case(
        "more pairs and rows than fit",
        "CAB",
        {k: Protein(species(60, 5) | species(20, 3, k), unpaired=300) for k in "ABC"},
        most_rows=64,
    ),
    Case(
        "chains regrouped",
        "BACBA",
        {k: Protein(species(25, 4) | species(9, 2, k), length=ord(k) % 7 + 5, templates=ord(k) % 5) for k in "ABC"},
    ),
    Case("products wrap", "ABABABABABABABABABAB", {k: Protein(species(60, 3)) for k in "AB"}),
    Case(
        "queries with a species",
        "ABC",
        {k: Protein(species(12, 4), query="sp|P12345|NAME_S3") for k in "AB"} | {"C": Protein(species(12, 4))},
    ),
)


def draw(case: Case, rng: np.random.Generator) -> Drawn:
    """Random MSAs. Among the unpaired rows are rows that are paired, twice the same row, and a row of gaps."""
    drawn, of_protein = Drawn(case), {}
    for key in dict.fromkeys(case.chains):
        protein = case.proteins[key]
        query = rng.integers(0, 20, protein.length).astype(np.int8)
        of_row = [name for name, count in protein.species.items() for _ in range(count)] + [""] * protein.others
        of_row = [of_row[k] for k in rng.permutation(len(of_row))]
        names = [protein.query]
        for row, name in enumerate(of_row):
            forms = NAMES if name else OTHER_NAMES
            names.append(forms[rng.integers(len(forms))].format(row=row, species=name))
        letters = _rows(query, len(of_row), protein.changed, rng)
        pairing = PairingMsa(letters, _deletions(letters, rng), tuple(map(uniprot_species, names))) if of_row else None
        shared = letters[rng.integers(0, len(letters), protein.unpaired // 2)]
        unpaired = _rows(query, protein.unpaired - len(shared), protein.changed, rng)
        gaps = np.full((1, protein.length), GAP, np.int8)
        unpaired = np.concatenate((unpaired, shared, gaps))[rng.permutation(protein.unpaired + 2)]
        msa = np.concatenate((query[None], unpaired))
        of_protein[key] = decode(query), MsaFeatures(msa, _deletions(msa, rng), letter_profile(msa)), pairing, names
    for place, key in enumerate(case.chains):
        sequence, features, pairing, names = of_protein[key]
        drawn.chains.append(ChainMsas(ProteinSequence(f"chain{place}", sequence), features, pairing))
        drawn.names.append(names)
    for key in dict.fromkeys(case.chains):
        sequence = of_protein[key][0]
        drawn.templates[sequence] = _templates(case.proteins[key].templates, len(sequence), rng)
    return drawn


def _templates(count: int, length: int, rng: np.random.Generator) -> TemplateFeatures:
    """Random templates, some of whose residues are gaps or unknown."""
    aatype = rng.integers(0, LETTERS_WITH_GAP, (count, length)).astype(np.int8)
    mask = ((rng.random((count, length, 37)) < 0.8) & (aatype != GAP)[..., None]).astype(np.float32)
    positions = rng.normal(size=(count, length, 37, 3)).astype(np.float32) * mask[..., None]
    return TemplateFeatures(
        tuple(f"{k}abc_A" for k in range(count)), aatype, positions, mask, np.zeros(count, np.float32)
    )


def _rows(query: np.ndarray, count: int, changed: float, rng: np.random.Generator) -> np.ndarray:
    """The query and `count` rows in which letters were replaced, half of them by gaps."""
    shape = (count, len(query))
    letters = np.where(rng.random(shape) < 0.5, GAP, rng.integers(0, GAP, shape))
    rows = np.where(rng.random(shape) < changed, letters, query)
    return np.concatenate((query[None], rows)).astype(np.int8)


def _deletions(letters: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.integers(1, 99, letters.shape) * (rng.random(letters.shape) < 0.1)).astype(np.int32)


def results_of(drawn: Drawn) -> Results:
    """What evodsp makes of one complex, under the names of DeepMind's side."""
    merged = merge(drawn.chains, drawn.case.most_rows, drawn.case.most_rows // 2)
    keys = [",".join(chain.to_pair().keys) for chain in drawn.chains]
    results = {"order": np.array(merged.order()), "species": np.array("\n".join(keys)), **_arrays(merged)}
    if len(merged.entities) > 1:
        copies = [len(entity.members) for entity in merged.entities]
        rows = pair([drawn.chains[entity.members[0]].to_pair() for entity in merged.entities], copies)
        results["pairs"] = np.repeat(rows, copies, axis=1)
    config = FeatureConfig(crop_size=None, msa_clusters=5, extra_msa=1, max_templates=4)
    templates = side_by_side(merged.entities, drawn.templates)
    sample = complex_features(merged, config, Draws.root(0), 1, piece(0, merged.msa.shape[1]), templates)
    results |= {name: sample[of_sample][0] for name, of_sample in TEMPLATES.items()}
    return {f"{name}|{drawn.case.name}": values for name, values in results.items()}


def _arrays(merged: MergedMsa) -> Results:
    """A merged MSA under the names of DeepMind's side."""
    return {
        "msa": merged.msa,
        "deletion_matrix": merged.deletions,
        "bert_mask": merged.bert_mask(),
        "msa_mask": np.ones(merged.msa.shape),
        "cluster_bias_mask": np.arange(len(merged.msa)) == 0,
        **{name: getattr(merged.ids, name) for name in ("asym_id", "entity_id", "sym_id", "residue_index")},
    }


def write_files(folder: Path, rng: np.random.Generator) -> None:
    """A complex of two chains in AlphaFold's layout: x.fasta, and the files of `FILES` in x/A/ and x/B/."""
    records = []
    for chain, files in FILES.items():
        query = rng.integers(0, 20, 24).astype(np.int8)
        records.append(f">{chain}\n{decode(query)}\n")
        for name, count in files.items():
            letters = [decode(row) for row in _rows(query, count - 1, 0.5, rng)]
            names = [chain, *(NAMES[1].format(row=row, species=f"S{row % 25}") for row in range(1, count))]
            path = folder / "x" / chain / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # Every fifth row has a letter between two columns.
            rows = [
                (of, row[:9], "-K"[place % 5 == 1], row[9:])
                for place, (of, row) in enumerate(zip(names, letters, strict=True))
            ]
            if path.suffix == ".a3m":
                text = "".join(
                    f">{of}\n{before}{inserted.strip('-').lower()}{after}\n" for of, before, inserted, after in rows
                )
            else:
                lines = [f"{of} {before}{inserted}{after}\n" for of, before, inserted, after in rows]
                text = f"# STOCKHOLM 1.0\n\n{''.join(lines)}#=GC RF {'x' * (len(query) + 1)}\n//\n"
            path.write_text(text)
    (folder / "x.fasta").write_text("".join(records))


def results_of_files(folder: Path) -> Results:
    """What evodsp makes of these files: of both chains, and of A alone."""
    (target,), _ = find_targets([folder / "x.fasta"], folder, one_complex=True)
    alone = merge_alignments(target.parts[0].read())
    results = _arrays(ComplexMsa.read(target).merged) | {"chain msa": alone.msa, "chain deletions": alone.deletions}
    return {f"{name}|files": values for name, values in results.items()}


def subject_of(complexes: list[Drawn]) -> dict[str, np.ndarray]:
    """What DeepMind's side gets."""
    cases, arrays = [], {}
    for drawn in complexes:
        named = zip(drawn.chains, drawn.names, strict=True)
        chains = [{"name": c.query.name, "sequence": c.query.letters, "descriptions": names} for c, names in named]
        cases.append({"name": drawn.case.name, "most_rows": drawn.case.most_rows, "chains": chains})
        for place, chain in enumerate(drawn.chains):
            parts: dict[str, MsaFeatures | PairingMsa] = {"": chain.msa, "all_": chain.to_pair()}
            for prefix, part in parts.items():
                arrays[f"{drawn.case.name}|{place}|{prefix}msa"] = part.msa
                arrays[f"{drawn.case.name}|{place}|{prefix}deletions"] = part.deletions
            own = drawn.templates[chain.query.letters]
            for name in ("aatype", "positions", "mask"):
                arrays[f"{drawn.case.name}|{place}|template_{name}"] = getattr(own, name)
    return {"cases": np.array(json.dumps(cases)), **arrays}


def run(options: argparse.Namespace) -> bool:
    complexes = [draw(case, np.random.default_rng((options.seed, k))) for k, case in enumerate(CASES)]
    start = time.perf_counter()
    ours: Results = {}
    for drawn in complexes:
        ours |= results_of(drawn)
    with tempfile.TemporaryDirectory(prefix="evodsp-parity-") as temporary:
        folder = Path(temporary)
        write_files(folder, np.random.default_rng((options.seed, len(CASES))))
        ours |= results_of_files(folder)
        seconds = time.perf_counter() - start
        subject = subject_of(complexes) | {"folder": np.array(str(folder))}
        start = time.perf_counter()
        theirs = deepminds_side(options.alphafold, "alphafold_pairing_side", subject)
    released = json.loads(str(theirs.pop("released")))
    print(f"DeepMind's data pipeline ({time.perf_counter() - start:.1f} s) against evodsp ({seconds:.1f} s)")
    rows = compare(ours, theirs)
    print(text(rows))
    print(f"as released, ties come in another order in: {'; '.join(released) or 'none'}")
    return all(row.passed for row in rows)


def main(arguments: list[str] | None = None) -> int:
    return program(run, "Compare paired and merged MSAs with DeepMind's code.", "the MSAs", arguments)


if __name__ == "__main__":
    sys.exit(main())
