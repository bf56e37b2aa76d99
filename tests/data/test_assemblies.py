"""Biological assemblies of mmCIF files: copies of chains, each in its place."""

from __future__ import annotations

from pathlib import Path

import gemmi
import numpy as np
import pytest

from evodsp.data.formats.mmcif import MOST_COPIES, read_assembly, read_structure
from evodsp.errors import FileFormatError

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "data" / "mmcif_files" / "s001.cif"


def operator(name: str, angle: float, shift: tuple[float, float, float]) -> str:
    """A rotation about z by `angle` (degrees) and a shift, as a row of the list of operators."""
    cos, sin = np.cos(np.radians(angle)), np.sin(np.radians(angle))
    matrix = [cos, -sin, 0, sin, cos, 0, 0, 0, 1]
    return " ".join([name, "?", *(f"{x:.9f}" for x in (*matrix, *shift))])


def entry(folder: Path, generators: list[str], operators: list[str]) -> Path:
    """The bundled entry with a list of assemblies."""
    numbers = [f"matrix[{row}][{column}]" for row in (1, 2, 3) for column in (1, 2, 3)]
    tags = ["id", "type", *numbers, *(f"vector[{row}]" for row in (1, 2, 3))]
    listed = "id", "details", "method_details", "oligomeric_details", "oligomeric_count"  # gemmi needs all of them
    text = ENTRY.read_text().rstrip() + "\n#\nloop_\n"
    text += "".join(f"_pdbx_struct_assembly.{tag}\n" for tag in listed) + "1 ? ? ? ?\n#\nloop_\n"
    text += "".join(f"_pdbx_struct_assembly_gen.{tag}\n" for tag in ("assembly_id", "oper_expression", "asym_id_list"))
    text += "\n".join(generators) + "\n#\nloop_\n"
    text += "".join(f"_pdbx_struct_oper_list.{tag}\n" for tag in tags) + "\n".join(operators) + "\n#\n"
    path = folder / "1abc.cif"
    path.write_text(text)
    return path


OPERATORS = [
    operator("1", 0, (0, 0, 0)),
    operator("2", 180, (50, 0, 0)),
    operator("3", 90, (0, 7, 1)),
    operator("P", 30, (1, 2, 3)),
]


@pytest.mark.parametrize("expression", ["1", "1,2", "'1,2,3'", "1-3", "'(1-3)'", "P"])
def test_copies_lie_where_gemmi_puts_them(expression: str, tmp_path: Path) -> None:
    """Catches a range without its end, and a rotation that is transposed. (gemmi 0.7 takes the first list of a product.)"""
    path = entry(tmp_path, [f"1 {expression} A"], OPERATORS)
    found = read_assembly(path)
    structure = gemmi.read_structure(str(path))
    structure.merge_chain_parts()
    expected = gemmi.make_assembly(structure.assemblies[0], structure[0], gemmi.HowToNameCopiedChain.AddNumber)
    assert len(found.chains) == len(expected)
    theirs = [
        np.array([residue.find_atom("CA", "*").pos.tolist() for residue in chain if residue.find_atom("CA", "*")])
        for chain in expected
    ]
    for chain, positions in zip(found.chains, theirs, strict=True):
        np.testing.assert_allclose(chain.positions[chain.mask[:, 1] > 0, 1], positions, atol=2e-4)


def test_products_of_operators_are_applied_from_right_to_left(tmp_path: Path) -> None:
    """Catches a product in the wrong order, and products in an order that is not that of the lists."""
    found = read_assembly(entry(tmp_path, ["1 '(2,3)(1,P)' A"], OPERATORS))
    unit = read_assembly(ENTRY).chains[0]
    start = unit.positions[unit.mask > 0].astype(float)

    def moved(points: np.ndarray, row: str) -> np.ndarray:
        numbers = np.array(row.split()[2:], float)
        return points @ numbers[:9].reshape(3, 3).T + numbers[9:]

    _, two, three, p = OPERATORS
    expected = [moved(start, two), moved(moved(start, p), two), moved(start, three), moved(moved(start, p), three)]
    for chain, points in zip(found.chains, expected, strict=True):
        np.testing.assert_allclose(chain.positions[chain.mask > 0], points, atol=1e-4)


def test_copies_have_names_and_places_of_their_own(tmp_path: Path) -> None:
    """Catches the coordinates of the first copy in all of them, and copies of one name."""
    found = read_assembly(entry(tmp_path, ["1 1-2 A"], OPERATORS))
    assert found.names == ("A", "A-2")
    assert found.entities == (0, 0)
    assert [chain.key for chain in found.chains] == ["1abc_A", "1abc_A"]
    first, second = (chain.positions[chain.mask > 0] for chain in found.chains)
    np.testing.assert_allclose(second, first * [-1, -1, 1] + [50, 0, 0], atol=1e-4)
    assert not found.chains[1].positions[found.chains[1].mask == 0].any()
    assert len(found) == 2 * len(found.chains[0])


def test_the_asymmetric_unit_is_a_choice_and_the_rule_without_assemblies(tmp_path: Path) -> None:
    """Catches operators that are applied where they were not asked for, and an error for a predicted model."""
    path = entry(tmp_path, ["1 1-2 A"], OPERATORS)
    chain = read_structure(path).chains["A"]
    for found in (read_assembly(path, None), read_assembly(ENTRY)):
        assert found.names == ("A",)
        np.testing.assert_array_equal(found.chains[0].positions, chain.positions)


@pytest.mark.parametrize(
    ("generators", "message"),
    [
        (["1 1-999999999 A"], "no expression of operators"),
        (["1 '(1-900)(1-900)' A"], "more than 1,000 operators"),
        (["1 '(1' A"], "no expression of operators"),
        (["1 1,,2 A"], "no expression of operators"),
        (["1 7 A"], "operator '7', which the file does not list"),
        (["2 1 A"], "no assembly '1': its assemblies are 2"),
        (["1 1 Z"], "no protein chain"),
        ([f"1 1 {','.join(['A'] * (MOST_COPIES + 1))}"], "more than 1,000 copies"),
    ],
)  # fmt: skip
def test_a_wrong_list_of_assemblies_is_one_line(generators: list[str], message: str, tmp_path: Path) -> None:
    """Catches a file that fills the memory or hangs, and a message without the file's name."""
    path = entry(tmp_path, generators, OPERATORS)
    with pytest.raises(FileFormatError, match=message) as error:
        read_assembly(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("matrix", ["2 0 0 0 1 0 0 0 1", "-1 0 0 0 -1 0 0 0 -1"])
def test_an_operator_that_is_no_rotation_is_refused(matrix: str, tmp_path: Path) -> None:
    """Catches coordinates that are stretched or not numbers, and chains of the other hand."""
    path = entry(tmp_path, ["1 S A"], [f"S ? {matrix} 0 0 0"])
    with pytest.raises(FileFormatError, match="operator 'S' of _pdbx_struct_oper_list is no rotation"):
        read_assembly(path)
