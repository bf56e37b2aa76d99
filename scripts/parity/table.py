"""The differences between two sides of a comparison, and the largest allowed, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, np.ndarray]

# Axes of residues, and quantities that have an axis of MSA rows before them. Padding is not compared: AF2 leaves noise there
# (attention over a row without letters has logits of 1e9, with rounding errors to match), and the noise stays there.
MSA = ("representations/msa", "masked_msa/logits")
RESIDUE_AXES = {
    "representations/msa": (1,),
    "representations/msa_first_row": (0,),
    "representations/pair": (0, 1),
    "representations/single": (0,),
    "representations/structure_module": (0,),
    "distogram/logits": (0, 1),
    "masked_msa/logits": (1,),
    "predicted_lddt/logits": (0,),
    "experimentally_resolved/logits": (0,),
    "predicted_aligned_error/logits": (0, 1),
}
POSITIONS = "structure/positions"
LOSS, GRADIENT = "loss/", "gradient/"

OUTPUT = 2e-5
"""Largest difference of representations and logits, relative to the largest value."""
ATOM = 1e-3
"""Largest difference of atom positions, in Å."""
LOSS_TERM = 1e-5
"""Largest relative difference of a loss term."""
NORM, OF_GLOBAL = 1e-3, 1e-6
"""Largest difference of a parameter's gradient: relative to its norm, plus relative to the norm of the whole gradient."""


@dataclass(frozen=True)
class Row:
    """One quantity: the measured and the largest allowed difference, in the same unit."""

    quantity: str
    measured: float
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference is allowed; NaN is not."""
        return self.measured <= self.allowed


def compare(ours: Arrays, theirs: Arrays, features: Arrays) -> list[Row]:
    """One row per quantity in `theirs`. Raises KeyError if `ours` lacks one.

    `features`, axes [cycle, …]: `seq_mask`, `msa_mask` and `atom37_atom_exists` of the last pass mark the padding.
    """
    real, real_rows = features["seq_mask"][-1] > 0, features["msa_mask"][-1].any(-1)
    atom_mask = features["atom37_atom_exists"][-1]
    rows = []
    for name in (name for name in RESIDUE_AXES if name in theirs):
        keep = dict.fromkeys(RESIDUE_AXES[name], real) | ({0: real_rows} if name in MSA else {})
        rows.append(_output(name, ours[name], theirs[name], keep))
    if POSITIONS in theirs:
        away = np.abs(ours[POSITIONS] - theirs[POSITIONS])[atom_mask > 0].max()
        rows.append(Row("atom positions", float(away), ATOM, "Å"))
    for name in sorted(name for name in theirs if name.startswith(LOSS)):
        expected = float(theirs[name])
        away = abs(float(ours[name]) - expected) / abs(expected)
        rows.append(Row(f"loss {name.removeprefix(LOSS)}", away, LOSS_TERM, f"relative to {expected:.5g}"))
    return [*rows, *_gradients(ours, theirs)]


def _output(name: str, ours: np.ndarray, theirs: np.ndarray, keep: dict[int, np.ndarray]) -> Row:
    for axis, real in keep.items():
        ours, theirs = (np.compress(real, values, axis) for values in (ours, theirs))
    largest = np.abs(theirs).max()
    return Row(name, float(np.abs(ours - theirs).max() / largest), OUTPUT, f"relative to {largest:.3g}")


def _gradients(ours: Arrays, theirs: Arrays) -> Iterator[Row]:
    """Two rows, for the norm of a gradient and for the gradient itself: each for the parameter with the worst difference."""
    keys = sorted(key for key in theirs if key.startswith(GRADIENT))
    if not keys:
        return
    norms = np.array([_norm(theirs[key]) for key in keys])
    allowed = NORM * norms + OF_GLOBAL * np.sqrt(np.square(norms).sum())
    found = {
        "norm": np.abs(np.array([_norm(ours[key]) for key in keys]) - norms),
        "difference": np.array([_norm(ours[key] - theirs[key]) for key in keys]),
    }
    for what, measured in found.items():
        share = np.where(np.isnan(measured), np.inf, measured / allowed)
        worst = int(share.argmax())
        parameter = "/".join(keys[worst].replace("//", "/").split("/")[-3:])
        yield Row(
            f"gradient {what}, {len(keys)} parameters",
            float(measured[worst]),
            float(allowed[worst]),
            f"worst: {parameter}",
        )


def _norm(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values.astype(np.float64)).sum()))


def text(rows: list[Row]) -> str:
    """The table: one line per row, then a summary."""
    width = max(len(row.quantity) for row in rows)
    lines = [f"{'quantity':{width}}  {'measured':>9}  {'allowed':>9}"]
    for row in rows:
        verdict = "" if row.passed else "  BEYOND"
        lines.append(f"{row.quantity:{width}}  {row.measured:9.1e}  {row.allowed:9.1e}{verdict}  {row.note}".rstrip())
    beyond = sum(not row.passed for row in rows)
    lines.append(
        f"{len(rows)} quantities, " + (f"{beyond} beyond what is allowed" if beyond else "all within what is allowed")
    )
    return "\n".join(lines)
