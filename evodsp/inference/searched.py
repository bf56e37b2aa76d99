"""Alignments that a prediction searches on its way, for records that have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evodsp.data.chain_folder import has_files
from evodsp.inference.failures import Failure
from evodsp.inference.search import say, search_missing
from evodsp.inference.targets import Target
from evodsp.output import output_errors
from evodsp.search.limits import ServerLimits
from evodsp.search.server import MsaServer

SEARCHED = "_alignments"
"""Folder in the output of a prediction for alignments that it has searched."""
_ORIGIN = f"alignments of a server's search, kept in {SEARCHED}"


def with_searched(
    targets: Sequence[Target], output: Path, address: str | None, limits: ServerLimits
) -> tuple[list[Target], list[Failure]]:
    """The targets, each with alignments if the server at `address` found some; and the records whose search failed.

    The alignments are kept in <output>/_alignments, where a later run reads them.
    """
    if address is None:
        return list(targets), []
    folder, searcher = output / SEARCHED, MsaServer(address, limits)
    missing = [target.query for target in targets if target.alignments is None]
    wanted = [query for query in missing if not has_files(folder / query.name)]
    with output_errors(output):
        failed = search_missing(wanted, folder, searcher, say) if wanted else {}
    found = [
        # The last note of such a target says 'no alignments'; it becomes where these came from.
        replace(target, alignments=folder / target.query.name, notes=(*target.notes[:-1], _ORIGIN))
        if target.alignments is None
        else target
        for target in targets
        if target.query.name not in failed
    ]
    return found, [Failure(name, str(error)) for name, error in failed.items()]
