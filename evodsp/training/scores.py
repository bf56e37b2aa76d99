"""Scores of validation and test chains: of one batch, of all ranks, as a table and as a file; and the bar of a run: what
copying the nearest training chain scores.

Where one of these is trained on, by its name or its sequence, there is no bar, but a warning in log, report and model card.

Rank 0 computes it before the first step and writes `baseline.json`. It may take 20 seconds, and nothing of it ends a run: a
run without it lacks a line in its report.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from evodsp import metrics
from evodsp.data.samples.selection import DISTILLED
from evodsp.data.similarity.nearest import Bar, Compared, Copy, gathered
from evodsp.data.similarity.sequences import Letters, plain
from evodsp.errors import UserError
from evodsp.files import write_rows, write_text
from evodsp.geometry.residues import CA
from evodsp.losses.total import CHAIN
from evodsp.model.heads import ModelOutput, compute_plddt
from evodsp.printing import one_line, tell
from evodsp.reading.text_files import read_json
from evodsp.report.runs import overlap_line
from evodsp.training.chains import Chains

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


SECONDS = 20.0
"""The most time that it may take."""
MOST_CHAINS = 10_000
"""The most training chains that are looked at. To count the words of more takes too long for the start of a run."""


def write_baseline(path: Path, chains: Chains, cache: str | None) -> None:
    """Write the bar of the validation chains, unless `path` has that of the same chains; and warn of those that are trained on,
    for which there is no bar. `cache`: OpenFold's chain_data_cache.json, which has sequences.

    A failure is one line on standard error.
    """
    try:
        if not _is_of(path, chains):
            path.unlink(missing_ok=True)
            write_text(path, json.dumps(_content(chains, cache), indent=1) + "\n")
        content = read_json(path, "remove it")
        if both := content.get("trained_on"):
            tell(f"evodsp: warning: {overlap_line(both, len(chains.validation))}")
    except Exception as error:  # whatever it is: the run does not need this file
        reason = one_line(str(error)) or type(error).__name__
        tell(f"evodsp: warning: the report will not say what copying the nearest training chain scores ({reason})")


def warn_of_overlap(chains: Chains, scored: Sequence[str], cache: str | None) -> None:
    """Warn of chains that are scored and were trained on. What is not known within the limits of the bar is not said."""
    both = _by_name(chains, scored)
    with suppress(UserError):
        both |= _by_sequence(_letters(chains, scored, Compared(chains.store, cache), _end()), chains, scored)
    if both:
        tell(f"evodsp: warning: {overlap_line(both, len(scored))}")


def _content(chains: Chains, cache: str | None) -> dict[str, Any]:
    """Content of the file. Raises UserError if it is not known within the limits."""
    end, comparison, both = _end(), Compared(chains.store, cache), _by_name(chains, chains.validation)
    try:
        letters = _letters(chains, chains.validation, comparison, end)
        both |= _by_sequence(letters, chains, chains.validation)
        found = Bar([]) if both else _bar(letters, chains, comparison, end)
    except UserError:
        if not both:
            raise
        found = Bar([])
    if not found.copies and found.without:
        raise UserError("{}: {}".format(*next(iter(found.without.items()))))
    interface = found.interface_lddt_ca
    return {
        **({} if both else {"lddt_ca": found.lddt_ca, "identity": found.identity}),
        **({} if interface is None else {"interface_lddt_ca": interface}),
        "trained_on": both,
        "validation_chains": len(chains.validation),
        "training_chains": len(chains.train),
        "training_names": _checksum(chains.train),
        "validation_names": _checksum(chains.validation),
        "copies": [dataclasses.asdict(copy) for copy in found.copies],
        "without": found.without,
    }


def _by_name(chains: Chains, scored: Iterable[str]) -> dict[str, str]:
    """The scored chains that are training chains, too, each with the name that it has there."""
    name_of = chains.store.name_of
    wanted = {key: name_of(key) for key in scored}
    names = {*wanted.values()}
    trained: dict[str, str] = {}
    for key in (*chains.train, *(key.removeprefix(DISTILLED) for key in chains.distilled)):
        if key in names:
            trained[key] = key
        elif key.rpartition("_")[0] in names:  # `name_of` looks files up, so it is asked only where the names may meet
            trained[name_of(key)] = key
    return {key: trained[name] for key, name in wanted.items() if name in trained}


def _by_sequence(letters: Letters, chains: Chains, scored: Iterable[str]) -> dict[str, str]:
    """The scored chains whose sequence a training chain has, each with that chain. Of complexes all sequences count."""
    alike = {key: frozenset(map(plain, letters[key])) for key in {*chains.train, *scored}}
    trained = {alike[key]: key for key in reversed(chains.train) if alike[key]}
    return {key: trained[alike[key]] for key in scored if alike[key] in trained}


def _end() -> float:
    return time.monotonic() + SECONDS


def _letters(chains: Chains, scored: Sequence[str], comparison: Compared, end: float) -> dict[str, tuple[str, ...]]:
    """The sequences of training chains and scored chains. Raises UserError if they are not known by `end`."""
    if len(chains.train) > MOST_CHAINS:
        raise UserError(f"more than {MOST_CHAINS:,} training chains; evodsp data doctor says it")
    letters = comparison.listed(dict.fromkeys([*chains.train, *scored]))
    for key in [key for key, sequences in letters.items() if not sequences]:
        _check_time(end)
        letters[key] = comparison.read(key)
    return letters


def _bar(letters: Letters, chains: Chains, comparison: Compared, end: float) -> Bar:
    """Compute the nearest-neighbour baseline. Raises UserError if the time `end` comes before."""
    targets, training = ({key: letters[key] for key in part} for part in (chains.validation, chains.train))
    found: dict[str, Copy | str] = {}
    for key, copy in comparison.copies(targets, training, workers=1):
        found[key] = copy
        _check_time(end)
    return gathered(found, targets, training)


def _check_time(end: float) -> None:
    if time.monotonic() > end:
        raise UserError(f"it takes more than {SECONDS:g} s; evodsp data doctor says it")


def _checksum(names: Sequence[str]) -> int:
    return zlib.crc32("\n".join(names).encode())


def _is_of(path: Path, chains: Chains) -> bool:
    """Whether a file of an earlier start has the bar of these chains."""
    try:
        content = read_json(path, "remove it")
        named = content["training_names"], content["validation_names"]
        return named == (_checksum(chains.train), _checksum(chains.validation))
    except (UserError, OSError, KeyError, TypeError):
        return False
