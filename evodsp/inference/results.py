"""The files in the folder of one target's predictions.

    <output>/<name>/seed_<k>.cif|.pdb       structure; B-factor = pLDDT
                    seed_<k>_scores.json    ColabFold's keys: plddt per residue; with a PAE head also max_pae, pae (Å) and ptm;
                                            of a complex those of its chains and interfaces (`interfaces`)
                    seed_<k>_pae.json       with a PAE head: predicted aligned error, in AlphaFold DB's format
                    seed_<k>_contacts.npz   `probability` of contacts, uint8 [R, R] in steps of 1/255
                    seed_<k>_representations.npz|.safetensors    with --save (`evodsp.inference.representations`)
                    seed_<k>_confidence.svg, alignment_coverage.svg    with --plots (`evodsp.inference.prediction`)
                    ranking.json            seeds, best first, and the settings of the run
                    ranking_debug.json      of complexes: the ranking as AlphaFold-Multimer writes it
                    timings.json            seconds per stage, peak memory
                    report.html             all of this to look at (`evodsp.inference.pages.target_page`)

Predictions of several models are in one folder: their files are called `<model>_seed_<k>…`.

Records that could not be predicted are named in one line each, the others go on, and failures.json lists them at the end.
`<output>/predictions.csv` has a line for each prediction of each target, best first.
"""

from __future__ import annotations

import json
import re
import shlex
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from evodsp.data.formats.mmcif import read_structure as read_file
from evodsp.data.records import Chain
from evodsp.errors import FileFormatError, UserError
from evodsp.files import csv_text, whole_file, write_text
from evodsp.geometry.residues import RESTYPES_WITH_X
from evodsp.inference.config import SaveSettings
from evodsp.inference.interfaces import score_entries
from evodsp.inference.representations import write_arrays
from evodsp.inference.result_checks import (
    FIX,
    check_ranking,
    check_relaxation,
    check_timings,
    is_number,
    numbers,
    read_object,
    wrong,
)
from evodsp.inference.structure_files import (
    MOST_CHAINS,
    MOST_IN_PDB,
    PAE_CATEGORY,
    AlignedError,
    Origin,
    PredictedStructure,
    chain_name,
    pdb_chain_name,
    structure_text,
)
from evodsp.model.heads import complex_ranking
from evodsp.printing import write_line
from evodsp.reading.array_files import read_archive
from evodsp.reading.text_files import json_of, read_json, text_of
from evodsp.version import __version__

RANKING, TIMINGS, REPORT = "ranking.json", "timings.json", "report.html"
_RANKING_DEBUG = "ranking_debug.json"
OURS = re.compile(
    r"seed_\d+(_relaxed)?\.(cif|pdb)|seed_\d+_(scores|pae|relaxed)\.json|seed_\d+_contacts\.npz|seed_\d+_representations\.(npz|safetensors)|seed_\d+_confidence\.(svg|png)"
    r"|alignment_coverage\.(svg|png)|ranking(_debug)?\.json|timings\.json|report\.html"
)
"""Names of the files that predict writes into a target's folder. All others are the user's."""
_CONTACT_STEPS = 255
_LARGEST_ERROR = 10_000.0
"""Largest aligned error that is believed, in Å."""

Format = Literal["cif", "pdb"]
Key = int | str
"""Name of a prediction in a target's folder: its seed, or `<model>_seed_<k>` if there are several models."""


def key_of(entry: Mapping[str, Any]) -> Key:
    """The key of an entry of ranking.json."""
    return f"{entry['model']}_seed_{entry['seed']}" if "model" in entry else int(entry["seed"])


def stem(key: Key) -> str:
    """The first part of the names of a prediction's files."""
    return key if isinstance(key, str) else f"seed_{key}"


@dataclass(frozen=True)
class PredictionResult:
    """The predictions of one target."""

    name: str
    folder: Path
    format: Format
    mean_plddt: Mapping[Key, float]
    """Mean pLDDT (0..100) of each seed, best first. Of several models: by `<model>_seed_<k>`."""
    kept: bool
    """True if the files are an earlier run's with the same inputs and settings."""

    @property
    def best(self) -> Key:
        """The prediction that ranks first."""
        return next(iter(self.mean_plddt))

    def structure(self, key: Key | None = None) -> Path:
        """The structure file of a seed (or of `<model>_seed_<k>`); by default the best one's."""
        return self.folder / f"{stem(self.best if key is None else key)}.{self.format}"


