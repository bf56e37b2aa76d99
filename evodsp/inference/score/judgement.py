"""`evodsp score --before MODEL --after MODEL`: what fine-tuning has changed, whether copies are as good, what is forgotten.

Both models predict the same structures, in the folders `before` and `after` of the output: these are `evodsp predict`'s, which
keeps what is finished. A structure that one model cannot predict, or that cannot be scored, is left out of both, and named.
`evodsp.inference.score.paired` says what a difference is worth.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evodsp.data.formats import check_name
from evodsp.data.records import CHAINS, COMPLEXES, ONE_OF, Kind
from evodsp.data.samples.selection import chain_list, chains_and_lines
from evodsp.data.sources.structures import StructureFolder
from evodsp.errors import FileFormatError, UserError
from evodsp.files import check_output_folder, write_rows, write_text
from evodsp.inference.config import PredictConfig
from evodsp.inference.jobs import find_models
from evodsp.inference.pages.figures import Calibration
from evodsp.inference.predict import predict_records
from evodsp.inference.results import run_log
from evodsp.inference.score import scores
from evodsp.inference.score.baseline import TrainingStructures, structures_in, training_set
from evodsp.inference.score.config import ALIKE_FOR_BOTH, ScoreConfig
from evodsp.inference.score.paired import ALIKE, FEWEST, Difference, families_of
from evodsp.inference.score.structure_scores import Confidence, Predicted, score_structure
from evodsp.inference.score.table import COLUMNS, StructureScores
from evodsp.printing import show
from evodsp.report.page import Page, Series, lines, scatter
from evodsp.version import __version__
from evodsp.weights.by_name import NAMES, need_weights
from evodsp.weights.checkpoint import is_parameter_file, load_sizes
from evodsp.weights.parameter_file import located
from evodsp.weights.pretrained import JUDGED, plain

_COMPARED: dict[Kind, tuple[str, ...]] = {
    CHAINS: ("lddt_ca", "gdt_ts"),
    COMPLEXES: ("interface_lddt_ca", "dockq", "lddt_ca"),
}
"""The scores that are compared; the sentences are about the first one."""
_HEADINGS = {name: heading for name, heading, *_ in COLUMNS}
_BEFORE, _AFTER, _COPY = "before", "after", "copy"
_OWN, _GENERAL = "chains", "general"
_THAN_COPIES = "is better", "is worse", "is not shown to be better", "is better"
_VERDICTS = {
    (_OWN, _BEFORE): ("Fine-tuning", "has helped", "has done harm", "is not shown to help", "helps"),
    (_OWN, _COPY): ("The model", *(f"{verb} than copies of the nearest training structures" for verb in _THAN_COPIES)),
    (_GENERAL, _BEFORE): (
        "The model",
        "has forgotten nothing",
        "has forgotten",
        "is not shown to have forgotten",
        "has forgotten",
    ),
}
"""By the set and by what the model is compared with: what is judged, what a difference above, below and not different from 0
says of it, and what too few structures do not say."""
_CELLS = ("set", "score", "of", "before (or copy)", "after", "difference", "95 % interval", "better on")


@dataclass(frozen=True)
class Judged:
    """A structure, as both models predict it."""

    group: str
    family: str
    before: StructureScores
    after: StructureScores
    """Scores of the model after, with those of the copy of the nearest training structure, if there is one."""

    def value(self, of: str, score: str) -> float | None:
        """A score of one of the models, or of the copy."""
        row = self.before if of == _BEFORE else self.after
        found: float | None = getattr(row, f"nearest_{score}" if of == _COPY else score)
        return found

    def cells(self, kind: Kind) -> Iterator[tuple[str, Any]]:
        """The columns of judgement.csv."""
        yield from ((ONE_OF[kind], self.after.name), ("set", self.group), ("family", self.family))
        yield from (("residues", self.after.residues), ("resolved", self.after.resolved))
        for score in (*_COMPARED[kind], "plddt"):
            pair = [self.value(of, score) for of in (_BEFORE, _AFTER)]
            yield from ((f"before_{score}", pair[0]), (f"after_{score}", pair[1]))
            yield f"difference_{score}", None if None in pair else pair[1] - pair[0]  # type: ignore[operator]
        for name in ("nearest", "nearest_identity", "nearest_coverage", *(f"nearest_{one}" for one in _COMPARED[kind])):
            yield name, getattr(self.after, name)
        yield "better_than_copy_by", self.after.better_by


@dataclass(frozen=True)
class Row:
    """A paired difference: of a group's structures, of one score, between the fine-tuned model and something else."""

    group: str
    beside: str
    score: str
    found: Difference

    @property
    def count(self) -> str:
        """Structures, and their families where these are fewer."""
        return f"{self.found.count:,}{self._families}"

    @property
    def _families(self) -> str:
        count, families = self.found.count, self.found.families
        return "" if families == count else f" in {families:,} famil{'y' if families == 1 else 'ies'}"

    def cells(self) -> list[str]:
        """Cells of a row, named by `_CELLS`."""
        one, beside = self.found, " beside copies" if self.beside == _COPY else ""
        means = f"{one.first:.3f}", f"{one.second:.3f}", f"{one.mean:+.3f}"
        return [f"{self.group}{beside}", _HEADINGS[self.score], self.count, *means, one.interval, f"{one.better:,}"]

    def sentence(self, kind: Kind) -> str:
        """Meaning of the difference, in words."""
        one, (what, up, down, unclear, unknown) = self.found, _VERDICTS[self.group, self.beside]
        numbers = (
            f"mean {_HEADINGS[self.score]} {one.first:.3f} {'of copies' if self.beside == _COPY else 'before'}, "
            f"{one.second:.3f} after, {one.mean:+.3f}"
        )
        if one.half is None:
            whether = f"{what[0].lower()}{what[1:]} {unknown}"
            return f"Too few {kind} ({self.count}) to tell whether {whether}: {numbers}, better on {one.better:,}"
        verdict = {1: up, -1: down, 0: unclear}[one.sign]
        sure = f"95 % confidence interval {one.interval}"
        return f"{what} {verdict}: {numbers} ({sure}), better on {one.better:,} of {one.count:,} {kind}{self._families}"


