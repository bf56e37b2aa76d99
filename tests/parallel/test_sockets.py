"""Which ranks exchange by sockets, and what becomes of those whose partner is gone, silent or elsewhere."""

from __future__ import annotations

import io
import logging
import socket
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from evodsp.launch.process_group import lost_contact
from evodsp.launch.watch import Watch
from evodsp.parallel import sockets as module
from evodsp.parallel.mesh import init_mesh
from evodsp.parallel.sockets import Sockets
from tests.ranks import RankPool


def connected(handle: Any, timeout_s: float = 60.0) -> Sockets:
    sockets = Sockets.of(handle, timeout_s)
    assert sockets is not None
    return sockets


def swap(sockets: Sockets, numbers: int = 3) -> Any:
    """Launch an exchange between two ranks."""
    x = torch.ones(2, numbers)
    return sockets.exchange(torch.empty_like(x).unbind(), x.unbind())


def folders(handle: Any) -> list[str]:
    """What connecting leaves in the folder of temporary files."""
    folder = Path(tempfile.gettempdir())
    connected(handle)
    dist.barrier(handle)
    return sorted(path.name for path in folder.glob("evodsp-*"))


def with_temporary_files(handle: Any, folder: str, function: Any, *arguments: Any) -> Any:
    """Call `function` with its temporary files in `folder`."""
    with mock.patch.object(tempfile, "tempdir", folder):
        return function(handle, *arguments)


def test_nothing_is_left_of_connecting(pool: RankPool, tmp_path: Path) -> None:
    """Catches sockets that stay behind as files."""
    assert pool.run(2, with_temporary_files, str(tmp_path), folders) == [[], []]


def elsewhere(handle: Any, alone: int) -> bool:
    """Connect while rank `alone` cannot be reached: the path it names does not exist here."""
    listen = module._listen
    if handle.rank() == alone:
        module._listen = lambda *those: (listen(*those)[0], "/nowhere/rank")
    try:
        return Sockets.of(handle, 5.0) is None
    finally:
        module._listen = listen


@pytest.mark.parametrize("alone", [0, 1])
def test_ranks_of_several_machines_use_their_process_group(pool: RankPool, alone: int) -> None:
    """Catches ranks that disagree about who has sockets: some would wait in gloo and some in the sockets."""
    assert pool.run(3, elsewhere, alone) == [True] * 3


def swapped_elsewhere(handle: Any, short: str) -> None:
    """Swap ones, with `short` as the folder for sockets whose paths would be too long."""
    with mock.patch.object(module, "_SHORT", short):
        swap(connected(handle)).wait()


def test_a_path_too_long_for_a_socket_is_no_error(pool: RankPool, tmp_path: Path) -> None:
    """Unix sockets have names of about a hundred characters; folders of temporary files may be deeper."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with tempfile.TemporaryDirectory(dir=module._SHORT, prefix="s") as short:
        pool.run(2, with_temporary_files, str(deep), swapped_elsewhere, short)
        assert not any(Path(short).iterdir())
    assert not any(deep.iterdir())


def without_unix_sockets(handle: Any, hosts: list[str]) -> str:
    """What is logged when no socket can be made."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    with (
        mock.patch.object(socket.socket, "bind", side_effect=OSError),
        mock.patch.object(socket, "gethostname", return_value=hosts[handle.rank()]),
    ):
        module._log.addHandler(handler)
        try:
            assert Sockets.of(handle, 60.0) is None
        finally:
            module._log.removeHandler(handler)
    return stream.getvalue()


def test_ranks_of_a_machine_without_sockets_say_that_gloo_is_slower(pool: RankPool) -> None:
    """Catches a run that silently takes longer, and a warning where ranks of two machines communicate by gloo as they must."""
    said, *others = pool.run(2, without_unix_sockets, ["a", "a"])
    assert "the 2 ranks of a " in said
    assert "TMPDIR" in said
    assert others == [""]
    assert pool.run(2, without_unix_sockets, ["a", "b"]) == ["", ""]


def carriers(handle: Any) -> list[bool]:
    """Whether there are sockets: as ever, when switched off, in groups of one rank, in one group of all four."""
    asked = (init_mesh(2), init_mesh(2, sockets=False), init_mesh(1), init_mesh(4))
    return [mesh.sockets is not None for mesh in asked] + [
        asked[0].sequence_group().sockets is asked[0].sockets,
        asked[0].data_group().sockets is not None,
        asked[0].all_ranks().sockets is not None,
        asked[3].all_ranks().sockets is not None,
    ]


def test_the_mesh_gives_sockets_to_its_sequence_groups(pool: RankPool) -> None:
    """Catches a setting that is ignored, and a group that was given the sockets of another."""
    expected = [True, False, False, True, True, False, False, True]
    assert pool.run(4, carriers) == [expected] * 4


def gone(handle: Any) -> str:
    """What rank 0 hears when rank 1 has left, while it waits and when it sends."""
    sockets = connected(handle)
    if handle.rank() == 1:
        del sockets  # closes them
        return ""
    said = []
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError) as error:
            swap(sockets, 1_000_000).wait()
        assert lost_contact(error.value)
        said.append(str(error.value))
    return " / ".join(said)


def test_a_rank_that_is_gone_is_named(pool: RankPool) -> None:
    """Catches ranks that wait for ever for one that has died, and an error that is reported as a defect of evodsp's."""
    said = pool.run(2, gone)[0].split(" / ")
    assert all(one.startswith("rank 1 has closed its connection") for one in said)


def silent(handle: Any) -> str:
    sockets = connected(handle, timeout_s=0.2)
    if handle.rank() == 0:
        with pytest.raises(dist.DistNetworkError) as error:
            swap(sockets).wait()
        dist.barrier(handle)
        return str(error.value)
    dist.barrier(handle)
    return ""


def test_a_rank_that_sends_nothing_is_named(pool: RankPool) -> None:
    """Catches waits without an end."""
    assert pool.run(2, silent)[0] == "rank 1 has sent nothing for 0.2 s"


def late(handle: Any) -> float:
    """CPU time of rank 0 while it waits a second for rank 1."""
    sockets = connected(handle)
    dist.barrier(handle)
    if handle.rank() == 1:
        time.sleep(1)
    begun = time.process_time()
    swap(sockets).wait()
    return time.process_time() - begun


def test_a_long_wait_takes_no_cpu_time(pool: RankPool) -> None:
    """Catches a rank that looks for a message all the time: it would take a core from those who compute."""
    assert pool.run(2, late)[0] < 0.3


def counted(handle: Any) -> list[int]:
    sockets = connected(handle)
    store = dist.HashStore()
    watch = Watch(store, handle.rank(), handle.size(), 60.0)
    watch.also_count(sockets)
    found = []
    for _ in range(3):
        watch._write_state()
        found.append(int(store.get(f"state/{handle.rank()}").split()[1]))
        swap(sockets).wait()
    return [number - found[0] for number in found]


def test_the_watch_counts_exchanges(pool: RankPool) -> None:
    """Catches a watch that takes a prediction, which communicates by sockets alone, for a run that hangs."""
    assert pool.run(2, counted) == [[0, 1, 2]] * 2
