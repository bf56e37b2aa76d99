"""The names that `import evodsp` offers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import evodsp


def test_every_public_name_can_be_imported() -> None:
    """A name in `__all__` that nobody finds, one that is missing there, or a star import that fails."""
    namespace: dict[str, object] = {}
    exec("from evodsp import *", namespace)
    assert set(evodsp.__all__) <= namespace.keys()
    assert set(evodsp.__all__) == {
        "AlphaFold", "ModelConfig", "Prediction", "embed", "fit", "from_pretrained", "load_deepmind", "load_model",
        "load_openfold", "metrics", "parallel", "predict", "save_pretrained", "__version__",
    }  # fmt: skip
    assert dir(evodsp) == sorted(evodsp.__all__)
    assert all(name in (evodsp.__doc__ or "") for name in evodsp.__all__ if name[0] != "_")
    with pytest.raises(AttributeError, match="no attribute 'alphafold'"):
        evodsp.alphafold  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    """`evodsp --help` that takes seconds."""
    code = "import sys, evodsp; print(sorted({'torch', 'numpy', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_threads_wait_as_in_the_commands() -> None:
    """Passes from Python that take seconds on a busy machine, and the command's a tenth; a user's setting that is lost."""
    code = "import os, evodsp; print(os.environ['OMP_WAIT_POLICY'])"
    for own, found in ({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | own
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout == f"{found}\n"
