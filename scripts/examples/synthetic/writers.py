"""Families to files, in OpenFold's layout. Everything is written under a temporary name and renamed when complete."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from evodsp.files import whole_folder
from scripts.examples.synthetic.alignments import to_a3m, to_stockholm
from scripts.examples.synthetic.config import SynthesisConfig
from scripts.examples.synthetic.families import Member, make_family
from scripts.examples.synthetic.mmcif_writer import write_mmcif


def write_families(config: SynthesisConfig, report: Callable[[str], None] | None = None) -> None:
    """See `scripts.examples.synthetic.synthesize`."""
    with whole_folder(config.output) as partial:
        _write(partial, config, report)


def _write(root: Path, config: SynthesisConfig, report: Callable[[str], None] | None) -> None:
    for folder in ("mmcif_files", "alignments", "fasta"):
        (root / folder).mkdir(parents=True)
    members: list[Member] = []
    for family in range(config.families):
        for member in make_family(config, family):
            _write_member(root, member)
            members.append(member)
            if report:
                kind = "validation" if member.held_out else "train"
                report(f"{member.chain.key}: family {family + 1}, {member.fold}, {len(member.chain)} residues, {kind}")
    for name, held_out in (("train.txt", False), ("validation.txt", True)):
        keys = [m.chain.key for m in members if m.held_out == held_out]
        (root / name).write_text("".join(f"{key}\n" for key in keys), encoding="utf-8")
    # OpenFold's training weights a chain by the inverse of its cluster's size: a family is a cluster.
    size = config.members + config.held_out
    _write_json(
        root / "chain_data_cache.json", {m.chain.key: _chain_entry(m) | {"cluster_size": size} for m in members}
    )
    _write_json(root / "mmcif_cache.json", {m.chain.pdb_id: _entry(m) for m in members})
    (root / "README.md").write_text(_readme(config, members), encoding="utf-8")


def _readme(config: SynthesisConfig, members: list[Member]) -> str:
    """The README of the output folder: its contents, and the command that makes it."""
    options = "".join(
        f" --{field.name} {value}"
        for field in dataclasses.fields(config)
        if field.name != "output" and (value := getattr(config, field.name)) != field.default
    )
    size = config.members + config.held_out
    rows = []
    for family in range(config.families):
        chains = members[family * size : (family + 1) * size]
        train, held_out = ([m.chain.key for m in chains if m.held_out == kind] for kind in (False, True))
        rows.append(
            f"| {family + 1} | {chains[0].fold} | {len(chains[0].chain)} | {' '.join(train)} | {' '.join(held_out) or '-'} |"
        )
    table = "\n".join(["| family | fold | residues | train.txt | validation.txt |", "|---|---|---|---|---|", *rows])
    return f"""# Synthetic protein families

Made by

    python -m scripts.examples.synthetic --output data{options}

(`data` may be any empty folder; the same command gives the same bytes on one machine.) No sequence or structure is taken from
nature: the backbones have ideal geometry and are folded towards sketches, the sequences come from a Potts model whose coupled
columns are the contacts, and the side chains are AlphaFold2's rigid groups.

{table}

Members of a family share the fold and at least half of their residues. Each has its own structure and alignments.

- `mmcif_files/<id>.cif`: structures, all heavy atoms
- `alignments/<id>_A/bfd_uniclust_hits.a3m`, `uniref90_hits.sto`: {config.sequences} sequences each; the first is the chain's
- `fasta/<id>_A.fasta`: the sequence, for prediction
- `train.txt`, `validation.txt`: chain names; the validation chains are held out
- `chain_data_cache.json`, `mmcif_cache.json`: OpenFold's caches; a family is a cluster
"""


def _write_member(root: Path, member: Member) -> None:
    chain = member.chain
    title = f"Synthetic protein, fold {member.fold}"
    write_mmcif(root / "mmcif_files" / f"{chain.pdb_id}.cif", [chain], items={"_struct.title": title})
    (root / "fasta" / f"{chain.key}.fasta").write_text(f">{chain.key} {title}\n{chain.sequence}\n", encoding="utf-8")
    folder = root / "alignments" / chain.key
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


def _entry(member: Member) -> dict[str, object]:
    chain = _chain_entry(member)
    return {
        "release_date": chain["release_date"],
        "chain_ids": [member.chain.chain_id],
        "seqs": [member.chain.sequence],
        "no_chains": 1,
        "resolution": member.chain.resolution,
    }


def _write_json(path: Path, values: dict[str, dict[str, object]]) -> None:
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n", encoding="utf-8")
