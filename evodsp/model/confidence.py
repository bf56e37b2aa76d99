"""Confidence measures computed from the heads' logits: pLDDT, predicted aligned error (PAE) and predicted TM-score (pTM).

Each head predicts a distribution over bins; the confidence is an expected value over the bins' centres. The losses that train
the heads are in `evodsp.losses.confidence`. Shapes: *b batch axes, R residues; i this rank's shard of the rows of the pair
representation, which on one device is all R of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from evodsp.parallel.exchange import Exchange, LocalExchange

MAX_ALIGNED_ERROR = 31.0
"""Last bin edge of the aligned error in Å; larger errors fall in the last bin (supplement 1.9.7)."""
CONTACT_DISTANCE = 8.0
"""Largest CB-CB distance of two residues in contact in Å, as CASP defines it."""
_ROWS = 64
"""Number of rows of residue pairs that are computed together."""
_SHORTEST_CHAIN = 19
"""Smallest number of residues for d0: the TM-score does not define it below 16, and AlphaFold2 treats chains of less than 19
as having 19."""


def compute_plddt(logits: Float[Tensor, "*b R bins"]) -> Float[Tensor, "*b R"]:
    """Expected lDDT-CA of each residue, 0 to 100 (algorithm 29). The bins divide 0 to 100 equally."""
    bins = logits.shape[-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    centres = (torch.arange(bins, dtype=logits.dtype, device=logits.device) + 0.5) / bins  # [bins]
    return 100 * (logits.softmax(-1) * centres).sum(-1)


def compute_contacts(
    logits: Float[Tensor, "*b i R bins"], min_distance: float, max_distance: float
) -> Float[Tensor, "*b i R"]:
    """Probability, 0 to 1, that two residues are in contact: CB atoms (CA of glycine) within about `CONTACT_DISTANCE`.

    It is the total probability of the distogram's bins that end below this distance: at 7.94 Å in AlphaFold2, whose bins are
    0.31 Å wide. Any subset of the rows may be given. `min_distance`, `max_distance`: the first and the last edge between
    bins, Å (supplement 1.9.8).
    """
    edges = torch.linspace(min_distance, max_distance, logits.shape[-1] - 1, dtype=torch.float64, device="cpu")
    near = int((edges <= CONTACT_DISTANCE).sum())
    return _by_rows(logits, lambda probabilities: probabilities[..., :near].sum(-1))


def compute_pae(logits: Float[Tensor, "*b i R bins"], max_error: float = MAX_ALIGNED_ERROR) -> Float[Tensor, "*b i R"]:
    """Expected aligned error in Å: how far the CA of each residue (last axis) is from its true place, seen from the backbone
    frame of each row's residue (axis i). Any subset of the rows may be given."""
    centres = _centres(logits, max_error)
    return _by_rows(logits, lambda probabilities: (probabilities * centres).sum(-1))


def highest_pae(bins: int, max_error: float = MAX_ALIGNED_ERROR) -> float:
    """The largest error in Å that `compute_pae` can return: the last bin's centre."""
    return (bins - 0.5) * max_error / (bins - 2)


@torch.no_grad()
def compute_ptm(
    logits: Float[Tensor, "*b i R bins"],
    mask: Float[Tensor, "*b R"],
    max_error: float = MAX_ALIGNED_ERROR,
    exchange: Exchange = LocalExchange(),
) -> Float[Tensor, "*b"]:
    """Predicted TM-score, 0 to 1 (supplement 1.9.7): the expected TM-score seen from a residue's frame, for the best residue.

    `mask` is 1 for the residues that count (at least one) and 0 for padding. The logits are this rank's rows, the mask is
    the whole chain's; every rank gets the same score. It is not differentiated.
    """
    rows = exchange.owned(mask.shape[-1])
    centres = _centres(logits, max_error)
    mask = mask.to(centres.dtype)
    d0 = 1.24 * (mask.sum(-1).clamp(min=_SHORTEST_CHAIN) - 15) ** (1 / 3) - 1.8  # [*b], Å
    score = 1 / (1 + (centres / d0[..., None]).square())  # [*b, bins]
    score = score[..., None, None, :]
    expected = _by_rows(logits, lambda probabilities: (probabilities * score).sum(-1))  # [*b, i, R]
    per_frame = (expected * mask[..., None, :]).sum(-1) / (1e-8 + mask.sum(-1, keepdim=True))  # [*b, i]
    return exchange.max((per_frame * mask[..., rows]).amax(-1))


def _by_rows(
    logits: Float[Tensor, "*b i R bins"], of: Callable[[Tensor], Float[Tensor, "*b n R"]]
) -> Float[Tensor, "*b i R"]:
    """`of` applied to the probabilities of the bins, in float32 or wider. A few rows are computed at a time: the
    probabilities of all pairs would be as large as the logits, and twice as large for logits in half precision.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.cat([of(rows.to(wide).softmax(-1)) for rows in logits.split(_ROWS, -3)], -2)


def _centres(logits: Float[Tensor, "*b i R bins"], max_error: float) -> Float[Tensor, " bins"]:
    """The centres of the aligned error's bins in Å, in float32 or wider.

    `bins` - 1 edges divide 0 to `max_error` equally. The first bin lies below 0, so its centre is half a bin above; the last
    one is open.
    """
    bins, dtype = logits.shape[-1], torch.promote_types(logits.dtype, torch.float32)
    return (torch.arange(bins, dtype=dtype, device=logits.device) + 0.5) * (max_error / (bins - 2))
