"""The store through which the ranks of a run meet: who may connect to it, and how its values are read.

torch's store asks nobody for a password: whoever reaches its port reads and writes every key. So a store of one machine listens
on its loopback address only, and evodsp's own values are numbers and texts that are checked here. Nothing is unpickled.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from evodsp.errors import UserError
from evodsp.printing import shown

LONGEST = 4 << 20
"""Bytes of the longest value that is read. torch's store takes messages of twice this size."""
_BACKLOG = 2048
"""Connections that may wait to be accepted, as many as where torch itself listens."""


def loopback(host: str) -> str | None:
    """The address of `host` if that names this machine to itself, such as 127.0.0.1 for 'localhost'; otherwise None."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:  # the name of a machine
        return None


def local_store() -> dist.TCPStore:
    """A store on a free port of this machine's loopback address, where no other machine can reach it."""
    return _listening("127.0.0.1", 0, timedelta(minutes=5))


def open_store(host: str, port: int, timeout_s: float, hosts: bool) -> dist.TCPStore:
    """A connection to the store at `host`, which is made here if this process `hosts` it: on the loopback address if `host` is
    one, otherwise on all addresses, because ranks of other machines connect to it. Raises DistError if that is impossible.
    """
    timeout, address = timedelta(seconds=timeout_s), loopback(host)
    if hosts and address is not None:
        return _listening(address, port, timeout)
    return dist.TCPStore(address or host, port, None, hosts, timeout=timeout, wait_for_workers=False)


def _listening(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """A store that listens at one address. torch by itself listens at all of them, whatever host it is given."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise dist.DistNetworkError(f"cannot listen at {address}:{port}: {error.strerror}") from error
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, None, True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def text(store: dist.Store, key: str) -> str:
    """The text under a key that has been set, or is about to be: ranks come to a place one after another.

    Raises UserError if the store's time limit passes without one, if it is no text, or too long a one.
    """
    try:
        value = store.get(key)
    except dist.DistStoreError:  # nothing but the time limit; a lost connection is a DistNetworkError
        raise foreign(store, key, "nothing", "a text") from None
    return as_text(store, key, value)


def as_text(store: dist.Store, key: str, value: bytes) -> str:
    """A value of the store as text. `key`: the key of the value. Raises UserError if it is no text, or too long a one."""
    if len(value) > LONGEST:
        raise foreign(store, key, f"{len(value):,} bytes", f"{LONGEST:,} at most")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise foreign(store, key, shown(value), "UTF-8 text") from None


def set_texts(store: dist.Store, key: str, texts: Sequence[str]) -> None:
    """Write texts under a key, as JSON."""
    store.set(key, json.dumps(list(texts)))


def texts(store: dist.Store, key: str) -> list[str]:
    """The texts that `set_texts` wrote. Raises UserError if anything else is under the key, or nothing."""
    found = text(store, key)
    try:
        content = json.loads(found)
        if isinstance(content, list) and all(isinstance(entry, str) for entry in content):
            "".join(content).encode()  # JSON can spell halves of characters
            return content
    except (ValueError, RecursionError):
        pass
    raise foreign(store, key, shown(found), "a list of texts in JSON")


def foreign(store: dist.Store, key: str, found: str, expected: str) -> UserError:
    """The error for a value that no rank has written."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    where = f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
    return UserError(
        f"the ranks' store{where}, key {key}: found {found}, expected {expected}; another program writes into it. "
        "Close its port to other users and machines (docs/security.md, 'Ports')"
    )
