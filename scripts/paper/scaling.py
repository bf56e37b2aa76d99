"""Part `scaling`: weak and strong scaling (section 5.2, figures 6 and 7) and latency of inference (figure 8), on gloo ranks.

Weak: as many samples as ranks, all ranks share each sample. Strong and latency: one sample. On one rank every method is the
model as it is. This machine has two cores, so the linear line ends at two ranks: from there on no method can be faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .counting import CLAIMS
from .methods import method_named
from .part import Part, Row, Tables, Tick
from .rounds import Job, Spread, timed
from .workload import Workload

EXPERIMENTS = ("weak", "strong", "latency")


def part(settings: Mapping[str, Any]) -> Part:
    """`settings`: the section `scaling` of `experiments/cpu.yaml`."""
    jobs = [(experiment, job) for experiment in EXPERIMENTS for job in jobs_of(experiment, settings)]

    def measure(tick: Tick) -> Tables:
        seconds = timed([job for _, job in jobs], settings["rounds"], tick)
        return {
            "scaling": [
                {
                    "experiment": experiment,
                    "method": job.method,
                    "ranks": job.ranks,
                    "batch": job.workload.batch,
                    "tokens": job.workload.tokens,
                    "round": number,
                    "seconds": f"{found:.4f}",
                }
                for (experiment, job), times in zip(jobs, seconds, strict=True)
                for number, found in enumerate(times)
            ]
        }

    return Part(
        "scaling",
        settings,
        ("scaling.py", "rounds.py", "gloo_ranks.py"),
        measure,
        report,
        steps=settings["rounds"] + 1,
        seconds=settings["seconds"],
    )


def jobs_of(experiment: str, settings: Mapping[str, Any]) -> list[Job]:
    """What one experiment times."""
    jobs = []
    for ranks in settings["ranks"]:
        batch = ranks if experiment == "weak" else 1
        workload = Workload(**settings["workload"], batch=batch)
        methods = ["one_device"] if ranks == 1 else list(CLAIMS)
        jobs += [Job(method, ranks, workload, training=experiment != "latency") for method in methods]
    return jobs


def throughput(rows: list[Row] | Any, experiment: str, method: str, ranks: int) -> Spread:
    """Thousand tokens per second."""
    name = "one_device" if ranks == 1 else method
    return Spread.of(
        [
            row["batch"] * row["tokens"] / float(row["seconds"]) / 1000
            for row in rows
            if (row["experiment"], row["method"], row["ranks"]) == (experiment, name, ranks)
        ]
    )


def report(tables: Tables) -> str:
    """Throughput and latency as text."""
    rows = tables["scaling"]
    ranks = sorted({row["ranks"] for row in rows})
    lines = [EXPLANATION]
    for experiment, title in (
        ("weak", "Weak scaling, training, thousand tokens/s (in brackets: of linear)"),
        ("strong", "Strong scaling, training, thousand tokens/s (in brackets: of linear)"),
        ("latency", "Inference, thousand tokens/s (in brackets: of linear)"),
    ):
        lines += ["", title, f"{'method':18}" + "".join(f"{f'{n} ranks':>16}" for n in ranks)]
        one = throughput(rows, experiment, "one_device", 1).median
        for method in CLAIMS:
            found = [throughput(rows, experiment, method, n).median for n in ranks]
            cells = "".join(f"{x:9.2f} ({x / one / n:4.2f})" for x, n in zip(found, ranks, strict=True))
            lines.append(f"{method_named(method).title:18}{cells}")
    return "\n".join(lines) + "\n"


EXPLANATION = """\
Processes of this machine, one thread each, connected by gloo, fp32; medians of interleaved rounds. The machine has two cores:
at four ranks linear scaling is out of reach, and 0.50 of it would be perfect."""