def run(settings: ScoreConfig, words: list[str]) -> int:
    """`evodsp score`: the exit code, 1 if a structure was left out. `words`: the command line, for the logs."""
    if settings.before is None:
        return scores.run(settings, words)
    try:
        return judge(settings, words)
    except KeyboardInterrupt as interrupt:
        again = "the same command without --overwrite" if settings.overwrite else "the same command again"
        raise KeyboardInterrupt(f"{again} keeps what is finished") from interrupt


def judge(settings: ScoreConfig, words: list[str]) -> int:
    """Predict, score and compare; write judgement.csv, judgement.html and judgement.md. Returns 1 if a structure was left out.

    Raises UserError, before a model runs, for a list with a name that has no structure, or that is in both lists, and for two
    models that cannot be compared.
    """
    check_output_folder(settings.output)
    models, truth = _models(settings), structures_in(settings, settings.structures)
    groups = _groups(settings, truth)
    letters = {name: chains for names in groups.values() for name, chains in names.items()}
    training = _training(settings, models[_AFTER])
    lost: dict[str, str] = {}
    for label in models:
        left = {name: chains for name, chains in letters.items() if name not in lost}
        lost |= _predict(settings, label, models[label], left, words)
    names = [name for name in letters if name not in lost]
    copies = {} if isinstance(training, str) else training.copies_for(names, truth)
    families = families_of({name: list(chains.values()) for name, chains in letters.items()})
    judged: list[Judged] = []
    confidence: dict[str, list[Confidence]] = {}
    for group, name in [(group, name) for group, listed in groups.items() for name in listed if name not in lost]:
        try:
            whole = truth.assembly_of(name)
            both = [score_structure(name, group, whole, Predicted.read(settings.output / of / name)) for of in models]
        except UserError as error:
            lost[name] = str(error)
            continue
        before, after = (one.scores for one in both)
        judged.append(Judged(group, families[name], before, scores.beside(after, copies.get(name, ""), truth.kind)))
        for label, one in zip(models, both, strict=True):
            if (of_residues := one.confidence()) is not None:
                confidence.setdefault(f"{group}, {label}", []).append(of_residues)
    remarks = [f"{name} is left out of both models: {reason}" for name, reason in lost.items()]
    if not judged:
        raise UserError(f"none of the {len(letters):,} {truth.kind} can be compared; {remarks[0]}")
    if isinstance(training, str):
        remarks.append(f"Copies of training structures are not scored: {training}")
    else:
        for group, listed in groups.items():
            there = [name for name in listed if name not in lost]
            remarks += scores.without(group, there, copies, training, ONE_OF[truth.kind])
    if settings.general is None:
        remarks.append("What the model has forgotten is not known; give chains of other proteins with --general.")
    calibrations = {name: Calibration.of(found) for name, found in confidence.items()}
    _write(settings, _Result(truth.kind, judged, list(_rows(judged, truth.kind)), calibrations, remarks))
    return 1 if lost else 0


