"""Residues that a structure file without a sequence (no SEQRES) does not have, found by a sequence that has them.

A refinement program writes the residues that were seen, and no sequence. The search for the alignment, or the prediction, was
made with all residues of the protein. The pieces between the breaks of the chain are found in that sequence, in their order;
what lies before, between and behind them is missing.

Shapes: L residues of the chain, M of the whole sequence, P of a piece, n places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int8, Int64

from evodsp.data.records import Chain
from evodsp.geometry.residues import UNKNOWN, decode, encode


def with_missing_residues(chain: Chain, whole: Int8[np.ndarray, " M"]) -> Chain | None:
    """The chain with the residues of `whole` (codes), those without coordinates masked.

    None if the file lists the chain's sequence, so there is nothing to be found; if `whole` has gaps; or if the pieces between
    the breaks do not lie in it in exactly one way. X on either side matches any letter.
    """
    if chain.breaks is None or (whole > UNKNOWN).any():
        return None
    pieces = np.split(encode(chain.sequence), [after + 1 for after in chain.breaks])
    first = _placed(pieces, whole)
    # From the end, everything mirrored: the last way. If it is the first way too, there is no other.
    last = _placed([piece[::-1] for piece in pieces[::-1]], whole[::-1])
    if first is None or last is None:
        return None
    ends = [len(whole) - start for start in last[::-1]]
    if any(start + len(piece) != end for start, piece, end in zip(first, pieces, ends, strict=True)):
        return None
    place = np.concatenate([np.arange(len(piece)) + start for start, piece in zip(first, pieces, strict=True)])
    return _spread(chain, place, decode(whole))


def _placed(pieces: Sequence[Int8[np.ndarray, " _"]], whole: Int8[np.ndarray, " M"]) -> list[int] | None:
    """A start for each piece, behind the piece before it and as early as possible; None if one finds no place."""
    found, end = [], 0
    for piece in pieces:
        starts = _starts(piece, whole[end:])
        if not len(starts):
            return None
        found.append(end + int(starts[0]))
        end = found[-1] + len(piece)
    return found


def _starts(piece: Int8[np.ndarray, " P"], whole: Int8[np.ndarray, " M"]) -> Int64[np.ndarray, " n"]:
    """Where the piece lies in the whole sequence, in ascending order."""
    at = np.arange(max(0, len(whole) - len(piece) + 1))
    for place, code in enumerate(piece):  # all windows at once would be as large as the product of the lengths
        if code != UNKNOWN:
            letters = whole[at + place]
            at = at[(letters == code) | (letters == UNKNOWN)]
    return at


def _spread(chain: Chain, place: Int64[np.ndarray, " L"], letters: str) -> Chain:
    """The chain with residue i at `place[i]` of `letters`, and residues without coordinates at the others."""
    length = len(letters)
    sequence, codes = list(letters), [""] * length
    for at, letter, code in zip(place.tolist(), chain.sequence, chain.insertion_code, strict=True):
        sequence[at], codes[at] = letter, code

    def at_place(values: np.ndarray) -> np.ndarray:
        spread = np.zeros((length, *values.shape[1:]), values.dtype)
        spread[place] = values
        return spread

    return replace(
        chain,
        sequence="".join(sequence),
        residue_number=at_place(chain.residue_number),
        insertion_code=tuple(codes),
        is_missing=~at_place(~chain.is_missing),
        positions=at_place(chain.positions),
        mask=at_place(chain.mask),
        alternatives=tuple((int(place[index]), several) for index, several in chain.alternatives),
        breaks=None,
    )