def result_folders(output: Path, outdated: Collection[str] = ()) -> list[Path]:
    """The folders of `output` that hold a ranking, by name; numbers in names count by value, so x_2 is before x_10.

    `outdated`: records of which only an earlier run has written results, for example of another sequence; they are left out.
    """
    found = [path.parent for path in output.glob(f"*/{RANKING}") if path.parent.name not in outdated]

    def by_value(folder: Path) -> tuple[list[str | int], str]:
        parts = re.split("([0-9]+)", folder.name)  # texts and numbers in turns
        return [int(part) if place % 2 else part for place, part in enumerate(parts)], folder.name

    return sorted(found, key=by_value)


def read_result(folder: Path) -> PredictionResult:
    """The finished result in `folder`. Raises UserError if there is none, or it is incomplete."""
    return read_with_ranking(folder)[0]


def read_with_ranking(folder: Path) -> tuple[PredictionResult, Mapping[str, Any]]:
    """`read_result`, and the content of ranking.json."""
    path = folder / RANKING
    if not path.is_file():
        raise UserError(f"{folder}: no {RANKING}, so there is no finished prediction; run evodsp predict --overwrite")
    ranking = read_object(path)
    check_ranking(path, ranking)
    mean_plddt = {key_of(entry): float(entry["mean_plddt"]) for entry in ranking["ranking"]}
    file_format = Path(ranking["ranking"][0]["structure"]).suffix[1:]
    result = PredictionResult(ranking["name"], folder, file_format, mean_plddt, kept=True)  # type: ignore[arg-type]
    expected = [
        TIMINGS,
        *(name for key in mean_plddt for name in (result.structure(key).name, scores_name(key))),
    ]
    expected += [pae_name(key_of(entry)) for entry in ranking["ranking"] if "ptm" in entry]
    if lost := [name for name in expected if not (folder / name).is_file()]:
        raise UserError(f"{folder}: '{lost[0]}' is missing from a finished run; predict again with --overwrite")
    return result, ranking


def read_timings(folder: Path) -> Mapping[str, Any]:
    """The content of timings.json. Raises UserError for a file that predict has not written."""
    content = read_object(folder / TIMINGS)
    check_timings(folder / TIMINGS, content)
    return content


def read_relaxation(folder: Path, key: Key) -> dict[str, Any] | None:
    """The content of `<stem>_relaxed.json`; None if the prediction has not been relaxed."""
    path = folder / f"{stem(key)}_relaxed.json"
    if not path.is_file():
        return None
    content = read_object(path)
    check_relaxation(path, content)
    return content


def relaxed_name(key: Key, file_format: Format) -> str:
    """The file of a relaxed structure."""
    return f"{stem(key)}_relaxed.{file_format}"


def scores_name(key: Key) -> str:
    return f"{stem(key)}_scores.json"


def read_plddt(folder: Path, key: Key) -> Float32[np.ndarray, " R"]:
    """pLDDT, 0..100, of a prediction in a target's folder. Raises UserError unless predict has written its scores."""
    return plddt_of(folder / scores_name(key))


def plddt_of(scores: Path) -> Float32[np.ndarray, " R"]:
    """pLDDT, 0..100, in the file of a prediction's scores. Raises UserError unless predict has written it.

    The aligned errors behind it in the file are not parsed: of thousands of long targets that would take minutes.
    """
    data = text_of(scores)
    start = data.find(b"[", data.find(b'"plddt"'))
    end = data.find(b"]", start) + 1
    if b'"plddt"' not in data or not 0 <= start < end:
        raise FileFormatError(scores, f"not written by evodsp predict (it has no list plddt); {FIX}")
    return numbers(scores, "plddt", json_of(scores, data[start:end], FIX), 1, 0.0, 100.0)


def read_structure(result: PredictionResult, key: Key, path: Path | None = None) -> PredictedStructure:
    """A prediction as its files hold it: positions to 0.001 Å, pLDDT to 0.01. Without aligned errors (`read_pae`).

    `path`: another file with its atoms, such as the relaxed ones; None: those that were predicted. Raises UserError if the
    two files hold different numbers of residues.
    """
    path = path or result.structure(key)
    chains, plddt = _read_chains(path), read_plddt(result.folder, key)
    if len(plddt) != (residues := sum(map(len, chains))):
        raise FileFormatError(path, f"has {residues} residues, but its scores are of {len(plddt)}; {FIX}")
    return PredictedStructure(
        name=result.name,
        aatype=np.array([RESTYPES_WITH_X.index(letter) for chain in chains for letter in chain.sequence]),
        positions=np.concatenate([chain.positions for chain in chains]),
        mask=np.concatenate([chain.mask for chain in chains]),
        plddt=plddt,
        lengths=tuple(map(len, chains)) if len(chains) > 1 else (),
    )


