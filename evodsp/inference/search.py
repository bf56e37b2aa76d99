"""Searches for alignments: `evodsp search` for the records of FASTA files, `evodsp predict --msa_server` for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from evodsp.data.complexes.pairing import BY_SPECIES, file_of_pairs
from evodsp.data.formats import parse_complex_a3m
from evodsp.data.records import ProteinSequence
from evodsp.data.sources.layout import has_files
from evodsp.data.sources.msa import holds_query_alone
from evodsp.errors import UserError
from evodsp.files import output_errors
from evodsp.inference.results import RecordFailure
from evodsp.inference.targets import AlignmentFolder, Target, read_inputs
from evodsp.printing import counted, progress, quoted, show, tell
from evodsp.search.config import SearchConfig
from evodsp.search.programs import LocalProgram
from evodsp.search.searcher import TEMPLATES, NoAnswerError, Searcher, is_kept, listed_templates, origin_of, search
from evodsp.search.server import MsaServer, NotPairedError

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
    unfound = search_missing(queries, settings.output, searcher, settings.retry)
    found = len(queries) - len(unfound)
    if isinstance(searcher, MsaServer) and not any(isinstance(error, NoAnswerError) for error in unfound.values()):
        complexes = {record.query.name: distinct(record.chains) for record in records if record.alignment is None}
        for name, error in search_pairs(complexes, settings.output, searcher, settings.retry).items():
            if isinstance(error, NotPairedError):
                tell(f"{name}: {error}")
            else:
                unfound[f"pairs of {name}"] = (
                    error if isinstance(error, NoAnswerError) else UserError(f"{name}: {error}")
                )
        if settings.msa_server_templates:
            names = [query.name for query in queries if query.name not in unfound]
            fetch_templates(names, AlignmentFolder(settings.output), searcher)
    failed = [failure.reason for failure in broken]
    failed += [str(error) for error in unfound.values() if not isinstance(error, NoAnswerError)]
    for reason in failed:
        tell(f"failed: {reason}")
    for error in unfound.values():
        if isinstance(error, NoAnswerError):
            raise error
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
                advance(error is None)
        except NoAnswerError as error:
            without = [query.name for query in wanted if not has_files(folder / query.name)]
            failed |= dict.fromkeys((name for name in without if name not in failed), error)
            if not without:
                tell(f"{error}; the earlier alignments stay")
    return failed


def search_pairs(
    complexes: Mapping[str, Sequence[ProteinSequence]], folder: Path, server: MsaServer, retry: bool = False
) -> dict[str, UserError]:
    """Ask for the paired rows of the complexes that `folder` has none of, given the different sequences of each. Returns the
    reasons for those that have none now: a NoAnswerError for each that was not asked for any more. With `retry` a complex is
    asked for again whose rows none was paired of."""
    failed: dict[str, UserError] = {}
    wanted: dict[str, list[str]] = {}
    for name, chains in complexes.items():
        file = file_of_pairs(folder, name)
        if len(chains) > 1 and not _has_pairs(file, retry):
            wanted[name] = [chain.letters for chain in chains]
        elif file.is_file() and (mode := origin_of(file.parent).get("mode", server.pairing)) != server.pairing:
            failed[name] = UserError(
                f"{file.parent} holds rows of the server's mode '{quoted(mode)}', but --msa_server_pairing asks for "
                f"{server.pairing}; remove that folder, or give another --output"
            )
    if wanted:
        tell(
            f"rows of {counted(len(wanted), 'complex')} will be paired by {server.address}, which is sent the sequences"
        )
    for number, (name, sequences) in enumerate(wanted.items()):
        try:
            server.keep_pairs(sequences, file_of_pairs(folder, name).parent, tell)
        except NoAnswerError as error:
            return failed | dict.fromkeys([*wanted][number:], error)
        except UserError as error:
            failed[name] = error
    return failed


def fetch_templates(names: Sequence[str], folder: AlignmentFolder, server: MsaServer) -> None:
    """Ask for the structures of the template hits of records whose alignments are in `folder`, and keep them there. Says which
    records get none: that costs no record."""
    places = [place for name in names if (place := folder.of(name)) is not None and not (place / TEMPLATES).is_dir()]
    wanted = {place: listed for place in places if (listed := listed_templates(place)) is not None}
    with progress("fetched templates of", len(wanted)) as advance:
        for number, (place, listed) in enumerate(wanted.items()):
            try:
                server.keep_templates(listed, place / TEMPLATES, tell)
            except NoAnswerError as error:
                tell(f"{error}; {counted(len(wanted) - number, 'record')} get no templates ({place.name}, …)")
                return
            except UserError as error:
                tell(f"{place.name} gets no templates: {error}")
            advance(1)


def _has_pairs(file: Path, retry: bool) -> bool:
    return file.is_file() and not (retry and holds_query_alone([parse_complex_a3m(file)[0]]))


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
        return MsaServer(settings.msa_server, settings.msa_server_limits, pairing=settings.msa_server_pairing)
    assert settings.program is not None, "checked by the settings"
    assert settings.database is not None, "checked by the settings"
    return LocalProgram(settings.program, settings.database, settings.threads)


def with_searched(
    targets: Sequence[Target], output: Path, searcher: MsaServer, retry: bool = False, templates: bool = False
) -> tuple[list[Target], list[RecordFailure]]:
    """The targets, each with alignments if the server found some; and the records whose search failed.

    A complex of whose sequences none had alignments gets rows that the server has paired, too. `templates`: whether structures
    of template hits are fetched. What is found is kept in <output>/_alignments, where a later run reads it; that of a target
    with results stands unless `retry` is set.
    """
    folder = output / SEARCHED
    kept = AlignmentFolder(folder)
    missing = {target.query.name: _lacking(target) for target in targets}
    is_open = {name: retry or not (output / name).is_dir() for name in missing}
    wanted = [
        query
        for name, queries in missing.items()
        for query in queries
        if not is_kept(folder / query.name, retry)
        if is_open[name] or not has_files(folder / query.name)
    ]
    with output_errors(output):
        failed = search_missing(wanted, folder, searcher, retry) if wanted else {}
        whole = {
            name: missing[name]
            for target in targets
            if target.rule is BY_SPECIES and len(missing[name := target.query.name]) == len(target.distinct)
            if not any(query.name in failed for query in missing[name])
        }
        asked = {name: own for name, own in whole.items() if is_open[name] or file_of_pairs(folder, name).is_file()}
        unpaired = search_pairs(asked, folder, searcher, retry) if asked else {}
        if templates:
            names = [query.name for name in missing if is_open[name] for query in missing[name]]
            fetch_templates([name for name in names if name not in failed], kept, searcher)
    found: list[Target] = []
    failures: list[RecordFailure] = []
    for target in targets:
        name = target.query.name
        names = [query.name for query in missing[name]]
        error = unpaired.get(name)
        if lost := [one for one in names if one in failed]:
            failures.append(RecordFailure(name, str(failed[lost[0]])))
            continue
        if error is not None and not isinstance(error, NotPairedError):
            failures.append(RecordFailure(name, f"{name}: {error}; --pairing none predicts it without paired rows"))
            continue
        places = {one: place for one in names if (place := kept.of(one)) is not None}
        target = _with_alignments(target, places)
        if name in whole and (paired := file_of_pairs(folder, name)).is_file():
            target = replace(target, paired=paired)
        notes = [] if error is None else [f"{error}; its queries alone are paired, so its interfaces are less reliable"]
        if names and name not in whole and target.rule is BY_SPECIES:
            own = ", ".join(one.query.name for one in target.distinct.values() if one.query.name not in names)
            notes.append(
                f"no paired rows are asked of {searcher.address}: sequences with alignments of your own ({own}) are not sent "
                "to it; without these in --alignments it searches and pairs all chains"
            )
        found.append(replace(target, notes=(*target.notes, *notes)))
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
