"""`evodsp.save_pretrained` and `evodsp.from_pretrained`: a model as a model folder, and back; also from the hub.

The card of a model folder, `README.md`, says what the model is, how it is used, and the data, recipe and scores of its run.
All of it is read from the files that the run wrote: its settings (`config.yaml`), its learning curve (`curve.csv`) and its
bar (`baseline.json`). Of paths only the last part is told: a card is read by strangers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.model.alphafold import AlphaFold
from evodsp.printing import counted
from evodsp.reading.text_files import lines_of
from evodsp.report.runs import Run, read_runs
from evodsp.version import __version__
from evodsp.weights.checkpoint import checkpoint_entries, is_parameter_file, load_model, read_checkpoint
from evodsp.weights.parameter_file import (
    FILES,
    check_new_folder,
    fetched,
    is_name,
    is_pretrained,
    located,
    write_pretrained,
)

_HEAD = """---
library_name: evodsp
tags:
- biology
- protein-structure-prediction
---
"""
_USE = """## Use

```bash
evodsp predict proteins.fasta --alignments alignments --checkpoint FOLDER --output predictions
```

```python
import evodsp

model = evodsp.from_pretrained("FOLDER")
prediction = evodsp.predict("MKTAYIAKQR", checkpoint=model)
```

FOLDER is this folder, or `hf:organisation/name` of its repository on the Hugging Face hub."""
_DATA = (
    *(
        "data.train_chains",
        "data.validation_chains",
        "data.alignment_dir",
        "data.structure_dir",
        "data.store",
        "data.index",
    ),
    *("data.filters.", "data.sampling", "data.distillation.chains", "data.distillation.alignment_dir"),
    *("data.distillation.store", "data.template_structure_dir", "data.template_chains", "data.max_template_date"),
)
"""Settings that say what was learnt from; a name that ends in a dot is a group."""
_RECIPE = (
    *("seed", "init_from", "max_samples", "trainer.max_steps", "trainer.precision", "matmul_precision"),
    *("trainer.gradient_clip_val", "model.ema_decay", "model.freeze", "model.optimizer.", "model.loss.", "data.train."),
)
"""Settings that say how."""
_NAMES = {
    "loss": "loss",
    "lddt_ca": "lDDT-CA (0 to 1)",
    "interface_lddt_ca": "lDDT-CA between chains (0 to 1)",
    "gdt_ts": "GDT-TS (0 to 1)",
    "tm_score": "TM-score (0 to 1)",
    "rmsd": "RMSD of CA (Å)",
    "plddt": "pLDDT (0 to 100)",
    "plddt_too_high": "pLDDT minus 100 times lDDT-CA",
}
"""Scores in the columns val/… of the learning curve."""
JUDGED = "## Before and after fine-tuning"
"""The heading of the section that `evodsp score --before --after` writes for a card."""
_FOLDERS = re.compile(r"(?<![^\s'\"\[])(?!hf:)[^\s,'\"\[\]]*/(?=[^\s,'\"\[\]/])")
"""The folders of a path within a text."""
_LONGEST_VALUE = 100
_CHECKPOINTS = "checkpoints"
_NOT_USED = "null", "[]", "0.0"
_COUNTS = "global_step", "samples_per_step"


def model_card(
    name: str,
    model: AlphaFold,
    path: Path | None = None,
    checkpoint: Mapping[str, Any] | None = None,
    raw: bool = False,
    judgement: Path | None = None,
) -> str:
    """The text of `README.md`. `name`: the model's, its heading. `judgement`: a file with a section more.

    path: the file that the model was loaded from; the run whose folder it lies in tells data, recipe and scores. checkpoint:
    its dictionary, if it is evodsp's. raw: whether its raw weights are taken instead of their moving average.

    Raises UserError for a damaged file of the run, and for a file without such a section.
    """
    run, is_multimer = None if path is None else _run_of(path), model.config.arrangement == "multimer"
    return _HEAD + "\n".join(
        [
            f"# {plain(name)}",
            "",
            *_what(model, path, checkpoint, raw),
            "",
            _USE + (" A complex is written with `:` between its chains." if is_multimer else ""),
            "",
            *(_of_run(run, checkpoint or {}, raw) if run is not None else _without_run(path)),
            "",
            *([] if judgement is None else _judged(judgement)),
        ]
    )


def _judged(path: Path) -> list[str]:
    """The lines of a section. Raises UserError if the file does not begin with it."""
    found = lines_of(path)
    if found[:1] != [JUDGED]:
        raise UserError(
            f"{path}: does not begin with '{JUDGED}'; give the judgement.md of `evodsp score --before --after`"
        )
    return [*found, ""]


def _run_of(path: Path) -> Run | None:
    """The run that wrote a checkpoint, if its folder is around it."""
    folder = path.absolute().parent.parent
    if path.parent.name != _CHECKPOINTS or not (folder / "curve.csv").is_file():
        return None
    return read_runs([folder])[0]


def _what(model: AlphaFold, path: Path | None, checkpoint: Mapping[str, Any] | None, raw: bool) -> Iterable[str]:
    chains = (
        "complexes (AlphaFold-Multimer's" if model.config.arrangement == "multimer" else "single chains (AlphaFold2's"
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    yield (
        f"A model that predicts structures of {chains} arrangement), with {count:,} parameters, "
        f"{model.config.evoformer.blocks} Evoformer blocks and {'' if model.config.templates.enabled else 'no '}templates. "
        f"Written by evodsp {__version__}."
    )
    if path is not None:
        kind = (
            "raw weights"
            if raw or (checkpoint or {}).get("ema_state_dict") is None
            else "moving average of the weights"
        )
        of = "" if checkpoint is None else f": the {kind}"
        yield f"From the file {plain(path.name)}{of}."


def _without_run(path: Path | None) -> Iterable[str]:
    yield "## Data, recipe and scores"
    yield ""
    yield "No run's folder was beside the weights when this card was written, so it says nothing of them."
    if path is not None and path.name.startswith("params_model_"):
        yield (
            "A file of this name is of AlphaFold2's published parameters: DeepMind, licence CC BY 4.0, which asks for their "
            "name to be kept."
        )


def _of_run(run: Run, checkpoint: Mapping[str, Any], raw: bool) -> Iterable[str]:
    excludes = run.settings.get("data.exclude_like", "null") != "null"
    data = _chosen(run.settings, (*_DATA, *(["data.exclude_like", "data.exclude_identity"] if excludes else [])))
    yield from ("## Data", "", *_table("setting", data), "")
    steps, samples = (value if type(value := checkpoint.get(key)) is int else None for key in _COUNTS)
    most_steps, most_samples = (run.settings.get(name, "") for name in ("trainer.max_steps", "max_samples"))
    are_both = most_steps.isdigit() and most_samples.isdigit()
    is_reached = not are_both or int(most_steps) * (samples or 1) >= int(most_samples)
    recipe = _chosen(run.settings, [name for name in _RECIPE if is_reached or name != "max_samples"])
    yield from ("## Recipe", "", *_table("setting", recipe), "")
    if steps is not None:
        each = "" if samples is None else f" of {counted(samples, 'sample')} each"
        yield from (f"The weights are those after {counted(steps, 'step')}{each}.", "")
    yield from ("## Scores", "", *_scores(run, steps, raw))


def _scores(run: Run, steps: int | None, raw: bool) -> Iterable[str]:
    """The last validation up to the checkpoint's step. A row of the curve has the number of the step before."""
    scored = {
        step + 1: {shown: f"{float(row[f'val/{name}']):.4g}" for name, shown in _NAMES.items() if f"val/{name}" in row}
        for step, row in sorted(run.rows.items())
        if steps is None or step < steps
    }
    scored = {step: row for step, row in scored.items() if row}
    if not scored:
        yield "The run has no validation scores up to these weights."
        return
    step, row = next(reversed(scored.items()))
    yield f"Means over the validation chains after {counted(step, 'step')}."
    if raw and run.settings.get("model.ema_decay", "null") != "null":
        yield "They are scores of the moving average, not of these raw weights."
    yield from ("", *_table("score", row))
    if run.overlap:
        yield from ("", f"**Warning:** {plain(run.overlap)}.")
    if (bar := run.baseline) is not None:
        yield from ("", f"For comparison, {bar.name} scores an lDDT-CA of {bar.lddt_ca:.3f} on these chains.")


