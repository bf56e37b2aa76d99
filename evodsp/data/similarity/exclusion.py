"""Chains or complexes that resemble those of a list, so that a run does not train on them.

One resembles a listed one if it has, for every chain of that, a chain with more than a share of identical residues (`pairs`: of
the shorter sequence), or an equal one. Numbers of copies do not count. Chains of fewer than `SHORTEST` residues count only
where the listed one has no other, and are compared for equality.

A sequence is aligned with the listed ones that share most words of four residues with it: with all that share one, unless these
would be more than `PAIRS_ALIGNED` in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evodsp.data.executors import processes_for, with_progress
from evodsp.data.formats.fasta import read_fasta
from evodsp.data.pool import WorkerEndedError
from evodsp.data.similarity.comparison import Compared
from evodsp.data.similarity.pairs import MOST_CELLS, SHORTEST, Words, identity, plain
from evodsp.data.similarity.sequences import Letters
from evodsp.errors import FileFormatError, UserError
from evodsp.reading.text_files import text_of

FEWEST_ALIGNED, PAIRS_ALIGNED = 5, 1_000_000
"""Listed sequences that a sequence is aligned with: as many as make this number of pairs in all, but no fewer than these."""
_IN_THIS_PROCESS = 20_000
"""Pairs that are aligned without further processes."""
_SUFFIXES = (".fasta", ".fa", ".faa")


@dataclass(frozen=True)
class Exclusion:
    """What a run must not train on. `listed`: the sequences of the listed chains or complexes by name. `identity`: the largest
    share of identical residues that is trained on. `comparison`: knows the sequences of the training keys."""

    listed: Letters
    identity: float
    comparison: Compared

    def resembling(self, keys: Iterable[str]) -> tuple[dict[str, str], list[str]]:
        """The keys that resemble a listed one, each with that one; and those whose sequences cannot be read. Shows progress."""
        keys = list(keys)
        letters = self.comparison.sequences(keys, {}, processes_for(len(keys), _IN_THIS_PROCESS))
        return resembling(self.listed, letters, self.identity), [key for key in keys if not letters[key]]


def sequences_of_keys(keys: Sequence[str], comparison: Compared) -> Letters:
    """The sequences of listed keys. Raises UserError for one whose sequence cannot be read."""
    found = comparison.sequences(keys, {}, 1)
    if unknown := [key for key in keys if not found[key]]:
        raise UserError(
            f"data.exclude_like: the sequence of '{unknown[0]}' cannot be read from the run's data; correct the name, or "
            "give a FASTA file"
        )
    return found


def is_fasta(source: str | list[str]) -> bool:
    """Whether the setting names a FASTA file, by its suffix."""
    return isinstance(source, str) and source.lower().endswith(_SUFFIXES)


def sequences_of_fasta(path: str) -> Letters:
    """The sequences of a FASTA file by name; with ':' between the chains of a complex. Raises UserError for a broken record."""
    if not Path(path).is_file():
        raise UserError(f"data.exclude_like: {path}: no such FASTA file; check the path")
    found: dict[str, tuple[str, ...]] = {}
    for record in read_fasta(path, substitute=True, data=text_of(path), several=True):
        if isinstance(record.sequence, FileFormatError):
            raise record.sequence
        found[record.name] = record.chains or (record.sequence.letters,)
    return found


def resembling(listed: Letters, training: Letters, share: float) -> dict[str, str]:
    """The keys of `training` that resemble one of `listed`, each with the first such. `share`: see `Exclusion.identity`."""
    wanted = {name: _counted(letters) for name, letters in listed.items()}
    owners: dict[str, list[str]] = {}
    for key, letters in training.items():
        for one in {plain(chain) for chain in letters}:
            owners.setdefault(one, []).append(key)
    near = _near(list(dict.fromkeys(one for chains in wanted.values() for one in chains)), list(owners), share)
    found: dict[str, str] = {}
    for name, chains in wanted.items():
        having = [{key for one in near.get(chain, ()) for key in owners[one]} for chain in chains]
        for key in set.intersection(*having) if having else ():
            found.setdefault(key, name)
    return {key: found[key] for key in training if key in found}


def _counted(letters: Iterable[str]) -> list[str]:
    chains = sorted({plain(chain) for chain in letters})
    return [chain for chain in chains if len(chain) >= SHORTEST] or chains


def _near(listed: list[str], others: list[str], share: float) -> Mapping[str, list[str]]:
    """For each listed sequence the others that are near it."""
    known = set(others)
    near = {one: [one] if one in known else [] for one in listed}
    long, rest = ([one for one in part if len(one) >= SHORTEST] for part in (listed, others))
    if not long or not rest or share >= 1:
        return near
    words, most = Words(long), max(FEWEST_ALIGNED, PAIRS_ALIGNED // len(rest))
    jobs = []
    for one in rest:
        shares = words.shares_with(one)
        rows = np.argsort(-shares, kind="stable")[:most]
        candidates = [long[row] for row in rows[shares[rows] > 0] if len(long[row]) * len(one) <= MOST_CELLS]
        jobs += [(one, [other for other in candidates if other != one], share)]
    pairs = sum(len(candidates) for _, candidates, _ in jobs)
    for at, alike in with_progress(
        "compared with what is excluded", _alike, jobs, processes_for(pairs, _IN_THIS_PROCESS)
    ):
        if isinstance(alike, WorkerEndedError):
            raise alike
        for other in alike:
            near[other].append(jobs[at][0])
    return near


def _alike(one: str, candidates: list[str], share: float) -> list[str]:
    return [other for other in candidates if identity(other, one) > share]
