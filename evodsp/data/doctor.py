"""Whether training can start on a data set, found before any GPU is booked.

All chains are looked up; what the index knows of them is counted; a sample of them is read completely, as training reads them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date

import numpy as np
from jaxtyping import Bool

from evodsp.config import FilterConfig
from evodsp.data.chain_table import UNKNOWN_CLUSTER, UNKNOWN_DAY, ChainTable
from evodsp.data.examine import Examined, examine
from evodsp.data.metadata import ChainFacts, day_of, table_of
from evodsp.data.pool import in_processes, processes
from evodsp.data.presence import Lacking, Presence
from evodsp.data.sampling import left_out_by_filters
from evodsp.data.store import FeatureStore
from evodsp.progress import progress


@dataclass(frozen=True)
class Diagnosis:
    """What was found."""

    training: list[str]
    """Training chains with alignments and structure."""
    missing: dict[str, Lacking]
    """Training chains that lack one of them."""
    missing_validation: dict[str, Lacking]
    examined: list[Examined]
    """Training chains that were read."""
    validated: list[Examined]
    """Validation chains that were read."""
    table: ChainTable
    """What is known of the training chains: of all of them with an index, otherwise of those that were read."""
    stale: list[str]
    """Sources that are newer than the index."""
    max_bad: float
    workers: int
    unreadable_headers: list[str] = field(default_factory=list)
    """What the index says it could not read."""
    unaligned: list[str] = field(default_factory=list)
    """Entries with a structure file, of which no chain has alignments."""

    @property
    def bad(self) -> list[Examined]:
        return [chain for chain in self.examined if chain.state != "good"]

    @property
    def obstacles(self) -> list[str]:
        """Why training cannot start; empty if it can."""
        found = []
        if not self.training:
            found.append("no training chain has alignments and structure")
        if self.examined and len(self.bad) > self.max_bad * len(self.examined):
            found.append(
                f"{len(self.bad):,} of {len(self.examined):,} training chains read are bad (more than {self.max_bad:.0%})"
            )
        if self.missing_validation:
            found.append(f"{len(self.missing_validation):,} validation chains are missing")
        if bad := sum(chain.state != "good" for chain in self.validated):
            found.append(f"{bad:,} validation chains are bad")
        return found

    def counts(self) -> dict[str, int]:
        """Chains by what is wrong with them; of what only reading shows, among those that were read."""
        states = Counter(chain.state for chain in self.examined)
        lacking = Counter(self.missing.values())
        return {
            "without alignments": lacking["alignments"],
            "without a structure": lacking["structure"],
            "read": len(self.examined),
            "read, alignments of another sequence": states["mismatching"],
            "read, unreadable": states["unreadable"],
            "unreadable header or first alignment (index)": len(self.unreadable_headers),
        }

    def store_bytes(self) -> int:
        """Estimated size of a feature store of all training chains."""
        good = [chain.packed_bytes for chain in self.examined if chain.state == "good"]
        return int(np.mean(good) * len(self.training)) if good else 0

    def store_seconds(self) -> float:
        """Estimated time to build it with all processes."""
        good = [chain.seconds for chain in self.examined if chain.state == "good"]
        return float(np.mean(good) * len(self.training) / max(1, self.workers)) if good else 0.0


def diagnose(
    store: FeatureStore,
    training: list[str] | None,
    validation: list[str],
    sample: int,
    seed: int,
    workers: int | None,
    max_bad: float,
) -> Diagnosis:
    """Examine the chains of a run. `training`: None for all with alignments. `sample`: how many are read, 0 for all."""
    presence = Presence(store)
    listed = presence.keys if training is None else training
    missing = {key: lacking for key in listed if (lacking := presence.lacks(key)) is not None}
    usable = [key for key in listed if key not in missing]
    drawn = usable if not sample or sample >= len(usable) else random.Random(seed).sample(usable, sample)
    missing_validation = {key: lacking for key in validation if (lacking := presence.lacks(key)) is not None}
    scored = [key for key in validation if key not in missing_validation]
    wanted = list(dict.fromkeys([*drawn, *scored]))
    found: dict[str, Examined] = {}
    number = processes(workers, len(wanted))
    with progress("read chains", len(wanted)) as advance:
        for chain in in_processes(examine, ((store, key) for key in wanted), number):
            found[chain.key] = chain
            advance(1)
    examined = [found[key] for key in sorted(drawn)]
    index = store.index
    if index is None:
        table, stale, problems = read_table(examined), [], []
    else:
        rows = np.array([row for key in usable if (row := index.keys.find(key)) is not None], np.int64)
        table = selected(index.table, rows)
        now_at = {"alignment_dir": store.alignment_dir}
        if store.structure_dir is not None:
            now_at["structure_dir"] = store.structure_dir
        stale = index.stale_sources(now_at)
        if changed := [key for key in wanted if store.differs_from_index(key)]:
            stale.append(
                f"the files of {len(changed):,} of {len(wanted):,} chains that were read, such as {changed[0]}"
            )
        problems = [index.content.problems[int(row)] for row in rows[index.content.problems.lengths()[rows] > 0]]
    validated = [found[key] for key in scored]
    unaligned = [] if store.structure_dir is None else presence.structures_without_alignments(store.structure_dir)
    return Diagnosis(
        usable,
        missing,
        missing_validation,
        examined,
        validated,
        table,
        stale,
        max_bad,
        max(1, number),
        problems,
        unaligned,
    )


def read_table(chains: list[Examined]) -> ChainTable:
    """What reading showed of chains; their cluster sizes are unknown."""
    good = sorted((chain for chain in chains if chain.state == "good"), key=lambda chain: chain.key)
    released = [date.fromisoformat(chain.release_date) if chain.release_date else None for chain in good]
    facts = [
        ChainFacts(chain.sequence, chain.resolution, day_of(day)) for chain, day in zip(good, released, strict=True)
    ]
    return table_of([chain.key for chain in good], facts)


def selected(table: ChainTable, rows: np.ndarray) -> ChainTable:
    """The given rows of a table. Representatives are the rows themselves: alignments are looked up by key."""
    return ChainTable(
        keys=[table.keys[int(row)] for row in rows],
        lengths=table.lengths[rows],
        resolutions=table.resolutions[rows],
        release_days=table.release_days[rows],
        cluster_sizes=table.cluster_sizes[rows],
        largest_fractions=table.largest_fractions[rows],
        unknown_fractions=table.unknown_fractions[rows],
        representatives=np.arange(len(rows), dtype=np.int32),
    )


def filter_reasons(table: ChainTable) -> Mapping[str, Bool[np.ndarray, " n"]]:
    """Why AlphaFold2's filters would leave a chain out; a chain may have several reasons. Then what else is not known."""
    return {
        **left_out_by_filters(table, FilterConfig()),
        "unknown release date": table.release_days == UNKNOWN_DAY,
        "unknown cluster size": table.cluster_sizes == UNKNOWN_CLUSTER,
    }