def _read_chains(path: Path) -> list[Chain]:
    """The chains of a structure file, in their order. Raises FileFormatError unless they have the names that predict gives."""
    found = read_file(path).chains
    name_of, most = (pdb_chain_name, MOST_IN_PDB) if path.suffix == ".pdb" else (chain_name, MOST_CHAINS)
    names = [name_of(number) for number in range(min(len(found), most))]
    if other := sorted(found.keys() - set(names)):
        raise FileFormatError(
            path, f"not written by evodsp predict (it has a chain '{other[0]}', not {names[-1]}); {FIX}"
        )
    return [found[name] for name in names]


def contacts_name(key: Key) -> str:
    return f"{stem(key)}_contacts.npz"


def read_contacts(folder: Path, key: Key) -> Float32[np.ndarray, "R R"] | None:
    """The contact probabilities of a prediction in a target's folder; None in folders of versions that wrote none.

    Raises UserError if the file is damaged.
    """
    file = folder / contacts_name(key)
    if not file.is_file():
        return None
    steps = read_archive(file, FIX).get("probability")
    if steps is None or steps.dtype != np.uint8:
        raise FileFormatError(file, f"not written by evodsp predict (it has no array probability of bytes); {FIX}")
    return numbers(file, "probability", steps, 2, 0.0, 255.0) / np.float32(_CONTACT_STEPS)


def _write_contacts(file: Path, contacts: Float32[np.ndarray, "R R"]) -> None:
    """Write steps of 1/255, a byte each; most are zero and take next to nothing when they are compressed."""
    steps = np.round(contacts.clip(0, 1) * _CONTACT_STEPS).astype(np.uint8)
    np.savez_compressed(file, probability=steps)


def pae_name(key: Key) -> str:
    return f"{stem(key)}_pae.json"


def read_pae(folder: Path, key: Key) -> tuple[Float32[np.ndarray, "R R"], float]:
    """The aligned errors of a prediction in a target's folder, and the largest that the head can predict. Å.

    Raises UserError for a file that predict has not written.
    """
    path = folder / pae_name(key)
    content = read_json(path, FIX)
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
        raise wrong(path, "its content", content, "a list of one object")
    (error,) = content
    highest = error.get("max_predicted_aligned_error")
    if not is_number(highest, 0.01, _LARGEST_ERROR):
        raise wrong(path, "max_predicted_aligned_error", highest, "a number of Å")
    matrix = numbers(path, "predicted_aligned_error", error.get("predicted_aligned_error"), 2, 0.0, _LARGEST_ERROR)
    return matrix, float(highest)


def read_aligned_error(folder: Path, key: Key, ptm: float) -> AlignedError:
    """The aligned errors of a prediction in a target's folder. `ptm`: the number in its entry of ranking.json."""
    pae, highest = read_pae(folder, key)
    return AlignedError(pae, highest, ptm)


def holds_pae(file: Path) -> bool:
    """Whether a ModelCIF file that predict has written holds aligned errors."""
    with file.open(encoding="utf-8") as lines:
        return any(line.startswith(PAE_CATEGORY) for line in lines)


