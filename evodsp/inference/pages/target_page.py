"""The pages of predictions: of one target, `<output>/<name>/report.html` (structure, confidence, alignments, settings),
and of a folder, `<output>/index.html` (every target with its scores and a link to its page).

It is one file that needs no network: the viewer (3Dmol.js) is in it. It is made from the finished files of the target's
folder, so seeds of earlier runs are on it. Tables and charts need no script. Shapes: R residues.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import gemmi
import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from evodsp.data.records import Alignment
from evodsp.errors import UserError
from evodsp.files import write_text
from evodsp.geometry.residues import ATOM_TYPES, CA, RESTYPE_1TO3
from evodsp.inference.interfaces import CLASH_DISTANCE, PairScores, clash_line, clashes_of, read_pair_scores
from evodsp.inference.pages.residue_charts import (
    BANDS,
    FRAME,
    PAE_COLOURS,
    Coverage,
    coverage,
    coverage_chart,
    named_bands,
    pae_uri,
    palette,
    peptide_bonds,
    plddt_chart,
    strip,
    view_of,
)
from evodsp.inference.result_checks import FIX, read_object
from evodsp.inference.results import (
    REPORT,
    TIMINGS,
    PredictionResult,
    RecordFailure,
    key_of,
    read_pae,
    read_plddt,
    read_relaxation,
    read_structure,
    read_timings,
    read_with_ranking,
    relaxed_name,
    result_folders,
    scores_name,
    stem,
)
from evodsp.inference.structure_files import ChainSpan, PredictedStructure
from evodsp.printing import counted
from evodsp.report.page import OURS, Page, histogram, render

INDEX, BESIDE = "index.html", "index_evodsp.html"
_STYLE = """
.strip { width: 190px; height: 14px; border-radius: 3px; display: block; }
.targets td { vertical-align: middle; } .targets .sorts { cursor: pointer; white-space: nowrap; }
.sorts::after { content: " ↕"; opacity: 0.4; } [aria-sort]::after { opacity: 1; }
[aria-sort="ascending"]::after { content: " ↑"; } [aria-sort="descending"]::after { content: " ↓"; }
.targets th { position: sticky; top: 0; background: var(--back); }
a { color: var(--bar); } .bands { margin-bottom: 20px; }
"""
_STRIP = 60
"""Most pieces of the coloured strip of a target."""


def write_batch_page(output: Path, failures: Sequence[RecordFailure], outdated: Collection[str] = ()) -> Path:
    """Write the page of `result_folders`, also of earlier runs, and of the records that failed now.

    An index.html that evodsp has not written is the user's: the page is then index_evodsp.html.
    """
    path, html = output / index_name(output), batch_page(output, failures, outdated).html()
    if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == html:
        return path  # a run that keeps everything changes nothing
    write_text(path, html)
    return path


def index_name(output: Path) -> str:
    """The name of the page of a folder of predictions, whether it is there yet or not."""
    path = output / INDEX
    return BESIDE if path.is_file() and OURS not in path.read_text(encoding="utf-8", errors="replace") else INDEX


def batch_page(output: Path, failures: Sequence[RecordFailure], outdated: Collection[str] = ()) -> Page:
    """The page. Folders without a complete result are left out."""
    rows: list[dict[str, str]] = []
    means = []
    for folder in result_folders(output, outdated):
        try:
            result, ranking = read_with_ranking(folder)
            plddt, depth = read_plddt(folder, result.best), read_object(folder / TIMINGS).get("alignment_rows")
        except UserError:
            continue  # not a result of ours, or one that predict would refuse to keep
        means.append(result.mean_plddt[result.best])
        scores = {name: ranking["ranking"][0].get(key) for name, key in _SCORES.items()}
        rows.append(_row(folder, result.name, plddt, means[-1], depth, scores, len(result.mean_plddt)))
    page = Page("Predictions", f"{counted(len(rows), 'target')}, best prediction of each")
    page.style(_STYLE)
    page.figures(
        {
            "targets": f"{len(rows):,}",
            "mean pLDDT": f"{np.mean(means):.1f}" if means else "–",
            "failed": f"{len(failures):,}",
        }
    )
    # Of models without a PAE head no target has a pTM, and no single chain has an ipTM.
    # Folders of early versions do not say how many sequences their alignments had.
    columns = {name: kind for name, kind in _HEADINGS.items() if any(row[name] for row in rows)}
    page.template("inference/pages/targets.html.j2", columns=columns, rows=rows, bands=named_bands())
    counts, _ = np.histogram(means, bins=20, range=(0, 100))
    if len(means) > 4 and np.count_nonzero(counts) > 1:  # a chart of one bar says what the mean says
        page.charts({"Mean pLDDT": histogram([5.0 * n for n in range(21)], counts.tolist(), "mean pLDDT", "targets")})
    if failures:
        page.heading("Records that failed")
        page.table(["record", "reason"], [[failure.name, failure.reason] for failure in failures])
    page.script(_asset("targets.js"))
    return page


_ALONG, _DEPTH = "pLDDT along the sequence", "aligned sequences"
_SCORES = {"pTM": "ptm", "ipTM": "iptm"}
"""Columns that may be empty, and their entries in ranking.json."""
_HEADINGS = {
    "target": False,
    "residues": True,
    _DEPTH: True,
    "mean pLDDT": True,
    **dict.fromkeys(_SCORES, True),
    "predictions": True,
    _ALONG: False,
}
"""Headings of the columns, and whether their cells are numbers."""


def _row(
    folder: Path,
    name: str,
    plddt: np.ndarray,
    mean: float,
    depth: object,
    scores: Mapping[str, float | None],
    seeds: int,
) -> dict[str, str]:
    """The cells, by column, and the address of the target's page."""
    pieces = np.array([piece.mean() for piece in np.array_split(plddt, min(_STRIP, len(plddt)))])
    return {
        "target": name,
        "page": f"{quote(folder.name)}/{REPORT}" if (folder / REPORT).is_file() else "",
        "residues": f"{len(plddt):,}",
        _DEPTH: f"{depth:,}" if isinstance(depth, int) else "",
        "mean pLDDT": f"{mean:.1f}",
        **{column: "" if score is None else f"{score:.2f}" for column, score in scores.items()},
        "predictions": f"{seeds}",
        _ALONG: strip(pieces, f"pLDDT from {plddt.min():.0f} to {plddt.max():.0f}", kind="strip"),
    }


