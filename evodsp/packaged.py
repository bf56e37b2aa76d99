"""The configs, synthetic proteins and batch scripts that come with evodsp, in a checkout and in an installed package alike.

A wheel holds them in evodsp/packaged/ (setup.py copies them there); a checkout has them in the folders of `_IN_CHECKOUT`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from evodsp.errors import UserError

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