def _chosen(settings: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The settings of these names, and those of the groups whose names end in a dot, as far as they are used."""
    found: dict[str, str] = {}
    for name in names:
        group = name if name.endswith(".") else f"{name}."
        found |= {key: value for key, value in settings.items() if key == name or key.startswith(group)}
    return {key: value for key, value in found.items() if value not in _NOT_USED}


def _table(what: str, rows: Mapping[str, str]) -> Iterable[str]:
    yield from (f"| {what} | value |", "|---|---|")
    for name, value in rows.items():
        yield f"| {plain(name)} | {plain(_shown(value))} |"


def _shown(value: str) -> str:
    """A value without the folders of paths, and shortened."""
    value = _FOLDERS.sub("", value)
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}…"


def plain(text: str) -> str:
    """A text without the folders of paths, that no reader of Markdown takes for a command."""
    return re.sub(r"([\\`*|<>\[\]#])", r"\\\1", _FOLDERS.sub("", " ".join(text.split())))


def from_pretrained(source: str | Path, revision: str | None = None, layers: Collection[str] = ()) -> AlphaFold:
    """The model of a folder that `save_pretrained` wrote, or of the Hugging Face hub; on the CPU, in evaluation mode.

    source: the folder, or the name of a repository on the hub, such as organisation/name. A folder of this name counts first.
    revision: a branch, a tag or a commit of the repository; None: the newest. The hub needs huggingface_hub
        (pip install 'evodsp[hub]').
    layers: as in `load_model`: sub-layers of your own that the model has.

    Raises UserError if there is no such model, or its files are damaged or do not fit one another.

        model = evodsp.from_pretrained("organisation/name", revision="v1.0")
        evodsp.predict("MKTAYIAKQR", checkpoint=model)
    """
    folder = Path(source)
    if folder.is_dir():
        if revision is not None:
            raise UserError(f"{source}: a folder of this machine has no revision '{revision}'; leave it out")
    elif is_name(str(source)):
        folder = fetched(str(source), revision)
    elif revision is not None:
        raise UserError(f"{source}: a revision is that of a model on the hub; write organisation/name as its name")
    else:
        folder = located(source)
    if not folder.is_dir() or not is_pretrained(folder):
        what = "a folder without them" if folder.is_dir() else "a file" if folder.exists() else "no such folder"
        raise UserError(
            f"{source}: {what}; give a folder of {' and '.join(FILES[:2])}, or organisation/name of the hub; other files "
            "are read by evodsp.load_model"
        )
    return load_model(folder, layers=layers)


def save_pretrained(
    model: AlphaFold, folder: str | Path, checkpoint: str | Path | None = None, overwrite: bool = False
) -> None:
    """Write a model folder: `model.safetensors`, `config.json` and a model card, `README.md`.

    checkpoint: the file that the model was loaded from. If it lies in the folder of its run, the card tells the run's data,
    recipe and scores. overwrite: replace these files where they exist.

    Raises UserError if the folder holds a model already, or a weight is not finite.

        evodsp.save_pretrained(evodsp.load_model(path), "my-model", checkpoint=path)
    """
    folder = Path(folder)
    check_new_folder(folder, overwrite)
    write_folder(model, folder, None if checkpoint is None else Path(checkpoint))


def write_folder(
    model: AlphaFold, folder: Path, path: Path | None, raw: bool = False, judgement: Path | None = None
) -> int:
    """Write a model's folder; returns the number of arrays. `path`: the file that it was loaded from. `raw`, `judgement`: as
    for `model_card`."""
    own = path is not None and not is_parameter_file(path)
    entries = read_checkpoint(path) if own and path else None
    card = model_card(folder.absolute().name, model, path, entries, raw, judgement)
    weights = model.state_dict()
    write_pretrained(folder, checkpoint_entries(model.config, model.trained_features), weights, card)
    return len(weights)
