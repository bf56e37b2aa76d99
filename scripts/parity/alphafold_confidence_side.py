"""DeepMind's and ColabFold's sides of the comparison of a complex's confidence, on the arrays of one .npz file.

    .venv-parity/bin/python scripts/parity/alphafold_confidence_side.py SUBJECT.npz RESULT.npz

The scores of pairs of chains and actifpTM are ColabFold's (`colabfold` 1.6.3, module `extra_ptm`). They are left out where that
package, which is not a part of the environment, cannot be imported. They are of unpadded arrays, because its d0 counts padding.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import alphafold_side as side  # type: ignore[import-not-found]  # noqa: F401  (it stubs what the package lacks, or ends if there is none)
import numpy as np
from alphafold.common import confidence  # type: ignore[import-not-found]
from peer_calls import serve  # type: ignore[import-not-found]


def run(subject: dict[str, np.ndarray]) -> dict[str, Any]:
    """The scores, under the names of `evodsp.model.heads.ComplexConfidence`."""
    logits, mask, asym, breaks = (subject[name] for name in ("logits", "mask", "chains", "breaks"))
    error = {"logits": logits, "breaks": breaks, "asym_id": asym}
    plddt = {"logits": np.zeros((len(mask), 50), np.float32)}
    prediction = {"predicted_lddt": plddt, "predicted_aligned_error": error}
    metrics = confidence.get_confidence_metrics(prediction, mask, rank_by="multimer")
    chains = [np.flatnonzero((asym == number) & (mask > 0)) for number in range(1, int(asym.max()) + 1)]
    found: dict[str, Any] = {
        "ptm": metrics["ptm"],
        "iptm": metrics["iptm"],
        "ranking_confidence": metrics["ranking_confidence"] / 100,
        "chain_ptm": [confidence.predicted_tm_score(logits[np.ix_(own, own)], breaks) for own in chains],
    }
    if importlib.util.find_spec("colabfold") is not None:
        found |= by_colabfold(subject, chains)
    return {name: np.asarray(value) for name, value in found.items()}


def by_colabfold(subject: dict[str, np.ndarray], chains: list[np.ndarray]) -> dict[str, Any]:
    """The scores that ColabFold adds. `chains`: each one's residues."""
    from colabfold.alphafold import extra_ptm  # type: ignore[import-not-found]

    real = np.concatenate(chains)
    asym, square = subject["chains"][real], np.ix_(real, real)
    result = {
        "distogram": {"logits": subject["distogram"][square]},
        "predicted_aligned_error": {"logits": subject["logits"][square], "breaks": subject["breaks"]},
    }
    contacts, ends = np.asarray(extra_ptm.get_contact_map(result)), extra_ptm.get_chain_indices(asym)
    pairs, active = np.zeros((2, len(ends), len(ends)), np.float32)
    for a, first in enumerate(ends):
        for b, second in enumerate(ends[:a]):
            iptm = extra_ptm.get_pairwise_iptm(result, asym, *second, *first)
            actifptm = extra_ptm.get_actifptm_probs(result, asym, contacts, *second, *first)
            pairs[a, b] = pairs[b, a] = iptm.max()
            active[a, b] = active[b, a] = actifptm.max()
    last = len(asym) - 1
    whole = extra_ptm.get_actifptm_probs(result, asym, contacts, 0, last, 0, last).max()
    return {"pair_iptm": pairs, "pair_actifptm": active, "actifptm": whole}


if __name__ == "__main__":
    serve(__file__, "alphafold", run)
