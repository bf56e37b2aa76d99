"""Biological assemblies of an mmCIF entry: which chains they hold, and how many times, each moved by an operator.

    _pdbx_struct_assembly_gen    assembly, expression of operators, chains (label_asym_id)
    _pdbx_struct_oper_list       operator: a rotation and a translation

An expression lists operators: `1`, `1,3`, `1-60`, or a product of lists, `(1-60)(61-88)`: every operator of the first list
after every one of the second.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gemmi import cif
from jaxtyping import Float64

from evodsp.data.formats.cif_values import rows_of
from evodsp.errors import FileFormatError, nearest
from evodsp.printing import LONGEST_REASON, quoted, shown

MOST_COPIES = 1000
"""Most copies of chains in an assembly. The largest capsids have more, but no model takes them."""
_LARGEST = 1e9
_TERM = re.compile(r"(?:\([^()]*\))+|[^(),]+")
_GROUP = re.compile(r"\(([^()]*)\)")
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")


@dataclass(frozen=True)
class Motion:
    """Where a copy of a chain lies: x becomes `rotation` x + `translation`, in Å."""

    rotation: Float64[np.ndarray, "3 3"]
    translation: Float64[np.ndarray, "3"]

    def after(self, first: Motion) -> Motion:
        """The motion that moves by `first` and then by this one."""
        return Motion(self.rotation @ first.rotation, self.rotation @ first.translation + self.translation)

    def apply(self, positions: np.ndarray) -> np.ndarray:
        """Moved positions [..., 3], in double precision."""
        return positions.astype(np.float64) @ self.rotation.T + self.translation


IDENTITY = Motion(np.eye(3), np.zeros(3))


def copies_in(path: str | Path, block: cif.Block, assembly: str) -> list[tuple[str, Motion]]:
    """The copies of an assembly in the order of the file: (label_asym_id, motion). Ligands and water are among them.

    `path`: for messages. Raises FileFormatError if the entry has no such assembly, an operator is missing or no rigid motion,
    or there are more than `MOST_COPIES` copies.
    """
    tags = (f"_pdbx_struct_assembly_gen.{tag}" for tag in ("assembly_id", "oper_expression", "asym_id_list"))
    rows = rows_of(block, *tags)
    if not any(name == assembly for name, _, _ in rows):
        names = sorted({name for name, _, _ in rows})
        listed = f"its assemblies are {quoted(', '.join(names), LONGEST_REASON)}" if names else "it lists none"
        raise FileFormatError(
            path, f"no assembly '{quoted(assembly)}': {listed}.{nearest(assembly, names)} Give one of these"
        )
    operators = _operators(path, block)
    copies: list[tuple[str, Motion]] = []
    for name, expression, chains in rows:
        if name != assembly:
            continue
        asyms = [asym for asym in map(str.strip, chains.split(",")) if asym]
        for product in _products(path, expression, MOST_COPIES):
            motion = IDENTITY
            for identifier in product:
                if identifier not in operators:
                    found = f"assembly {assembly} needs the operator {shown(identifier)}, which the file does not list"
                    raise FileFormatError(path, f"{found}; correct the file")
                motion = motion.after(operators[identifier])
            copies += [(asym, motion) for asym in asyms]
            if len(copies) > MOST_COPIES:
                found = f"assembly {assembly} has more than {MOST_COPIES:,} copies of chains"
                raise FileFormatError(path, f"{found}; take the asymmetric unit instead")
    return copies


def has_assemblies(block: cif.Block) -> bool:
    """Whether the entry lists assemblies."""
    return bool(block.find_values("_pdbx_struct_assembly_gen.assembly_id"))


def _products(path: str | Path, expression: str, most: int) -> list[tuple[str, ...]]:
    """The products of operators that an expression lists, each in the order in which it is written."""
    found: list[tuple[str, ...]] = []
    text = "".join(expression.split())
    terms = _TERM.findall(text)
    if ",".join(terms) != text or not terms:
        raise _no_expression(path, expression)
    for term in terms:
        groups = [_listed(path, group, expression, most) for group in _GROUP.findall(term) or [term]]
        if len(found) + np.prod([float(len(group)) for group in groups]) > most:
            raise FileFormatError(
                path, f"'{quoted(expression)}' stands for more than {most:,} operators; correct the file"
            )
        found += itertools.product(*groups)
    return found


def _listed(path: str | Path, group: str, expression: str, most: int) -> list[str]:
    """The operators of a list such as 1,3,5-8."""
    found: list[str] = []
    for item in group.split(","):
        if span := _RANGE.fullmatch(item):
            first, last = int(span[1]), int(span[2])
            if not first <= last < first + most:
                raise _no_expression(path, expression)
            found += map(str, range(first, last + 1))
        elif item:
            found.append(item)
        else:
            raise _no_expression(path, expression)
    return found


def _operators(path: str | Path, block: cif.Block) -> dict[str, Motion]:
    """The rigid motions that the entry lists, by their names."""
    numbers = [f"matrix[{row}][{column}]" for row in (1, 2, 3) for column in (1, 2, 3)]
    tags = ["id", *numbers, *(f"vector[{row}]" for row in (1, 2, 3))]
    found: dict[str, Motion] = {}
    for name, *texts in rows_of(block, *(f"_pdbx_struct_oper_list.{tag}" for tag in tags)):
        values = np.array([cif.as_number(text) for text in texts])
        rotation, translation = values[:9].reshape(3, 3), values[9:]
        is_finite = bool((np.abs(values) < _LARGEST).all())
        # A reflection, which racemic crystals have, would make chains of D-amino acids.
        if not is_finite or np.abs(rotation @ rotation.T - np.eye(3)).max() > 1e-2 or np.linalg.det(rotation) < 0:
            wrong = f"operator {shown(name)} of _pdbx_struct_oper_list is no rotation with a translation"
            raise FileFormatError(path, f"{wrong}; correct the file")
        found[name] = Motion(rotation, translation)
    return found


def _no_expression(path: str | Path, expression: str) -> FileFormatError:
    return FileFormatError(
        path, f"'{quoted(expression)}' is no expression of operators, such as 1,2 or (1-60)(61-88); correct the file"
    )
