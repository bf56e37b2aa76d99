"""Puts configs/, data/ and the batch scripts into the wheel, for `evodsp fit --config quickstart` outside of a checkout.

Makes the links of README absolute.

The rest of the build is described in pyproject.toml.
"""

from __future__ import annotations

import re
import runpy
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


def readme() -> str:
    """README for a package index, which has no files beside it. As it is while the repository has no address."""
    text, known = Path("README.md").read_text(encoding="utf-8"), runpy.run_path("evodsp/version.py")
    if known["REPOSITORY"]:
        for opening, kind in ((r'!\[[^\]]*\]\(|src(?:set)?="', "raw"), (r'\]\(|href="', "blob")):
            text = re.sub(
                f"({opening})(?!https?:|#)", rf"\1{known['REPOSITORY']}/{kind}/v{known['__version__']}/", text
            )
    return text


setup(
    cmdclass={"build_py": WithConfigsAndData},
    long_description=readme(),
    long_description_content_type="text/markdown",
)
