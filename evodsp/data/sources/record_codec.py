"""A parsed chain as bytes and back: the records of a feature store.

A record is a safetensors file (arrays and a text header, no code) in a zstandard frame. Atoms that do not exist and positions
without deletions are left out, so decoding restores every array bit by bit.

Shapes: N sequences, L residues, A existing atoms, D positions with deletions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np
import zstandard
from jaxtyping import Int32
from safetensors import SafetensorError
from safetensors.numpy import load, save

from evodsp.data.records import Chain
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.parsed_chain import ParsedChain
from evodsp.data.templates.hits import TemplateHit

LEVEL = 9
"""The level of zstandard. On real alignments level 3 is 6 % larger and 19 is 9 % smaller, at a fourth and 30 times the time."""
LARGEST_RECORD = 1 << 33
"""Bytes to which a record may unpack: 8 GiB, more than any public alignment."""

_Arrays = dict[str, np.ndarray]
_HEADER = "header"


def encode_parsed(parsed: ParsedChain) -> bytes:
    """The bytes of a chain; equal chains give equal bytes."""
    arrays, header = _chain_arrays(parsed.chain)
    msa, header["hits"] = parsed.msa, [_hit_fields(hit) for hit in parsed.hits]
    at = np.flatnonzero(msa.deletions)  # [D]
    arrays |= {
        "msa": msa.msa.view(np.uint8),
        "profile": msa.profile,
        "deletion_steps": _narrow(np.diff(at, prepend=0)),
        "deletion_counts": _narrow(msa.deletions.ravel()[at]),
        "hit_query_indices": _joined([hit.indices_query for hit in parsed.hits]),
        "hit_template_indices": _joined([hit.indices_hit for hit in parsed.hits]),
    }
    return _packed(arrays, header)


def decode_parsed(data: bytes, with_hits: bool) -> ParsedChain:
    """The chain of `encode_parsed`, without its hits if they are not wanted. Raises ValueError for other bytes."""
    arrays, header = _unpacked(data)
    try:
        msa = arrays["msa"].view(np.int8)
        deletions = np.zeros(msa.size, np.int32)
        deletions[np.cumsum(arrays["deletion_steps"], dtype=np.int64)] = arrays["deletion_counts"]
        hits = _hits(arrays, header["hits"]) if with_hits else ()
        return ParsedChain(
            _chain(arrays, header), MsaFeatures(msa, deletions.reshape(msa.shape), arrays["profile"]), hits
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not the record of a chain ({error!r})") from error


def encode_chain(chain: Chain) -> bytes:
    """The bytes of a structure alone; equal chains give equal bytes."""
    return _packed(*_chain_arrays(chain))


def decode_chain(data: bytes) -> Chain:
    """The chain of `encode_chain`. Raises ValueError for other bytes."""
    arrays, header = _unpacked(data)
    try:
        return _chain(arrays, header)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not the record of a structure ({error!r})") from error


def _packed(arrays: _Arrays, header: dict[str, Any]) -> bytes:
    text = np.frombuffer(json.dumps(header, sort_keys=True).encode(), np.uint8)
    data = save({name: np.ascontiguousarray(array) for name, array in {**arrays, _HEADER: text}.items()})
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(data)


def _unpacked(data: bytes) -> tuple[_Arrays, dict[str, Any]]:
    try:
        if not 0 <= zstandard.frame_content_size(data) <= LARGEST_RECORD:
            raise ValueError("its size is unknown, or beyond that of any chain")
        arrays = load(zstandard.ZstdDecompressor().decompress(data))
        return arrays, json.loads(arrays[_HEADER].tobytes())
    except (zstandard.ZstdError, SafetensorError, KeyError) as error:
        raise ValueError(f"not a record of a feature store ({error})") from error


def _chain_arrays(chain: Chain) -> tuple[_Arrays, dict[str, Any]]:
    exists = chain.mask != 0
    if not np.array_equal(exists, chain.mask) or chain.positions[~exists].any():
        raise ValueError(
            f"chain {chain.key}: its mask is not of 0 and 1, or an atom that does not exist has a position"
        )
    header = {
        "pdb_id": chain.pdb_id,
        "chain_id": chain.chain_id,
        "sequence": chain.sequence,
        "insertion_codes": {str(i): code for i, code in enumerate(chain.insertion_code) if code},
        "resolution": chain.resolution,
        "method": chain.method,
        "alternatives": chain.alternatives,
        "released": None if chain.release_date is None else chain.release_date.isoformat(),
    }
    arrays = {
        "atom_exists": np.packbits(exists),
        "atom_positions": chain.positions[exists],  # [A, 3]
        "residue_number": chain.residue_number,
        "is_missing": np.packbits(chain.is_missing),
    }
    return arrays, header


def _chain(arrays: _Arrays, header: dict[str, Any]) -> Chain:
    sequence, codes, released = header["sequence"], header["insertion_codes"], header["released"]
    length = len(sequence)
    exists = np.unpackbits(arrays["atom_exists"], count=length * 37).view(bool).reshape(length, 37)
    positions = np.zeros((length, 37, 3), np.float32)
    positions[exists] = arrays["atom_positions"]
    return Chain(
        pdb_id=header["pdb_id"],
        chain_id=header["chain_id"],
        sequence=sequence,
        residue_number=arrays["residue_number"],
        insertion_code=tuple(codes.get(str(i), "") for i in range(length)),
        is_missing=np.unpackbits(arrays["is_missing"], count=length).view(bool),
        positions=positions,
        mask=exists.astype(np.float32),
        resolution=header["resolution"],
        method=header["method"],
        release_date=None if released is None else date.fromisoformat(released),
        alternatives=tuple((int(index), str(letters)) for index, letters in header["alternatives"]),
    )


_HIT_FIELDS = (
    "index", "name", "pdb_id", "chain_id", "aligned_columns", "sum_probs", "query", "hit_sequence",
)  # fmt: skip


def _hit_fields(hit: TemplateHit) -> list[Any]:
    return [*(getattr(hit, name) for name in _HIT_FIELDS), len(hit.indices_query), len(hit.indices_hit)]


def _hits(arrays: _Arrays, fields: list[list[Any]]) -> tuple[TemplateHit, ...]:
    of_query = np.split(arrays["hit_query_indices"], np.cumsum([entry[-2] for entry in fields], dtype=np.int64))
    of_hit = np.split(arrays["hit_template_indices"], np.cumsum([entry[-1] for entry in fields], dtype=np.int64))
    return tuple(
        TemplateHit(**dict(zip(_HIT_FIELDS, entry[:-2], strict=True)), indices_query=query, indices_hit=hit)
        for entry, query, hit in zip(fields, of_query[:-1], of_hit[:-1], strict=True)
    )


def _joined(indices: Sequence[np.ndarray]) -> Int32[np.ndarray, " C"]:
    return np.concatenate([np.zeros(0, np.int32), *indices])


def _narrow(values: np.ndarray) -> np.ndarray:
    """Non-negative integers in the smallest unsigned type that holds them."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))
