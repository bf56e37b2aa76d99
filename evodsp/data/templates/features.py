"""The templates of one query as arrays along the query's residues (AF2 supplement, section 1.2.9 and table 1).

Shapes: T templates, R residues of the query, 37 atom types.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int8, Int64

from evodsp.geometry.residues import PSEUDO_BETA_SLOT


@dataclass(frozen=True)
class TemplateFeatures:
    """The templates of one query, best first; T may be 0. Residues without a counterpart are gaps, all masked.

    `names`: chain keys, '<pdbid>_<chain>'. `aatype`: the TEMPLATE's residues, 0..19, X = 20, gap = 21. `positions` are in Å,
    0 where `mask` is 0. `sum_probs`: the search's score, 0 where it gives none (hmmsearch).
    """

    names: tuple[str, ...]
    aatype: Int8[np.ndarray, "T R"]
    positions: Float32[np.ndarray, "T R 37 3"]
    mask: Float32[np.ndarray, "T R 37"]
    sum_probs: Float32[np.ndarray, " T"]

    def __post_init__(self) -> None:
        templates, length = self.aatype.shape
        shapes = (self.positions.shape, self.mask.shape, self.sum_probs.shape, len(self.names))
        if shapes != ((templates, length, 37, 3), (templates, length, 37), (templates,), templates):
            raise ValueError(f"aatype {self.aatype.shape}; positions, mask, sum_probs, names {shapes}")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return self.aatype.nbytes + self.positions.nbytes + self.mask.nbytes + self.sum_probs.nbytes

    @classmethod
    def none(cls, residues: int) -> TemplateFeatures:
        """No templates, for a query of `residues` residues."""
        return cls(
            names=(),
            aatype=np.zeros((0, residues), np.int8),
            positions=np.zeros((0, residues, 37, 3), np.float32),
            mask=np.zeros((0, residues, 37), np.float32),
            sum_probs=np.zeros(0, np.float32),
        )

    def select(
        self,
        templates: Int64[np.ndarray, " K"] | slice = slice(None),
        residues: Int64[np.ndarray, " r"] | slice = slice(None),
    ) -> TemplateFeatures:
        """The given templates, in the given order, cropped to the given residues of the query."""
        chosen = np.arange(len(self))[templates]
        return TemplateFeatures(
            names=tuple(self.names[number] for number in chosen.tolist()),
            aatype=self.aatype[chosen][:, residues],
            positions=self.positions[chosen][:, residues],
            mask=self.mask[chosen][:, residues],
            sum_probs=self.sum_probs[chosen],
        )

    def processed(self) -> dict[str, np.ndarray]:
        """The model's input under AF2's names, [T, ...], without padding. (AF2 pads T and R with zeros.)"""
        slot = PSEUDO_BETA_SLOT[self.aatype]  # [T, R]
        return {
            "template_aatype": self.aatype.astype(np.int32),
            "template_all_atom_positions": self.positions,
            "template_all_atom_masks": self.mask,
            "template_pseudo_beta": np.take_along_axis(self.positions, slot[..., None, None], -2)[
                ..., 0, :
            ],  # [T, R, 3]
            "template_pseudo_beta_mask": np.take_along_axis(self.mask, slot[..., None], -1)[..., 0],
            "template_mask": np.ones(len(self), np.float32),
            "template_sum_probs": self.sum_probs[:, None],
        }
