"""The chains of a record with their MSAs as bytes and back: what a feature store holds.

A record has each chain of the assembly with its own coordinates, and the MSAs and hits of each sequence once. Which rows are
paired depends on the pairing rule, so a store is of one rule, as it is of one assembly.

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
from jaxtyping import Int8, Int32, Integer
from safetensors import SafetensorError
from safetensors.numpy import load, save

from evodsp.data.complexes.pairing import PairingMsa
from evodsp.data.records import Assembly, Chain, ProteinSequence
from evodsp.data.sources.msa import MsaFeatures
from evodsp.data.sources.parsed import ChainMsas, Parsed
from evodsp.data.templates.hits import TemplateHit
from evodsp.errors import UserError

LEVEL = 9
"""The level of zstandard. On real alignments level 3 is 6 % larger and 19 is 9 % smaller, at a fourth and 30 times the time."""
LARGEST_RECORD = 1 << 33
"""Bytes to which a record may unpack: 8 GiB, more than any public alignment."""

Arrays = dict[str, np.ndarray]
_HEADER = "header"


def encode_record(parsed: Parsed) -> bytes:
    """The bytes of a record; equal records give equal bytes. Each sequence has the MSAs of the first of its chains."""
    arrays: Arrays = {}
    header: dict[str, Any] = {
        "pdb_id": parsed.assembly.pdb_id,
        "key": parsed.assembly.key,
        "names": parsed.assembly.names,
        "chains": [],
        "msas": {},
    }
    for number, chain in enumerate(parsed.assembly.chains):
        of_chain, fields = chain_arrays(chain)
        header["chains"].append(fields)
        arrays |= _named(f"chain{number}", of_chain)
    for number, own in enumerate(parsed.of_each_sequence.values()):
        name = f"sequence{number}"
        of_hits, hits = hit_arrays(parsed.hits.get(own.query.letters, ()))
        arrays |= _named(name, {**row_arrays(own.msa.msa, own.msa.deletions), "profile": own.msa.profile, **of_hits})
        if own.pairing is not None:
            arrays |= _named(f"{name}.pairing", row_arrays(own.pairing.msa, own.pairing.deletions))
        keys = None if own.pairing is None else own.pairing.keys
        header["msas"][own.query.letters] = {"name": name, "keys": keys, "hits": hits}
    return packed(arrays, header)


def decode_record(data: bytes, with_hits: bool) -> Parsed:
    """The record of `encode_record`, without its hits if they are not wanted. Raises ValueError for other bytes."""
    arrays, header = unpacked(data)
    try:
        of_chains = enumerate(header["chains"])
        read = tuple(chain_of(_part(arrays, f"chain{number}"), fields) for number, fields in of_chains)
        assembly = Assembly(header["pdb_id"], tuple(header["names"]), read, header["key"])
        msas, hits = {}, {}
        for letters, fields in header["msas"].items():
            own, keys = _part(arrays, fields["name"]), fields["keys"]
            pairing = None
            if keys is not None:
                pairing = PairingMsa(*rows_of(_part(arrays, f"{fields['name']}.pairing")), tuple(map(str, keys)))
            msas[letters] = MsaFeatures(*rows_of(own), own["profile"]), pairing
            if with_hits:
                hits[letters] = hits_of(own, fields["hits"])
        chains = (
            ChainMsas(ProteinSequence(name, chain.sequence), *msas[chain.sequence])
            for name, chain in zip(assembly.names, assembly.chains, strict=True)
        )
        return Parsed(assembly, tuple(chains), hits)
    except (KeyError, TypeError, IndexError, AttributeError, UserError) as error:
        raise ValueError(f"not a record of chains with their MSAs ({error!r})") from error


def encode_chain(chain: Chain) -> bytes:
    """The bytes of a structure alone; equal chains give equal bytes."""
    return packed(*chain_arrays(chain))


def decode_chain(data: bytes) -> Chain:
    """The chain of `encode_chain`. Raises ValueError for other bytes."""
    arrays, header = unpacked(data)
    try:
        return chain_of(arrays, header)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"not the record of a structure ({error!r})") from error


def packed(arrays: Arrays, header: dict[str, Any]) -> bytes:
    """A record of arrays and a header that JSON can hold."""
    text = np.frombuffer(json.dumps(header, sort_keys=True).encode(), np.uint8)
    data = save({name: np.ascontiguousarray(array) for name, array in {**arrays, _HEADER: text}.items()})
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(data)


def unpacked(data: bytes) -> tuple[Arrays, dict[str, Any]]:
    """The arrays and the header of `packed`. Raises ValueError for other bytes."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= LARGEST_RECORD:
            raise ValueError("its size is unknown, or beyond that of any chain")
        arrays = load(zstandard.ZstdDecompressor().decompress(data))
        return arrays, json.loads(arrays[_HEADER].tobytes())
    except (zstandard.ZstdError, SafetensorError, KeyError) as error:
        raise ValueError(f"not a record of a feature store ({error})") from error


def row_arrays(msa: Int8[np.ndarray, "N L"], deletions: Integer[np.ndarray, "N L"]) -> Arrays:
    """Rows of an MSA as arrays."""
    at = np.flatnonzero(deletions)  # [D]
    return {
        "msa": msa.view(np.uint8),
        "deletion_steps": _narrow(np.diff(at, prepend=0)),
        "deletion_counts": _narrow(deletions.ravel()[at]),
    }


def rows_of(arrays: Arrays) -> tuple[Int8[np.ndarray, "N L"], Integer[np.ndarray, "N L"]]:
    """The letters and deletions of `row_arrays`."""
    msa = arrays["msa"].view(np.int8)
    deletions = np.zeros(msa.size, arrays["deletion_counts"].dtype)
    deletions[np.cumsum(arrays["deletion_steps"], dtype=np.int64)] = arrays["deletion_counts"]
    return msa, deletions.reshape(msa.shape)


def chain_arrays(chain: Chain) -> tuple[Arrays, dict[str, Any]]:
    """A structure as arrays and a header. Raises ValueError for a mask or positions that they would not restore."""
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


def chain_of(arrays: Arrays, header: dict[str, Any]) -> Chain:
    """The chain of `chain_arrays`."""
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


def hit_arrays(hits: Sequence[TemplateHit]) -> tuple[Arrays, list[list[Any]]]:
    """Template hits as arrays and a header."""
    arrays = {
        "hit_query_indices": _joined([hit.indices_query for hit in hits]),
        "hit_template_indices": _joined([hit.indices_hit for hit in hits]),
    }
    return arrays, [
        [*(getattr(hit, name) for name in _HIT_FIELDS), len(hit.indices_query), len(hit.indices_hit)] for hit in hits
    ]


def hits_of(arrays: Arrays, fields: list[list[Any]]) -> tuple[TemplateHit, ...]:
    """The hits of `hit_arrays`."""
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


def _named(part: str, arrays: Arrays) -> Arrays:
    """The arrays of a part of a record, under names of their own."""
    return {f"{part}/{name}": values for name, values in arrays.items()}


def _part(arrays: Arrays, part: str) -> Arrays:
    """The arrays that `_named` gave names."""
    return {name.removeprefix(f"{part}/"): values for name, values in arrays.items() if name.startswith(f"{part}/")}
