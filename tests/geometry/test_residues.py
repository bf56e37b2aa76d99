"""The derived tables of residues against AlphaFold2's, and their inner consistency."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evodsp.geometry import residues
from tests.shared import load

EXACT = [
    "restype_atom14_to_rigid_group", "restype_atom14_mask", "restype_atom14_rigid_group_positions",
    "restype_atom37_mask", "restype_atom37_rigid_group_positions",
    "chi_pi_periodic", "chi_angles_atom_indices", "renaming_matrices",
]  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_table_equals_alphafold(golden: Path, name: str) -> None:
    """Catches a wrong digit, atom or group in the packaged tables."""
    np.testing.assert_array_equal(getattr(residues, name.upper()), load(golden / "residue_constants.npz")[name])


def test_default_frames_equal_alphafold(golden: Path) -> None:
    """Catches a frame with a wrong axis, sign or parent."""
    expected = load(golden / "residue_constants.npz")["restype_rigid_group_default_frame"]
    np.testing.assert_allclose(residues.RESTYPE_RIGID_GROUP_DEFAULT_FRAME, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bound", ["lower", "upper"])
def test_distance_bounds_equal_alphafold(golden: Path, bound: str) -> None:
    """Catches a wrong digit in the bond tables, a tolerance of 15 deviations, or the angle's deviation ignored."""
    expected = load(golden / "residue_constants.npz")[f"atom14_dists_{bound}_bound"]
    found = getattr(residues, f"ATOM14_DISTS_{bound.upper()}_BOUND")
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(found, found.swapaxes(1, 2))


def test_chi_mask_equals_alphafold_and_x_has_none(golden: Path) -> None:
    expected = load(golden / "residue_constants.npz")["chi_angles_mask"]
    np.testing.assert_array_equal(residues.CHI_ANGLES_MASK[:20], expected)
    assert not residues.CHI_ANGLES_MASK[20].any()


def test_atom_names_equal_alphafold(golden: Path) -> None:
    """Catches two atoms exchanged, which no test of shapes would show."""
    expected = load(golden / "residue_constants.npz")["atom_types"]
    assert list(residues.ATOM_TYPES) == [name.decode() for name in expected]


def test_index_maps_equal_alphafold(golden: Path) -> None:
    """The maps that features carry, over every residue type that the real chains have."""
    seen = set()
    for path in sorted(golden.glob("geometry_*.npz")):
        expected = load(path)
        aatype = expected["aatype"]
        seen.update(aatype.tolist())
        np.testing.assert_array_equal(residues.RESTYPE_ATOM14_TO_ATOM37[aatype], expected["residx_atom14_to_atom37"])
        np.testing.assert_array_equal(residues.RESTYPE_ATOM37_TO_ATOM14[aatype], expected["residx_atom37_to_atom14"])
        np.testing.assert_array_equal(residues.RESTYPE_ATOM14_MASK[aatype], expected["atom14_atom_exists"])
        np.testing.assert_array_equal(residues.RESTYPE_ATOM37_MASK[aatype], expected["atom37_atom_exists"])
    assert set(range(20)) <= seen


def test_atom14_and_atom37_maps_undo_each_other() -> None:
    types, slots = np.nonzero(residues.RESTYPE_ATOM14_MASK)
    there = residues.RESTYPE_ATOM14_TO_ATOM37[types, slots]
    np.testing.assert_array_equal(residues.RESTYPE_ATOM37_TO_ATOM14[types, there], slots)
    for letter, three in residues.RESTYPE_1TO3.items():
        names = residues.RESTYPE_NAME_TO_ATOM14_NAMES[three]
        number = residues.RESTYPE_ORDER[letter]
        indices = residues.RESTYPE_ATOM14_TO_ATOM37[number]
        assert all(residues.ATOM_TYPES[index] == name for index, name in zip(indices, names, strict=True) if name)


def test_numpy_only_at_import() -> None:
    """Catches an import of torch, which would slow down data-loading workers."""
    code = "import sys, evodsp.geometry.residues; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
