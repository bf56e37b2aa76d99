"""`evodsp plan`: meshes, memory by part, the choice, and what a wrong command says."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from evodsp.cli import main
from evodsp.config import LossConfig, ModelConfig
from evodsp.errors import UserError
from evodsp.model.recomputation import Recomputed
from evodsp.packaged import read_run_config
from evodsp.planner import mesh
from evodsp.planner.command import training_of
from evodsp.planner.config import PlanConfig
from evodsp.planner.device import Device, Links, load_device, load_link
from evodsp.planner.mesh import (
    Estimate,
    Memory,
    TracedPass,
    Training,
    _reductions,
    _update_s,
    compare,
    estimate,
    memory,
    possible,
)
from evodsp.planner.program import PlannedStep, Program, Repeat, SampleSizes
from evodsp.planner.report import page
from evodsp.planner.simulate import Item, Span, Times
from evodsp.training.command import TrainingCLI
from evodsp.training.execution import check_compilation, check_graphs

SMALL = Training(ModelConfig.preset("small"), LossConfig(), SampleSizes(32, 16, 32), global_batch=12)
LINKS = Links(load_link("nvlink4"), load_link("infiniband"), 8)


def test_meshes_divide_devices_and_batch() -> None:
    """Catches a mesh whose data ranks do not divide the batch, or whose ranks get no row."""
    assert possible(SMALL, 6) == [1, 2, 3, 6]
    assert possible(SMALL, 24) == [2, 4, 6, 8, 12]  # 24 data ranks do not divide 12 samples; 24 ranks have 16 rows
    assert possible(SMALL, 24, 4) == [4]
    for devices, sequence, message in ((24, 17, "at most 16"), (24, 5, "not a multiple"), (1024, None, "at least 86")):
        with pytest.raises(UserError, match=message):
            possible(SMALL, devices, sequence)


def test_memory_that_lasts_for_the_whole_step() -> None:
    """Catches a part that is left out, or sharded where it is whole. Bytes a parameter are the oracle's: 4 and 2 of the weights
    and their copies, 8 of a gradient and a sum of clipped ones, 8 of Adam, 4 of the average."""
    program = Program([], [], batch_bytes=10, parameters=100, sent=[])

    def parts(**changes: object) -> Memory:
        worst = Span(("losses", 0), "forward", 1, 1, 0.0, 0, 0, 0, 7, 0)
        return memory(dataclasses.replace(SMALL, **changes), program, [worst], ranks=4, batches=3)

    assert parts() == Memory(600, 800, 800, 400, 40, 7, "losses, forward")
    assert parts(clip="batch", half=False, ema=False) == Memory(400, 400, 800, 0, 40, 7, "losses, forward")
    assert parts(parameters="zero1") == Memory(600, 800, 200, 400, 40, 7, "losses, forward")
    assert parts(parameters="fsdp2", clip="batch") == Memory(100, 100, 200, 100, 40, 7, "losses, forward")
    assert parts().total == 600 + 800 + 800 + 400 + 40 + 7


def test_gradients_are_reduced_once_a_sample_or_once_a_step() -> None:
    """Catches an all-reduce that clipping per sample needs and clipping per batch hides behind the backward pass."""
    numbers = 10_000_000
    within, after = _reductions(SMALL, numbers, 4, 2, LINKS, backward_s=1.0)
    assert within == pytest.approx(LINKS.seconds("all-reduce", 8 * numbers, 2))
    assert after == pytest.approx(LINKS.apart("all-reduce", 8 * numbers, 4, stride=2))
    batch = dataclasses.replace(SMALL, clip="batch")
    assert _reductions(batch, numbers, 4, 2, LINKS, backward_s=1.0) == (0.0, 0.0)
    assert _reductions(batch, numbers, 4, 2, LINKS, backward_s=0.0)[1] > 0
    recorded = dataclasses.replace(batch, graphs=True)  # no other collective runs beside those of a replay
    assert _reductions(recorded, numbers, 4, 2, LINKS, backward_s=1.0)[1] > 0
    assert _reductions(recorded, numbers, 4, 1, LINKS, backward_s=1.0) == (0.0, 0.0)


def test_the_time_of_a_step_is_that_of_its_parts() -> None:
    """Catches a part of a step that is left out, taken away, or counted for each sample although a step has it once."""
    place = ("evoformer", 1)
    few: list[Item] = [
        Span(place, "forward", 1, 1, 0.01, 0, 0, 0, 7, 3), Span(place, "backward", 1, 1, 0.02, 0, 0, 3, 7, 0)
    ]  # fmt: skip
    program = Program([], [], batch_bytes=10, parameters=10_000_000, sent=[])
    found = estimate(SMALL, TracedPass(program, few), Recomputed(0), 4, 2, load_device("h100"), LINKS)
    of_sample = found.one.total + (SMALL.passes - 1) * found.free_pass_s + found.gradients_s
    assert found.batches == 3
    assert found.step_s == pytest.approx(3 * of_sample + found.reduction_s + found.update_s)
    assert min(found.one.total, found.free_pass_s, found.gradients_s, found.reduction_s, found.update_s) > 1e-4


def test_what_an_update_touches() -> None:
    """Catches a moving average, casts or norms of samples that cost nothing or save time, and shards that are updated whole."""

    def moved(**changes: object) -> float:
        device = dataclasses.replace(load_device("h100"), memory_gbps=1.0, memory_efficiency=1.0, crowding=1.0)
        return _update_s(dataclasses.replace(SMALL, **changes), 10**9, 3, 8, 2, device)

    # Bytes a number. Each of three samples: casts 28, norm, scale, mask, sum and zero 36, the group's mean 8. The step: 8, Adam
    # 28, average 12.
    assert moved() == pytest.approx(3 * (28 + 36 + 8) + 8 + 28 + 12)
    assert moved(half=False, clip="batch", ema=False) == pytest.approx(3 * 8 + 8 + 28)
    assert moved(parameters="zero1") == pytest.approx(3 * (28 + 36 + 8) + 8 + 28 / 8 + 12)
    assert moved(parameters="fsdp2", clip="batch") == pytest.approx((3 * (28 + 8) + 8 + 28 / 8 + 12) / 8)


def fake(monkeypatch: pytest.MonkeyPatch, step_s: dict[int, float], needs: dict[int, int]) -> None:
    """Estimates with given times and memory, by the size of the sequence group."""

    def estimate(
        training: Training,
        traced_pass: TracedPass,
        recomputed: Recomputed,
        data: int,
        sequence: int,
        device: Device,
        links: Links,
    ) -> Estimate:
        held, no_time = Memory(needs[sequence], 0, 0, 0, 0, 0, ""), (0.0,) * 4
        none = Times()
        return Estimate(data, sequence, held, 100, recomputed, step_s[sequence], 1, none, *no_time, 12, none)

    monkeypatch.setattr(mesh, "estimate", estimate)
    monkeypatch.setattr(mesh, "traced", _nothing)


def _nothing(training: Training, sequence: int, recomputed: Recomputed) -> Program:
    """Stands in for a traced pass; a function of a module, because it goes to another process."""
    return Program([], [], 0, 0, [])


def test_the_fastest_mesh_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a choice that does not fit, or that is slower, and a search that ends before anything fits."""
    times = {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 6: 5.0, 12: 6.0}
    fake(monkeypatch, times, dict(zip(times, (300, 200, 150, 90, 80, 10), strict=True)))
    found = compare(SMALL, 12, load_device("h100"), LINKS, auto=False)
    assert [one.sequence for one in found.estimates] == [1, 2, 3, 4, 6, 12]
    assert found.best is not None
    assert found.best.sequence == 4
    fake(monkeypatch, times, dict.fromkeys(times, 101))
    nothing = compare(SMALL, 12, load_device("h100"), LINKS, auto=False)
    assert (nothing.best, nothing.fewer) == (None, None)
    fake(monkeypatch, times, dict.fromkeys(times, 100))
    assert [one.sequence for one in compare(SMALL, 12, load_device("h100"), LINKS, auto=False).estimates] == [1, 2]