def write_results(
    folder: Path,
    structures: Mapping[int, PredictedStructure],
    file_format: Format,
    settings: Mapping[str, Any],
    name: str,
    earlier: Sequence[Mapping[str, Any]] = (),
    model: str | None = None,
    models: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    pae_in_cif: bool = False,
    save: SaveSettings | None = None,
) -> PredictionResult:
    """Write the structures (by seed), scores and ranking of the target `name` into the existing folder `folder`.

    `earlier`: the ranking's entries of earlier predictions, whose files are in the folder already; those of the same seeds are
    replaced. `model`: what the model is called among several; None: it is the only one. `models`: the settings of the others.
    `pae_in_cif`: write aligned errors into ModelCIF files too. `save`: the arrays that the structures hold besides.
    """
    named = {} if model is None else {"model": model}
    replaced = {(model, seed) for seed in structures}
    kept = [entry for entry in earlier if (entry.get("model"), entry["seed"]) not in replaced]
    entries = [{name: entry[name] for name in _OF_PREDICTION if name in entry} for entry in kept]
    for seed, structure in structures.items():
        entry: dict[str, Any] = {**named, "seed": seed, "mean_plddt": round(structure.mean_plddt, 3), **_ptm(structure)}
        entries.append(entry)
        key = key_of(entry)
        text = structure_text(structure, file_format, Origin.of(entry, settings), pae_in_cif)
        (folder / f"{stem(key)}.{file_format}").write_text(text, encoding="utf-8")
        scores: dict[str, Any] = {"plddt": [round(float(p), 2) for p in structure.plddt]}
        if (error := structure.aligned_error) is not None:
            scores |= {"max_pae": round(float(error.pae.max()), 2), "pae": _matrix(error), **_ptm(structure)}
            if error.of_chains is not None:
                names = [chain.name for chain in structure.chains]
                scores |= score_entries(error.of_chains, structure.interfaces, names)
            (folder / pae_name(key)).write_text(pae_text(error), encoding="utf-8")
        if structure.contacts is not None:
            _write_contacts(folder / contacts_name(key), structure.contacts)
        if save is not None:
            entry["saved"] = write_arrays(folder, stem(key), structure.arrays, save)
        (folder / scores_name(key)).write_text(json.dumps(scores, allow_nan=False) + "\n", encoding="utf-8")
    called, score = _ranking(entries)
    entries.sort(key=lambda entry: (-score(entry), -entry["mean_plddt"], stem(key_of(entry))))
    if called == _MULTIMER_RANKING:
        order = [stem(key_of(entry)) for entry in entries]
        scores_by_name = {name: round(score(entry), 4) for name, entry in zip(order, entries, strict=True)}
        write_json(folder / _RANKING_DEBUG, {"iptm+ptm": scores_by_name, "order": order})
    made_with = {"settings": dict(settings)} if model is None else {"models": {**models, model: dict(settings)}}
    write_json(
        folder / RANKING,
        {
            "name": name,
            "ranked_by": called,
            "ranking": [{**entry, "structure": f"{stem(key_of(entry))}.{file_format}"} for entry in entries],
            **made_with,
            "evodsp_version": __version__,
        },
    )
    return PredictionResult(
        name, folder, file_format, {key_of(entry): entry["mean_plddt"] for entry in entries}, kept=False
    )


_OF_PREDICTION = ("model", "seed", "mean_plddt", "ptm", "iptm", "saved")
"""Keys of an entry of ranking.json, besides the name of the structure's file."""
_MULTIMER_RANKING = "0.8 ipTM + 0.2 pTM"


def _ranking(entries: Sequence[Mapping[str, Any]]) -> tuple[str, Callable[[Mapping[str, Any]], float]]:
    """Score by which predictions of a target are ranked, as AlphaFold and ColabFold do: its name and function."""
    if all("iptm" in entry for entry in entries):
        return _MULTIMER_RANKING, lambda entry: complex_ranking(float(entry["iptm"]), float(entry["ptm"]))
    return "mean pLDDT", lambda entry: float(entry["mean_plddt"])


def pae_text(error: AlignedError) -> str:
    """AlphaFold DB's JSON, a list of one entry. Errors in Å; row i holds the errors seen from residue i's frame.

    `max_predicted_aligned_error` is the end of the scale, not the matrix's maximum, which is `max_pae` in the scores.
    """
    entry = {"predicted_aligned_error": _matrix(error), "max_predicted_aligned_error": round(error.highest, 2)}
    return json.dumps([entry], separators=(",", ":"), allow_nan=False) + "\n"


def _matrix(error: AlignedError) -> list[list[float]]:
    """The errors with two decimals."""
    return np.round(error.pae.astype(np.float64), 2).tolist()


def _ptm(structure: PredictedStructure) -> dict[str, float]:
    """The entries of the JSON files; none for models without a PAE head."""
    if (error := structure.aligned_error) is None:
        return {}
    iptm = {} if error.of_chains is None else {"iptm": round(error.of_chains.iptm, 3)}
    return {"ptm": round(error.ptm, 3), **iptm}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Indented JSON, except that lists of numbers stay on one line."""
    text = json.dumps(value, indent=2, allow_nan=False)
    text = re.sub(r"\[\s*([\d\s.,eE+-]*?)\s*\]", lambda numbers: f"[{' '.join(numbers[1].split())}]", text)
    path.write_text(text + "\n", encoding="utf-8")


FAILURES = "failures.json"


@dataclass(frozen=True)
class RecordFailure:
    """A record without a result, or without a part of it."""

    name: str
    reason: str
    """One line: where, what was found, and the fix."""
    some_written: bool = False
    """Whether some of its seeds are finished and written, with the same inputs."""


@dataclass(frozen=True)
class Outcome:
    """The results and failures of all records."""

    results: list[PredictionResult]
    """The results in the order of the input."""
    failures: list[RecordFailure]

    @property
    def line(self) -> str:
        """For the log, for example '12 done, 3 kept, 1 failed'."""
        kept = sum(result.kept for result in self.results)
        return f"{len(self.results) - kept:,} done, {kept:,} kept, {len(self.failures):,} failed"


def none_usable(failures: Sequence[RecordFailure]) -> UserError:
    """The error of a run that has no result: the first record's, and how many there were."""
    records = len({failure.name for failure in failures})  # one fails once with each model
    others = f". None of the {records:,} records can be predicted" if records > 1 else ""
    return UserError(failures[0].reason + others)