_MOST_CELLS = 2_500_000
"""Cells of all matrices of aligned errors together: 3.3 MB of the page. Larger ones are averaged over neighbouring residues."""
_PICTURE = 400
"""Most rows of the picture that is there without a script."""
_LEVELS = 254
_MOST_PAIRS = 100
"""Pairs of chains in the table of interfaces."""
_CHAIN_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#994455")
"""Colours that people with any colour vision tell apart (Paul Tol's bright scheme); further chains repeat them."""
_FARTHEST = 22.0
"""Å; the scale of the distances that are shown if there are no aligned errors. The distogram's last bin begins there."""


@dataclass(frozen=True)
class _Seed:
    """One prediction, as its files say."""

    seed: int
    """Its number on the page: the seed, or the place in the ranking if there are several models."""
    structure: PredictedStructure
    pae: Float[np.ndarray, "R R"] | None
    """Å."""
    highest: float
    """The largest error that the head can predict, Å."""
    relaxed: PredictedStructure | None = None
    """The structure after relaxation; None if it was not relaxed."""
    relaxed_file: str = ""
    """Name of its file."""

    @property
    def plddt(self) -> Float[np.ndarray, " R"]:
        """pLDDT, 0 to 100."""
        return self.structure.plddt

    @property
    def shapes(self) -> dict[str, PredictedStructure]:
        """The structures that the page shows, the first one at first."""
        relaxed = {} if self.relaxed is None else {"relaxed": self.relaxed}
        return {**relaxed, "predicted": self.structure}

    @cached_property
    def clashes(self) -> dict[str, dict[tuple[int, int], int]]:
        """Pairs of atoms that clash, of each two chains, by the name of the structure."""
        return {
            shape: clashes_of([(one.positions[span.residues], one.mask[span.residues]) for span in one.chains])
            for shape, one in self.shapes.items()
        }


