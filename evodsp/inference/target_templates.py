"""Templates for a target: found in the search results beside its alignments, read from a folder of structures."""

from __future__ import annotations

import hashlib
from pathlib import Path

from evodsp.config import FeatureConfig
from evodsp.data.sources.chain_folder import SEARCH_RESULTS, search_result_files
from evodsp.data.templates.features import TemplateFeatures
from evodsp.data.templates.source import FoundTemplates, TemplateSource
from evodsp.errors import UserError
from evodsp.inference.config import PredictConfig
from evodsp.inference.targets import Target

_STRUCTURES = (".cif", ".cif.gz", ".pdb", ".pdb.gz")


def template_source(config: PredictConfig, features: FeatureConfig, checkpoint: Path) -> TemplateSource | None:
    """The source of templates; None without --templates.

    Raises UserError if the model takes no templates, the folder holds no structure, or a file is missing or broken.
    """
    if config.templates is None:
        return None
    if features.max_templates == 0:
        raise takes_no_templates(config, checkpoint)
    if config.templates.is_file():
        raise UserError(
            f"{config.templates}: is a file, but --templates takes the folder of structures; give the folder"
        )
    if not config.templates.is_dir():
        raise UserError(f"{config.templates}: no such folder of template structures; check --templates")
    if not any(path.name.endswith(_STRUCTURES) for path in config.templates.iterdir()):
        raise UserError(
            f"{config.templates}: no structure (<pdbid>.cif or .pdb, gzipped or not) in this folder; check --templates"
        )
    return TemplateSource.open(config.templates, config.latest_template, config.obsolete)


def takes_no_templates(config: PredictConfig, checkpoint: Path) -> UserError:
    """The error for --templates with a model that was trained without templates."""
    return UserError(
        f"{checkpoint}: its model takes no templates, but --templates is {config.templates}; "
        "leave it out, or use a model with templates (of the published models, model_1 and model_2)"
    )


def find_templates(source: TemplateSource | None, target: Target, most: int) -> tuple[TemplateFeatures, str]:
    """Up to `most` templates of the target, best first, and a line for the log that accounts for every hit.

    Raises UserError, or FileFormatError with file and line, if a search result or a structure is broken or of another chain.
    """
    if source is None:
        return TemplateFeatures.none(len(target.query)), "templates: none"
    folder = target.folder
    if folder is None:
        return TemplateFeatures.none(len(target.query)), "templates: none; no folder with search results of this record"
    found = source.find(folder, target.query)
    used = found.features.select(slice(most))
    return used, _line(found, used, folder)


def _line(found: FoundTemplates, used: TemplateFeatures, folder: Path) -> str:
    if not search_result_files(folder):
        return f"templates: none; no search result ({SEARCH_RESULTS}) in {folder}"
    taken = f"the best {len(used)} are used: {', '.join(used.names)}" if len(used) else "none is used"
    return f"templates: {found.log_line.removeprefix(f'{found.name}: ')}; {taken}"


def template_digest(templates: TemplateFeatures) -> str:
    """A fingerprint of everything that the model reads of the templates; empty without templates."""
    if not len(templates):
        return ""
    total = hashlib.blake2b(repr(templates.names).encode(), digest_size=16)
    for values in (templates.aatype, templates.positions, templates.mask, templates.sum_probs):
        total.update(values.tobytes())
    return total.hexdigest()
