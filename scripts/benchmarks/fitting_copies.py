"""What it costs to find the true copies that fit a prediction (`evodsp.losses.permutation.align_chains`), by number of copies.

    python -m scripts.benchmarks.fitting_copies

One entity of N chains of 100 residues, the crop as large as the entity and at most 640 residues (AlphaFold-Multimer's crop of
fine-tuning). The prediction is the truth with its copies in another order, moved, and disturbed by 2 Å. The search runs on
the host, once a sample and step, on CPUs and GPUs alike. Times are the median and the 90th percentile of 50 calls, in ms.
"""

from __future__ import annotations

import statistics
import time

import torch

from evodsp.losses.permutation import TrueChains, align_chains
from evodsp.rng import Draws

LENGTH, CROP, CALLS = 100, 640, 50


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'copies':>7s} {'residues':>9s} {'median':>8s} {'90 %':>8s}   found")
    for copies in (2, 3, 6, 12, 24, 60):
        draws = Draws.root(copies)
        noise = torch.from_numpy(draws.at("truth").gumbel(copies, LENGTH, 3)).cumsum(1)
        truth = noise + 60 * torch.from_numpy(draws.at("place").gumbel(copies, 1, 3))
        order = torch.randperm(copies, generator=torch.Generator().manual_seed(copies))
        predicted = truth[order] + torch.from_numpy(draws.at("error").gumbel(copies, LENGTH, 3))
        chain = torch.arange(1, copies + 1).repeat_interleave(LENGTH)
        residue = torch.arange(LENGTH).repeat(copies)
        crop = slice(0, CROP)
        true = TrueChains(truth, torch.ones(copies, LENGTH), [1] * copies)
        seconds = []
        for call in range(CALLS):
            begun = time.perf_counter()
            found = align_chains(
                predicted.flatten(0, 1)[crop], chain[crop], residue[crop], true, draws.at("call", call)
            )
            seconds.append(time.perf_counter() - begun)
        shown = int(chain[crop].max())
        right = int((found[:shown] == order[:shown]).sum())
        times = statistics.median(seconds), statistics.quantiles(seconds, n=10)[-1]
        print(
            f"{copies:7d} {len(chain[crop]):9d} {times[0] * 1e3:8.1f} {times[1] * 1e3:8.1f}   {right} of {shown} chains"
        )


if __name__ == "__main__":
    main()
