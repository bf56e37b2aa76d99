"""Puts configs/, data/ and the batch scripts into the wheel, for `evodsp fit --config quickstart` outside of a checkout.

The rest of the build is described in pyproject.toml.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigsAndData(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout has them
            return
        unpacked = shutil.ignore_patterns("*.sh")  # what tries the batch scripts without a cluster
        for folder in (Path("configs"), Path("data"), Path("scripts/examples/slurm")):
            shutil.copytree(
                folder, Path(self.build_lib) / "evodsp" / "packaged" / folder.name, dirs_exist_ok=True, ignore=unpacked
            )


setup(cmdclass={"build_py": WithConfigsAndData})
