"""hmmsearch results (Stockholm, usually hmm_output.sto): template hits over pdb_seqres."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from evodsp.data.formats.stockholm import alignment_end
from evodsp.data.templates.hits import CHAIN, TemplateHit, column_indices, of_chains
from evodsp.errors import FileFormatError
from evodsp.reading.text_files import text_of

_NAME = re.compile(rf"{CHAIN}/(\d{{1,9}})-(\d{{1,9}})$", re.IGNORECASE)


def parse_hmmsearch(
    path: str | Path, data: bytes | None = None, *, query: str, listed: str | None = None
) -> list[TemplateHit]:
    """The hits of `hmmsearch -A` (Stockholm, usually hmm_output.sto) over pdb_seqres, in the file's order.

    `query`: the query's one-letter codes. The profile must have been built with one match state per residue of the query
    (hmmbuild --hand): the alignment's match columns (upper case and '-') are then the query's positions. `listed`: the query
    with all monomers of residues that have several; a profile of that length is one of this query, too. Chains described as
    nucleic acids ('mol:na') are skipped, but counted in `index`; so are, with a warning, hits named as no PDB chain. `data`:
    as in `parse_hhr`.

    Raises FileFormatError (file and line) for a file that is not Stockholm, truncated or empty, and for a hit whose number of
    match columns is not the query's length, or whose residues are not first..last.
    """
    raw_lines = text_of(path, data).splitlines()
    lines = [line.decode() for line in raw_lines[: alignment_end(path, raw_lines, "run hmmsearch again")]]
    chunks: dict[str, list[str]] = {}
    line_of_hit: dict[str, int] = {}
    descriptions: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split(maxsplit=3)
        if line.startswith("#=GS"):
            if len(words) == 4 and words[2] == "DE":
                descriptions[words[1]] = words[3]
        elif words and not line.startswith("#"):
            if len(words) != 2:
                raise FileFormatError(
                    path, f"expected 'name residues', found '{line[:30]}'; run hmmsearch again", number
                )
            chunks.setdefault(words[0], []).append(words[1])
            line_of_hit.setdefault(words[0], number)
    found = [
        _hit(path, line_of_hit[name], rank, name, "".join(parts), (query, listed or query))
        for rank, (name, parts) in enumerate(chunks.items(), 1)
        if not re.search(r"\bmol:(?!protein\b)", descriptions.get(name, ""))
    ]
    return of_chains(path, found)


def _hit(
    path: str | Path, line: int, rank: int, name: str, letters: str, queries: tuple[str, str]
) -> TemplateHit | str:
    """The hit; its name alone if it is no PDB chain."""
    found = _NAME.match(name)
    if found is None:
        return name
    pdb_id, chain_id, first, last = found.groups()
    codes = np.frombuffer(letters.encode("ascii", "replace"), np.uint8)
    upper, lower = (codes >= ord("A")) & (codes <= ord("Z")), (codes >= ord("a")) & (codes <= ord("z"))
    gap = codes == ord("-")
    if (illegal := np.flatnonzero(~(upper | lower | gap | (codes == ord("."))))).size:
        raise FileFormatError(
            path, f"illegal character {letters[illegal[0]]!r} in hit '{name}'; run hmmsearch again", line
        )
    columns = int((upper | gap).sum())
    query = next((query for query in queries if len(query) == columns), None)
    if query is None:
        message = (
            f"hit '{name}' has {columns} match columns, the query {len(queries[0])} residues; "
            f"build the profile on this query with hmmbuild --hand"
        )
        raise FileFormatError(path, message, line)
    if (count := int((upper | lower).sum())) != int(last) - int(first) + 1:
        message = f"hit '{name}' has {count} residues, its range says {int(last) - int(first) + 1}; run hmmsearch again"
        raise FileFormatError(path, message, line)
    indices = column_indices(upper | lower, int(first) - 1)[upper | gap]
    # Residues before the first match are not aligned. They are dropped, so that `pairs` counts from the first aligned one.
    kept = upper | gap | (lower & np.logical_or.accumulate(upper))
    sequence = codes[kept].tobytes().decode().upper()
    return TemplateHit(
        rank, f"{pdb_id}_{chain_id}", pdb_id.lower(), chain_id, int(upper.sum()), None,
        query, sequence, np.arange(len(query), dtype=np.int32), indices,
    )  # fmt: skip
