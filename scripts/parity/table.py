"""How two sides of a comparison differ, against what is allowed, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, np.ndarray]

# Axes of residues, and quantities with an axis of MSA rows before them. What lies in padding is not compared: AF2 leaves noise
# there (the attention of a row without a letter has logits of 1e9, and rounding of that size), and nothing of it reaches
# the rest.
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
"""Allowed of representations and logits, relative to the largest."""
ATOM = 1e-3
"""Allowed of atom positions, in Å."""
LOSS_TERM = 1e-5
"""Allowed of a loss term, relative."""
NORM, OF_GLOBAL = 1e-3, 1e-6
"""Allowed of a gradient's norm: relative, and of the norm of the whole gradient."""


@dataclass(frozen=True)
class Row:
    """One quantity: the difference that was measured, the largest that passes, both in the same unit."""

    quantity: str
    measured: float
    allowed: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.measured <= self.allowed


def compare(ours: Arrays, theirs: Arrays, features: Arrays) -> list[Row]:
    """Rows for all that `theirs` has. Raises KeyError if `ours` lacks any of it.

    Of `features`, axes [cycle, …], those of the last pass say what is padding: `seq_mask`, `msa_mask`, `atom37_atom_exists`.
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
    """The parameters whose gradient's norm, and whose gradient itself, is nearest to what is allowed (or furthest beyond)."""
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
    """The table, a line for each row and one of summary."""
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
