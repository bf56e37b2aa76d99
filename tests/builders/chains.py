"""Chains in memory, and a store of chains that counts its reads."""

from __future__ import annotations

from collections import Counter

import numpy as np

from evodsp.data.records import CHAINS, Alignment, Chain, ProteinSequence
from evodsp.data.sources.parsed import Parsed, parse_chain
from evodsp.data.templates.hits import TemplateHit
from evodsp.geometry import residues
from evodsp.geometry.residues import encode_sequence
from tests.builders.alignments import make_alignment

AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"


def make_chain(name: str, letters: str, resolved: bool = True, resolution: float | None = 2.0) -> Chain:
    """A chain A with residue i's atoms near (10 i, 0, 0). Without `resolved` it has no atoms."""
    length = len(letters)
    mask = residues.RESTYPE_ATOM37_MASK[encode_sequence(letters)].astype(np.float32) * resolved
    jitter = np.random.default_rng(length).normal(size=(length, 37, 3))
    positions = jitter + np.array([10.0, 0, 0]) * np.arange(length)[:, None, None]
    return Chain(
        pdb_id=name,
        chain_id="A",
        sequence=letters,
        residue_number=np.arange(1, length + 1, dtype=np.int32),
        insertion_code=("",) * length,
        is_missing=np.full(length, not resolved),
        positions=(positions * mask[..., None]).astype(np.float32),
        mask=mask,
        resolution=resolution,
    )


def straight_chain(letters: str, key: str = "1abc_A") -> Chain:
    """A straight chain: residue i has its backbone and CB at x = 3.8 i; the atom's index is added to y."""
    length = len(letters)
    positions, mask = np.zeros((length, 37, 3), np.float32), np.zeros((length, 37), np.float32)
    mask[:, [residues.N, residues.CA, residues.C, residues.CB, residues.O]] = 1
    mask[[letter == "G" for letter in letters], residues.CB] = 0
    positions[..., 0] = 3.8 * np.arange(length)[:, None]
    positions[..., 1] = np.arange(37)
    pdb_id, chain_id = key.split("_")
    return Chain(
        pdb_id, chain_id, letters, np.arange(length, dtype=np.int32), ("",) * length, np.zeros(length, bool),
        positions * mask[..., None], mask,
    )  # fmt: skip


class MemoryStore:
    """A chain store in memory: random alignments, no template hits. `reads` counts how often each chain is read."""

    kind = CHAINS

    def __init__(self, *chains: Chain, rows: int = 9) -> None:
        self.chains = {chain.key: chain for chain in chains}
        self.rows = rows
        self.reads: Counter[str] = Counter()

    def alignments(self, key: str, query: ProteinSequence | None = None) -> list[Alignment]:
        assert query is None or query.letters == self.chains[key].sequence
        self.reads[key] += 1
        return [make_alignment(self.chains[key].sequence, self.rows)]

    def chain(self, key: str) -> Chain:
        return self.chains[key]

    def template_hits(self, key: str, query: ProteinSequence) -> list[TemplateHit]:
        return []

    def alignments_for_pairing(self, key: str, query: ProteinSequence, reads: object) -> list[Alignment]:
        return []

    def parsed(self, key: str, with_hits: bool = False) -> Parsed:
        return parse_chain(self, key, self.chain(key), with_hits)
