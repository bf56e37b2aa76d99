"""Families of chains or of complexes to files, in OpenFold's layout. Everything is written under a temporary name and renamed
when complete.

An entry is one structure: a tuple of its chains, which in a family of single chains has one member.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from evodsp.errors import UserError
from evodsp.files import whole_folder
from scripts.examples.synthetic.alignments import to_a3m, to_stockholm
from scripts.examples.synthetic.complexes import make_complexes
from scripts.examples.synthetic.config import SynthesisConfig, check_new_folder
from scripts.examples.synthetic.families import Member, make_family
from scripts.examples.synthetic.mmcif_writer import assembly_tables, mmcif_text, write_mmcif

Entry = tuple[Member, ...]


def synthesize(config: SynthesisConfig, report: Callable[[str], None] | None = None) -> None:
    """Write the families of `config` to the folder `config.output`, in OpenFold's layout:

    `mmcif_files/<id>.cif`, `alignments/<id>_A/{bfd_uniclust_hits.a3m, uniref90_hits.sto}`, `fasta/<id>_A.fasta`,
    `chain_data_cache.json`, `mmcif_cache.json`, `train.txt` and `validation.txt` (chain names; the last `held_out` members of
    each family) and a README.md with the contents and the command. Ids are s001, s002, …. `report` is given a line for
    every chain written.

    With `complexes` an entry is c001, c002, …: `mmcif_files/<id>.cif.gz` has the chains A and B and their assembly 1,
    `alignments/<id>_A/` and `<id>_B/` hold `uniprot_hits.a3m` and `uniref90_hits.sto` (a homodimer's are in `<id>_A/` alone),
    `fasta/<id>.fasta` both sequences with `:` between them, and `train.txt` and `validation.txt` list entries.

    The same config gives the same bytes on one machine. On another machine the last digits of its linear algebra may differ
    and lead the folding elsewhere: families of the same kind, not the same atoms.

    Raises UserError if the output exists and is not an empty folder, if its parent folder does not exist, and if the files
    cannot be written; then nothing is left.
    """
    check_new_folder(config.output)
    try:
        with whole_folder(config.output) as partial:
            _write(partial, config, report)
    except OSError as error:
        raise UserError(
            f"{config.output}: cannot be written ({error.strerror}); make room, or choose another --output"
        ) from error


def _write(root: Path, config: SynthesisConfig, report: Callable[[str], None] | None) -> None:
    for folder in ("mmcif_files", "alignments", "fasta"):
        (root / folder).mkdir(parents=True)
    entries: list[Entry] = []
    size = config.members + config.held_out
    for entry in make_complexes(config) if config.complexes else _single_chains(config):
        _write_structure(root, entry)
        for member in entry:
            _write_member(root, member)
        if report:
            kind = "validation" if entry[0].held_out else "train"
            residues = " + ".join(str(len(member.chain)) for member in entry)
            report(f"{_key(entry)}: family {len(entries) // size + 1}, {_folds(entry)}, {residues} residues, {kind}")
        entries.append(entry)
    for name, held_out in (("train.txt", False), ("validation.txt", True)):
        keys = [_key(entry) for entry in entries if entry[0].held_out == held_out]
        (root / name).write_text("".join(f"{key}\n" for key in keys), encoding="utf-8")
    # OpenFold's training weights a chain by the inverse of its cluster's size: a family is a cluster.
    chains = [member for entry in entries for member in entry]
    _write_json(root / "chain_data_cache.json", {m.chain.key: _chain_entry(m) | {"cluster_size": size} for m in chains})
    _write_json(root / "mmcif_cache.json", {entry[0].chain.pdb_id: _entry(entry) for entry in entries})
    (root / "README.md").write_text(_readme(config, entries), encoding="utf-8")


def _single_chains(config: SynthesisConfig) -> Iterator[Entry]:
    for family in range(config.families):
        for member in make_family(config, family):
            yield (member,)


def _key(entry: Entry) -> str:
    """What lists call an entry: by its chain if it has one, else by its name."""
    first = entry[0].chain
    return first.key if len(entry) == 1 else first.pdb_id


def _folds(entry: Entry) -> str:
    return " + ".join(member.fold for member in entry)


def _readme(config: SynthesisConfig, entries: list[Entry]) -> str:
    """The README of the output folder: its contents, and the command that makes it."""
    options = "".join(
        f" --{field.name} {str(value).lower()}"
        for field in dataclasses.fields(config)
        if field.name != "output" and (value := getattr(config, field.name)) != field.default
    )
    size = config.members + config.held_out
    rows = []
    for number, start in enumerate(range(0, len(entries), size), 1):
        family = entries[start : start + size]
        train, held_out = ([_key(e) for e in family if e[0].held_out == kind] for kind in (False, True))
        residues = " + ".join(str(len(member.chain)) for member in family[0])
        listed = f"{' '.join(train)} | {' '.join(held_out) or '-'}"
        rows.append(f"| {number} | {_folds(family[0])} | {residues} | {listed} |")
    table = "\n".join(["| family | fold | residues | train.txt | validation.txt |", "|---|---|---|---|---|", *rows])
    at = "dimers" if config.complexes else "data"
    what = (_ABOUT_TWINS if config.twins else "") + (_ABOUT_COMPLEXES if config.complexes else _ABOUT_CHAINS)
    return f"""# Synthetic {"complexes" if config.complexes else "protein families"}

Made by

    python -m scripts.examples.synthetic --output {at}{options}

(`{at}` may be any empty folder; the same command gives the same bytes on one machine.) No sequence or structure is taken from
nature: the backbones have ideal geometry and are folded towards sketches, the sequences come from a Potts model whose coupled
columns are the contacts, and the side chains are AlphaFold2's rigid groups.

{table}

{what.format(sequences=config.sequences)}"""


_ABOUT_CHAINS = """\
Members of a family share the fold and at least half of their residues. Each has its own structure and alignments.

- `mmcif_files/<id>.cif`: structures, all heavy atoms
- `alignments/<id>_A/bfd_uniclust_hits.a3m`, `uniref90_hits.sto`: {sequences} sequences each; the first is the chain's
- `fasta/<id>_A.fasta`: the sequence, for prediction
- `train.txt`, `validation.txt`: chain names; the validation chains are held out
- `chain_data_cache.json`, `mmcif_cache.json`: OpenFold's caches; a family is a cluster
"""
_ABOUT_TWINS = """\
Heterodimers at the same place of two families are twins: their sequences are the same, and all rows that could be paired, too.

"""
_ABOUT_COMPLEXES = """\
Members of a family share the folds of their two chains and the interface between them, up to small differences. Families with
the same folds have other interfaces. Which one a heterodimer has is written in the pairing of its rows: columns that touch
across the interface co-vary in rows of one species. The rows of each chain were drawn without the other chain.

- `mmcif_files/<id>.cif.gz`: structures, all heavy atoms; assembly 1 is the chains A and B
- `alignments/<id>_A/`, `<id>_B/`: a homodimer has the first alone, because its chains have one sequence
  - `uniprot_hits.a3m`: {sequences} sequences with UniProt-like names; rows of one species in both chains belong together
  - `uniref90_hits.sto`: sequences of the chain alone
- `fasta/<id>.fasta`: the sequences of both chains with `:` between them, for prediction
- `train.txt`, `validation.txt`: entries; the validation entries are held out
- `chain_data_cache.json`, `mmcif_cache.json`: OpenFold's caches; a family is a cluster
"""


def _write_structure(root: Path, entry: Entry) -> None:
    """The structure of an entry and its sequences."""
    chains = [member.chain for member in entry]
    path, items = root / "mmcif_files" / f"{chains[0].pdb_id}.cif", {"_struct.title": _title(entry)}
    if len(chains) == 1:
        write_mmcif(path, chains, items=items)
    else:
        text = mmcif_text(chains, items=items, tables=assembly_tables(chains))
        # Two chains take much room. Without a time the same text gives the same bytes.
        path.with_suffix(".cif.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    record = f">{_key(entry)} {_title(entry)}\n{':'.join(chain.sequence for chain in chains)}\n"
    (root / "fasta" / f"{_key(entry)}.fasta").write_text(record, encoding="utf-8")


def _title(entry: Entry) -> str:
    kind = "protein, fold" if len(entry) == 1 else "complex, folds"
    return f"Synthetic {kind} {_folds(entry)}"


def _write_member(root: Path, member: Member) -> None:
    """The alignments of a chain. A copy of another chain has none."""
    if not member.alignments:
        return
    folder = root / "alignments" / member.chain.key
    folder.mkdir()
    for name, homologs in member.alignments.items():
        text = to_a3m(homologs) if name.endswith(".a3m") else to_stockholm(homologs)
        (folder / name).write_text(text, encoding="utf-8")


def _chain_entry(member: Member) -> dict[str, object]:
    chain = member.chain
    return {
        "release_date": chain.release_date.isoformat() if chain.release_date else None,
        "seq": chain.sequence,
        "resolution": chain.resolution,
    }


def _entry(entry: Entry) -> dict[str, object]:
    first = _chain_entry(entry[0])
    return {
        "release_date": first["release_date"],
        "chain_ids": [member.chain.chain_id for member in entry],
        "seqs": [member.chain.sequence for member in entry],
        "no_chains": len(entry),
        "resolution": first["resolution"],
    }


def _write_json(path: Path, values: dict[str, dict[str, object]]) -> None:
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