def test_fewer_devices_that_are_faster_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a sample on four GPUs that one GPU with CUDA graphs computes sooner, planned without a word; and advice to take
    fewer that are slower, that do not fit, or that are more than were asked about."""
    times = {1: 1.0, 2: 2.0, 4: 1.5, 8: 3.0}

    def fewer(gpus: int, **needs: int) -> tuple[int, int] | None:
        fake(monkeypatch, times, dict.fromkeys(times, 90) | {int(k[1:]): v for k, v in needs.items()})
        one = compare(SMALL, gpus, load_device("h100"), LINKS, auto=False).fewer
        return None if one is None else (one.data, one.sequence)

    assert fewer(48) == (12, 1)
    assert fewer(16) == (12, 1)  # 4 x 4 of 16, because 16 does not divide the batch
    assert fewer(48, k1=101) is None, "12 x 2 is slower than 12 x 4"
    assert fewer(12) is None, "one GPU a sample takes all of them"
    times[1] = 1.6
    assert fewer(48) is None


def test_graphs_are_planned_where_a_run_has_them() -> None:
    """Catches a plan without graphs of a run that would be faster with them, and one with graphs that `evodsp fit` refuses."""

    def graphs(**changes: object) -> list[bool | None]:
        return [one.graphs for one in dataclasses.replace(SMALL, **changes).recorded()]

    assert (graphs(graphs=None), graphs(graphs=True), graphs(graphs=False)) == ([False, True], [True], [False])
    assert graphs(graphs=True, parameters="fsdp2") == graphs(graphs=None, on_gpu=False) == [False]


def test_a_plan_with_little_room_is_not_green(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a green tick for a count of bytes that is 1 % below the memory."""
    for needs, tight in ((97, False), (98, True), (100, True), (101, False)):
        fake(monkeypatch, {1: 1.0}, {1: needs})
        found = compare(SMALL, 1, load_device("h100"), LINKS, sequence=1, auto=False)
        assert found.estimates[0].tight is tight
        if found.best is not None:
            made = dataclasses.replace(found.best, one=Times(total=1.0), block=Times())
            html = page(dataclasses.replace(found, estimates=[made], best=made, alone=made), 1).html()
            assert ("less than 3% of the memory is free" in html) == tight == ("✓" not in html)