def _models(settings: ScoreConfig) -> dict[str, Path]:
    """The places of both models. Raises UserError if one is missing, or if they are one model or of different kinds."""
    models: dict[str, Path] = {}
    for label, given in ((_BEFORE, settings.before), (_AFTER, settings.after)):
        assert given is not None, "checked by the settings"
        (path,) = need_weights([str(given)]) if str(given) in NAMES and not given.exists() else [located(given)]
        if not path.exists():
            raise UserError(f"--{label} {given}: no such checkpoint or model folder; check the path")
        found = find_models([path])
        if len(found) > 1:
            raise UserError(f"--{label} {given}: a folder of {len(found)} models; give one of them")
        models[label] = found[0].path
    before, after = models.values()
    if before == after or len(find_models([before, after])) == 1:
        raise UserError(
            f"--before {before} and --after {after} are the same model; give the one before its fine-tuning"
        )
    kinds = [load_sizes(path, _preset(settings, path))[0].arrangement for path in (before, after)]
    if kinds[0] != kinds[1]:
        raise UserError(
            f"--before {before} is a {kinds[0]} model, but --after {after} a {kinds[1]} model; give two of one kind"
        )
    return models


def _preset(settings: ScoreConfig, model: Path) -> str | None:
    """The preset, for a model whose file does not hold its sizes."""
    return settings.preset if is_parameter_file(model) else None


def _groups(settings: ScoreConfig, truth: StructureFolder) -> dict[str, dict[str, dict[str, str]]]:
    """The structures of both lists by their names, each with the sequences of its chains by theirs.

    Raises FileFormatError, with the line, for a name that is listed twice or has no structure.
    """
    places: dict[str, str] = {}
    groups: dict[str, dict[str, dict[str, str]]] = {}
    for group, path in ((_OWN, settings.chains), (_GENERAL, settings.general)):
        if path is None:
            continue
        groups[group] = {}
        chain_list(str(path))  # refuses a list that has no name, or one twice
        for name, line in chains_and_lines(str(path)):
            check_name(path, name, line)
            if name in places:
                raise FileFormatError(path, f"'{name}' is in {places[name]}, too; leave it out of one", line)
            try:
                whole = truth.assembly_of(name)
            except UserError as error:
                raise FileFormatError(path, str(error), line) from error
            places[name] = f"{path}:{line}"
            headers = [name] if truth.kind == CHAINS else [f"{name}_{chain}" for chain in whole.names]
            groups[group][name] = {header: chain.sequence for header, chain in zip(headers, whole.chains, strict=True)}
    return groups


def _training(settings: ScoreConfig, after: Path) -> TrainingStructures | str:
    """The training structures that are copied, or why there are none. Those of the model's own run need not be there."""
    if settings.config is not None or settings.train_chains is not None:
        return training_set(settings, ())
    config = after.absolute().parent.parent / "config.yaml"
    if after.parent.name != "checkpoints" or not config.is_file():
        return f"{after} lies in no run's folder; give --config or --train_chains"
    try:
        return training_set(replace(settings, config=config), ())
    except UserError as error:
        return str(error)


def _predict(
    settings: ScoreConfig, label: str, model: Path, letters: Mapping[str, Mapping[str, str]], words: Sequence[str]
) -> dict[str, str]:
    """Predict with one model, or keep what is finished. Returns why structures have no prediction."""
    with tempfile.TemporaryDirectory() as folder:
        for name, chains in letters.items():
            text = "".join(f">{header}\n{sequence}\n" for header, sequence in chains.items())
            (Path(folder) / f"{name}.fasta").write_text(text, encoding="utf-8")
        config = PredictConfig(
            inputs=(Path(folder),),
            complex=settings.complexes,
            checkpoint=model,
            output=settings.output / label,
            preset=_preset(settings, model),
            **{name: getattr(settings, name) for name in ALIKE_FOR_BOTH},
        )
        with run_log(config.output, words, partial(show, flush=True)) as say:
            say(f"{label}: {model}")
            outcome = predict_records(config, say)
    done, reasons = {result.name for result in outcome.results}, {one.name: one.reason for one in outcome.failures}
    return {name: f"{label}: {reasons.get(name, 'not predicted')}" for name in letters if name not in done}


def _pairs(judged: Sequence[Judged], group: str, beside: str, score: str) -> list[tuple[Judged, float, float]]:
    """The structures of a set that have both scores: that of the copy or of the model before, and that of the model after."""
    found = [(one, one.value(beside, score), one.value(_AFTER, score)) for one in judged if one.group == group]
    return [(one, first, second) for one, first, second in found if first is not None and second is not None]


def _rows(judged: Sequence[Judged], kind: Kind) -> Iterator[Row]:
    for group, beside in _VERDICTS:
        for score in _COMPARED[kind]:
            if found := _pairs(judged, group, beside, score):
                pairs = [(first, second) for _, first, second in found]
                yield Row(group, beside, score, Difference.of(pairs, [one.family for one, *_ in found]))


