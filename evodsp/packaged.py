"""The configs, synthetic proteins and batch scripts that come with evodsp, in a checkout and in an installed package
alike; and the config file of a run, for commands that use a part of it without running it.

A wheel holds them in evodsp/packaged/ (setup.py copies them there); a checkout has them in the folders of `_IN_CHECKOUT`.

A config may be a path, or the name of one that comes with evodsp: --config quickstart.

`evodsp slurm` writes the batch scripts, for users without a checkout.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from evodsp.config import started_with
from evodsp.errors import UserError
from evodsp.files import check_output_folder, whole_file
from evodsp.printing import quoted, show
from evodsp.reading.text_files import compose_yaml

Kind = Literal["configs", "data", "slurm"]

_IN_CHECKOUT: dict[Kind, str] = {"configs": "configs", "data": "data", "slurm": "scripts/examples/slurm"}


def packaged_folder(kind: Kind) -> Path:
    """The folder of the configs, of the data or of SLURM's batch scripts that came with this evodsp."""
    package = Path(__file__).parent
    installed = package / "packaged" / kind
    return installed if installed.is_dir() else package.parent / _IN_CHECKOUT[kind]


def packaged_config(named: Path) -> Path | None:
    """The packaged config with the name `named`: quickstart is configs/quickstart.yaml. None for a path, or for a file of
    the user's.

    Raises UserError for a name that is neither.
    """
    if named.name != str(named) or named.suffix or named.exists():
        return None
    folder = packaged_folder("configs")
    file = folder / f"{named}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise UserError(f"--config {named}: no such file, and not one of the configs that come with evodsp: {names}")
    return file


def packaged_data(path: str) -> str | None:
    """The path of the packaged file that a packaged config calls data/...; None for other values.

    None also if the working folder has that file, as a checkout's root has.
    """
    inside = Path(path)
    if inside.parts[:1] != ("data",) or inside.exists():
        return None
    return str(packaged_folder("data") / inside.relative_to("data"))


def where_packaged(path: Path) -> str:
    """For a message about a missing data/…: the place of the file that comes with evodsp, or an empty text."""
    found = packaged_data(str(path))
    return f"; the one that comes with evodsp is {found}" if found is not None and Path(found).exists() else ""


_OPTIONS = ("--config", "-c")


def read_run_config(config: Path | None) -> dict[str, Any]:
    """The content of a YAML file of `evodsp fit`, references resolved, with what follows from `init_from`; empty without one.

    A packaged config (`packaged_config`) is read with the paths of the packaged data.

    Raises UserError if the file cannot be read or is not a mapping.
    """
    if config is None:
        return {}
    packaged = packaged_config(config)
    content = _read(packaged or config)
    of_start = started_with(content.get("init_from"))
    if of_start and not (isinstance(model := content.get("model"), dict) and model.get("preset")):
        for name, value in of_start.items():
            *groups, last = name.split(".")
            group = content
            for part in groups:
                inner = group.get(part)
                group[part] = group = inner if isinstance(inner, dict) else {}
            group.setdefault(last, value)
    return content if packaged is None else _with_texts(content, lambda text: packaged_data(text) or text)


def with_packaged_configs(words: Sequence[str]) -> list[str]:
    """A command line of `evodsp fit` in which names of packaged configs are replaced by their files.

    Options that name the packaged data follow each of them, except those that the command line gives later.
    """
    found: list[str] = []
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if equals and option in _OPTIONS:
            found.append(option)
        elif place > 0 and words[place - 1] in _OPTIONS:
            value = word
        else:
            found.append(word)
            continue
        file = packaged_config(Path(value))
        found.append(value if file is None else str(file))
        later = {name.partition("=")[0].replace("-", "_") for name in words[place + 1 :]}
        data = () if file is None else ((name, packaged_data(text)) for name, text in _texts(_read(file)))
        found += [f"--{name}={path}" for name, path in data if path is not None and f"__{name}" not in later]
    return found


def _read(config: Path) -> dict[str, Any]:
    # This import is here so that the help of the commands does not wait for it.
    from omegaconf import OmegaConf

    compose_yaml(config)
    try:
        content = OmegaConf.to_container(OmegaConf.load(config), resolve=True)
    except Exception as error:  # from the part between ${ and }
        raise UserError(
            f"--config {config}: cannot be read ({quoted(error)}); check what is between ${{ and }}"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"--config {config}: not a YAML mapping of options; give a config of 'evodsp fit'")
    return {str(key): value for key, value in content.items()}


def _texts(content: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """The texts of a nested mapping, with their dotted names."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{above}{name}.")
        elif isinstance(value, str):
            yield f"{above}{name}", value


def _with_texts(content: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A nested mapping with its texts replaced."""
    return {
        name: _with_texts(value, change)
        if isinstance(value, Mapping)
        else change(value)
        if isinstance(value, str)
        else value
        for name, value in content.items()
    }


@dataclass(frozen=True)
class BatchScriptsConfig:
    """Folder of the batch scripts."""

    output: Path
    """Folder for fit.sbatch, build.sbatch and README.md, which explains them. It is made if it is missing."""
    overwrite: bool = False
    """Replace files of these names that have another content, such as a script that you changed."""


def write_batch_scripts(config: BatchScriptsConfig, words: list[str]) -> int:
    """Write the scripts, print their paths and return the exit code. `words`: the command line (not needed here).

    Raises UserError if a file has this name and another content, unless it may be replaced; nothing is written then.
    """
    check_output_folder(config.output)
    sources = [*sorted(packaged_folder("slurm").glob("*.sbatch")), packaged_folder("slurm") / "README.md"]
    for source in sources:
        target = config.output / source.name
        if not config.overwrite and target.exists() and target.read_bytes() != source.read_bytes():
            raise UserError(
                f"{target}: has another content than the {source.name} of this evodsp; choose another --output, or replace "
                "it with --overwrite true"
            )
    for source in sources:
        with whole_file(config.output / source.name) as partial:
            shutil.copyfile(source, partial)
            partial.chmod(0o755 if source.suffix == ".sbatch" else 0o644)
        show(str(config.output / source.name))
    return 0
