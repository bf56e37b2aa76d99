"""Clocks, links and repeated segments by hand-made items whose times are known; the files of `evodsp plan --measure`."""

from __future__ import annotations

import itertools
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.parallel.group import Kind
from evodsp.planner import measure
from evodsp.planner.device import Device, Link, Links, load_device, load_link, names
from evodsp.planner.measure import with_shares
from evodsp.planner.program import Repeat
from evodsp.planner.simulate import Item, Span, replayed, simulate, spans, whole
from evodsp.planner.trace import Communication, Operation, Wait, logits_of

PLACE = ("evoformer", 1)
LINK = Link("test", dict.fromkeys(load_link("nvlink4").start_us, 10.0), [[1e3, 1.0], [1e6, 2.0]], 0.5)


def span(
    seconds: float, operators: int = 1, held: tuple[int, int, int] = (0, 0, 0), place: tuple[str, int] = PLACE
) -> Span:
    return Span(place, "forward", operators, operators, seconds, 0, 0, *held)


def send(number: int, place: tuple[str, int] = PLACE, kind: Kind = "all-gather") -> Communication:
    return Communication(place, "forward", number, kind, 100)


def wait(number: int, place: tuple[str, int] = PLACE) -> Wait:
    return Wait(place, "forward", number)


def operation(
    name: str, moved: int, launches: int = 1, flops: int = 0, half: bool = True, logits: float = 0.0
) -> Operation:
    return Operation(PLACE, "forward", name, flops, moved, launches, half, 0, logits)


def three_seconds(kind: Kind, counted: int) -> float:
    return 3.0


def test_communication_hides_behind_what_is_computed_meanwhile() -> None:
    """Catches a collective that starts before its input is there, and a wait that counts as exposed although nothing waits."""
    items: list[Item] = [span(1.0), send(1), span(2.0), wait(1), span(5.0), send(2), span(4.0), wait(2)]
    times = simulate(items, 0.0, three_seconds)
    assert (times.total, times.exposed, times.communication, times.calls) == (13.0, 1.0, 6.0, 2)
    assert simulate(items, 0.0, three_seconds, overlaps=False).total == 18.0


def test_collectives_take_turns() -> None:
    """Catches two collectives on one link at the same time."""
    assert simulate([span(1.0), send(1), send(2), wait(1), wait(2)], 0.0, three_seconds).total == 7.0


def test_the_host_limits_many_small_operators() -> None:
    """Catches launches that take no time, and a host that waits for the device."""
    assert simulate([span(1.0, operators=30)], 0.1, three_seconds).total == pytest.approx(3.0)
    assert simulate([span(10.0, operators=30)], 0.1, three_seconds).total == pytest.approx(10.1)


def test_a_crowded_node_is_slower_by_the_devices_that_work() -> None:
    """Catches one process that pays for neighbours that it does not have, and nodes that crowd each other."""
    device = replace(load_device("h100"), gpus_per_node=5, crowding=1.4)
    assert [device.crowded(busy) for busy in (1, 3, 5, 80)] == pytest.approx([1.0, 1.2, 1.4, 1.4])
    assert replace(device, gpus_per_node=1).crowded(80) == 1.0


def test_a_repeated_segment_sends_to_the_next_one_and_holds_more_each_time() -> None:
    """Catches a collective that is awaited twice or never after a repetition, and memory that stays as it was."""

    def held(items: list[Item]) -> list[tuple[int, int, int]]:
        return [(item.before, item.peak, item.after) for item in items if isinstance(item, Span)]

    first, last = ("evoformer", 0), ("evoformer", 2)
    items: list[Item] = [
        span(1.0, held=(0, 3, 1), place=first), send(1, first),
        wait(1), span(1.0, held=(1, 9, 3)), send(2),
        wait(2, last), span(1.0, held=(3, 8, 4), place=last),
    ]  # fmt: skip
    found = whole(items, [Repeat("evoformer", 1, 3)])
    assert held(found) == [(0, 3, 1), (1, 9, 3), (3, 11, 5), (5, 13, 7), (7, 12, 8)]
    sent = [item.number for item in found if isinstance(item, Communication)]
    assert [item.number for item in found if isinstance(item, Wait)] == sent
    assert len(set(sent)) == 4
    # Each of the four waits three seconds for what the segment before it sent.
    assert simulate(found, 0.0, three_seconds).exposed == 12.0


