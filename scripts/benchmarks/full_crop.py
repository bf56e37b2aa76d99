"""One step of a recipe's config at its full crop, on a CPU: does it run, how long does it take, how much memory does it need?

    python -m scripts.benchmarks.full_crop --data ../shared/data [--config af2_initial] [--blocks 2] [--recycles 3]

`--data`: folder with alignments/ and mmcif_files/ of 102m and 1k1a. The step has one sample of 1k1a_A (241 residues, padded
to the crop) with one template. Widths, crop, MSA rows and losses are the config's; the Evoformer and the extra-MSA stack have
`--blocks` blocks, and the sample is computed `--recycles` + 1 times. The seconds are wall-clock: of the step, and of the whole
command, with its start and its checkpoint. Memory is the process's largest resident set.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from evodsp.report.curve import read_curve
from scripts.benchmarks.real_finetuning import SEARCHED, prepare

ROOT = Path(__file__).parents[2]


def config_text(name: str, data: Path, folder: Path) -> str:
    """The config, with one real chain in place of OpenProteinSet."""
    content = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    content.pop("init_from", None)
    content["data"] |= {
        "alignment_dir": str(folder / "alignments"),
        "structure_dir": str(data / "mmcif_files"),
        "template_structure_dir": str(data / "mmcif_files"),
        "train_chains": [SEARCHED],
        "sampling": "uniform",
        "chain_data_cache": None,
        "distillation": {},
        "num_workers": 0,
        "time_limit": None,
    }
    return yaml.safe_dump(content)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with alignments/ and mmcif_files/")
    parser.add_argument("--config", default="af2_initial", choices=("af2_initial", "af2_finetune", "af2_finetune_ptm"))
    parser.add_argument("--blocks", type=int, default=2, help="blocks of the Evoformer and of the extra-MSA stack")
    parser.add_argument("--recycles", type=int, default=3, help="recycling iterations before the last one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(options.data.resolve(), folder / "alignments")
        (folder / "run.yaml").write_text(config_text(options.config, options.data.resolve(), folder))
        command = [sys.executable, "-m", "evodsp", "fit", f"--config={folder}/run.yaml", f"--output={folder}/run",
                   "--global_batch=1", "--trainer.max_steps=1", "--trainer.accelerator=cpu", "--trainer.precision=32-true",
                   "--trainer.log_every_n_steps=1",
                   f"--model.evoformer.blocks={options.blocks}", f"--model.extra_msa.blocks={options.blocks}",
                   f"--data.train.recycles={options.recycles}", "--data.train.uniform_recycling=false"]  # fmt: skip
        begun = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        seconds = time.monotonic() - begun
        if done.returncode:
            return done.returncode
        (row,) = read_curve(folder / "run" / "curve.csv").values()
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    step, loss = float(row["train/step_seconds"]), float(row["train/loss"])
    print(
        f"{options.config}, {options.blocks} blocks, {options.recycles + 1} passes, one thread: step {step:.0f} s, command "
        f"{seconds:.0f} s, {memory:.1f} GiB; loss {loss:.1f}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
