"""Template hits, the structures they refer to, and template features."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date

import numpy as np

from evodsp.data.records import Chain, ProteinSequence, Structure
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import UserError
from evodsp.geometry.residues import encode

LETTERS = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEV"
QUERY = ProteinSequence("q", LETTERS)
QUERY73_TEMPLATES = ("3u8v_A", "2crb_A", "4zey_A", "1psm_A", "3zee_A", "4i6p_A", "2q2k_A")
"""The usable templates of the real chain query73_A, best first."""
HHBLITS_LETTERS = "ACDEFGHIKLMNPQRSTVWYX-"
"""Order of the letters in AF2's raw features."""


def make_hit(query: str, hit: str, *, first_query: int = 0, first_hit: int = 0, key: str = "1abc_A", score=10.0):
    """A hit from two aligned rows with '-' for gaps."""

    def indices(row: str, first: int) -> np.ndarray:
        is_residue = np.array([letter != "-" for letter in row])
        return np.where(is_residue, first - 1 + np.cumsum(is_residue), -1).astype(np.int32)

    in_query, in_hit = indices(query, first_query), indices(hit, first_hit)
    columns = int(((in_query >= 0) & (in_hit >= 0)).sum())
    return TemplateHit(1, key, *key.split("_"), columns, score, query, hit, in_query, in_hit)


class MemoryStructures:
    """Template structures in memory, with a release date for each entry.

    `asked` lists the entries whose dates were looked up. If `error` is set, reading a chain raises it.
    """

    def __init__(
        self, *chains: Chain, dates: dict[str, date | None] | None = None, error: UserError | None = None
    ) -> None:
        self.chains, self.dates, self.error = {chain.key: chain for chain in chains}, dates or {}, error
        self.asked: list[str] = []

    def has_structure(self, key: str) -> bool:
        return self.error is not None or any(chain.pdb_id == key.split("_")[0] for chain in self.chains.values())

    def chain(self, key: str) -> Chain:
        if self.error is not None:
            raise self.error
        if key not in self.chains:
            raise UserError(f"no protein chain '{key}'")
        return self.chains[key]

    def structure(self, pdb_id: str) -> Structure:
        chains = {chain.chain_id: chain for chain in self.chains.values() if chain.pdb_id == pdb_id}
        return Structure(pdb_id, "", None, None, chains)

    def release_date(self, pdb_id: str) -> date | None:
        self.asked.append(pdb_id)
        return self.dates.get(pdb_id)


def random_templates(number: int, residues: int) -> TemplateFeatures:
    """Random template features with falling scores."""
    rng = np.random.default_rng(number)
    return TemplateFeatures(
        names=tuple(f"{k}abc_A" for k in range(number)),
        aatype=rng.integers(0, 20, (number, residues)).astype(np.int8),
        positions=rng.normal(size=(number, residues, 37, 3)).astype(np.float32),
        mask=np.ones((number, residues, 37), np.float32),
        sum_probs=np.arange(number, 0, -1).astype(np.float32),
    )


def from_raw(raw: Mapping[str, np.ndarray]) -> TemplateFeatures:
    """Template features from AF2's raw ones, where `template_aatype` is one-hot in the order `HHBLITS_LETTERS`."""
    return TemplateFeatures(
        names=tuple(name.decode() for name in raw["template_domain_names"].tolist()),
        aatype=encode(HHBLITS_LETTERS)[raw["template_aatype"].argmax(-1)],
        positions=raw["template_all_atom_positions"].astype(np.float32),
        mask=raw["template_all_atom_masks"].astype(np.float32),
        sum_probs=raw["template_sum_probs"].reshape(-1).astype(np.float32),
    )