def test_a_link_starts_up_and_grows_faster_with_size() -> None:
    """Catches bytes that a rank keeps for itself on the wire, a table that is not interpolated, and a start
    that is forgotten."""
    links = Links(LINK, LINK, 8)
    assert links.seconds("all-gather", 4, 1) == 0.0
    assert links.seconds("all-gather", 2_000_000, 2) == pytest.approx(10e-6 + 1_000_000 / 2e9)
    assert links.seconds("all-to-all", 2_000_000, 2) == pytest.approx(10e-6 + 1_000_000 / 1e9)
    middle = LINK.seconds("all-gather", 1e3 * 1000**0.5)
    assert middle == pytest.approx(1e3 * 1000**0.5 / 1.5e9)


def test_between_nodes_an_all_to_all_gets_one_adapter_and_a_gather_gets_all() -> None:
    """Catches a collective across nodes that is timed with the link inside of a node."""
    slow = Link("slow", LINK.start_us, [[1.0, 0.1]], 1.0)
    links = Links(LINK, slow, 4)
    counted = 8_000_000
    assert links.seconds("all-to-all", counted, 8) == pytest.approx(10e-6 + counted / 2 / 0.1e9)
    assert links.seconds("all-gather", counted, 8) == pytest.approx(10e-6 + counted / 2 / 4 / 0.1e9)
    # Data ranks that are four devices apart have one neighbour in each node.
    assert links.apart("all-gather", counted, 2, stride=4) == pytest.approx(10e-6 + counted / 2 / 0.1e9)


def test_an_operator_takes_the_longer_of_its_products_and_its_traffic() -> None:
    """Catches peaks of another precision, launches that take no time, and operators that take none."""
    device = load_device("h100")

    def more(name: str, flops: int, moved: int, launches: int, half: bool, tf32: bool = False) -> float:
        """The seconds beside those of the launches, of 3 us each."""
        return device.seconds(operation(name, moved, launches, flops, half), tf32) - 3e-6 * launches

    assert more("mm", 10**12, 8, 1, half=True) == pytest.approx(1 / (989 * 0.6))
    assert more("mm", 10**12, 8, 4, half=False) == pytest.approx(1 / (67 * 0.6))
    assert more("mm", 10**12, 8, 1, half=False, tf32=True) == pytest.approx(1 / (494 * 0.6))
    assert more("evodsp::attention", 10**12, 8, 1, half=True) == pytest.approx(1 / (989 * 0.45))
    assert more("add", 0, 10**9, 1, half=True) == pytest.approx(1 / (3350 * 0.7))
    assert device.seconds(operation("add", 8, 3)) == pytest.approx(9e-6, rel=1e-3)
    assert device.seconds(operation("view", 0, 0)) == 0.0


def test_attention_of_a_gpu_takes_the_time_of_its_logits() -> None:
    """Catches narrow heads that are planned as faster than wide ones: an H200 needed the same time for 8 channels as for 32."""
    device = replace(load_device("h200"), kernel_us=0.0)
    for flops in (10**12, 4 * 10**12):
        taken = device.seconds(operation("evodsp::attention", 8, 1, flops, logits=2e9))
        assert taken == pytest.approx(2e-3)
    single = operation("evodsp::attention", 8, 1, 10**12, half=False, logits=2e9)
    assert device.seconds(single) == pytest.approx(1 / (67 * 0.45))
    half, slow = replace(single, half=True), replace(device, attention_tlogits=0.0)
    assert slow.seconds(half) == pytest.approx(1 / (989 * 0.45))
    backward = logits_of("evodsp::attention_backward", (None, torch.empty(1, 3, 5, 4, 2, 8, device="meta")))
    assert backward == pytest.approx(3.4 * 3 * 2 * 5 * 5)