def write_target_page(folder: Path, alignments: Sequence[Alignment]) -> None:
    """Write the page of the finished result in `folder`. `alignments`: the ones that it was predicted from."""
    result, ranking = read_with_ranking(folder)
    timings = read_timings(folder)
    seeds = [
        _read_seed(result, entry, number) for number, entry in zip(_numbers(ranking), ranking["ranking"], strict=True)
    ]
    found = coverage(alignments) if alignments else None
    read = {stem(key): read_relaxation(folder, key) for key in map(key_of, ranking["ranking"])}
    best, names = ranking["ranking"][0], [chain.name for chain in seeds[0].structure.chains]
    pairs = read_pair_scores(folder / scores_name(key_of(best)), names) if "iptm" in best else []
    relaxed = {name: facts for name, facts in read.items() if facts}
    page = target_page(ranking, timings, seeds, found, relaxed, pairs, index_name(folder.parent))
    write_text(folder / REPORT, page.html())


def target_page(
    ranking: Mapping[str, Any],
    timings: Mapping[str, Any],
    seeds: Sequence[_Seed],
    found: Coverage | None,
    relaxed: Mapping[str, Mapping[str, Any]],
    pairs: Sequence[PairScores] = (),
    index: str = INDEX,
) -> Page:
    """The page. `ranking`, `timings`: the contents of the two files; `seeds`: best first. `relaxed`: contents of the files of
    relaxation, by the names of predictions. `pairs`: the scores of the best seed's pairs of chains. `index`: the page of all
    targets, in the folder above."""
    best, entries = seeds[0], ranking["ranking"]
    length, chains = len(best.plddt), best.structure.chains if best.structure.lengths else ()
    # Where the alignments are one row, the query, there is nothing to show.
    found = found if found is not None and found.sequences > 1 else None
    of = f" of {len(chains)} chains" if chains else ""
    page = Page(
        ranking["name"], f"Predicted structure{of}, {length:,} residues. Confidence is the model's own estimate."
    )
    page.style(_asset("target.css"))
    page.template("inference/pages/back.html.j2", index=quote(index))
    figures = {"mean pLDDT, best seed": f"{entries[0]['mean_plddt']:.1f}"}
    if "ptm" in entries[0]:
        figures["pTM, best seed"] = f"{entries[0]['ptm']:.2f}"
    if "iptm" in entries[0]:
        figures["ipTM, best seed"] = f"{entries[0]['iptm']:.2f}"
    if len(chains) > 1:
        figures["clashes between chains, best seed"] = f"{sum(next(iter(best.clashes.values())).values()):,}"
    figures |= {"residues": f"{length:,}", "residues with pLDDT above 70": f"{np.mean(best.plddt > 70):.0%}"}
    figures["sequences in the alignments" if found else "no alignments"] = (
        f"{found.sequences:,}" if found else "1 sequence"
    )
    # Of several models: the settings of each, under its name.
    every = ranking.get("models") or {"": ranking["settings"]}
    named = [own["templates"] for own in every.values() if isinstance(own.get("templates"), list) and own["templates"]]
    if named:
        by = (
            "templates found by the server" if any(own.get("templates_from") for own in every.values()) else "templates"
        )
        figures[by] = f"{max(map(len, named))}"
    figures["seconds in the model"] = f"{timings['model_seconds']:,.1f}"
    page.figures(figures)
    if len(entries) > 1:
        page.template("inference/pages/seeds.html.j2", buttons=_buttons(entries, seeds))
    shapes = list(dict.fromkeys(shape for one in seeds for shape in one.shapes))
    page.template("inference/pages/views.html.j2", **_views(best), files=[*_files(entries, seeds)], shapes=shapes)
    page.wide_chart("pLDDT along the sequence", plddt_chart({one.seed: one.plddt for one in seeds}, best.seed, chains))
    if found:
        page.template("inference/pages/coverage.html.j2", chart=coverage_chart(found, chains))
    if timings.get("paired_rows") == 0:
        page.note(
            "No row of the alignments pairs different chains, so the model sees nothing of how they have changed together: its "
            "interfaces are less reliable."
        )
    if pairs:
        page.heading("Interfaces")
        page.table(_INTERFACES, _interface_rows(pairs, best.clashes["predicted"], chains), numbers={*_INTERFACES[1:]})
        left_out = f" The {_MOST_PAIRS} pairs with the highest ipTM." if len(pairs) > _MOST_PAIRS else ""
        page.note(
            "Of the best seed, as it was predicted; of scores that depend on the direction the higher one. A contact is a pair "
            "of residues whose CB atoms are within 8 Å, a clash a pair of atoms of two chains that are closer than "
            f"{CLASH_DISTANCE:g} Å: the scores of chains that lie in one another mean nothing.{left_out}"
        )
    page.heading("Seeds")
    headings = [
        "rank",
        *(["model"] if "model" in entries[0] else []),
        "seed",
        "mean pLDDT",
        *(["pTM"] if "ptm" in entries[0] else []),
        *(["ipTM"] if "iptm" in entries[0] else []),
        "CA RMSD to the best, Å",
        "file",
    ]
    page.table(headings, _seed_rows(entries, seeds), numbers=set(headings) - {"file", "model"})
    if relaxed:
        page.heading("Relaxation")
        page.table(_RELAXATION, _relaxation_rows(relaxed), numbers=set(_RELAXATION))
        page.note(
            "Violations: residues whose bonds to neighbours, inner distances or contacts are impossible. AMBER99SB."
        )
    page.heading("Timings")
    page.table(["what", "value"], _plain_rows(timings))
    page.heading("Settings")
    settings = {f"{model} {name}".strip(): value for model, own in every.items() for name, value in own.items()}
    page.table(["setting", "value"], _plain_rows({"evodsp_version": ranking.get("evodsp_version"), **settings}))
    page.note(
        "3D view: 3Dmol.js (Rego and Koes, 2015), BSD licence. Colours of pLDDT and aligned error as in the AlphaFold database."
    )
    page.data("prediction", _data(seeds, found))
    page.script((files("evodsp.report") / "third_party" / "3Dmol-min.js").read_text(encoding="utf-8"))
    page.script(_asset("target.js"))
    return page


