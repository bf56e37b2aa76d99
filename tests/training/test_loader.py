"""Samples, batches and steps: their order on any mesh and after any resume, and chains that cannot be read."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from evodsp.cli import main
from evodsp.config import FeatureConfig
from evodsp.data.samples.dataset import MadeHere, SampleDataset
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.errors import FileFormatError, UserError
from evodsp.parallel.config import ParallelConfig
from evodsp.report.runs import read_curve
from evodsp.training.chains import ChainDataModule, Chains
from evodsp.training.config import DataConfig
from evodsp.training.gradients import Batching, batching
from evodsp.training.loader import (
    EpochSampler,
    FailedChain,
    Quarantine,
    QuarantineFull,
    TrainingLoader,
    WholeChainLoader,
)
from evodsp.training.world import MeshWorld, World
from tests.builders.chains import MemoryStore
from tests.ranks import RankPool

CHECK = World().check_batches


class Numbers(SampleDataset):
    """Sample i of any chain is the number i; samples of `broken` chains are a mistake in a file. Notes what it made."""

    def __init__(self, keys: tuple[str, ...] = ("a",), broken: tuple[str, ...] = (), training: bool = True) -> None:
        super().__init__(MemoryStore(), keys, FeatureConfig(), 0, training)
        self.broken = broken
        self.made: list[tuple[int, str]] = []

    def make(self, index: int, key: str) -> dict[str, torch.Tensor]:
        self.made.append((index, key))
        if key in self.broken:
            raise FileFormatError(f"{key}.a3m", "cut short", line=7)
        return {"aatype": torch.tensor([index] * 3), "chain": torch.tensor(ord(key))}


def training(
    samples: SampleDataset, sampler: EpochSampler, limit: int = 3, check: Any = CHECK, pool: Any = None, ahead: int = 0
) -> TrainingLoader:
    return TrainingLoader(samples, sampler, pool or MadeHere(samples), check, Quarantine(limit), lambda _: ahead)


def indices(stream: TrainingLoader) -> list[int]:
    return [int(i) for batch in stream for i in batch["sample_index"]]


def chains(stream: TrainingLoader) -> list[str]:
    return [chr(int(chain)) for batch in stream for chain in batch["chain"]]


def test_epochs_go_on_where_the_last_one_ended() -> None:
    """Every epoch showing the same samples."""
    stream = training(Numbers(), EpochSampler(2, batches=3))
    assert len(stream) == 3
    assert indices(stream) == [0, 1, 2, 3, 4, 5]
    assert indices(stream) == [6, 7, 8, 9, 10, 11]


def test_ranks_share_the_global_indices() -> None:
    """Rank d of D takes the indices that are d modulo D; another rule changes the run with the number of ranks."""
    streams = [training(Numbers(), EpochSampler(2, 2, rank, ranks=3)) for rank in range(3)]
    batches = [[b["sample_index"].tolist() for b in stream] for stream in streams]
    assert batches == [[[0, 3], [6, 9]], [[1, 4], [7, 10]], [[2, 5], [8, 11]]]


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 4])
def test_a_resume_yields_the_rest_of_the_epoch(taken: int) -> None:
    """A resume that starts the epoch anew, skips a batch, or forgets to end the epoch; both ends of an epoch included."""
    stream = training(Numbers(), EpochSampler(1, batches=3))
    seen: list[int] = []
    while len(seen) < taken:
        for batch in stream:
            seen.append(int(batch["sample_index"]))
            if len(seen) == taken:
                break
    other = training(Numbers(), EpochSampler(1, batches=3))
    other.load_state_dict(stream.state_dict())
    assert seen + indices(other) == list(range(3 * (taken // 3 + 1)))


def test_epochs_hold_whole_optimizer_steps() -> None:
    """A last accumulation of fewer batches than the others."""
    assert Batching(data_ranks=1, batch_size=2, accumulate=1).batches(10) == 5
    assert Batching(data_ranks=2, batch_size=2, accumulate=2).batches(10) == 4


def test_samples_made_ahead_do_not_move_the_saved_position() -> None:
    """Prefetching that advances what a checkpoint stores: a resume would skip samples."""
    samples = Numbers()
    stream = training(samples, EpochSampler(2, batches=4), ahead=5)
    assert next(iter(stream))["sample_index"].tolist() == [0, 1]
    assert [index for index, _ in samples.made] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert stream.state_dict() == {"samples": 2}


LETTERS = tuple("abcdefghij")


def test_a_chain_that_cannot_be_read_is_replaced_and_named() -> None:
    """A run that ends, a chain read again and again, other samples that move, or a reason nobody can act on."""
    undisturbed = chains(training(Numbers(LETTERS), EpochSampler(2, batches=25)))
    samples = Numbers(LETTERS, broken=("c", "f"))
    stream = training(samples, EpochSampler(2, batches=25))
    seen = chains(stream)
    assert len(seen) == 50
    assert not {"c", "f"} & set(seen)
    for before, after in zip(undisturbed, seen, strict=True):
        assert before == after or before in ("c", "f")
    assert [f"{failure.chain}: {failure.reason}" for failure in stream.quarantine.failures] == [
        f"{chain}: {chain}.a3m:7: cut short" for chain in sorted("cf", key=undisturbed.index)
    ]
    assert [failure.sample for failure in stream.quarantine.failures] == sorted(map(undisturbed.index, "cf"))
    assert len([key for _, key in samples.made if key in ("c", "f")]) == 2


@pytest.mark.parametrize("ahead", [0, 7])
@pytest.mark.parametrize("stopped", [1, 4, 9])
def test_a_resume_takes_the_same_replacements(stopped: int, ahead: int) -> None:
    """A replacement that depends on when a chain failed, or a quarantine that only the first part of the run knew."""
    samples = Numbers(LETTERS, broken=("a", "b", "c"))
    whole = chains(training(samples, EpochSampler(1, batches=30), ahead=ahead))
    first = training(samples, EpochSampler(1, batches=30), ahead=ahead)
    iterator = iter(first)
    begun = [chr(int(next(iterator)["chain"])) for _ in range(stopped)]
    later = training(samples, EpochSampler(1, batches=30))
    later.load_state_dict(first.state_dict())
    later.quarantine.restore(first.quarantine.failures)
    assert begun + chains(later) == whole


def test_a_chain_that_failed_is_not_read_again_for_samples_made_ahead() -> None:
    """A chain that kills its worker or sleeps, drawn several times within the samples that are made ahead: it would do so
    each time."""
    samples = Numbers(LETTERS, broken=("c", "f"))
    seen = chains(training(samples, EpochSampler(1, batches=30), ahead=29))
    assert sorted(key for _, key in samples.made if key in ("c", "f")) == ["c", "f"]
    assert seen == chains(training(Numbers(LETTERS, broken=("c", "f")), EpochSampler(1, batches=30)))


def test_a_chain_is_left_out_from_its_sample_on() -> None:
    """A resume from before a failure that cannot be repeated (a time limit): it must take what the run took then."""
    samples = Numbers(LETTERS)
    whole = chains(training(samples, EpochSampler(1, batches=40)))
    chain, second = whole[0], whole.index(whole[0], 10)
    stream = training(samples, EpochSampler(1, batches=40))
    stream.quarantine.restore([FailedChain(chain, second, "took longer")])
    seen = chains(stream)
    assert seen[:second] == whole[:second]
    assert chain not in seen[second:]


def test_too_many_bad_chains_end_the_run() -> None:
    """A disk that is gone: without a limit all chains would be tried, and training would go on with the few that are cached."""
    samples = Numbers(LETTERS, broken=LETTERS[2:])
    with pytest.raises(QuarantineFull, match=r"4 chains failed, the last .* but data.max_quarantined is 3"):
        chains(training(samples, EpochSampler(1, batches=30)))
    assert len(samples.made) < 15
    with pytest.raises(UserError, match="all 10 chains to train on are left out"):
        chains(training(Numbers(LETTERS, broken=LETTERS), EpochSampler(1, batches=30), limit=50))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ranks_compare_once_a_step(accumulate: int) -> None:
    """Catches all ranks of a run waiting for each other at each batch of a step; or, of a step whose batches are compared
    together, other samples than those of single batches, samples taken twice, or a batch that is counted before it is used.
    """
    compared: list[int] = []

    def check(found: Any, failures: Any) -> list[FailedChain]:
        compared.append(len(found))
        return CHECK(found, failures)

    samples = Numbers(LETTERS, broken=("c", "f"))
    stream = TrainingLoader(
        samples, EpochSampler(2, 12), MadeHere(samples), check, Quarantine(3), lambda _: 4, accumulate
    )
    taken = [(stream.indices.samples, [chr(int(chain)) for chain in batch["chain"]]) for batch in stream]
    alone = training(Numbers(LETTERS, broken=("c", "f")), EpochSampler(2, 12))
    assert [chain for _, batch in taken for chain in batch] == chains(alone)
    assert [count for count, _ in taken] == list(range(2, 26, 2))
    assert len([batches for batches in compared if batches]) == 12 // accumulate
    good = [index for index, chain in samples.made if chain not in samples.broken]
    assert len(good) == len(set(good))


class AnotherProcess(MadeHere):
    """Hands over whatever error a sample raised, as `SamplePool` does, instead of raising it at once."""

    def submit(self, index: int, key: str) -> Future[dict[str, torch.Tensor]]:
        try:
            return super().submit(index, key)
        except IndexError as error:
            future: Future[dict[str, torch.Tensor]] = Future()
            future.set_exception(error)
            return future


@pytest.mark.parametrize("maker", [MadeHere, AnotherProcess])
def test_a_bug_is_no_bad_chain(maker: type[MadeHere]) -> None:
    """A mistake of the program that hides as a chain in the quarantine, in this process or in a worker."""

    class Wrong(Numbers):
        def make(self, index: int, key: str) -> dict[str, torch.Tensor]:
            raise IndexError("a bug")

    samples = Wrong(LETTERS)
    with pytest.raises(IndexError, match="a bug"):
        chains(training(samples, EpochSampler(1, batches=3), pool=maker(samples)))


SAMPLES = 80


def stream_on_mesh(group: Any, broken: list[tuple[str, ...]], sequence: int) -> tuple[list[str], list[str], set[int]]:
    """Chains of the samples, and of the quarantine, on a rank that cannot read the chains `broken[rank]`, and the samples that
    it reads."""
    world = MeshWorld(ParallelConfig(sequence=sequence))
    sampler = EpochSampler(1, SAMPLES // world.data_ranks, world.data_rank, world.data_ranks)
    samples = Numbers(LETTERS, broken[torch.distributed.get_rank(group)])
    maker, cpu = MadeHere(samples) if world.reads else None, torch.device("cpu")
    stream = TrainingLoader(samples, sampler, maker, world.check_batches, Quarantine(3), lambda _: 3)
    seen = [chr(int(world.share(batch, {}, cpu)[0]["chain"])) for batch in stream]
    return (
        seen,
        [f"{failure.sample} {failure.chain}" for failure in stream.quarantine.failures],
        {index for index, _ in samples.made},
    )


def test_ranks_agree_on_replacements(pool: RankPool) -> None:
    """Other samples on another mesh; a rank of a sequence group that reads what another one reads; or, if a chain fails on one
    rank only (a time limit, a killed worker), a rank that computes on another sample, and groups that keep using the chain."""
    alone = training(Numbers(LETTERS, broken=("c", "f")), EpochSampler(1, SAMPLES))
    expected = chains(alone)
    quarantine = [f"{failure.sample} {failure.chain}" for failure in alone.quarantine.failures]
    for sequence in (1, 2):
        data = 4 // sequence
        found = pool.run(4, stream_on_mesh, [("c", "f")] * 4, sequence)
        for rank, (seen, left_out, made) in enumerate(found):
            assert seen == expected[rank // sequence :: data]
            assert left_out == quarantine
            assert (not made) == (rank % sequence > 0)
        # On any mesh a sample is read once, by one rank: the work of the hosts does not grow with the sequence group.
        # (Beyond the epoch are the next one's samples, which are requested ahead.)
        assert sorted(index for *_, made in found for index in made if index < SAMPLES) == list(range(SAMPLES))
        found = pool.run(4, stream_on_mesh, [("c",), (), ("f",), ()], sequence)
        assert len({tuple(left_out) for _, left_out, _ in found}) == 1
        first = {chain: int(sample) for sample, chain in (entry.split() for entry in found[0][1])}
        assert sorted(first) == ["c", "f"]
        for rank, (seen, *_) in enumerate(found):
            assert seen == found[rank - rank % sequence][0]
            for place, chain in enumerate(seen):
                assert rank // sequence + place * data < first.get(chain, SAMPLES)


def whole_chains(samples: Numbers, leave_out: bool) -> list[int]:
    loader = WholeChainLoader(samples, range(len(samples)), MadeHere(samples), CHECK, leave_out)
    return [int(batch["sample_index"]) for batch in loader]


def test_a_validation_chain_that_fails_is_left_out_in_training(caplog: pytest.LogCaptureFixture) -> None:
    """A run that ends after days because of one validation chain, or a score that silently covers fewer chains."""
    samples = Numbers(LETTERS, broken=("c",), training=False)
    assert whole_chains(samples, leave_out=True) == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert "chain c is left out of this validation: c.a3m:7: cut short" in caplog.text
    with pytest.raises(UserError, match=r"^c.a3m:7: cut short$"):
        whole_chains(samples, leave_out=False)
    with pytest.raises(UserError, match="no validation chain can be read"):
        whole_chains(Numbers(LETTERS, broken=LETTERS, training=False), leave_out=True)


def two_validating_groups(group: Any) -> list[int]:
    samples = Numbers(LETTERS, broken=("b", "c", "i", "j"), training=False)
    share = range(torch.distributed.get_rank(group) // 2, len(samples), 2)
    world = MeshWorld(ParallelConfig(sequence=2))
    maker = MadeHere(samples) if world.reads else None
    loader = WholeChainLoader(samples, share, maker, world.check_batches, True)
    return [int(batch["sample_index"]) for batch in loader]


def test_ranks_leave_out_their_own_validation_chains(pool: RankPool) -> None:
    """A rank that skips a batch and does not compare it: the others compare theirs with the next one, or wait for ever."""
    assert pool.run(4, two_validating_groups) == [[0, 4, 6]] * 2 + [[3, 5, 7]] * 2


def test_a_resume_within_a_step_repeats_the_step() -> None:
    """Samples of an interrupted step whose gradients are lost must be taken again; those of finished steps must not."""
    chains = Chains(["a"], [], [], store=Mock(spec=ChainFiles))
    config = DataConfig(batch_size=2, samples_per_epoch=8)
    for taken, expected in ((0, 0), (3, 0), (4, 4), (6, 4), (7, 4), (8, 8)):
        module = ChainDataModule(config, chains)
        module.trainer = Mock(accumulate_grad_batches=2)  # 4 samples per step
        module.load_state_dict({"samples": taken})
        assert module.train_dataloader().indices.samples == expected


@pytest.mark.parametrize(("workers", "share"), [(0, 2), (1, 2), (5, 6)])
def test_processes_share_the_memory_for_parsed_chains(workers: int, share: int) -> None:
    """A limit that every worker has to itself, or one that is lost on the way to a worker."""
    chains = Chains(["a"], ["a"], [], store=Mock(spec=ChainFiles))
    config = DataConfig(cache="3GiB", num_workers=workers)
    reads = Mock(spec=World, data_ranks=1, data_rank=0, reads=False)
    module = ChainDataModule(config, chains, 0, reads)
    module.trainer = Mock(accumulate_grad_batches=1)
    samples = module.train_dataloader().samples
    assert samples.cache_bytes == 3 * 2**30 // share
    assert samples.__getstate__()["cache_bytes"] == samples.cache_bytes


@pytest.mark.parametrize(
    ("data_ranks", "batch_size", "accumulate"), [(1, 1, 128), (8, 1, 16), (64, 2, 1), (128, 1, 1), (2, 32, 2)]
)
def test_batches_are_accumulated_to_the_global_batch(data_ranks: int, batch_size: int, accumulate: int) -> None:
    """Ranks that share a sample counted as data ranks; samples of a batch counted twice."""
    found = batching(128, data_ranks, batch_size, 1)
    assert found == Batching(data_ranks, batch_size, accumulate)
    assert found.samples == 128
    assert [found.steps(samples) for samples in (1, 128, 129, 1_500_000)] == [1, 1, 2, 11_719]


@pytest.mark.parametrize(("data_ranks", "batch_size"), [(256, 1), (3, 1), (64, 4), (1, 129)])
def test_a_global_batch_that_does_not_divide(data_ranks: int, batch_size: int) -> None:
    """A global batch rounded to what the mesh allows, without a word."""
    with pytest.raises(UserError, match=rf"global_batch is 128, but must be a multiple of {data_ranks * batch_size} "):
        batching(128, data_ranks, batch_size, 1)


def sample_numbers(config: DataConfig, data_ranks: int, accumulate: int, steps: int) -> list[list[tuple[int, int]]]:
    """By step, the number and the recycling iterations of each sample of all data ranks."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    for rank in range(data_ranks):
        chains = Chains(["a"], [], [], store=Mock(spec=ChainFiles))
        module = ChainDataModule(config, chains, 7, Mock(spec=World, data_ranks=data_ranks, data_rank=rank, reads=True))
        module.trainer = Mock(accumulate_grad_batches=accumulate)
        loader = module.train_dataloader()
        for number, indices in zip(range(steps * accumulate), loader.indices, strict=False):
            found[number // accumulate] += [(index, loader.samples.cycles_of(index)) for index in indices]
    return [sorted(step) for step in found]


def test_a_global_batch_has_the_same_samples_and_recycles_alike_on_every_mesh() -> None:
    """Recycling agreed within the batch of a rank only: on many data ranks all wait for the slowest; and another draw on
    another mesh."""
    config = DataConfig(train=FeatureConfig(recycles=3), samples_per_epoch=1000)
    serial = sample_numbers(config, 1, 16, steps=6)
    assert [[index for index, _ in step] for step in serial] == [list(range(n, n + 16)) for n in range(0, 96, 16)]
    assert all(len({cycles for _, cycles in step}) == 1 for step in serial)
    assert len({step[0][1] for step in serial}) > 1
    for data_ranks in (2, 8, 16):
        assert sample_numbers(config, data_ranks, 16 // data_ranks, steps=6) == serial


def test_a_run_ends_by_samples_and_resumes_with_its_global_batch_only(
    chains: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A length in samples that counts steps or batches; a resume whose steps are other samples of the schedule than the steps
    before it: the learning rate, the epochs and the end of the run would move."""
    words = ["fit", "--config", str(chains / "tiny.yaml"), "--output", str(tmp_path / "run"), "--trainer.max_steps=-1"]
    words += ["--model.optimizer.warmup_samples=20", "--data.validation_chains=null"]
    assert main([*words, "--global_batch=2", "--max_samples=3"]) == 0
    assert "2 samples a step: data ranks 1 x data.batch_size 1 x accumulated batches 2" in capsys.readouterr().err
    assert main([*words, "--max_samples=5", "--ckpt_path=last"]) == 2
    assert (
        "last.ckpt: its run has 2 samples a step, but this one has 1 sample a step: data ranks"
        in capsys.readouterr().err
    )
    words += ["--ckpt_path=last", "--data.batch_size=2"]
    assert main([*words, "--max_samples=5"]) == 0
    rates = {step: float(row["train/lr"]) for step, row in read_curve(tmp_path / "run" / "curve.csv").items()}
    assert rates == pytest.approx({step: 0.01 * (2 * step + 2) / 20 for step in range(3)})
