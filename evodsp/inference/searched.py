"""Alignments that a prediction searches on its way, for records that have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evodsp.data.sources.chain_folder import has_files
from evodsp.inference.config import PredictConfig
from evodsp.inference.failures import Failure
from evodsp.inference.search import say, search_missing
from evodsp.inference.targets import Target
from evodsp.output import output_errors
from evodsp.search.server import MsaServer

SEARCHED = "_alignments"
"""Folder in the output of a prediction for alignments that it has searched."""
_ORIGIN = f"alignments of a server's search, kept in {SEARCHED}"


def with_searched(targets: Sequence[Target], config: PredictConfig) -> tuple[list[Target], list[Failure]]:
    """The targets, those without alignments with what `config.msa_server` finds; and those of which the search failed.

    What is found is kept in <output>/_alignments, where a later run reads it.
    """
    if config.msa_server is None:
        return list(targets), []
    folder, searcher = config.output / SEARCHED, MsaServer(config.msa_server, config.msa_server_limits)
    missing = [target.query for target in targets if target.alignments is None]
    wanted = [query for query in missing if not has_files(folder / query.name)]
    with output_errors(config.output):
        failed = search_missing(wanted, folder, searcher, say) if wanted else {}
    found = [
        # The last note of a target without alignments says that it has none.
        replace(target, alignments=folder / target.query.name, notes=(*target.notes[:-1], _ORIGIN))
        if target.alignments is None
        else target
        for target in targets
        if target.query.name not in failed
    ]
    return found, [Failure(name, str(error)) for name, error in failed.items()]
