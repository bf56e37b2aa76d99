"""Puts configs/ and data/ into the wheel, for `evodsp fit --config quickstart` outside of a checkout.

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
        for kind in ("configs", "data"):
            shutil.copytree(kind, Path(self.build_lib) / "evodsp" / "packaged" / kind, dirs_exist_ok=True)


setup(cmdclass={"build_py": WithConfigsAndData})