def _asset(name: str) -> str:
    return (files("evodsp.inference") / "pages" / name).read_text(encoding="utf-8")


def _numbers(ranking: Mapping[str, Any]) -> list[int]:
    """The number of each prediction on the page."""
    entries = ranking["ranking"]
    return list(range(len(entries))) if "models" in ranking else [int(entry["seed"]) for entry in entries]


def _read_seed(result: PredictionResult, entry: Mapping[str, Any], number: int) -> _Seed:
    key = key_of(entry)
    pae, highest = None, _FARTHEST
    if "ptm" in entry:
        pae, highest = read_pae(result.folder, key)
    structure, path = read_structure(result, key), result.folder / relaxed_name(key, result.format)
    relaxed = read_structure(result, key, path) if path.is_file() else None
    if relaxed is not None and (relaxed.mask != structure.mask).any():
        raise UserError(f"{path}: has other atoms than {result.structure(key).name}; {FIX}")
    if pae is not None and len(pae) != len(structure.plddt):
        raise UserError(f"{result.structure(key)}: has another number of residues than its scores; {FIX}")
    return _Seed(number, structure, pae, highest, relaxed, path.name)


def _chain_colour(number: int) -> str:
    return _CHAIN_COLOURS[number % len(_CHAIN_COLOURS)]


def _buttons(entries: Sequence[Mapping[str, Any]], seeds: Sequence[_Seed]) -> list[dict[str, str | int]]:
    """The values on the button of each prediction."""
    names = [
        f"{entry['model']}, seed {entry['seed']}" if "model" in entry else f"seed {entry['seed']}" for entry in entries
    ]
    means = [f"{entry['mean_plddt']:.1f}" for entry in entries]
    return [
        {"number": one.seed, "name": name, "mean_plddt": mean}
        for one, name, mean in zip(seeds, names, means, strict=True)
    ]


def _files(entries: Sequence[Mapping[str, Any]], seeds: Sequence[_Seed]) -> Iterator[dict[str, Any]]:
    """Caption of each 3D view: links to the prediction's files, and warnings about the backbone and about clashes of chains."""
    for entry, one in zip(entries, seeds, strict=True):
        for shape, structure in one.shapes.items():
            bonds = peptide_bonds(structure).note
            mend = " --relax best mends such bonds." if bonds and one.relaxed is None else ""
            clashes = clash_line(one.clashes[shape], [chain.name for chain in structure.chains])
            yield {
                "number": one.seed,
                "shape": shape,
                "links": _links(entry, one),
                "bonds": bonds + mend,
                "clashes": clashes,
            }