def test_as_little_is_recomputed_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a search that ends one block too early or too late, a mesh that recomputes although there is room, one that
    recomputes a block whole although its projections suffice, and one that fills the last percent of the memory although it
    need not."""
    blocks = 48
    training = dataclasses.replace(SMALL, model=ModelConfig.preset("model_3"))
    monkeypatch.setattr(mesh, "traced", _mixed)

    def needs(training: Training, program: Program, items: list[Item], ranks: int, batches: int) -> Memory:
        if not program.repeats:
            return Memory(0, 0, 0, 0, 0, 0, "")
        first, last = program.repeats[0].times + 3, program.repeats[1].times + 2  # of a stack of 48 blocks
        assert first + last == blocks
        # A block keeps 2 GiB, 1 GiB of them projections.
        of_first, of_last = 1 - program.batch_bytes, 2 - (program.parameters == blocks)
        return Memory((first * of_first + last * of_last) * 2**30, 0, 0, 0, 0, 0, "")

    monkeypatch.setattr(mesh, "memory", needs)

    def recomputed(usable_gib: float) -> tuple[int, ...]:
        device = dataclasses.replace(load_device("h100"), memory_gib=usable_gib, fragmentation=0.0, reserved_gib=0.0)
        with ThreadPoolExecutor(1) as pool:
            planned = mesh.Planned(training, device, LINKS, True, pool)
            return tuple(planned._cheapest(TracedPass(_mixed(training, 1, Recomputed(0, 4)), []), 1, 1)[0])

    whole = {0.0: (48, 0), 2.9: (48, 0), 3.01: (45, 3), 3.9: (45, 3), 4.01: (44, 4), 43.7: (5, 43), 50.9: (4, 44)}
    projections = {51.01: (0, 45), 51.9: (0, 45), 52.01: (0, 44), 91.9: (0, 5), 92.01: (0, 4), 1e6: (0, 4)}
    for gib, expected in (whole | projections).items():
        assert recomputed(gib / 0.97) == expected, gib


@pytest.mark.parametrize(
    ("setting", "projections", "expected"),
    [
        (True, False, (48, 0)), (False, False, (0, 0)), (10, False, (10, 0)), (60, True, (48, 0)), ("auto", False, (48, 0)),
        (False, True, (0, 48)), (10, True, (10, 38)), (10, 20, (10, 20)), (40, 20, (40, 8)),
    ],
)  # fmt: skip
def test_what_is_recomputed_as_the_config_says(
    setting: bool | int | str, projections: bool | int, expected: tuple[int, int]
) -> None:
    """Catches a plan that shows other numbers of kept blocks than the config's."""
    model = ModelConfig.preset("model_3")
    again: Any = {"checkpoint": setting, "checkpoint_projections": projections}
    model = dataclasses.replace(model, evoformer=dataclasses.replace(model.evoformer, **again))
    with ProcessPoolExecutor(1) as pool:  # starts no process before it gets work
        planned = mesh.Planned(dataclasses.replace(SMALL, model=model), load_device("h100"), LINKS, False, pool)
    assert planned._unsearched == expected


