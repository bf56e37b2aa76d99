"""The bar of a run, which its report draws: what copying the nearest training chain scores on the validation chains.

Rank 0 computes it before the first step and writes `baseline.json`. It may take 20 seconds, and nothing of it ends a run: a run
without it lacks a line in its report.
"""

from __future__ import annotations

import dataclasses
import json
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evodsp.data.similarity.comparison import ComparedKeys
from evodsp.data.similarity.nearest import Bar, Copy, gathered
from evodsp.data.similarity.nearest_complex import interface_lddt_ca
from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.printing import tell
from evodsp.reading.quoting import one_line
from evodsp.reading.text_files import read_json
from evodsp.training.chains import Chains

SECONDS = 20.0
"""The most time that it may take."""
MOST_CHAINS = 10_000
"""The most training chains that are looked at. To count the words of more takes too long for the start of a run."""


def write_baseline(path: Path, chains: Chains, cache: str | None) -> None:
    """Write the bar of the validation chains, unless `path` has that of the same chains. `cache`: OpenFold's
    chain_data_cache.json, which has sequences.

    A failure is one line on standard error.
    """
    try:
        if _is_of(path, chains):
            return
        path.unlink(missing_ok=True)
        if len(chains.train) == 1 and chains.train == chains.validation:
            return  # a chain that is learnt by heart: there is no other to copy
        found = _bar(chains, chains.samples.comparison(cache), time.monotonic() + SECONDS)
        if not found.copies and found.without:
            raise UserError("{}: {}".format(*next(iter(found.without.items()))))
        write_text(path, json.dumps(_as_json(found, chains), indent=1) + "\n")
    except Exception as error:  # whatever it is: the run does not need this file
        reason = one_line(str(error)) or type(error).__name__
        tell(f"evodsp: warning: the report will not say what copying the nearest training chain scores ({reason})")


def _bar(chains: Chains, comparison: ComparedKeys, end: float) -> Bar:
    """The bar. Raises UserError if it is not known by `end`."""
    if len(chains.train) > MOST_CHAINS:
        raise UserError(f"more than {MOST_CHAINS:,} training chains; evodsp data doctor says it")
    letters = comparison.listed(dict.fromkeys([*chains.train, *chains.validation]))
    for key in [key for key, sequences in letters.items() if not sequences]:
        _check_time(end)
        letters[key] = comparison.read(key)
    targets, training = ({key: letters[key] for key in part} for part in (chains.validation, chains.train))
    found: dict[str, Copy | str] = {}
    for key, copy in comparison.copies(targets, training, workers=1):
        found[key] = copy
        _check_time(end)
    return gathered(found, targets, training)


def _check_time(end: float) -> None:
    if time.monotonic() > end:
        raise UserError(f"it takes more than {SECONDS:g} s; evodsp data doctor says it")


def _as_json(bar: Bar, chains: Chains) -> dict[str, Any]:
    interface = interface_lddt_ca(bar)
    return {
        "lddt_ca": bar.lddt_ca,
        **({} if interface is None else {"interface_lddt_ca": interface}),
        "identity": bar.identity,
        "validation_chains": len(chains.validation),
        "training_chains": len(chains.train),
        "training_names": _checksum(chains.train),
        "copies": [dataclasses.asdict(copy) for copy in bar.copies],
        "without": bar.without,
    }


def _checksum(names: Sequence[str]) -> int:
    return zlib.crc32("\n".join(names).encode())


def _is_of(path: Path, chains: Chains) -> bool:
    """Whether a file of an earlier start has the bar of these chains."""
    try:
        content = read_json(path, "remove it")
        known = [*(copy["chain"] for copy in content["copies"]), *content["without"]]
        return sorted(known) == sorted(chains.validation) and content["training_names"] == _checksum(chains.train)
    except (UserError, OSError, KeyError, TypeError):
        return False
