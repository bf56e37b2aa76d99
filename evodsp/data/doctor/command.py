"""`evodsp data doctor`: examine a data set, and report it on the terminal, as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from evodsp.data.config import DoctorConfig
from evodsp.data.doctor.diagnosis import Diagnosis, data_of_run, diagnose, filter_reasons
from evodsp.data.doctor.examination import COPYING, Overlap
from evodsp.files import check_output_folder, write_text
from evodsp.printing import counted, duration, show
from evodsp.report.page import Page, histogram

_SHOWN = 50
"""Bad or missing chains listed on the page; the JSON file lists all."""


def run(settings: DoctorConfig, words: list[str]) -> int:
    """Examine and report; 0 if training can start, 1 if not."""
    check_output_folder(settings.output)
    data = data_of_run(settings)
    for part in (data.training, data.distillation):
        if part is not None and (index := part.examiner.store.index) is not None:
            index.check()
    held_out = [key for keys in data.scored.values() for key in keys]
    how = settings.sample, settings.seed, settings.workers, settings.max_bad
    predictions = None if data.distillation is None else diagnose(data.distillation, {}, *how, None, held_out)
    found = diagnose(data.training, data.scored, *how, predictions, held_out)
    write_text(settings.output / "doctor.json", json.dumps(_as_json(found), indent=1) + "\n")
    write_text(settings.output / "doctor.html", _page(found).html())
    _print(found, settings.output / "doctor.html")
    return 1 if found.obstacles else 0


def _summary(found: Diagnosis) -> dict[str, str]:
    depths = [chain.depth for chain in found.examined if chain.state == "good"]
    lengths = found.table.lengths[found.table.lengths > 0]
    usable, drawn, kind, units = len(found.training), len(found.selected.keys), found.data.kind, found.data.units
    can_be_built = found.data.examiner.store.unknown != "record"
    of_store = {
        "size of a feature store, about": _bytes(found.store_bytes()),
        f"time to build it on {counted(found.workers, 'core')}, about": duration(found.store_seconds()),
    }
    return {
        f"{kind} {units} that can be used": f"{usable:,} of {usable + len(found.missing):,}",
        f"{kind} {units} that the filters leave": f"{drawn:,}",
        f"{units} read": f"{len(found.examined):,}, {len(found.bad):,} bad",
        "structures without alignments": f"{len(found.unaligned):,}",
        "residues, median": f"{np.median(lengths):,.0f}" if len(lengths) else "unknown",
        "different sequences in the MSA, median": f"{np.median(depths):,.0f}" if depths else "unknown",
        f"draws of a {found.data.examiner.unit} in an epoch": f"{found.data.samples / drawn:.3g}" if drawn else "none",
        **(of_store if can_be_built else {}),
    }


def _bytes(number: int) -> str:
    unit, size = next(
        ((unit, size) for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)) if number >= size), ("kB", 1e3)
    )
    return f"{number / size:,.3g} {unit}"


def _bad_rows(found: Diagnosis) -> list[tuple[str, str, str]]:
    """(chain, state, reason) of each fault of a single chain, scored chains first; then the structures that need a look."""
    read = [*(chain for part in found.scored for chain in part.examined), *found.examined]
    notes = ((chain.key, note) for chain in read for note in chain.notes)
    pairing = ((chain.key, note) for chain in read for note in chain.pairing_notes)
    unit = found.data.examiner.unit
    return [
        *(
            row
            for part in found.scored
            for row in (
                *((key, f"{part.kind} {unit} missing", f"no {lacking}") for key, lacking in part.missing.items()),
                *(
                    (chain.key, f"{part.kind} {unit} {chain.state}", chain.reason)
                    for chain in part.examined
                    if chain.state != "good"
                ),
            )
        ),
        *((chain.key, chain.state, chain.reason) for chain in found.bad),
        *((key, "missing", f"no {lacking}") for key, lacking in found.missing.items()),
        *((key, "usable, with a note on its structure", note) for key, note in dict.fromkeys(notes)),
        *((key, "usable, with a note on its rows for pairing", note) for key, note in dict.fromkeys(pairing)),
        *((one.key, "good, one chain only", "nothing is paired") for one in found.of_one_chain),
    ]


def _as_json(found: Diagnosis) -> dict[str, Any]:
    """The verdict and the findings about the training set; under `distillation` those about the self-distillation set."""
    predictions = {} if found.distillation is None else {"distillation": _set_as_json(found.distillation)}
    return {"can_start": not found.obstacles, "obstacles": found.obstacles, **_set_as_json(found), **predictions}


def _set_as_json(found: Diagnosis) -> dict[str, Any]:
    return {
        "summary": _summary(found),
        "counts": found.counts(),
        "filters": filter_reasons(found),
        "left_out": found.selected.left_out,
        "stale": found.stale,
        "chains": [{"chain": key, "state": state, "reason": reason} for key, state, reason in _bad_rows(found)],
        "unreadable_headers": found.unreadable_headers,
        "structures_without_alignments": found.unaligned,
        "not_counted": found.uncounted,
        "overlaps": [_overlap_as_json(part) for part in found.overlaps],
        "identity": found.data.examiner.definition,
        "copied": [part.as_json() for part in found.copied],
    }


def _overlap_as_json(part: Overlap) -> dict[str, Any]:
    """The overlap of two sets; `covered` is absent for chains."""
    known = {name: value for name, value in asdict(part).items() if name != "covered" or value is not None}
    return {**known, "highest": part.highest}


def _page(found: Diagnosis) -> Page:
    page = Page("Data for training", found.data.place)
    page.verdict(
        "Training can start." if not found.obstacles else f"Training cannot start: {'; '.join(found.obstacles)}.",
        not found.obstacles,
    )
    _add_set(page, found)
    if found.distillation is not None:
        page.heading("Self-distillation set")
        page.note(found.distillation.data.place)
        _add_set(page, found.distillation)
    return page


def _add_set(page: Page, found: Diagnosis) -> None:
    bars = {f"lDDT-CA of copies, {part.kind}": f"{part.bar.lddt_ca:.3f}" for part in found.copied if part.bar.copies}
    between = {part.kind: part.bar.interface_lddt_ca for part in found.copied}
    bars |= {
        f"interface lDDT-CA of copies, {kind}": f"{share:.3f}" for kind, share in between.items() if share is not None
    }
    page.figures(_summary(found) | bars)
    for source in found.stale:
        page.note(f"The index is older than {source}: make it again with evodsp data index.")
    if found.uncounted is not None:
        page.note(f"{found.uncounted}.")
    for line in found.trained_on:
        page.verdict(f"{line}.", good=False)
    if found.overlaps:
        _add_overlaps(page, found)
    if any(part.readable for part in found.copied):
        _add_copied(page, found)
    units = found.data.units
    page.heading(units.capitalize())
    page.table(["what", units], found.counts().items())
    page.heading("Filters")
    applied = (
        f"The filters leave out these {units}"
        if found.data.selection.is_applied
        else f"No filter is applied. The defaults, which sampling: alphafold2 turns on, would leave out these {units}"
    )
    page.note(
        f"{applied}, of {len(found.table):,}, by reason. 'unknown' counts the {units} whose value could not be looked up; a "
        f"structure whose file states no resolution has none, and is kept. The values come from: {found.known_from}."
    )
    page.table(["reason", units], filter_reasons(found).items())
    page.heading("Distributions")
    page.charts(_charts(found))
    rows = _bad_rows(found)
    page.heading(f"{units.capitalize()} with problems, or with notes")
    if len(rows) > _SHOWN:
        page.note(f"The first {_SHOWN} of {len(rows):,}; doctor.json lists all.")
    page.table([found.data.examiner.unit, "state", "reason"], rows[:_SHOWN]) if rows else page.note("None.")
    if found.unaligned:
        page.heading("Structures without alignments")
        more = f", and {len(found.unaligned) - _SHOWN:,} more in doctor.json" if len(found.unaligned) > _SHOWN else ""
        page.note(f"{', '.join(found.unaligned[:_SHOWN])}{more}")


def _add_overlaps(page: Page, found: Diagnosis) -> None:
    overlaps, unit = found.overlaps, found.data.examiner.unit
    page.heading("Training, validation and test")
    page.note(found.data.examiner.definition)
    titles = [
        "sets",
        f"{found.data.units} in both",
        "others with equal sequences",
        *(["others known from the first set"] if any(part.covered is not None for part in overlaps) else []),
        "highest identity",
        "pairs aligned",
        "unknown sequences",
    ]
    rows = [
        (
            " and ".join(part.sets), f"{len(part.chains):,}", f"{len(part.same_sequence):,}",
            *([] if part.covered is None else [f"{len(part.covered):,}"]),
            _percent(part.highest), f"{part.alignments:,}", f"{part.unknown:,}",
        )
        for part in overlaps
    ]  # fmt: skip
    page.table(titles, rows, numbers=titles[1:])
    pairs = [(part, *pair) for part in overlaps for pair in _alike(part)]
    if len(pairs) > _SHOWN:
        page.note(f"The first {_SHOWN} of {len(pairs):,} pairs; doctor.json lists all.")
    covered = [(part, near.first, near.second, near.identity) for part in overlaps for near in part.covered or ()]
    of_known = f"The known ones, with the identity of the chain that has least ({min(_SHOWN, len(covered)):,} shown)."
    for note, several in (("", pairs), (of_known, covered)):
        if several and note:
            page.note(note)
        if several:
            rows = [(" and ".join(part.sets), *names, _percent(share)) for part, *names, share in several[:_SHOWN]]
            titles = ["sets", f"{unit} of the first", f"{unit} of the second", "identity"]
            page.table(titles, rows, numbers=titles[3:])


def _add_copied(page: Page, found: Diagnosis) -> None:
    unit = found.data.examiner.unit
    page.heading(f"The bar: copying the nearest training {unit}")
    for part in found.copied:
        page.note(f"{part.line}.")
    page.note(COPYING[unit])
    rows = sorted(
        ((part.kind, copy) for part in found.copied for copy in part.bar.copies), key=lambda row: row[1].lddt_ca
    )
    if len(rows) > _SHOWN:
        page.note(f"The lowest {_SHOWN} of {len(rows):,}; doctor.json lists all.")
    if rows:
        titles = ["set", unit, f"nearest training {unit}", "identity", "coverage", "lDDT-CA of the copy"]
        page.table(
            titles,
            [
                (kind, copy.chain, copy.nearest, f"{copy.identity:.1%}", f"{copy.coverage:.1%}", f"{copy.lddt_ca:.3f}")
                for kind, copy in rows[:_SHOWN]
            ],
            numbers=titles[3:],
        )


def _alike(part: Overlap) -> list[tuple[str, str, float]]:
    """Chains of two sets with their identity, the most alike first."""
    return [
        *((key, key, 1.0) for key in part.chains),
        *((first, second, 1.0) for first, second in part.same_sequence),
        *((near.first, near.second, near.identity) for near in part.nearest),
    ]


def _percent(share: float | None) -> str:
    return "none found" if share is None else f"{share:.1%}"


def _overlap_line(part: Overlap, unit: str) -> str:
    """A line about the overlap of two sets, with the most alike pair."""
    said = [
        f"{counted(len(part.chains), unit)} in both",
        f"{len(part.same_sequence):,} others with equal sequences",
        *([] if part.covered is None else [f"{len(part.covered):,} others known from {part.sets[0]}"]),
        f"highest identity {_percent(part.highest)}",
    ]
    pairs = _alike(part)
    such = f" ({pairs[0][0]}" + (f" and {pairs[0][1]})" if pairs[0][0] != pairs[0][1] else ")") if pairs else ""
    unknown = f"; {part.unknown:,} sequences unknown" if part.unknown else ""
    return f"{' and '.join(part.sets)}: {', '.join(said)}{such}; {part.alignments:,} pairs aligned{unknown}"


def _charts(found: Diagnosis) -> dict[str, Markup]:
    table = found.table
    depths = np.array([chain.depth for chain in found.examined if chain.state == "good"])
    units = found.data.units
    sizes = np.array([len(one.sequences) for one in found.examined if one.state == "good"])
    of_complexes = {"Chains of a complex (complexes read)": (sizes, "chains")} if units == "complexes" else {}
    columns = {
        "Lengths": (table.lengths[table.lengths > 0], "residues"),
        **of_complexes,
        f"Depths of the MSA ({units} read)": (depths, "different sequences"),
        "Resolutions": (table.resolutions[table.resolutions > 0], "Å"),
    }
    charts = {}
    for title, (values, unit) in columns.items():
        if len(values):
            bins = min(30, max(10, len(values) // 5))
            low, high = values.min(), values.max()
            if np.issubdtype(values.dtype, np.integer):  # bars between whole numbers
                step = -(-int(high - low + 1) // bins)
                bins = max(10, -(-int(high - low + 1) // step))
                high = low + step * bins
            counts, edges = np.histogram(values, bins=bins, range=(low, high))
            charts[title] = histogram(edges.tolist(), counts.tolist(), unit, units)
    return charts


def _print(found: Diagnosis, page: Path) -> None:
    _print_set(found)
    if found.distillation is not None:
        show(f"self-distillation set: {found.distillation.data.place}")
        _print_set(found.distillation)
    verdict = "training can start" if not found.obstacles else f"training cannot start: {'; '.join(found.obstacles)}"
    show(f"{verdict}; report: {page}")


def _print_set(found: Diagnosis) -> None:
    figures = Table(box=None, show_header=False)
    for name, value in _summary(found).items():
        figures.add_row(name, value)
    for name, count in found.counts().items():
        if count and name != "read":
            figures.add_row(f"{found.data.units} {name}", f"{count:,}")
    for reason, count in filter_reasons(found).items():
        if count:
            figures.add_row(reason, f"{count:,} of {len(found.table):,} {found.data.units}")
    Console().print(figures)
    lines = [f"{key}: {state}: {reason}" for key, state, reason in _bad_rows(found)[:5]]
    lines += [f"the index is older than {source}" for source in found.stale]
    lines += [] if found.uncounted is None else [found.uncounted]
    lines += [f"warning: {line}" for line in found.trained_on]
    overlaps = [_overlap_line(part, found.data.examiner.unit) for part in found.overlaps]
    lines += [*overlaps, found.data.examiner.definition] if overlaps else []
    lines += [part.line for part in found.copied if part.readable]
    for line in lines:
        show(line)
