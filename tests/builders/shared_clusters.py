"""Clusters as AlphaFold-Multimer's code makes them, as one formula on dense arrays."""

from __future__ import annotations

import numpy as np

from evodsp.geometry.residues import GAP

LETTERS = 23


def by_formula(
    centres: np.ndarray, extra: np.ndarray, of_centres: np.ndarray, deletions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Profiles and mean deletions: a softmax of 1,000 times the agreement, times the number of residues."""
    residues = centres.shape[1]
    centre_letters, extra_letters = (np.eye(LETTERS)[x] for x in (centres, extra))
    counted = np.arange(LETTERS) < GAP
    agreement = np.einsum("mrc,nrc->nm", extra_letters, centre_letters * counted)
    exponential = np.exp(1e3 * (agreement - agreement.max(0)))
    share = exponential / exponential.sum(0) * residues  # [S, E]
    weight = share.sum(1) + 1
    profile = (np.einsum("nm,mrc->nrc", share, extra_letters) + centre_letters) / weight[:, None, None]
    return profile, (share @ deletions + of_centres) / weight[:, None]
