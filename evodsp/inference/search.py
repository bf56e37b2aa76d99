"""`evodsp search`: alignments for the records of FASTA files; and the same on the way to a prediction."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from evodsp.data.chain_folder import has_files
from evodsp.data.records import ProteinSequence
from evodsp.errors import UserError
from evodsp.inference.config import PredictConfig
from evodsp.inference.failures import Failure
from evodsp.inference.inputs import read_inputs
from evodsp.inference.search_config import SearchConfig
from evodsp.inference.targets import Target
from evodsp.output import output_errors
from evodsp.progress import progress
from evodsp.search.programs import LocalProgram
from evodsp.search.searcher import Say, Searcher, search
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
    failed += [str(error) for error in search_missing(queries, settings.output, searcher, _say).values()]
    for reason in failed:
        _say(f"failed: {reason}")
    print(
        f"{len(queries) + len(broken) - len(failed):,} records have alignments in {settings.output}, {len(failed):,} failed"
    )
    return 1 if failed else 0


def search_missing(
    queries: Sequence[ProteinSequence], folder: Path, searcher: Searcher, say: Say
) -> dict[str, UserError]:
    """Search the records that `folder` has no alignments of; shows progress. Returns why, of those that have none now."""
    failed: dict[str, UserError] = {}
    with progress("searched", len(queries)) as advance:
        for name, error in search(queries, folder, searcher, say):
            if error is not None:
                failed[name] = error
            advance(1)
    return failed


def with_searched(targets: Sequence[Target], config: PredictConfig) -> tuple[list[Target], list[Failure]]:
    """The targets, those without alignments with what `config.msa_server` finds; and those of which the search failed.

    What is found is kept in <output>/_alignments, where a later run reads it. Other ranks must not wait for a search: where
    there are some, alignments that are missing are a UserError.
    """
    if config.msa_server is None:
        return list(targets), []
    folder, searcher = config.output / SEARCHED, MsaServer(config.msa_server)
    if any(target.query.name == SEARCHED for target in targets):
        raise UserError(
            f"a record is called '{SEARCHED}', which is the folder of searched alignments; rename the record"
        )
    missing = [target.query for target in targets if target.alignments is None]
    wanted = [query for query in missing if not has_files(folder / query.name)]
    if wanted and dist.is_initialized():
        raise UserError(
            f"{len(wanted)} records have no alignments, and ranks do not wait for a search; run `evodsp search INPUT... "
            f"--msa_server {config.msa_server} --output DIR` first, and give --alignments DIR"
        )
    with output_errors(config.output):
        failed = search_missing(wanted, folder, searcher, _say) if wanted else {}
    found = [
        # The last note of a target without alignments says that it has none.
        replace(target, alignments=folder / target.query.name, notes=(*target.notes[:-1], _ORIGIN))
        if target.alignments is None
        else target
        for target in targets
        if target.query.name not in failed
    ]
    return found, [Failure(name, str(error)) for name, error in failed.items()]


def _searcher(settings: SearchConfig) -> Searcher:
    if settings.msa_server is not None:
        return MsaServer(settings.msa_server)
    assert settings.program is not None, "checked by the settings"
    assert settings.database is not None, "checked by the settings"
    return LocalProgram(settings.program, settings.database, settings.threads)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
