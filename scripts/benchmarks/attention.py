"""Time and memory of evodsp's attention against the plain formula: forward and backward pass, on this machine's CPU.

    python scripts/benchmarks/attention.py [--rounds 20] [--threads 1]

Each round runs both once, in alternating order, so that other load on the machine affects both. The ratio of a round is the
formula's time divided by evodsp's: above 1, evodsp is faster. The table shows the median ratio and the middle half (first to
third quartile). Memory is the peak of PyTorch's allocations during a separate, untimed pass, inputs excluded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from evodsp.model.kernels.chunked import biased_attention

# (rows, heads, length, head width). The first has the size of chain 2q2k_A's triangle attention, the others of larger crops.
SHAPES = ((70, 4, 70, 8), (128, 4, 128, 32), (191, 4, 191, 32))

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def formula(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask + bias) v by autograd. Do not change it: it is the baseline of all measurements."""
    logits = torch.einsum("bnhqd,bnhkd->bnhqk", q * q.shape[-1] ** -0.5, k)
    logits = logits + mask_bias[:, :, None, None, :] + pair_bias[:, None]
    return torch.einsum("bnhqk,bnhkd->bnhqd", logits.softmax(-1), v)


def evodsp(q: Tensor, k: Tensor, v: Tensor, mask_bias: Tensor, pair_bias: Tensor) -> Tensor:
    """The package's operator, with gates that are open. It takes positions before heads, as projections deliver them."""
    projected = torch.stack([q, k, v, torch.full_like(q, torch.inf)], 3).transpose(2, 4)
    return biased_attention(projected, (mask_bias == 0).to(q.dtype), pair_bias).transpose(2, 3)


CONTENDERS: dict[str, Attention] = {"formula": formula, "evodsp": evodsp}


@dataclass(frozen=True)
class Inputs:
    """Random operands of one shape; one tenth of the keys is masked."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask_bias: Tensor
    pair_bias: Tensor
    upstream: Tensor

    @classmethod
    def random(cls, rows: int, heads: int, length: int, width: int) -> Inputs:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        q, k, v = (normal(1, rows, heads, length, width).requires_grad_() for _ in range(3))
        masked = torch.rand((1, rows, length), generator=generator) < 0.1
        pair_bias = normal(1, heads, length, length).requires_grad_()
        return cls(q, k, v, masked * -1e9, pair_bias, normal(1, rows, heads, length, width))

    def run(self, function: Attention) -> tuple[Tensor, ...]:
        """Output and gradients of one forward and backward pass."""
        operands = (self.q, self.k, self.v, self.pair_bias)
        out = function(self.q, self.k, self.v, self.mask_bias, self.pair_bias)
        return (out.detach(), *torch.autograd.grad(out, operands, self.upstream))


def seconds(inputs: Inputs, function: Attention) -> float:
    start = time.perf_counter()
    inputs.run(function)
    return time.perf_counter() - start


def peak_mib(inputs: Inputs, function: Attention) -> float:
    """Peak of the memory that the pass allocates, in MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        inputs.run(function)
    allocated, peak = 0, 0
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak / 2**20


def largest_difference(inputs: Inputs) -> float:
    """Largest difference between the two, over output and gradients, relative to the largest value of each tensor."""
    pairs = zip(inputs.run(evodsp), inputs.run(formula), strict=True)
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds per shape (default: 20)")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads (default: 1)")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads must be at least 1")
    torch.set_num_threads(arguments.threads)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs its start and stop

    print(
        f"PyTorch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds, forward + backward, fp32"
    )
    head = f"{'rows, heads, length, width':28}{'formula ms':>12}{'evodsp ms':>12}{'ratio':>8}  {'middle half':14}"
    print(f"{head}{'formula MiB':>12}{'evodsp MiB':>12}{'largest difference':>20}")
    for shape in SHAPES:
        inputs = Inputs.random(*shape)
        times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for function in CONTENDERS.values():
            seconds(inputs, function)  # warm-up
        for number in range(arguments.rounds):
            for name in sorted(CONTENDERS, reverse=bool(number % 2)):
                times[name].append(seconds(inputs, CONTENDERS[name]))
        ratios = [slow / fast for slow, fast in zip(times["formula"], times["evodsp"], strict=True)]
        low, ratio, high = (float(torch.tensor(ratios).quantile(at)) for at in (0.25, 0.5, 0.75))
        formula_ms, evodsp_ms = (1e3 * statistics.median(times[name]) for name in ("formula", "evodsp"))
        memory = {name: peak_mib(inputs, function) for name, function in CONTENDERS.items()}
        row = f"{', '.join(map(str, shape)):28}{formula_ms:12.1f}{evodsp_ms:12.1f}{ratio:8.2f}  {f'{low:.2f} to {high:.2f}':14}"
        print(f"{row}{memory['formula']:12.1f}{memory['evodsp']:12.1f}{largest_difference(inputs):20.1e}", flush=True)


if __name__ == "__main__":
    main()
