"""What it saves and costs to leave sub-layers out of all blocks, of the Evoformer and of the extra-MSA stack: a table.

    python -m scripts.benchmarks.layers OUTPUT.csv                    what is counted: a minute or two a row
    python -m scripts.benchmarks.layers OUTPUT.csv --runs FOLDER      and lDDT-CA of the quickstart's validation chains: hours

Counted is AlphaFold2's model in fine-tuning (384 residues, 512 rows, 5,120 extra rows), one sample, forward and backward pass
with every block recomputed, stacks recorded as CUDA graphs, by the planner: launches and memory on one H200; MiB that each of 8
ranks communicates; seconds of a pass with gradients on 1 and on 8. `--runs` trains the quickstart for `--steps` steps with each
of `--seeds` seeds. What a run has trained already it does not train again, so the program may be stopped and started.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evodsp.config import ALPHAFOLD2, MULTIMER, LossConfig, ModelConfig
from evodsp.model.recomputation import Recomputed
from evodsp.planner.device import Device, Links, load_device, load_link
from evodsp.planner.mesh import TracedPass, Training, estimate, traced
from evodsp.planner.program import SampleSizes
from evodsp.report.runs import read_runs

from .tables import write_csv

RANKS = 8
FINE_TUNING = SampleSizes(residues=384, clusters=508, extra=5120, templates=4)


def without(*names: str) -> tuple[str, ...]:
    """AlphaFold2's sub-layers without some."""
    return tuple(name for name in ALPHAFOLD2 if name not in names)


def cases() -> dict[str, tuple[str, ...]]:
    """The sub-layers of a block of each row."""
    single = {f"no {name}": without(name) for name in ALPHAFOLD2}
    return {
        "all": ALPHAFOLD2,
        **single,
        "no triangle attention": without("attention_starting", "attention_ending"),
        "no triangle multiplication": without("triangle_outgoing", "triangle_incoming"),
        "outer_product_mean first": MULTIMER,
    }


def counted(
    layers: tuple[str, ...], model: ModelConfig, sizes: SampleSizes, device: Device, links: Links
) -> dict[str, Any]:
    """The planner's columns of a row."""
    stacks = {name: dataclasses.replace(getattr(model, name), layers=layers) for name in ("evoformer", "extra_msa")}
    training = Training(dataclasses.replace(model, **stacks), LossConfig(), sizes, graphs=True)
    recomputed = Recomputed(model.evoformer.blocks)

    def on(ranks: int) -> Any:
        passed = TracedPass.of(traced(training, ranks, recomputed), training, device, ranks)
        return estimate(training, passed, recomputed, 1, ranks, device, links)

    alone, shared = on(1), on(RANKS)
    return {
        "parameters": alone.memory.weights // 6,  # 4 bytes, and 2 of the copy in half precision
        "launches": alone.one.launches,
        "activations_gib": round(alone.memory.activations / 2**30, 2),
        "pass_s": round(alone.one.total, 3),
        f"mib_of_{RANKS}_ranks": round(shared.one.bytes / 2**20),
        f"calls_of_{RANKS}_ranks": shared.one.calls,
        f"pass_s_of_{RANKS}_ranks": round(shared.one.total, 3),
    }


def trained(layers: tuple[str, ...], folder: Path, seed: int, steps: int, words: Sequence[str] = ()) -> float:
    """lDDT-CA of the validation chains after `steps` steps of the quickstart. `words`: further options of `evodsp fit`."""
    found = _curve(folder)
    if max(found, default=0) < steps - 1:  # the last step of 800 is called 799
        listed = f"[{', '.join(layers)}]"
        command = [sys.executable, "-m", "evodsp", "fit", "--config", "quickstart", "--output", str(folder)]
        # A run validates at the end of its epochs, so the whole run is one.
        command += ["--trainer.max_steps", str(steps), "--data.samples_per_epoch", str(steps), "--seed", str(seed)]
        command += ["--model.evoformer.layers", listed, "--model.extra_msa.layers", listed, *words]
        if (folder / "checkpoints" / "last.ckpt").exists():
            command += ["--ckpt_path", "last"]
        subprocess.run(command, check=True)
        found = _curve(folder)
    return found[max(found)]


def _curve(folder: Path) -> dict[int, float]:
    """lDDT-CA by step."""
    if not (folder / "curve.csv").exists():
        return {}
    return dict(zip(*read_runs([folder])[0].points("val/lddt_ca"), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="CSV file to write, after each row")
    parser.add_argument("--runs", type=Path, help="folder of the training runs; without it none are trained")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--only", nargs="*", help="names of rows")
    parser.add_argument("--preset", default="model_1", help="the model that is counted")
    arguments = parser.parse_args()
    device = load_device("h200")
    links = Links(load_link(device.inside), load_link(device.across), device.gpus_per_node)
    rows: list[dict[str, Any]] = []
    for name, layers in cases().items():
        if arguments.only and name not in arguments.only:
            continue
        row = {"layers": name, **counted(layers, ModelConfig.preset(arguments.preset), FINE_TUNING, device, links)}
        if arguments.runs is not None:
            folders = [arguments.runs / f"{name.replace(' ', '_')}_{seed}" for seed in range(arguments.seeds)]
            scores = [trained(layers, folder, seed, arguments.steps) for seed, folder in enumerate(folders)]
            row |= {"lddt_ca": round(statistics.fmean(scores), 4)}
            row |= {f"lddt_ca_{seed}": round(score, 4) for seed, score in enumerate(scores)}
        rows.append(row)
        write_csv(arguments.output, rows)


if __name__ == "__main__":
    main()
