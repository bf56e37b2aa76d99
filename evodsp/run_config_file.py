"""Reads the config file of a run, for the commands that take a part of it without being that run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evodsp.errors import UserError


def read_run_config(config: Path | None) -> dict[str, Any]:
    """The content of a YAML file of `evodsp fit`, references resolved; empty without a file.

    Raises UserError if the file cannot be read or is not a mapping.
    """
    if config is None:
        return {}
    # Here, so that the help of the commands does not wait for it.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        content = OmegaConf.to_container(OmegaConf.load(config), resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(
            f"--config {config}: cannot be read ({' '.join(str(error).split())}); check the path"
        ) from error
    if not isinstance(content, dict):
        raise UserError(f"--config {config}: not a YAML mapping of options; give a config of 'evodsp fit'")
    return {str(key): value for key, value in content.items()}