def write_failures(output: Path, failures: Sequence[RecordFailure]) -> None:
    """Write `<output>/failures.json`; without failures, remove the file of an earlier run."""
    path = output / FAILURES
    if failures:
        with whole_file(path) as partial:
            write_json(partial, {"failures": [{"name": f.name, "reason": f.reason} for f in failures]})
    else:
        path.unlink(missing_ok=True)


def page_problem(page: str, make: Callable[[], object]) -> str | None:
    """Call `make`, which writes a page; None, or one line that says why it could not.

    A page shows results that are on disk already. Whatever goes wrong with it must not end the run and cost the next ones.
    """
    try:
        make()
    except Exception as error:
        code = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__} in {Path(code.filename).name}, line {code.lineno}: {error}"
        if isinstance(error, OSError) and error.strerror:  # a full disk needs no place in the code
            what = error.strerror
        return f"{page} could not be written ({what}); the results themselves are complete"
    return None


TABLE, BESIDE_TABLE = "predictions.csv", "predictions_evodsp.csv"
_COLUMNS = ("target", "rank", "model", "seed", "residues", "mean_plddt", "ptm", "iptm", "structure")


def write_batch_table(output: Path, outdated: Collection[str] = ()) -> Path:
    """Write the table of `result_folders`, also of earlier runs; returns its path.

    A predictions.csv that evodsp has not written is the user's: the table is then predictions_evodsp.csv.
    """
    path, text = output / TABLE, csv_text(_COLUMNS, _rows(result_folders(output, outdated)))
    if path.is_file():
        there = path.read_text(encoding="utf-8", errors="replace")
        if there == text:
            return path
        if there.partition("\n")[0] != text.partition("\n")[0]:
            path = output / BESIDE_TABLE
    write_text(path, text)
    return path


def _rows(folders: Sequence[Path]) -> Iterator[dict[str, object]]:
    """The lines. Folders without a complete result are left out."""
    for folder in folders:
        try:
            result, ranking = read_with_ranking(folder)
            residues = len(read_plddt(folder, result.best))
        except UserError:
            continue  # not a result of ours, or one that predict would refuse to keep
        for rank, entry in enumerate(ranking["ranking"], start=1):
            known = {name: entry[name] for name in _COLUMNS if name in entry}
            structure = f"{folder.name}/{entry['structure']}"
            yield {**known, "target": result.name, "rank": rank, "residues": residues, "structure": structure}


LOG = "predict.log"
Report = Callable[[str], None]
"""Takes one line of the log."""
_TIME = "%Y-%m-%d %H:%M:%S"


@contextmanager
def run_log(output: Path, words: Sequence[str], show: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line and adds it to the log, with the time. `words`: the command line, for the head.

    The file begins, or goes on, with the first line. A run that ends with an error, and leaves nothing else in `output`, leaves
    no log either, nor the folders that were made for it.
    """
    path = output / LOG
    created = [place for place in (path, output, *output.parents) if not place.exists()]
    with ExitStack() as stack:
        lines: list[Callable[[str], None]] = []

        def add(line: str) -> None:
            if not lines:
                output.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
                lines.append(partial(write_line, file.write))
                lines[0](f"# {time.strftime(_TIME)} evodsp {__version__}: evodsp {shlex.join(words)}")
            lines[0](f"{time.strftime(_TIME)} {line}")

        def say(line: str) -> None:
            show(line)
            add(line)

        try:
            yield say
        except BaseException as error:
            if lines:
                add(f"error: {error}" if isinstance(error, UserError) else f"ended by {type(error).__name__}")
            stack.close()
            _remove_unless_used(created)
            raise


def _remove_unless_used(created: Sequence[Path]) -> None:
    """Remove the log, the first of `created`, if it is alone in its folder, and then the empty ones of the folders above it."""
    if not created or created[0].name != LOG or not created[0].exists() or len(list(created[0].parent.iterdir())) > 1:
        return
    created[0].unlink()
    for folder in created[1:]:
        if any(folder.iterdir()):
            return
        folder.rmdir()