def _links(entry: Mapping[str, Any], one: _Seed) -> Markup:
    """Links to the files of a prediction's structures, which lie beside the page."""
    names = {"predicted": str(entry["structure"]), "relaxed": one.relaxed_file}
    files = [(quote(names[shape]), names[shape]) for shape in one.shapes]
    return render("inference/pages/files.html.j2", files=files)


def _views(best: _Seed) -> dict[str, Any]:
    """The structure and the matrix side by side: values of the template."""
    values: dict[str, Any] = {
        "bands": named_bands(), "residues": f"{len(best.plddt):,}", "highest": f"{best.highest:g}",
        "chains": [], "colours": [],
    }  # fmt: skip
    if best.structure.lengths:
        length = len(best.plddt)
        values["chains"] = [
            {"name": one.name, "border": f"{100 * one.start / length:.3f}", "share": f"{100 * len(one) / length:.3f}"}
            for one in best.structure.chains
        ]
        values["colours"] = [(one.name, _chain_colour(number)) for number, one in enumerate(best.structure.chains)]
    if best.pae is None:
        title, scale, across, down, image = "CA-CA distances of the structure", "distance", "residue", "residue", ""
    else:
        title, scale, across, down = "Predicted aligned error", "error", "scored residue", "aligned residue"
        image = pae_uri(_reduced(best.pae, math.ceil(len(best.pae) / _PICTURE)), best.highest)
    return values | {"title": title, "scale": scale, "across": across, "down": down, "image": image}


def _seed_rows(entries: Sequence[Mapping[str, Any]], seeds: Sequence[_Seed]) -> list[list[str | int]]:
    rows: list[list[str | int]] = []
    for rank, (entry, one) in enumerate(zip(entries, seeds, strict=True), start=1):
        ptm = [f"{entry[name]:.3f}" for name in ("ptm", "iptm") if name in entry]
        moved = _superposed(one.structure, seeds[0].structure)[:, CA] - seeds[0].structure.positions[:, CA]
        both = one.structure.mask[:, CA] > 0.5
        rmsd = f"{math.sqrt((moved[both] ** 2).sum(-1).mean()):.2f}" if both.any() else ""
        model = [str(entry["model"])] if "model" in entry else []
        rows.append([rank, *model, str(entry["seed"]), f"{entry['mean_plddt']:.2f}", *ptm, rmsd, _links(entry, one)])
    return rows


_INTERFACES = ["chains", "ipTM", "ipSAE", "pDockQ", "pDockQ2", "contacts", "clashes"]


def _interface_rows(
    pairs: Sequence[PairScores], clashes: Mapping[tuple[int, int], int], chains: Sequence[ChainSpan]
) -> Iterator[list[str | int]]:
    named = {f"{chains[a].name}-{chains[b].name}": count for (a, b), count in clashes.items()}
    for one in sorted(pairs, key=lambda one: -one.iptm)[:_MOST_PAIRS]:
        scores = [f"{score:.3f}" for score in (one.iptm, one.ipsae, one.pdockq, one.pdockq2)]
        yield [one.chains, *scores, f"{one.contacts:,}", f"{named.get(one.chains, 0):,}"]


_RELAXATION = [
    "prediction", "violations before", "after", "moved, Å", "energy before, kJ/mol", "energy after, kJ/mol", "seconds",
]  # fmt: skip


def _relaxation_rows(relaxed: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str | int]]:
    for name, facts in relaxed.items():
        violations = [str(facts[f"violations_{when}"]["any"]) for when in ("before", "after")]
        found = [facts[f"energy_{when}"] for when in ("before", "after")]
        energies = ["atoms coincide" if energy is None else f"{energy:,.0f}" for energy in found]
        yield [name, *violations, f"{facts['rmsd']:.2f}", *energies, f"{facts['seconds']:.1f}"]


