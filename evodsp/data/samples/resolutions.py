"""Which structures the losses of the confidence heads count: those whose resolution is within bounds (supplement 1.9.6).

A structure without a resolution (NMR, a prediction, often a file of one's own) has the resolution 0, as in AlphaFold2, and is
not counted. A run on such chains alone learns no confidence, and its `train/plddt` is 0. Nobody sees why unless it is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from evodsp.config import LossConfig


@dataclass(frozen=True)
class CountedStructures:
    """The rule of a run."""

    loss: LossConfig
    assumed: float | None
    """What a structure without a resolution is taken to have, in Å; None for nothing."""
    setting: str = "data.assumed_resolution"
    """The setting that says so."""

    def line(self, resolutions: Float[np.ndarray, " n"], chains: int, kind: str) -> str | None:
        """How many chains the losses do not count, and what to do about it; None if they count all, or have no weight.

        `resolutions`: in Å, 0 if there is none, NaN if unknown, of all or some of the `chains` chains. `kind`: what they are
        called.
        """
        known = resolutions[~np.isnan(resolutions)]
        terms, loss = self.loss.by_resolution, self.loss
        low, high = loss.confidence_min_resolution, loss.confidence_max_resolution
        # A resolution that was rounded to float32, as a table has it, is not outside of bounds that it was given as.
        taken = np.where(known == 0, self.assumed or 0, known).astype(np.float32)
        is_outside = (taken < np.float32(low)) | (taken > np.float32(high))
        without, others = int((is_outside & (known == 0)).sum()), int((is_outside & (known != 0)).sum())
        if not terms or not without + others:
            return None
        among = (
            f"{chains:,} {kind} chains"
            if len(known) == chains
            else f"{len(known):,} {kind} chains whose resolution is known"
        )
        have = f"{without:,} of {among} have no resolution" if without else ""
        which = f"{others:,}" if without else f"{others:,} of {among}"
        outside = f"{which} have one outside of {low:g} to {high:g} Å" if others else ""
        names = " and ".join([", ".join(terms[:-1]), terms[-1]] if terms[1:] else terms)
        fix = f"; {self.setting} gives a resolution to chains without one" if without else ""
        return (
            f"{' and '.join(filter(None, (have, outside)))}: the loss {names} does not count them, as in AlphaFold2, so "
            f"train/{terms[0]} is 0 in steps of such chains alone{fix}"
        )
