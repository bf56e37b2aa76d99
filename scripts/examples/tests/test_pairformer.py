"""The trunk of scripts/examples/pairformer.py on several ranks: outputs and all gradients are those of one device.

In double precision, with dropout, with every parameter random. docs/parallelize.md shows the program.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor

from evodsp.config import ChannelsConfig
from evodsp.model.primitives import use_exchange, use_memory
from evodsp.model.sharded import Sharded
from evodsp.parallel import average_gradients
from evodsp.parallel.exchange import Exchange, LocalExchange, ShardedExchange
from evodsp.parallel.group import Group
from evodsp.parallel.testing import dense
from evodsp.rng import Draws
from scripts.examples import pairformer
from tests.builders.comparison import close
from tests.builders.pages import ROOT, blocks
from tests.builders.processes import free_port
from tests.ranks import RankPool

SEQUENCES, RESIDUES = 5, 7


@contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def batch() -> dict[str, Tensor]:
    """A sample of random numbers, whose last residue is padding."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    mask = torch.ones(1, RESIDUES)
    mask[:, -1] = 0
    return {
        "seq_mask": mask, "target_feat": random(1, RESIDUES, 22), "residue_index": torch.arange(RESIDUES)[None],
        "msa_feat": random(1, SEQUENCES, RESIDUES, 49), "msa_mask": (random(1, SEQUENCES, RESIDUES) > -1) * mask[:, None],
        "pseudo_beta": 9 * random(1, RESIDUES, 3), "pseudo_beta_mask": mask, "resolution": torch.ones(1),
        "all_atom_mask": (random(1, RESIDUES, 37) > 0) * mask[..., None],
        "atom37_atom_exists": mask[..., None].expand(-1, -1, 37),
    }  # fmt: skip


Run = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Logits and loss; gradients."""


def run(exchange: Exchange, mean: Any = lambda parameters: None) -> Run:
    """A forward and a backward pass. `mean`: averages gradients over ranks."""
    with in_double():
        model = dense(pairformer.Trunk(ChannelsConfig(msa=6, pair=8, single=10)))
        use_exchange(model, exchange)
        given, draws = batch(), [Draws.root(3)]
        distogram, atoms = model(given, draws)
        loss = model.loss(given, draws)
        loss.backward()
        mean(model.parameters())
    outputs = {"distogram": distogram.detach(), "atoms": atoms.detach(), "loss": loss.detach()}
    return outputs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_rank(handle: Any) -> Run:
    group = Group(handle)
    return run(ShardedExchange(group), lambda parameters: average_gradients(parameters, group))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.verify)])
def test_ranks_equal_one_device(pool: RankPool, ranks: int) -> None:
    """Catches a shard that is taken for the whole, a sum over ranks instead of the mean, dropout that depends on the rank."""
    outputs, gradients = run(LocalExchange())
    found = pool.run(ranks, run_rank)
    close(torch.cat([out["distogram"] for out, _ in found], 1), outputs["distogram"], "distogram")
    close(torch.stack([out["loss"] for out, _ in found]).mean(0), outputs["loss"], "loss")
    # The m of the last block of the MSA module is not read.
    unread = "msa_module.blocks.1."
    names = {name for name, _ in pairformer.Trunk().named_parameters()}
    assert names - gradients.keys() == {n for n in names if n.startswith((f"{unread}averaging", f"{unread}transition"))}
    for out, own in found:
        close(out["atoms"], outputs["atoms"], "atoms")
        assert own.keys() == gradients.keys()
        for name, gradient in gradients.items():
            close(own[name], gradient, f"gradient of {name}")


def test_the_layers_that_the_file_adds() -> None:
    """Catches a layer that is another than AlphaFold3's: the other tests compare the trunk with itself."""
    with in_double():
        averaging = dense(pairformer.PairWeightedAveraging(c_m=6, c_z=8, heads=2, width=3))
        m, z, mask = torch.randn(1, SEQUENCES, RESIDUES, 6), torch.randn(1, RESIDUES, RESIDUES, 8), torch.ones(1, 7, 7)
        mask[:, :, 2] = 0
        norm, weight, value, gate, output = (
            getattr(averaging, name) for name in ("norm", "pair_weight", "value", "gate", "output")
        )
        w = weight(averaging.pair_norm(z))[0].exp() * mask[0, :, :, None]  # [i, j, h]
        w = w / w.sum(1, keepdim=True)
        heads = [torch.stack([w[..., h] @ value(norm(row))[:, 3 * h : 3 * h + 3] for row in m[0]]) for h in range(2)]
        expected = output(gate(norm(m)).sigmoid() * torch.cat(heads, -1))
        msa = Sharded.whole(m, "seq", torch.ones(1, SEQUENCES, RESIDUES))
        close(averaging(msa, Sharded.whole(z, "j", mask)).x, expected, "averaging")
        transition = dense(pairformer.SwiGLU(6, 4))
        a, b = transition.widen(transition.norm(m)).split(24, -1)
        close(transition(msa).x, transition.narrow(a * a.sigmoid() * b), "transition")
    assert {type(block.pair_stack.transition) for block in pairformer.Trunk().pairformer.blocks} == {pairformer.SwiGLU}


def test_dropout_drops() -> None:
    """Catches a comparison of runs in which nothing is dropped."""
    with in_double():
        model = dense(pairformer.Trunk(ChannelsConfig(msa=6, pair=8, single=10)))
        first, second, none = (model(batch(), draws)[0] for draws in ([Draws.root(3)], [Draws.root(4)], []))
    assert not torch.equal(first, second)
    assert not torch.equal(first, none)


def test_in_little_memory() -> None:
    """Catches a layer of the file that depends on rows which are computed later: a prediction goes piece by piece."""
    with in_double(), torch.no_grad():
        model = dense(pairformer.Trunk(ChannelsConfig(msa=6, pair=8, single=10)))
        whole = model(batch())
        use_memory(model, 4000)
        for name, found, expected in zip(("distogram", "atoms"), model(batch()), whole, strict=True):
            close(found, expected, name)


def test_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a program that runs and does not train, on one rank."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pairformer, "PAIRFORMER_BLOCKS", 1)
    pairformer.start("gloo")
    try:
        with redirect_stdout(io.StringIO()) as printed:
            pairformer.train(steps=6, sequence=1)
    finally:
        pairformer.stop()
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+)$", printed.getvalue(), re.MULTILINE)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.verify
def test_the_commands_of_the_page_print_the_same_losses() -> None:
    """Catches a program that works in the tests' processes only."""
    lines = [
        line.split() for block in blocks("docs/parallelize.md") if block.language == "bash" for line in block.commands()
    ]
    commands = [words for words in lines if "scripts.examples.pairformer" in words]
    assert len(commands) == 2
    printed = []
    for words in commands:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words[1:], "--steps=3"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed.append([float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)])
    assert printed[0] == pytest.approx(printed[1], rel=1e-4)
