"""The checks of `evodsp selftest`: what runs on one device, and what needs several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evodsp.packaged import packaged_folder

_RANKS = ("evodsp.selftest.ranks",)
GLOBAL_BATCH = 2
"""Samples of a training step, the same on every mesh."""
_FIRST = 5
"""Steps whose losses have to be equal. Each step amplifies rounding: on a CPU two ranks differ from one by 2e-6 in the fifth
step and by 1.4e-4 in the tenth, fsdp2 from replicated parameters by 2e-6 and 2.6e-3; in float64 by 7e-8 and 0 in the tenth.
"""


@dataclass(frozen=True)
class Check:
    """A command that checks something."""

    name: str
    words: tuple[str, ...]
    """The words after `python -m`."""
    ranks: int = 1
    """Number of processes that run it together; 0: one process that is no rank."""
    after: tuple[Check, ...] = ()
    """The checks whose files it reads."""


class Suite:
    """The checks of a machine, and the folder in which they leave files for each other."""

    def __init__(self, device: str, available: int, work: Path, jobs: int) -> None:
        self.device, self.available, self.work, self.jobs = device, available, work, jobs

    def kernels(self) -> list[Check]:
        """The check that runs before all others: by several processes, it compiles what the others need too."""
        processes = 2 * self.jobs if self.jobs > 1 else 1
        return [self._ranks("every kernel equals its formula", "kernels", str(processes))]

    def one_device(self) -> list[Check]:
        """The checks for which one device is enough; independent ones stand first."""
        first = self._fit("ten training steps, (data, sequence) = (1, 1)", "1_1")
        half = self._fit("the same in bf16-mixed", "bf16", "--trainer.precision", "bf16-mixed")
        zero1 = self._fit("the same with zero1", "zero1", "--parallel.parameters", "zero1")
        five = self._fit("five steps", "resumed", steps=5)
        resumed = self._fit("resumed for five more", "resumed", "--ckpt_path", "last", after=(five,))
        by_batch = ("--model.optimizer.clip", "batch")
        clipped = self._fit("ten steps, gradients clipped by batch", "clipped", *by_batch)
        fsdp2 = self._fit("the same with fsdp2", "fsdp2", *by_batch, "--parallel.parameters", "fsdp2")
        predicted = [self._predict(first, precision) for precision in ("fp32", "bf16")]
        folders = [str(self.work / name / "s005_A") for name in ("fp32", "bf16")]
        return [
            self._ranks("blocks in bf16-mixed against float32", "half"),
            first, half, zero1, five, clipped, fsdp2,
            Check("sharded kernels of ranks that share a device equal one rank", (*_RANKS, "shared", self.device), 3),
            resumed, *predicted,
            self._curves("losses in bf16-mixed are near", 0.02, {"1_1": first, "bf16": half}),
            self._curves(
                "losses with zero1, and after resuming, are equal", 1e-5,
                {"1_1": first, "zero1": zero1, "resumed": resumed},
            ),
            self._curves("first losses with fsdp2 are equal", 1e-5, {"clipped": clipped, "fsdp2": fsdp2}, _FIRST),
            Check("predictions in fp32 and bf16 are near", (*_RANKS, "predictions", *folders), after=tuple(predicted)),
        ]  # fmt: skip

    def several(self) -> list[Check]:
        """The checks that need several devices. Each takes all of them, so one runs at a time."""
        checks = []
        for ranks in (n for n in (2, 3, 4, 8) if n <= self.available):
            checks += [
                self._ranks(f"collectives and their transposes, {ranks} ranks", "collectives", ranks=ranks),
                self._ranks(f"model over {ranks} ranks equals one", "model", ranks=ranks),
                self._ranks(f"speed of the switch, {ranks} ranks", "switch", ranks=ranks),
            ]
        fits = {}
        for data, sequence in ((1, 2), (2, 1), (1, 3), (2, 2), (1, 4), (2, 4), (1, 8)):
            if data * sequence <= self.available:
                name = f"{data}_{sequence}"
                title = f"ten training steps, (data, sequence) = ({data}, {sequence})"
                fits[name] = self._fit(title, name, data=data, sequence=sequence)
        equal = self._curves("their first losses are equal", 1e-5, {"1_1": None, **fits}, _FIRST)
        return [*checks, *fits.values(), equal]

    def _ranks(self, name: str, check: str, *words: str, ranks: int = 1) -> Check:
        return Check(name, (*_RANKS, check, self.device, *words), ranks)

    def _fit(
        self,
        title: str,
        name: str,
        *words: str,
        data: int = 1,
        sequence: int = 1,
        steps: int = 10,
        after: tuple[Check, ...] = (),
    ) -> Check:
        """A check that trains the quickstart's model, in the folder `name`."""
        settings = {
            "trainer.accelerator": self.device, "trainer.max_steps": steps, "trainer.log_every_n_steps": 1,
            "trainer.num_sanity_val_steps": 0, "trainer.enable_progress_bar": "false", "data.validation_chains": "null",
            "data.batch_size": GLOBAL_BATCH // data, "parallel.sequence": sequence,
        }  # fmt: skip
        options = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        fit = ("evodsp", "fit", "--config", "quickstart", "--output", str(self.work / name))
        return Check(title, (*fit, *options, *words), data * sequence, after)

    def _predict(self, trained: Check, precision: str) -> Check:
        checkpoint, data = self.work / "1_1" / "checkpoints" / "last.ckpt", packaged_folder("data")
        fasta = str(data / "fasta" / "s005_A.fasta")
        options = {
            "alignments": data / "alignments", "format": "pdb", "checkpoint": checkpoint,
            "output": self.work / precision, "device": self.device, "precision": precision,
        }  # fmt: skip
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        return Check(f"a prediction in {precision}", ("evodsp", "predict", fasta, *words), 0, (trained,))

    def _curves(self, title: str, tolerance: float, runs: dict[str, Check | None], first: int = 10) -> Check:
        files = [str(self.work / name / "curve.csv") for name in runs]
        after = tuple(check for check in runs.values() if check is not None)
        return Check(title, (*_RANKS, "curves", str(tolerance), str(first), *files), 0, after)
