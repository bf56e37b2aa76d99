"""Masking of the clustered MSA on a device (supplement 1.2.7): the letters of `evodsp.data.features.mask_letters`.

Shapes: A rows (those of all recycling iterations), L columns of the chain. Residue codes: `evodsp.geometry.alphabet`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float32, Float64, Int8
from torch import Tensor

from evodsp.config import FeatureConfig
from evodsp.geometry.alphabet import LETTERS_WITH_GAP


def boundaries(profile: Float32[Tensor, "L 22"], config: FeatureConfig) -> Float64[Tensor, "22 22 L"]:
    """At [k, a, l]: the probability that letter a of column l becomes one of 0..k. The mask token is beyond them.

    Rounded as NumPy rounds: products and sums in float32, then cumulative sums in float64. Those are exact, hence equal in any
    order, as long as no probability but zero is below 2^-29.
    """
    letters = torch.arange(LETTERS_WITH_GAP, device=profile.device)
    uniform = (letters < 20).float() * (1 / 20)
    same = (letters[:, None] == letters).float()
    mixed = config.masked_uniform * uniform + config.masked_profile * profile
    probabilities = mixed[:, None] + config.masked_same * same  # [L, a, k]
    return probabilities.double().cumsum(-1).permute(2, 1, 0)


def mask_letters(
    msa: Int8[Tensor, "A L"],
    profile: Float32[Tensor, "L 22"],
    replace: Float64[Tensor, "A L"],
    letter: Float64[Tensor, "A L"],
    config: FeatureConfig,
) -> tuple[Int8[Tensor, "A L"], Bool[Tensor, "A L"]]:
    """Replace a fraction of the letters. Returns the masked MSA, and where a letter was redrawn.

    `replace` and `letter` are uniform in [0, 1). One boundary at a time, so that nothing is 22 times as large as the MSA.
    """
    own, drawn = msa.long(), torch.zeros_like(msa)
    for boundary in boundaries(profile, config):
        drawn += letter >= boundary.gather(0, own)
    replaced = replace < config.masked_msa_fraction
    return torch.where(replaced, drawn, msa), replaced
