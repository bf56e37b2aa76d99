"""Values of the categories of an mmCIF block."""

from __future__ import annotations

from gemmi import cif


def unquoted(text: str) -> str:
    """The value of a CIF token. A single quote character, which gemmi writes for odd insertion codes of PDB files, is kept."""
    return cif.as_string(text) if len(text) > 1 else text


def holds(block: cif.Block, *tags: str) -> bool:
    """Whether every tag has at least one value."""
    return all(len(block.find_values(tag)) > 0 for tag in tags)


def rows_of(block: cif.Block, *tags: str) -> list[tuple[str, ...]]:
    """Unquoted values of the given columns of one category."""
    return [tuple(unquoted(text) for text in row) for row in block.find(list(tags))]


def values_of(block: cif.Block, tag: str) -> list[str]:
    """Unquoted values of a tag that are neither '?' nor '.'."""
    return [unquoted(text) for text in block.find_values(tag) if not cif.is_null(text)]
