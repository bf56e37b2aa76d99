"""Reads the config file of a run, for commands that use a part of it without running it.

A config may be a path, or the name of one that comes with evodsp: --config quickstart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evodsp.errors import UserError
from evodsp.packaged import packaged_config, packaged_data
from evodsp.reading.quoting import quoted
from evodsp.reading.yaml_files import compose_yaml

_OPTIONS = ("--config", "-c")


def read_run_config(config: Path | None) -> dict[str, Any]:
    """The content of a YAML file of `evodsp fit`, references resolved; empty without a file.

    A packaged config (`packaged_config`) is read with the paths of the packaged data.

    Raises UserError if the file cannot be read or is not a mapping.
    """
    if config is None:
        return {}
    packaged = packaged_config(config)
    content = _read(packaged or config)
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
