"""`evodsp slurm`: writes the batch scripts that come with evodsp, for users without a checkout. Its import costs nothing."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from evodsp.errors import UserError
from evodsp.files import whole_file
from evodsp.output import check_output_folder
from evodsp.packaged import packaged_folder
from evodsp.printing import show


@dataclass(frozen=True)
class BatchScriptsConfig:
    """Where to write the batch scripts."""

    output: Path
    """Folder for fit.sbatch, build.sbatch and README.md, which explains them. It is made if it is missing."""
    overwrite: bool = False
    """Replace files of these names that have another content, such as a script that you changed."""


def run(config: BatchScriptsConfig, words: list[str]) -> int:
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
