"""`evodsp.parallel` as a library of its own: it needs torch, and nothing else of what evodsp needs."""

from __future__ import annotations

import subprocess
import sys

# Runs in a process of its own, in which the packages named in the arguments cannot be imported.
PROGRAM = """
import sys

for name in sys.argv[1:]:
    sys.modules[name] = None  # an import fails, and `find_spec`, which torch asks, finds nothing

import torch
import torch.distributed as dist
import evodsp.parallel as parallel

for name in set(parallel.__all__) - {"dropout"}:
    getattr(parallel, name)

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = parallel.init_mesh(sequence=1)
x = parallel.split(torch.ones(2, 3, 4, requires_grad=True), 1, mesh)
y = parallel.gather(parallel.switch(x, 1, 2, 3, mesh), 2, 4, mesh)
parallel.total(y, mesh).sum().backward()
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
parallel.parallelize(model, mesh, "time space channel", {"0": "time", "1": "space"})
model(torch.ones(2, 3, 4)).sum().backward()
parallel.average_gradients(model.parameters(), mesh)

del sys.modules["numpy"]
from evodsp.rng import Draws
parallel.dropout(x, 0.5, torch.arange(2)[:, None], Draws.root(0))
print(*sorted(module for module in sys.modules if module.startswith("evodsp.") and "parallel" not in module))
"""
ABSENT = (
    "lightning", "pytorch_lightning", "torchmetrics", "Bio", "gemmi", "jaxtyping", "beartype", "omegaconf", "jsonargparse",
    "yaml", "rich", "tensorboard", "matplotlib", "numpy",
)  # fmt: skip


def test_it_needs_torch_only() -> None:
    """Catches an import of a package that only proteins, settings or training need, or of their modules. Only `dropout` may
    need NumPy."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, *ABSENT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "evodsp.errors evodsp.printing evodsp.rng evodsp.version\n"