def _mixed(training: Training, sequence: int, recomputed: Recomputed) -> Program:
    """Stands in for a traced pass whose Evoformer recomputes this. `batch_bytes`: 1 if it recomputes blocks whole.
    `parameters`: number of blocks that keep no projections.
    """
    repeats = [Repeat("evoformer", 2, 1), Repeat("evoformer", 5, 42)] if recomputed.blocks < 48 else []
    return Program([], repeats, int(recomputed.blocks > 0), sum(recomputed), [])


_followed: dict[str, Program] = {}
"""Passes of this file's tests by their step: most of them plan the same one, which takes seconds to follow."""


class _Here(Executor):
    """Works at once, in this process."""

    def submit(self, function: Any, /, *arguments: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that an earlier test followed is taken from it."""
    follow = mesh.follow

    def once(step: PlannedStep) -> Program:
        if (key := repr(step)) not in _followed:
            _followed[key] = follow(step)
        return _followed[key]

    monkeypatch.setattr(mesh, "follow", once)
    monkeypatch.setattr(mesh, "ProcessPoolExecutor", lambda *_, **__: _Here())


def test_the_command_prints_and_writes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a table, a page or a file without the numbers of the other two."""
    output = tmp_path / "plan.html"
    sizes = {"gpus": 2, "preset": "small", "residues": 32, "msa": 16, "extra-msa": 32, "global_batch": 4}
    words = [f"--{name}={value}" for name, value in sizes.items()]
    assert main(["plan", *words, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "take 2 x 1 with CUDA graphs: " in printed
    assert (
        "\nevodsp fit --trainer.devices 2 --parallel.sequence 1 --cuda_graphs true --trainer.precision bf16-mixed "
        "--global_batch 4 --model.preset small --data.train.crop_size 32 --data.train.msa_clusters 16 "
        "--data.train.extra_msa 32 --model.evoformer.checkpoint true\n"
    ) in printed
    assert "not measured" in printed
    numbers = json.loads(output.with_suffix(".json").read_text())
    assert [(one["data"], one["sequence"]) for one in numbers["meshes"]] == [(2, 1), (1, 2)]
    days, rate = numbers["meshes"][0]["days"], numbers["meshes"][0]["samples_per_second"]
    assert 86400 * days * rate == pytest.approx(10_000_000)
    assert "10,000,000 samples in batches of 4" in printed
    assert numbers["meshes"][0]["pass_with_gradients"]["collectives"] == 0
    assert numbers["meshes"][1]["pass_with_gradients"]["collectives"] > 20
    html = output.read_text()
    for text in ("2 x 1", "1 x 2", "not measured", "<svg", "Memory of a device"):
        assert text in html
    assert "Time line" not in html, "a time line of one bar"
    assert "✓ Take 2 x 1 with" in html
    headings = re.findall(r"<th[^>]*>(.*?)</th>", html)
    assert headings[:6] == ["data x sequence", "GiB", "fits", "step, s", "samples/s", "efficiency"]
    assert headings[-4:] == ["GPU-hours", "part", "milliseconds, with waits", "share"]
    shares = [int(share) for share in re.findall(r">(\d+)%</td></tr>", html.partition("milliseconds, with waits")[2])]
    assert (sum(shares) == pytest.approx(100, abs=3), shares[0] == max(shares)) == (True, True)
    assert "extra_msa_stack" not in html
    assert "http://" not in html.replace("http://www.w3.org", "")


@pytest.mark.verify_but("cuda_graphs: true*")
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, ""),
        ("trainer: {accelerator: cpu}\ndata: {train: {crop_size: null}}\ncompile: blocks", ""),
        ("cuda_graphs: true\nparallel: {sequence: 1}", "--sequence 2"),
        ("cuda_graphs: false", ""),
        ("cuda_graphs: true\nmodel: {optimizer: {clip: batch}}", "--parameters fsdp2"),
    ],
)
def test_the_command_of_a_plan_runs(
    config: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], followed_once: None
) -> None:
    """Catches advice that evodsp refuses: graphs with sharded parameters, with compiled blocks or on a CPU, other meshes."""
    output, made = tmp_path / "plan.html", tmp_path / "my run.yaml"
    small = f"--gpus 2 --preset small --residues 32 --msa 16 --extra_msa 32 --global_batch 4 {words}".split()
    if config is not None:
        made.write_text(config)
        small += ["--config", str(made)]
    assert main(["plan", *small, "--output", str(output)]) == 0
    numbers = json.loads(output.with_suffix(".json").read_text())
    assert numbers["command"] in capsys.readouterr().out.splitlines()
    program, fit, *options = shlex.split(numbers["command"])
    assert (program, fit) == ("evodsp", "fit")
    assert main([fit, *options, "--print_config"]) == 0
    run = TrainingCLI("fit", options).settings
    check_graphs(run.run, run.parallel, run.data, run.trainer["accelerator"] != "cpu")
    check_compilation(run.run, run.parallel, run.plan, run.data, True)
    data, sequence = numbers["best"]
    assert (int(run.trainer["devices"]), run.parallel.sequence, run.run.global_batch) == (data * sequence, sequence, 4)
    recorded = words != "--parameters fsdp2" and not any(no in (config or "") for no in ("compile", "graphs: false"))
    assert run.run.cuda_graphs is (numbers["meshes"][0]["cuda_graphs"]) is recorded


