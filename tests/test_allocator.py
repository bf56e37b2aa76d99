"""What becomes of memory when tensors are freed (`evodsp.allocator`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evodsp.allocator import HUGE_PAGES, give_large_tensors_back

PROGRAM = """
import os, sys
from pathlib import Path
from evodsp.allocator import give_large_tensors_back
if sys.argv[1] != "never":
    assert give_large_tensors_back(Path(sys.argv[1]))
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
import torch

def resident():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) // 1024

def tensor(mib):
    return torch.ones(mib << 18)

tensor(24)  # glibc takes blocks of up to this size from its heap now
before = resident()
kept, large = [], []
for _ in range(12):
    large.append(tensor(10))
    kept.append(torch.ones(1000))  # on top of it
most = resident()
large.clear()
print(most - before, resident() - before)
"""


def mib(argument: str) -> tuple[int, int]:
    """How much the memory of a process grew with 12 tensors of 10 MiB, and how much is left of that after they are freed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "THP_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], env={**clean, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    most, left = map(int, done.stdout.split())
    return most, left


def huge_pages(tmp_path: Path, says: str) -> Path:
    file = tmp_path / "enabled"
    file.write_text(says)
    return file


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other C libraries")
def test_large_tensors_are_given_back_between_small_ones_that_stay(tmp_path: Path) -> None:
    """Where nothing is set, glibc keeps them all: the premise of the setting."""
    most, left = mib("never")
    assert most >= 115
    assert left >= 100
    most, left = mib(str(huge_pages(tmp_path, "always [madvise] never\n")))
    assert most >= 115
    assert left <= 15


@pytest.mark.parametrize("says", ["always madvise [never]\n", ""])
def test_without_huge_pages_nothing_changes(tmp_path: Path, says: str) -> None:
    """Small pages would take half as much time again."""
    assert not give_large_tensors_back(huge_pages(tmp_path, says))
    assert not give_large_tensors_back(tmp_path / "missing")


@pytest.mark.parametrize(
    "chosen", [{"MALLOC_TRIM_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}]
)
def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert not give_large_tensors_back(huge_pages(tmp_path, "[always] madvise never\n"))
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ


def test_each_command_does_it() -> None:
    """Before it imports PyTorch."""
    program = (
        "import os, sys; from evodsp.cli import main\nmain(['--version'])\n"
        "print(os.environ.get('THP_MEM_ALLOC_ENABLE', '0'), 'torch' in sys.modules)"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "THP_"))}
    done = subprocess.run([sys.executable, "-c", program], env=clean, capture_output=True, text=True)
    has = HUGE_PAGES.is_file() and "[never]" not in HUGE_PAGES.read_text()
    assert done.stdout.splitlines()[-1] == f"{int(has)} False"
