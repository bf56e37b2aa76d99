"""Masking of the clustered MSA (supplement 1.2.7).

Shapes: A rows (those of all recycling iterations), L columns of the chain. Residue codes: `evodsp.geometry.residues`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float32, Float64, Int8
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.geometry.residues import LETTERS_WITH_GAP


def mask_letters(
    msa: Int8[Tensor, "A L"],
    profile: Float32[Tensor, "L 22"],
    replace: Float64[Tensor, "A L"],
    letter: Float64[Tensor, "A L"],
    config: FeatureConfig,
) -> tuple[Int8[Tensor, "A L"], Bool[Tensor, "A L"]]:
    """Replace a fraction of the letters for the masked-MSA loss. Returns the masked MSA, and where a letter was redrawn.

    `replace` and `letter` are uniform in [0, 1). A letter is redrawn where `replace` is below the fraction; the new one is
    found by inverting the cumulative distribution at `letter`. The distribution is a mixture: a uniformly drawn amino acid
    (never X or gap), a letter from the column's profile, the letter itself, and the mask token for the rest.

    The old letter a adds its share to all cumulative probabilities from a on. So the new letter is among those before a if
    `letter` says so, and otherwise where `letter` less that share says. Products and sums of probabilities are rounded to
    float32; all that follows is in float64 and exact, as long as no probability but zero is below 2^-29.
    """
    letters = torch.arange(LETTERS_WITH_GAP, device=profile.device)
    mixed = config.masked_uniform * ((letters < 20).float() * (1 / 20)) + config.masked_profile * profile  # [L, 22]
    own_share = (mixed + config.masked_same).double() - mixed.double()
    cumulative = mixed.double().cumsum(-1)
    own, drawn = msa.T.long(), letter.T.contiguous()  # [L, A]
    before = torch.searchsorted(cumulative, drawn, right=True, out_int32=True)
    after = torch.searchsorted(cumulative, drawn - own_share.gather(1, own), right=True, out_int32=True)
    new = torch.minimum(before, own) + (after - own).clamp(min=0)
    replaced = replace < config.masked_msa_fraction
    return torch.where(replaced, new.T.to(torch.int8), msa), replaced
