"""Scores of validation and test chains: of one batch, of all ranks, as a table and as a file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from evodsp import metrics
from evodsp.geometry.residues import CA
from evodsp.losses.total import CHAIN
from evodsp.model.heads import ModelOutput, compute_plddt
from evodsp.score_tables import write_rows

_COLUMNS = ("chain", "split", "residues", "resolved", "plddt", "lddt_ca", "rmsd", "gdt_ts", "tm_score")
_COUNTS = ("residues", "resolved")
"""Numbers of residues, which the file of scores has beside the scores."""


def ca_atoms(output: ModelOutput, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted CA, true CA [B, R, 3] in Å, and the mask of the true ones [B, R]."""
    positions, truth, mask = output.structure.positions, batch["all_atom_positions"], batch["all_atom_mask"]
    return positions[:, :, CA], truth[:, :, CA], mask[:, :, CA]


def score(output: ModelOutput, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Metrics of the predicted CA atoms against the true ones, each [batch]: lDDT and TM-score in 0..1, RMSD in Å.

    plddt: the mean over residues with a true CA, 0..100. plddt_too_high: by how many points it exceeds their lDDT-CA. Complexes
    also have interface_lddt_ca, of the distances between chains alone, which is nan where no true one is below 15 Å.
    """
    atoms = ca_atoms(output, batch)
    mask = atoms[2]
    plddt = (compute_plddt(output.logits["plddt"]) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    truth = (100 * metrics.lddt_ca(*atoms, per_residue=True) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    found = {
        "lddt_ca": metrics.lddt_ca(*atoms),
        "gdt_ts": metrics.gdt_ts(*atoms),
        "tm_score": metrics.tm_score(*atoms),
        "rmsd": metrics.rmsd(*atoms),
        "plddt": plddt,
        "plddt_too_high": plddt - truth,
    }
    if CHAIN in batch:
        found["interface_lddt_ca"] = metrics.interface_lddt_ca(*atoms, batch[CHAIN][:, -1])
    return found


def residue_counts(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The residues of each sample, and those with a true CA, each [batch]."""
    return {"residues": batch["seq_mask"][:, -1].sum(-1), "resolved": batch["all_atom_mask"][:, :, CA].sum(-1)}


def known_scores(values: Mapping[str, float]) -> dict[str, float]:
    """The scores of a chain, without that of an interface if it has none."""
    return {name: value for name, value in values.items() if name != "interface_lddt_ca" or not math.isnan(value)}


def mean_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean of each score over the chains that have it. Numbers of residues are no scores."""
    by_name: dict[str, list[float]] = {}
    for row in scores.values():
        for name, value in row.items():
            if name in _COUNTS:
                continue
            by_name.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in by_name.items()}


def mean_by_chain(parts: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Mean of each chain's scores over the ranks that scored it.

    All ranks of a sequence group score the same chain, and the mean of their losses is the chain's loss. Chains that fill up a
    data rank's share are scored by several groups, with equal results.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for part in parts:
        for chain, values in part.items():
            found.setdefault(chain, []).append(values)
    return {
        chain: {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} for chain, rows in found.items()
    }


def write_scores(scores: Mapping[str, Mapping[str, float]], split: str, path: Path) -> None:
    """Write a line for each chain with the columns of `evodsp score`, and of complexes that of interfaces, whole or not at all.

    `split`: the name of the set. pLDDT is the mean over the residues that are compared.
    """
    interface = ["interface_lddt_ca"] if any("interface_lddt_ca" in row for row in scores.values()) else []
    rows = [
        {**row, **{count: round(row[count]) for count in _COUNTS}, "chain": chain, "split": split}
        for chain, row in scores.items()
    ]
    write_rows([*_COLUMNS, *interface], rows, path)


def score_table(scores: dict[str, dict[str, float]]) -> str:
    """A table of the scores: one line per chain, and their mean."""
    if not scores:
        return "no chains"
    mean = mean_scores(scores)
    rows = {**scores, "mean": mean} if len(scores) > 1 else scores
    width = max(len("chain"), *map(len, rows))
    titles = {"lddt_ca": "lDDT-CA", "gdt_ts": "GDT-TS", "tm_score": "TM-score", "rmsd": "RMSD (Å)", "plddt": "pLDDT"}
    titles |= {"plddt_too_high": "pLDDT off", "interface_lddt_ca": "iLDDT-CA"}
    lines = [f"{'chain':<{width}}" + "".join(f"{titles.get(name, name):>10}" for name in mean)]
    lines += [
        f"{chain:<{width}}" + "".join(f"{row[name]:>10.3f}" if name in row else f"{'-':>10}" for name in mean)
        for chain, row in rows.items()
    ]
    return "\n".join(lines)