def _plain_rows(values: Mapping[str, Any]) -> list[list[str]]:
    """Names and values for a table, without those that are None or empty, or of the program's own book-keeping."""
    values = {name: value for name, value in values.items() if name != "numerics"}
    if of := values.pop("peak_memory_of", None):
        values["peak_memory_mib"] = f"{_plain(values.get('peak_memory_mib'))} ({of})"
    words = {
        "peak_memory_mib": "peak memory, MiB",
        "alignments": "fingerprint of the alignments",
        "checkpoint": "fingerprint of the checkpoint",
        "raw": "raw weights, not averaged",
    }
    named = {words.get(name, name.replace("_", " ")): value for name, value in values.items()}
    return [[name, _plain(value)] for name, value in named.items() if value not in (None, "")]


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_plain, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_plain(item)}" for name, item in value.items())
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _data(seeds: Sequence[_Seed], found: Coverage | None) -> dict[str, Any]:
    """The data of the script. All seeds have the same atoms, because the sequence decides which there are."""
    first = seeds[0].structure
    view = view_of(first)
    residue, atom = np.nonzero(first.mask > 0.5)
    step = math.ceil(len(first.plddt) * math.sqrt(len(seeds) / _MOST_CELLS))
    return {
        "sequence": first.sequence,
        "chains": [
            {"name": one.name, "start": one.start, "end": one.end, "colour": _chain_colour(number)}
            for number, one in enumerate(first.chains)
        ],
        "residue_names": {letter: RESTYPE_1TO3.get(letter, "UNK") for letter in sorted(set(first.sequence))},
        "atom_names": ATOM_TYPES,
        "atom_type": _base64(atom.astype("u1")),
        "atom_residue": _base64(residue.astype("<i4")),
        "bands": [[lower, colour] for lower, colour, _ in BANDS],
        "palette": palette(PAE_COLOURS).reshape(-1).tolist(),
        "matrix": "distance" if seeds[0].pae is None else "PAE",
        "highest": seeds[0].highest,
        "step": step,
        "view": {"centre": view.centre.tolist(), "axes": view.axes.tolist(), "quaternion": view.quaternion},
        "charts": {"width": FRAME.width, "left": FRAME.left, "right": FRAME.right},
        "counts": found.counts.tolist() if found else None,
        "seeds": [
            {
                "seed": one.seed,
                "plddt": [round(float(value), 1) for value in one.plddt],
                "shapes": {
                    shape: {
                        "traced": peptide_bonds(structure).traced,
                        "coordinates": _base64((_superposed(structure, first)[residue, atom] * 1000).round().astype("<i4")),
                    }
                    for shape, structure in one.shapes.items()
                },
                "pae": None if one.pae is None else _base64(_quantised(_reduced(one.pae, step), one.highest)),
            }
            for one in seeds
        ],
    }  # fmt: skip


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _quantised(pae: Float[np.ndarray, "R R"], highest: float) -> np.ndarray:
    """Aligned errors as bytes: steps of about an eighth of an Å."""
    return np.clip(pae / highest * _LEVELS, 0, _LEVELS).round().astype("u1")


def _reduced(pae: Float[np.ndarray, "R R"], step: int) -> np.ndarray:
    """The matrix averaged over blocks of `step` residues; the last block may be smaller."""
    if step == 1:
        return pae
    starts = np.arange(0, len(pae), step)
    sizes = np.diff([*starts, len(pae)])
    sums = np.add.reduceat(np.add.reduceat(pae.astype(np.float64), starts, axis=0), starts, axis=1)
    return sums / np.outer(sizes, sizes)


def _superposed(moved: PredictedStructure, onto: PredictedStructure) -> Float[np.ndarray, "R 37 3"]:
    """Positions of `moved` after superposition of its CA atoms onto those of `onto`, so that seeds lie on one another."""
    both = (moved.mask[:, CA] > 0.5) & (onto.mask[:, CA] > 0.5)
    if moved is onto or both.sum() < 3:
        return moved.positions
    fixed, moving = ([gemmi.Position(*xyz) for xyz in one.positions[both, CA].tolist()] for one in (onto, moved))
    transform = gemmi.superpose_positions(fixed, moving).transform
    rotation, shift = np.array(transform.mat.tolist()), np.array(transform.vec.tolist())
    return moved.positions @ rotation.T + shift
