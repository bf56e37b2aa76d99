"""`evodsp search`: alignments for the records of FASTA files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evodsp.data.records import ProteinSequence
from evodsp.data.sources.chain_folder import has_files
from evodsp.errors import UserError
from evodsp.inference.inputs import read_inputs
from evodsp.inference.search_config import SearchConfig
from evodsp.printing import show, tell
from evodsp.progress import progress
from evodsp.search.programs import LocalProgram
from evodsp.search.searcher import NoAnswerError, Say, Searcher, search
from evodsp.search.server import MsaServer


def run(settings: SearchConfig, words: list[str]) -> int:
    """Search and return the exit code: 1 if a record has no alignment now. `words`: the command line (not needed here)."""
    searcher = _searcher(settings)
    records, broken = read_inputs(settings.inputs)
    if not records:
        raise UserError(broken[0].reason)
    queries = [record.query for record in records if record.alignment is None]
    failed = [failure.reason for failure in broken]
    unfound = search_missing(queries, settings.output, searcher, say)
    failed += [str(error) for error in unfound.values() if not isinstance(error, NoAnswerError)]
    for reason in failed:
        say(f"failed: {reason}")
    for error in unfound.values():
        if isinstance(error, NoAnswerError):
            raise error
    found = len(queries) + len(broken) - len(failed)
    show(
        f"{found:,} {'record has' if found == 1 else 'records have'} alignments in {settings.output}, {len(failed):,} failed"
    )
    return 1 if failed else 0


def search_missing(
    queries: Sequence[ProteinSequence], folder: Path, searcher: Searcher, say: Say
) -> dict[str, UserError]:
    """Search the records that `folder` has no alignments of; shows progress. Returns why, of those that have none now: a
    NoAnswerError for all that were not asked for any more."""
    failed: dict[str, UserError] = {}
    with progress("searched", len(queries)) as advance:
        try:
            for name, error in search(queries, folder, searcher, say):
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


def say(line: str) -> None:
    tell(line)
