"""OpenFold's `chain_data_cache.json` as a table of chains, for data sets that have no index.

`{chain: {"release_date": "2020-01-08", "seq": letters, "resolution": Å, "cluster_size": number}}`. OpenFold writes a
resolution of 0 for methods that have none (NMR), and a cluster size of -1, or no entry, for chains that its cluster file does
not list.
"""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from evodsp.data.chain_table import UNKNOWN_CLUSTER, UNKNOWN_DAY, ChainTable
from evodsp.data.text_files import read_json
from evodsp.errors import FileFormatError

_FIX = "make the cache again with OpenFold's scripts/generate_chain_data_cache.py"
_DAY_0 = date(1970, 1, 1).toordinal()
_MOST_CHAINS_OF_A_CLUSTER = 1 << 30
_LARGEST_RESOLUTION = 1e6


def read_chain_cache(path: str | Path) -> ChainTable:
    """The chains of a cache file. What an entry lacks, or says as null, is unknown. Each chain is its own representative.

    Raises UserError if the file cannot be read, FileFormatError, with the chain, if an entry is of another form.
    """
    cache = read_json(path, _FIX)
    if not isinstance(cache, dict) or not cache:
        raise FileFormatError(path, f'expected {{chain: {{"release_date": …, "seq": …, …}}}}; {_FIX}')
    keys = sorted(cache)
    rows = [_row(path, key, cache[key]) for key in keys]
    lengths, resolutions, days, clusters, largest, unknown = zip(*rows, strict=True)
    return ChainTable(
        keys,
        np.array(lengths, np.int32),
        np.array(resolutions, np.float32),
        np.array(days, np.int32),
        np.array(clusters, np.int32),
        np.array(largest, np.float32),
        np.array(unknown, np.float32),
        np.arange(len(keys), dtype=np.int32),
    )


def _row(path: str | Path, key: str, entry: Any) -> tuple[int, float, int, int, float, float]:
    """Length, resolution, release day, cluster size, largest and unknown fraction of one chain."""
    if not isinstance(entry, dict):
        raise FileFormatError(path, f"chain '{key}' is {entry!r:.40}, not an object; {_FIX}")
    letters = _value(path, key, entry, "seq", str, "") or ""
    resolution = _value(path, key, entry, "resolution", (int, float), None)
    cluster = _value(path, key, entry, "cluster_size", int, None)
    if resolution is not None and not 0 <= resolution < _LARGEST_RESOLUTION:
        raise FileFormatError(path, f"the resolution of '{key}' is {resolution}, but must be in Å, 0 for none; {_FIX}")
    if cluster is not None and not -1 <= cluster < _MOST_CHAINS_OF_A_CLUSTER:
        raise FileFormatError(path, f"the cluster_size of '{key}' is {cluster}, but must be a number of chains; {_FIX}")
    counts = {letter: letters.count(letter) for letter in set(letters)}
    length = len(letters)
    return (
        length,
        np.nan if resolution is None else resolution,
        _day(path, key, _value(path, key, entry, "release_date", str, None)),
        cluster if cluster is not None and cluster > 0 else UNKNOWN_CLUSTER,
        max(counts.values()) / length if length else np.nan,
        counts.get("X", 0) / length if length else np.nan,
    )


def _value(path: str | Path, key: str, entry: dict[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = entry.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise FileFormatError(path, f"the {name} of '{key}' is {value!r:.40}, which is of the wrong type; {_FIX}")
    return value


def _day(path: str | Path, key: str, text: str | None) -> int:
    if text is None:
        return UNKNOWN_DAY
    try:
        return date.fromisoformat(text[:10]).toordinal() - _DAY_0
    except ValueError as error:
        message = f"the release_date of '{key}' is {text!r:.40}, not a date such as 2020-05-14; {_FIX}"
        raise FileFormatError(path, message) from error