@dataclass(frozen=True)
class _Result:
    """Content of the files."""

    kind: Kind
    judged: list[Judged]
    rows: list[Row]
    calibrations: dict[str, Calibration]
    remarks: list[str]

    @property
    def verdicts(self) -> list[Row]:
        """The rows that become sentences."""
        return [row for row in self.rows if row.score == _COMPARED[self.kind][0]]

    @property
    def confidence(self) -> list[str]:
        """Accuracy of each model's pLDDT in each set."""
        return [f"{found.line(name)}; bins are off by {found.error:.1f}" for name, found in self.calibrations.items()]

    @property
    def method(self) -> str:
        """Method behind the intervals, in words."""
        return (
            f"Intervals are Student's, of paired differences over {self.kind}. Those with at least {100 * ALIKE:.0f} % "
            f"identical residues are one family and may vary together. There is an interval from {FEWEST} families on."
        )


def _write(settings: ScoreConfig, result: _Result) -> None:
    files = [settings.output / f"judgement.{suffix}" for suffix in ("html", "csv", "md")]
    table = [dict(one.cells(result.kind)) for one in result.judged]
    write_rows(list(table[0]), table, files[1])
    write_text(files[2], _section(settings, result))
    write_text(files[0], _page(settings, result).html())
    # After all files, because `evodsp score | head` ends with the tenth line.
    show("")
    for line in [*(row.sentence(result.kind) for row in result.verdicts), *result.confidence, *result.remarks]:
        show(line)
    show(f"wrote {', '.join(map(str, files))}")


def _page(settings: ScoreConfig, result: _Result) -> Page:
    kind, main = result.kind, _COMPARED[result.kind][0]
    page = Page("Before and after fine-tuning", f"{settings.before} and {settings.after}")
    for row in result.verdicts:
        worst = 0 if row.group == _GENERAL and row.found.half is not None else 1
        page.verdict(f"{row.sentence(kind)}.", good=row.found.sign >= worst)
    dots = {
        group: [(one.after.name, first, second) for one, first, second in _pairs(result.judged, group, _BEFORE, main)]
        for group in (_OWN, _GENERAL)
    }
    page.legend([_OWN, _GENERAL, _BEFORE, _AFTER])
    charts = {}
    if any(dots.values()):
        title = f"{_HEADINGS[main]} of each {ONE_OF[kind]}: above the line, the model has got better"
        charts[title] = scatter(dots, _BEFORE, _AFTER)
    right = Series("right", (0, 100), (0.0, 100.0), colour=7, dashed=True)
    for group in (_OWN, _GENERAL):
        series = [
            Series(of, [one.plddt for one in found.bins()], [one.lddt for one in found.bins()], colour)
            for colour, of in ((2, _BEFORE), (3, _AFTER))
            if (found := result.calibrations.get(f"{group}, {of}")) is not None
        ]
        if series:
            title = f"100 × lDDT-CA by pLDDT, {group}: the dashed line is right"
            charts[title] = lines([*series, right], "pLDDT", "100 × lDDT-CA", "linear")
    page.charts(charts)
    page.table(_CELLS, [row.cells() for row in result.rows], numbers=_CELLS[2:])
    for line in (result.method, *result.confidence, *result.remarks):
        page.note(line)
    page.heading(f"Each {ONE_OF[kind]}: {_HEADINGS[main]}")
    columns = (ONE_OF[kind], "set", "residues", *(f"{name}_{main}" for name in (_BEFORE, _AFTER, "difference")))
    columns = (*columns, "before_plddt", "after_plddt", "nearest", "nearest_identity", f"nearest_{main}")
    rows = [dict(one.cells(kind)) for one in result.judged]
    page.table(
        columns, [[_cell(row[name]) for name in columns] for row in rows], numbers=set(columns[2:]) - {"nearest"}
    )
    return page


def _cell(value: object) -> str:
    return "–" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def _section(settings: ScoreConfig, result: _Result) -> str:
    """The section of a model card. Of paths it tells the last part alone."""
    lists = [path.name for path in (settings.chains, settings.general) if path is not None]
    assert settings.before is not None
    assert settings.after is not None
    found = [
        *(JUDGED, ""),
        f"{plain(settings.after.name)} beside {plain(settings.before.name)}, the model before its fine-tuning, on "
        f"{' and '.join(map(plain, lists))}; judged by evodsp {__version__}.",
        "",
        *(f"- {plain(row.sentence(result.kind))}." for row in result.verdicts),
        "",
        f"| {' | '.join(_CELLS)} |",
        f"|{'---|' * len(_CELLS)}",
        *(f"| {' | '.join(map(plain, row.cells()))} |" for row in result.rows),
        "",
        result.method,
        "",
        *(f"- {plain(line)}" for line in (*result.confidence, *result.remarks)),
    ]
    return "\n".join([*found, ""])