@pytest.mark.parametrize("kind", ["device", "link"])
def test_every_number_of_a_data_file_says_where_it_comes_from(kind: str) -> None:
    """Catches a number without a source: each line with one has a comment behind it, or a comment above it."""
    folder = Path(__file__).parents[2] / "evodsp" / "planner" / f"{kind}s"
    for name in names(kind):
        lines = (folder / f"{name}.yaml").read_text().splitlines()
        for before, line in itertools.pairwise(lines):
            key, _, content = line.split("#")[0].partition(":")
            if key not in ("name", "inside", "across") and any(letter.isdigit() for letter in content):
                assert "#" in line or before.startswith("#"), f"{name}: {line}"
        assert isinstance(load_device(name) if kind == "device" else load_link(name), Device | Link)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "check the path"),
        ("a: [", "not YAML"),
        ("name: x", "missing or unknown keys"),
        ("- 1", "missing or unknown keys"),
    ],
)
def test_a_wrong_device_file_is_one_line(tmp_path: Path, content: str | None, message: str) -> None:
    """Catches a traceback for a file that a user wrote."""
    path = tmp_path / "own.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_device(str(path))


def test_a_wrong_number_of_a_device_file_is_named(tmp_path: Path) -> None:
    """Catches a negative bandwidth that turns into a negative time."""
    folder = Path(__file__).parents[2] / "evodsp" / "planner"
    path = tmp_path / "own.yaml"
    path.write_text((folder / "devices" / "h100.yaml").read_text().replace("memory_gbps: 3350", "memory_gbps: -1"))
    with pytest.raises(UserError, match="memory_gbps is -1"):
        load_device(str(path))
    path.write_text((folder / "links" / "pcie.yaml").read_text().replace("1.0e+6, 15", "9.0e+6, 15"))
    with pytest.raises(UserError, match="rising bytes"):
        load_link(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("inside: {a: 1}", "inside is {'a': 1}, but must be text"),
        ("gpus_per_node: 2.5", "2.5, but must be a whole number"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path: Path, line: str, message: str) -> None:
    """Catches an AttributeError for a link that is no text, and half a GPU in a node."""
    text = (Path(__file__).parents[2] / "evodsp" / "planner" / "devices" / "h100.yaml").read_text()
    path = tmp_path / "own.yaml"
    path.write_text(re.sub(f"^{line.partition(':')[0]}:.*", line, text, flags=re.MULTILINE))
    with pytest.raises(UserError, match=re.escape(message)):
        load_device(str(path))


def test_an_unknown_device_names_the_nearest() -> None:
    """Catches a message that does not help."""
    with pytest.raises(UserError, match=r"no device 'h10': evodsp has a100, b200, h100, h200.*mean 'h100'"):
        load_device("h10")


def test_the_host_launches_collectives_too() -> None:
    """Catches collectives that cost the host nothing: many small ones take as long as their launches."""
    items: list[Item] = [item for number in range(30) for item in (send(number), wait(number))]
    assert simulate(items, 0.1, lambda kind, counted: 0.0).total == pytest.approx(3.0)
    times = simulate([send(1), span(1.0), wait(1)], 0.25, three_seconds)
    assert (times.total, times.exposed, times.calls) == (3.25, 1.75, 1), (
        "launched at 0.25, the operator runs from 0.5 on"
    )


def test_the_host_launches_own_kernels_sooner_than_torchs_operators() -> None:
    """Catches one time for all operators, grids of an own operator that cost nothing, and a file of an earlier version that is
    refused or planned otherwise than before."""
    device = replace(load_device("h200"), launch_us=50.0, own_us=10.0)
    events = [operation("add", 8), operation("evodsp::gate", 8), operation("evodsp::attention_backward", 8, launches=4)]

    def host(of: Device) -> float:
        return simulate(spans(events, of), of.launch_us * 1e-6, three_seconds).host

    assert host(device) == pytest.approx(100e-6)
    earlier = {name: value for name, value in asdict(device).items() if name not in ("own_us", "small_efficiency")}
    assert host(Device(**earlier)) == pytest.approx(150e-6)


def test_two_blocks_tell_two_shares() -> None:
    """Catches one share for kernels that fill a device and for those that do not, and one that is fitted to the other block."""
    device = replace(load_device("h200"), memory_efficiency=0.8, small_efficiency=0.6)
    few = [operation("add", 10**7)] * 90 + [operation("add", 10**9)]
    many = [operation("add", 10**9)] * 90 + [operation("add", 10**7)]

    def taken(works: list[Operation]) -> float:
        return sum(map(device.seconds, works))

    start = replace(device, memory_efficiency=0.3, small_efficiency=1.0)
    found = with_shares(start, (few, taken(few)), (many, taken(many)))
    assert (found.memory_efficiency, found.small_efficiency) == pytest.approx((0.8, 0.6), abs=1e-3)
    assert with_shares(start, (many, taken(many))).small_efficiency == 1.0


def test_graphs_launch_the_stacks_and_nothing_else() -> None:
    """Catches graphs that are planned as launching the whole model: embedders and heads are not recorded."""
    parts = ("evoformer", "losses", "heads")
    items: list[Item] = [span(1.0, operators=30, place=(part, 0)) for part in parts]
    assert [item.operators for item in replayed(items) if isinstance(item, Span)] == [0, 0, 30]
    assert simulate(items, 0.1, three_seconds).total == pytest.approx(9.0)  # the host's 90 launches
    assert simulate(replayed(items), 0.1, three_seconds).total == pytest.approx(3.1)


def test_graphs_launch_the_collectives_of_the_stacks() -> None:
    """Catches a plan in which the host launches recorded collectives, or in which nobody waits for them."""
    items: list[Item] = [item for number in range(30) for item in (send(number), wait(number))]
    outside = [send(number, ("heads", 0)) for number in range(30, 40)]
    launched, recorded = (simulate(run, 0.1, three_seconds) for run in (items + outside, replayed(items + outside)))
    assert recorded.calls == launched.calls == 40
    assert simulate(replayed(items), 0.1, lambda kind, counted: 0.0).total == 0.0
    assert simulate(replayed(outside), 0.1, lambda kind, counted: 0.0).total == pytest.approx(1.0)
    assert recorded.exposed == pytest.approx(30 * 3.0)


def test_plans_take_the_files_that_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a device whose link is not the one that was measured, and a file that a plan does not read."""
    device, link = replace(load_device("a100"), tflops_half=123.4), replace(load_link("pcie"), name="measured")
    asked = []

    def measured(ranks: int | None) -> tuple[dict[str, object], dict[str, object]]:
        asked.append(ranks)
        return asdict(device), asdict(link)

    monkeypatch.setattr(measure, "measure", measured)
    assert main(["plan", "--measure", "--gpus", "3", "--output", str(tmp_path / "mine.yaml")]) == 0
    assert asked == [3]
    found = load_device(str(tmp_path / "mine.yaml"))
    assert found.tflops_half == 123.4
    assert load_link(found.inside).name == load_link(found.across).name == "measured"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--gpus is missing"),
        (["--measure"], "--measure needs --output FILE.yaml"),
        (["--measure", "--output", "plan.html"], "but the file of a device needs a name that ends in .yaml"),
        (["--gpus", "2", "--output", "plan.yaml"], "but the page needs a name that ends in .html"),
    ],
)
def test_options_that_do_not_go_together(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a measurement of a minute whose file is a page, and a plan for no devices."""
    assert main(["plan", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.verify
def test_one_device_is_measured(tmp_path: Path) -> None:
    """Catches a measurement that does not end, or numbers that no device has."""
    assert main(["plan", "--measure", "--gpus", "1", "--output", str(tmp_path / "mine.yaml")]) == 0
    found = load_device(str(tmp_path / "mine.yaml"))
    assert 0.001 < found.tflops_single < 100
    assert 0.02 <= found.products_efficiency <= 2
