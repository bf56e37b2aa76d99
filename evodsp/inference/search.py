"""Searches for alignments: `evodsp search` for the records of FASTA files, `evodsp predict --msa_server` for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_folder import has_files
from evodsp.errors import UserError
from evodsp.inference.failures import RecordFailure
from evodsp.inference.inputs import read_inputs
from evodsp.inference.targets import Target
from evodsp.output import output_errors
from evodsp.printing import show, tell
from evodsp.progress import progress
from evodsp.search.config import SearchConfig
from evodsp.search.limits import ServerLimits
from evodsp.search.programs import LocalProgram
from evodsp.search.searcher import NoAnswerError, Searcher, search
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
    queries = [record.query for record in records if record.alignment is None]
    failed = [failure.reason for failure in broken]
    unfound = search_missing(queries, settings.output, searcher)
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


def search_missing(queries: Sequence[ProteinSequence], folder: Path, searcher: Searcher) -> dict[str, UserError]:
    """Search the records that `folder` has no alignments of; shows progress. Returns the reasons for records that have none
    now: a NoAnswerError for each record that was not asked for any more."""
    failed: dict[str, UserError] = {}
    with progress("searched", len(queries)) as advance:
        try:
            for name, error in search(queries, folder, searcher, tell):
                if error is not None:
                    failed[name] = error
                advance(1)
        except NoAnswerError as error:
            without = [query.name for query in queries if not has_files(folder / query.name)]
            failed |= dict.fromkeys((name for name in without if name not in failed), error)
    return failed


def _searcher(settings: SearchConfig) -> Searcher:
    if settings.msa_server is not None:
        return MsaServer(settings.msa_server, settings.msa_server_limits)
    assert settings.program is not None, "checked by the settings"
    assert settings.database is not None, "checked by the settings"
    return LocalProgram(settings.program, settings.database, settings.threads)


def with_searched(
    targets: Sequence[Target], output: Path, address: str | None, limits: ServerLimits
) -> tuple[list[Target], list[RecordFailure]]:
    """The targets, each with alignments if the server at `address` found some; and the records whose search failed.

    The alignments are kept in <output>/_alignments, where a later run reads them.
    """
    if address is None:
        return list(targets), []
    folder, searcher = output / SEARCHED, MsaServer(address, limits)
    missing = [target.query for target in targets if target.alignments is None]
    wanted = [query for query in missing if not has_files(folder / query.name)]
    with output_errors(output):
        failed = search_missing(wanted, folder, searcher) if wanted else {}
    found = [
        # The last note of such a target says 'no alignments'; it becomes where these came from.
        replace(target, alignments=folder / target.query.name, notes=(*target.notes[:-1], _ORIGIN))
        if target.alignments is None
        else target
        for target in targets
        if target.query.name not in failed
    ]
    return found, [RecordFailure(name, str(error)) for name, error in failed.items()]
