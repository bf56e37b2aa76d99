"""Searches for alignments: `evodsp search` for the records of FASTA files, `evodsp predict --msa_server` for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.layout import has_files
from evodsp.errors import UserError
from evodsp.files import output_errors
from evodsp.inference.results import RecordFailure
from evodsp.inference.targets import AlignmentFolder, Target, read_inputs
from evodsp.printing import progress, show, tell
from evodsp.search.config import SearchConfig, ServerLimits
from evodsp.search.programs import LocalProgram
from evodsp.search.searcher import NoAnswerError, Searcher, is_kept, search
from evodsp.search.server import MsaServer

SEARCHED = "_alignments"
"""Folder in the output of a prediction for alignments that it has searched."""
_ORIGIN = f"alignments of a server's search, kept in {SEARCHED}"


def run(settings: SearchConfig, words: list[str]) -> int:
    """Search and return the exit code: 1 if a record has no alignment now. `words`: the command line (not needed here)."""
    searcher = _searcher(settings)
    records, broken = read_inputs(settings.inputs)
    if not records:
        raise UserError(broken[0].reason)
    queries = [
        query for record in records if record.alignment is None for query in distinct(record.chains or [record.query])
    ]
    failed = [failure.reason for failure in broken]
    unfound = search_missing(queries, settings.output, searcher, settings.retry)
    failed += [str(error) for error in unfound.values() if not isinstance(error, NoAnswerError)]
    for reason in failed:
        tell(f"failed: {reason}")
    for error in unfound.values():
        if isinstance(error, NoAnswerError):
            raise error
    found = len(queries) + len(broken) - len(failed)
    show(
        f"{found:,} {'record has' if found == 1 else 'records have'} alignments in {settings.output}, {len(failed):,} failed"
    )
    return 1 if failed else 0


def search_missing(
    queries: Sequence[ProteinSequence], folder: Path, searcher: Searcher, retry: bool = False
) -> dict[str, UserError]:
    """Search the records that `folder` has no alignments of, under their names or headers of databases; shows progress. Returns
    the reasons for records that have none now: a NoAnswerError for each record that was not asked for any more. `retry`: see
    `is_kept`."""
    wanted, failed = _not_under_headers(queries, folder)
    with progress("searched", len(wanted)) as advance:
        try:
            for name, error in search(wanted, folder, searcher, tell, retry):
                if error is not None:
                    failed[name] = error
                advance(1)
        except NoAnswerError as error:
            without = [query.name for query in wanted if not has_files(folder / query.name)]
            failed |= dict.fromkeys((name for name in without if name not in failed), error)
            if not without:
                tell(f"{error}; the earlier alignments stay")
    return failed


def _not_under_headers(
    queries: Sequence[ProteinSequence], folder: Path
) -> tuple[list[ProteinSequence], dict[str, UserError]]:
    """The records but those whose alignments in `folder` are called by a header of a database, and the reasons for records that
    two headers may stand for. Says how many there are."""
    kept = AlignmentFolder(folder)
    wanted: list[ProteinSequence] = []
    called: dict[str, str] = {}
    failed: dict[str, UserError] = {}
    for query in queries:
        try:
            place = kept.of(query.name)
        except UserError as error:
            failed[query.name] = error
            continue
        if place is None or place.name == query.name:
            wanted.append(query)
        else:
            called[query.name] = place.name
    if called:
        name, header = next(iter(called.items()))
        records = f"{len(called):,} {'record is' if len(called) == 1 else 'records are'}"
        tell(f"{records} not searched: {folder} has alignments by headers of databases, such as {header} for '{name}'")
    return wanted, failed


def _searcher(settings: SearchConfig) -> Searcher:
    if settings.msa_server is not None:
        return MsaServer(settings.msa_server, settings.msa_server_limits)
    assert settings.program is not None, "checked by the settings"
    assert settings.database is not None, "checked by the settings"
    return LocalProgram(settings.program, settings.database, settings.threads)


def with_searched(
    targets: Sequence[Target], output: Path, address: str, limits: ServerLimits, retry: bool = False
) -> tuple[list[Target], list[RecordFailure]]:
    """The targets, each with alignments if the server at `address` found some; and the records whose search failed.

    The alignments are kept in <output>/_alignments, where a later run reads them; those of a target with results stand unless
    `retry` is set.
    """
    folder, searcher = output / SEARCHED, MsaServer(address, limits)
    kept = AlignmentFolder(folder)
    missing = {target.query.name: _lacking(target) for target in targets}
    wanted = [
        query
        for name, queries in missing.items()
        for query in queries
        if not is_kept(folder / query.name, retry)
        if retry or not (has_files(folder / query.name) and (output / name).is_dir())
    ]
    with output_errors(output):
        failed = search_missing(wanted, folder, searcher, retry) if wanted else {}
    found: list[Target] = []
    failures: list[RecordFailure] = []
    for target in targets:
        names = [query.name for query in missing[target.query.name]]
        if lost := [name for name in names if name in failed]:
            failures.append(RecordFailure(target.query.name, str(failed[lost[0]])))
        else:
            places = {name: place for name in names if (place := kept.of(name)) is not None}
            found.append(_with_alignments(target, places))
    return found, failures


def _lacking(target: Target) -> list[ProteinSequence]:
    """The distinct sequences of a target that have no alignments."""
    if target.alignments is not None:
        return []
    return [one.query for one in target.distinct.values() if one.alignments is None]


def _with_alignments(target: Target, found: Mapping[str, Path]) -> Target:
    """The target with the alignments that were `found`, by the names of chains; none if it had all."""
    if not found:
        return target
    chains = tuple(replace(one, alignments=found.get(one.query.name, one.alignments)) for one in target.chains)
    # The last note of such a target says 'no alignments'; it becomes where these came from.
    notes = (*target.notes[:-1], _ORIGIN)
    # A chain of a complex may have the name of the complex: both are names that the user gives.
    own = None if target.chains else found.get(target.query.name)
    return replace(target, alignments=own, chains=chains, notes=notes)


def distinct(chains: Sequence[ProteinSequence]) -> list[ProteinSequence]:
    """The first chain of each sequence."""
    found: dict[str, ProteinSequence] = {}
    for chain in chains:
        found.setdefault(chain.letters, chain)
    return list(found.values())