@pytest.mark.parametrize("meshes", [2, 3])
def test_the_charts_of_a_plan_begin_at_zero(meshes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an axis that begins at the smallest value, so that 10 % more looks like ten times as much, and a curve through
    two points."""
    fake(monkeypatch, {1: 3.0, 2: 2.0, 4: 1.5}, {1: 300, 2: 200, 4: 1})
    found = compare(SMALL, 4, load_device("h100"), LINKS, auto=False)
    made = [dataclasses.replace(one, one=Times(total=1.0), block=Times()) for one in found.estimates]
    html = page(dataclasses.replace(found, estimates=made[:meshes], best=made[0], alone=made[0]), 4).html()
    charts = re.findall(r"<svg[^>]*by ranks of a.*?</svg>", html, re.DOTALL)
    assert len(charts) == 2 * (meshes > 2)
    assert all(re.search(r'<text[^>]*text-anchor="end"[^>]*>0</text>', chart) for chart in charts)


def test_a_plan_without_output_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], followed_once: None
) -> None:
    """Catches a file in the folder in which somebody asks for a plan, in the place of an earlier one."""
    monkeypatch.chdir(tmp_path)
    words = "--gpus 2 --sequence 1 --preset small --residues 32 --msa 16 --extra_msa 32 --global_batch 4"
    assert main(["plan", *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "take 2 x 1" in printed
    assert "page:" not in printed
    assert not [*tmp_path.iterdir()]


def test_one_mesh_is_a_table_and_its_time_line_has_both_lanes(tmp_path: Path, followed_once: None) -> None:
    """Catches a chart of a single bar, and a time line that is left out where devices wait for the link."""
    output = tmp_path / "plan.html"
    words = "--gpus 2 --sequence 2 --preset small --residues 32 --msa 16 --extra_msa 32 --global_batch 4"
    assert main(["plan", *words.split(), "--output", str(output)]) == 0
    html = output.read_text()
    assert "<td>activations</td>" in html
    assert html.count("<svg") == 1
    assert 'aria-label="time line of an Evoformer block"' in html


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 0", "--gpus is 0"),
        ("--gpus 8 --device h1000", "no device 'h1000'"),
        ("--gpus 8 --sequence 3", "not a multiple"),
        ("--gpus 8 --across carrier_pigeon", "no link 'carrier_pigeon'"),
        ("--gpus 8 --config nowhere.yaml", "cannot be read"),
        ("--gpus 8 --config wrong.yaml", "wrong.yaml: a value has the wrong type"),
        ("--gpus 8 --device latin.yaml", "latin.yaml: not a text in UTF-8"),
        ("--gpus 8 --preset model_9", "--preset is 'model_9'"),
        ("--gpus 8 --preset model_3 --templates 2", "--templates is 2"),
        ("--gpus 8 --msa 4", "--msa is 4"),
        ("--gpus 8 --output plan.txt", "ends in .html"),
        ("--gpus 131072", "at least 1024"),
    ],
)
def test_a_wrong_command_is_one_line(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a traceback, and work that begins before the options are checked."""
    monkeypatch.chdir(tmp_path)
    Path("latin.yaml").write_bytes("name: zappé\n".encode("latin-1"))
    Path("wrong.yaml").write_text("data: {train: {msa_clusters: many}}\n")
    Path("model.yaml").write_text("model: {evoformer: {blocks: many}}\n")
    assert main(["plan", *words.split()]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_config_of_a_run_is_planned_as_it_is(tmp_path: Path) -> None:
    """Catches sizes, losses or a batch that the plan takes from elsewhere."""
    found = training_of(PlanConfig(gpus=8, config=Path("configs/af2_finetune_ptm.yaml")))
    assert found.sizes == SampleSizes(384, 508, 5120, 4)
    assert found.samples == 1_500_000
    assert (found.global_batch, found.passes, found.clip, found.loss.violation) == (128, 2.5, "sample", 1.0)
    assert found.loss.pae > 0
    assert found.model.heads.predicted_aligned_error
    changed = training_of(
        PlanConfig(
            gpus=8, config=Path("configs/af2_finetune_ptm.yaml"), residues=100, templates=0, recycles=0, samples=7
        )
    )
    assert changed.samples == 7
    assert training_of(PlanConfig(gpus=8)).samples == 10_000_000
    assert changed.sizes == SampleSizes(100, 512, 5120, 0)
    assert changed.passes == 1
    assert not changed.model.templates.enabled


def planned(tmp_path: Path, text: str, **options: Any) -> Training:
    """The training that a config and options of the plan make."""
    (tmp_path / "run.yaml").write_text(text)
    return training_of(PlanConfig(gpus=8, config=tmp_path / "run.yaml", **options))


@pytest.mark.parametrize(
    ("trainer", "half"),
    [
        ("{}", False),
        ("{precision: null}", False),
        ("{precision: 32}", False),
        ("{precision: 32-true}", False),
        ("{precision: bf16-mixed}", True),
        ("{precision: bf16}", True),
    ],
)
def test_the_precision_is_that_of_the_config(trainer: str, half: bool, tmp_path: Path) -> None:
    """Catches a run in 32-true, which is the default of a run, that is planned in bf16-mixed: a quarter of its time."""
    found = planned(tmp_path, f"trainer: {trainer}")
    assert found.half == half
    assert found.options["trainer.precision"] == ("bf16-mixed" if half else "32-true")
    assert planned(tmp_path, f"trainer: {trainer}", precision="bf16-mixed").half
    assert not planned(tmp_path, f"trainer: {trainer}", precision="32-true").half
    by_predict = [planned(tmp_path, f"trainer: {trainer}", precision=name) for name in ("bf16", "fp32")]
    assert [one.options["trainer.precision"] for one in by_predict] == ["bf16-mixed", "32-true"]


def test_a_precision_that_is_not_planned_is_an_error(tmp_path: Path) -> None:
    """Catches double precision that is planned as another."""
    with pytest.raises(UserError, match=r"trainer\.precision is 64-true, which is not planned"):
        planned(tmp_path, "trainer: {precision: 64-true}")


def test_what_ranks_send_and_hold_is_that_of_the_config(tmp_path: Path) -> None:
    """Catches settings of a run that a plan leaves out, and options of the plan that it does not name."""
    found = planned(
        tmp_path,
        "parallel: {parameters: zero1, wire: bf16, sequence: 2}\ncuda_graphs: true\nmatmul_precision: high\n"
        "plan: {triangle_outgoing: gather}\nglobal_batch: 16\n"
        "model: {extra_msa: {checkpoint: auto}, evoformer: {checkpoint: auto}}",
    )
    assert (found.parameters, found.wire, found.graphs, found.tf32) == ("zero1", "bf16", True, True)
    assert found.plan.triangle_outgoing == "gather"
    assert found.model.extra_msa.checkpoint is True
    assert found.options == {"trainer.precision": "32-true", "data.train.max_templates": "4"}
    changed = planned(
        tmp_path,
        "parallel: {parameters: zero1, wire: bf16}\ncuda_graphs: true\nglobal_batch: 16\ndata: {train: {max_templates: 4}}",
        parameters="replicate", wire="same", cuda_graphs=False, global_batch=32, residues=100, preset="model_3",
    )  # fmt: skip
    assert (changed.parameters, changed.wire, changed.graphs) == ("replicate", "same", False)
    assert changed.options == {
        "trainer.precision": "32-true", "global_batch": "32", "model.preset": "model_3",
        "parallel.parameters": "replicate", "parallel.wire": "same", "data.train.crop_size": "100",
        "data.train.max_templates": "0",
    }  # fmt: skip


def test_the_recipes_are_trained_in_half_precision() -> None:
    """Catches a recipe without a precision: a run of it would take four times as long."""
    for name in ("af2_initial", "af2_finetune", "af2_finetune_ptm"):
        found = training_of(PlanConfig(gpus=8, config=Path(f"configs/{name}.yaml")))
        assert found.half
        assert found.options == {"trainer.precision": "bf16-mixed"}


def test_the_recipe_of_complexes() -> None:
    """Catches numbers of AlphaFold-Multimer that its config lacks, such as the clamp of every sample."""
    found = training_of(PlanConfig(gpus=8, config=Path("configs/multimer.yaml")))
    assert (found.model.arrangement, found.sizes) == ("multimer", SampleSizes(384, 252, 1152, 4))
    assert (found.loss.backbone_fape, found.loss.interface_fape, found.loss.chain_centre) == (0.5, 0.5, 1.0)
    assert (found.loss.interface_clamp, found.loss.pae, found.half) == (30.0, 0.1, True)
    configs = (read_run_config(Path(f"configs/multimer{step}.yaml")) for step in ("", "_finetune"))
    first, second = (config["data"]["train"] for config in configs)
    assert (first["clamp_fape_fraction"], first["spatial_crop_fraction"]) == (1.0, 0.5)
    assert second == {"crop_size": 640, "msa_clusters": 512, "extra_msa": 2048}
