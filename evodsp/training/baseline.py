"""The bar of a run, which its report draws: what copying the nearest training chain scores on the validation chains.

Where one of these is trained on, by its name or its sequence, there is no bar, but a warning in log, report and model card.

Rank 0 computes it before the first step and writes `baseline.json`. It may take 20 seconds, and nothing of it ends a run: a run
without it lacks a line in its report.
"""

from __future__ import annotations

import dataclasses
import json
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from evodsp.data.samples.sampling import DISTILLED
from evodsp.data.similarity.comparison import Compared
from evodsp.data.similarity.nearest import Bar, Copy, gathered
from evodsp.data.similarity.pairs import plain
from evodsp.data.similarity.sequences import Letters
from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.printing import one_line, tell
from evodsp.reading.text_files import read_json
from evodsp.report.runs import overlap_line
from evodsp.training.chains import Chains

SECONDS = 20.0
"""The most time that it may take."""
MOST_CHAINS = 10_000
"""The most training chains that are looked at. To count the words of more takes too long for the start of a run."""


def write_baseline(path: Path, chains: Chains, cache: str | None) -> None:
    """Write the bar of the validation chains, unless `path` has that of the same chains; and warn of those that are trained on,
    for which there is no bar. `cache`: OpenFold's chain_data_cache.json, which has sequences.

    A failure is one line on standard error.
    """
    try:
        if not _is_of(path, chains):
            path.unlink(missing_ok=True)
            write_text(path, json.dumps(_content(chains, cache), indent=1) + "\n")
        content = read_json(path, "remove it")
        if both := content.get("trained_on"):
            tell(f"evodsp: warning: {overlap_line(both, len(chains.validation))}")
    except Exception as error:  # whatever it is: the run does not need this file
        reason = one_line(str(error)) or type(error).__name__
        tell(f"evodsp: warning: the report will not say what copying the nearest training chain scores ({reason})")


def warn_of_overlap(chains: Chains, scored: Sequence[str], cache: str | None) -> None:
    """Warn of chains that are scored and were trained on. What is not known within the limits of the bar is not said."""
    both = _by_name(chains, scored)
    with suppress(UserError):
        both |= _by_sequence(_letters(chains, scored, Compared(chains.store, cache), _end()), chains, scored)
    if both:
        tell(f"evodsp: warning: {overlap_line(both, len(scored))}")


def _content(chains: Chains, cache: str | None) -> dict[str, Any]:
    """What the file holds. Raises UserError if it is not known within the limits."""
    end, comparison, both = _end(), Compared(chains.store, cache), _by_name(chains, chains.validation)
    try:
        letters = _letters(chains, chains.validation, comparison, end)
        both |= _by_sequence(letters, chains, chains.validation)
        found = Bar([]) if both else _bar(letters, chains, comparison, end)
    except UserError:
        if not both:
            raise
        found = Bar([])
    if not found.copies and found.without:
        raise UserError("{}: {}".format(*next(iter(found.without.items()))))
    interface = found.interface_lddt_ca
    return {
        **({} if both else {"lddt_ca": found.lddt_ca, "identity": found.identity}),
        **({} if interface is None else {"interface_lddt_ca": interface}),
        "trained_on": both,
        "validation_chains": len(chains.validation),
        "training_chains": len(chains.train),
        "training_names": _checksum(chains.train),
        "validation_names": _checksum(chains.validation),
        "copies": [dataclasses.asdict(copy) for copy in found.copies],
        "without": found.without,
    }


def _by_name(chains: Chains, scored: Iterable[str]) -> dict[str, str]:
    """The scored chains that are training chains, too, each with the name that it has there."""
    name_of = chains.store.name_of
    wanted = {key: name_of(key) for key in scored}
    names = {*wanted.values()}
    trained: dict[str, str] = {}
    for key in (*chains.train, *(key.removeprefix(DISTILLED) for key in chains.distilled)):
        if key in names:
            trained[key] = key
        elif key.rpartition("_")[0] in names:  # `name_of` looks files up, so it is asked only where the names may meet
            trained[name_of(key)] = key
    return {key: trained[name] for key, name in wanted.items() if name in trained}


def _by_sequence(letters: Letters, chains: Chains, scored: Iterable[str]) -> dict[str, str]:
    """The scored chains whose sequence a training chain has, each with that chain. Of complexes all sequences count."""
    alike = {key: frozenset(map(plain, letters[key])) for key in {*chains.train, *scored}}
    trained = {alike[key]: key for key in reversed(chains.train) if alike[key]}
    return {key: trained[alike[key]] for key in scored if alike[key] in trained}


def _end() -> float:
    return time.monotonic() + SECONDS


def _letters(chains: Chains, scored: Sequence[str], comparison: Compared, end: float) -> dict[str, tuple[str, ...]]:
    """The sequences of training chains and scored chains. Raises UserError if they are not known by `end`."""
    if len(chains.train) > MOST_CHAINS:
        raise UserError(f"more than {MOST_CHAINS:,} training chains; evodsp data doctor says it")
    letters = comparison.listed(dict.fromkeys([*chains.train, *scored]))
    for key in [key for key, sequences in letters.items() if not sequences]:
        _check_time(end)
        letters[key] = comparison.read(key)
    return letters


def _bar(letters: Letters, chains: Chains, comparison: Compared, end: float) -> Bar:
    """The bar. Raises UserError if it is not known by `end`."""
    targets, training = ({key: letters[key] for key in part} for part in (chains.validation, chains.train))
    found: dict[str, Copy | str] = {}
    for key, copy in comparison.copies(targets, training, workers=1):
        found[key] = copy
        _check_time(end)
    return gathered(found, targets, training)


def _check_time(end: float) -> None:
    if time.monotonic() > end:
        raise UserError(f"it takes more than {SECONDS:g} s; evodsp data doctor says it")


def _checksum(names: Sequence[str]) -> int:
    return zlib.crc32("\n".join(names).encode())


def _is_of(path: Path, chains: Chains) -> bool:
    """Whether a file of an earlier start has the bar of these chains."""
    try:
        content = read_json(path, "remove it")
        named = content["training_names"], content["validation_names"]
        return named == (_checksum(chains.train), _checksum(chains.validation))
    except (UserError, OSError, KeyError, TypeError):
        return False
