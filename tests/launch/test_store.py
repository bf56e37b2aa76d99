"""The ranks' store, into which whoever reaches its port may write: who reaches it, and that nothing in it is run."""

from __future__ import annotations

import pickle
import socket
import threading
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from evodsp.errors import UserError
from evodsp.launch import launcher, process_group, watch
from evodsp.launch.environment import RankAddress
from evodsp.launch.watch import LONGEST, Watch, local_store, loopback, open_store, text, texts
from tests.builders.hostile import Attack
from tests.builders.processes import free_port

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 in /proc/net."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """What an attack makes, if it succeeds."""
    pickle.loads(pickle.dumps(Attack(tmp_path / "it works")))
    assert (tmp_path / "it works").is_dir()
    return tmp_path / "attacked"


def listening(port: int) -> set[str]:
    """The addresses at which somebody listens on this port, as the kernel writes them."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    addresses = [local.split(":") for _, local, _, state, *_ in lines if state == "0A"]
    return {address for address, at in addresses if int(at, 16) == port}


def test_the_store_of_a_local_launch_listens_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a store that every machine of the network reaches, as torch opens it whatever host it is given."""
    found = []

    def note(number: int, ranks: int, port: int, *_: object) -> Mock:
        found.append(listening(port))
        return Mock(spec=launcher._Rank, number=number, process=Mock(poll=lambda: 0))

    monkeypatch.setattr(launcher, "_start", note)
    assert launcher.launch(2, []) == 0
    assert found == [{"0100007F"}] * 2


@pytest.mark.parametrize(
    ("cores", "said"), [(3, ""), (1, "evodsp: warning: 3 ranks share 1 core; on CPUs more ranks than cores gain")]
)
def test_more_ranks_than_cores_are_named(
    cores: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches eight ranks on two cores, which take an hour without a word, and a warning where each has its own."""

    def one(number: int, *_: object) -> Mock:
        return Mock(spec=launcher._Rank, number=number, process=Mock(poll=lambda: 0))

    monkeypatch.setattr(launcher, "_cores", lambda: cores)
    monkeypatch.setattr(launcher, "_start", one)
    assert launcher.launch(3, []) == 0
    assert capsys.readouterr().err[: len(said) or None] == said


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ranks_that_meet_on_loopback_listen_there_only(host: str) -> None:
    """Catches a store of rank 0 (srun, or ranks started by hand) that is open to other machines, though all ranks are here; and
    a rank that does not reach it."""
    if host == "::1" and "lo" not in Path("/proc/net/if_inet6").read_text():
        host = "127.0.0.1"  # a machine without IPv6
    port = free_port()
    store = open_store(host, port, 5.0, hosts=True)
    assert listening(port) <= LOOPBACK
    open_store(host, port, 5.0, hosts=False).set("key", "value")
    assert store.get("key") == b"value"


def test_other_hosts_are_no_loopback() -> None:
    """Catches a run on several machines whose store the other machines cannot reach."""
    assert [loopback(host) for host in ("gpu003", "10.0.0.1", "localhost.example.org", "0.0.0.0")] == [None] * 4


def test_a_port_that_is_taken_is_one_line() -> None:
    """Catches a traceback where another run listens on the port."""
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(dist.DistNetworkError, match="cannot listen at 127"),
    ):
        open_store("127.0.0.1", other.getsockname()[1], 5.0, hosts=True)


def test_a_text_that_another_rank_is_about_to_write_is_awaited() -> None:
    """Catches a run that ends because one rank looks for the name of another one that is slower."""
    store = local_store()
    later = threading.Timer(0.1, store.clone().set, ["key", "rank 1"])
    later.start()
    assert text(store, "key") == "rank 1"
    later.join()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "found nothing"),
        (b"\x80\x04\x95", "found '\ufffd.*expected UTF-8"),
        (b'["a"', "a list of texts in JSON"),
        (b'{"a": 1}', "a list of texts in JSON"),
        (b'["a", 1]', "a list of texts in JSON"),
        (b'["\\ud800"]', "a list of texts in JSON"),
        (b"[" * 100_000, r"found '\[{27}\.\.\.\[{28}'"),
        (b"9" * 5000, "a list of texts in JSON"),
        (b"x" * (LONGEST + 1), r"found 4,194,305 bytes"),
        (b"[\x1b[2J]", r"\\x1b"),
    ],
)  # fmt: skip
def test_wrong_texts_are_one_line(value: bytes | None, said: str) -> None:
    """Catches a traceback, a recursion without end, or a wrong value that is printed as it is."""
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    if value is not None:
        store.set("key", value)  # type: ignore[arg-type]  # torch takes bytes as well
    with pytest.raises(UserError, match=rf"the ranks' store, key key: .*{said}.*Close its port") as error:
        texts(store, "key")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def test_the_largest_message_that_torch_takes_is_refused() -> None:
    """Catches a value of any size that a rank keeps: the messages are limited, but values may be appended to."""
    store = local_store()
    for _ in range(3):
        store.append("key", " " * (2 << 20))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="found 6,291,456 bytes, expected 4,194,304 at most"):
        texts(store, "key")


def attacked(store: dist.TCPStore, trace: Path) -> None:
    """Overwrite every value of the store by a pickle that makes `trace`."""
    keys = store.list_keys()
    assert keys
    for key in keys:
        store.set(key, pickle.dumps(Attack(trace)))  # type: ignore[arg-type]  # torch takes bytes as well


def test_no_pickle_in_the_store_is_run(monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    """Catches code of whoever reaches the port in the watch of a rank: all that it reads is an attack."""
    ours = local_store()
    ended: list[str] = []
    monkeypatch.setattr(watch, "_end", ended.append)
    watching = Watch(ours, 0, 1, timeout_s=5.0)
    monkeypatch.setattr(watching, "_write_state", lambda: None)
    attacked(ours, trace)
    with pytest.raises(UserError, match="another program writes into it"):
        watching._look()
    watching.run()
    assert [("key who/0" in message) for message in ended] == [True]
    assert not trace.exists()


def test_a_meeting_that_is_disturbed_is_one_line(trace: Path) -> None:
    """Catches code, or a traceback, from the requests and answers by which ranks agree on a part of the store."""
    store, one = local_store(), RankAddress(0, 2, 0, "127.0.0.1", 1, hosts_store=True)
    dist.PrefixStore("evodsp", store).set("asks/1", pickle.dumps(Attack(trace)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="key asks/1: found"):
        process_group._fresh_part(store, one, 5.0)
    assert not trace.exists()
