"""AlphaFold2's parameters by name: from a folder, from an archive on a server of this machine, and from a folder of one."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from evodsp.cli import main
from evodsp.config import ModelConfig
from evodsp.errors import UserError
from evodsp.reading import answers as download
from evodsp.weights import by_name
from evodsp.weights.by_name import fetch_weights, find_weights, need_weights, weights_folder
from evodsp.weights.checkpoint import load_model
from tests.builders.msa_server import Answer, Send, answer, raw_server

FILES = ("params_model_1.npz", "params_model_2_ptm.npz", "LICENSE")


class Server(BaseHTTPRequestHandler):
    """Files, and parts of files unless `parts` is off. `asked`: paths and ranges. After `cut` bytes an answer ends, once."""

    content: dict[str, bytes]
    asked: list[tuple[str, str | None]]
    parts = True
    cut: int | None = None

    def do_HEAD(self) -> None:
        body = self.content.get(self.path)
        self.send_response(404 if body is None else 200)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()

    def do_GET(self) -> None:
        type(self).asked.append((self.path, self.headers["Range"]))
        body = self.content.get(self.path)
        if body is None:
            self.send_error(404)
            return
        status, wanted = 200, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if wanted is not None and self.parts:
            status, end = 206, wanted[2]
            body = body[int(wanted[1]) : int(end) + 1 if end else None]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.cut is not None and len(body) > self.cut:
            body, type(self).cut = body[: self.cut], None
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[type[Server], str]]:
    """Two models, as DeepMind's archive and as files of a folder with sums. The second one's name is beyond a long file."""
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    folder = tmp_path / "published"
    folder.mkdir()
    for number, name in enumerate(FILES[:2]):
        arrays = {
            f"alphafold/layer//{n}": np.random.default_rng(10 * number + n).normal(size=(40, 50)) for n in range(3)
        }
        np.savez(folder / name, **arrays)
    (folder / FILES[2]).write_text("CC BY 4.0\n")
    with tarfile.open(tmp_path / "all.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in FILES:
            archive.add(folder / name, f"./{name}")

    class Handler(Server):
        pass

    Handler.asked, Handler.content = [], {f"/files/{name}": (folder / name).read_bytes() for name in FILES}
    Handler.content["/all.tar"] = (tmp_path / "all.tar").read_bytes()
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  ./{name}\n" for name in FILES]
    Handler.content["/files/SHA256SUMS"] = "".join(sums).encode()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield Handler, f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def published(tmp_path: Path, name: str) -> bytes:
    return (tmp_path / "published" / name).read_bytes()


@pytest.mark.parametrize("place", ["/all.tar", "/files"])
def test_a_model_is_fetched_once(server: tuple[type[Server], str], tmp_path: Path, place: str) -> None:
    """Catches another model of the archive, the whole archive for one model, and a second fetch of a file that is there."""
    handler, address = server
    said: list[str] = []
    (path,) = fetch_weights(["model_2_ptm"], tmp_path / "kept", address + place, said.append)
    assert path == tmp_path / "kept" / FILES[1]
    assert path.read_bytes() == published(tmp_path, FILES[1])
    assert [file.name for file in path.parent.iterdir()] == [FILES[1]]
    assert f"{address}{place}" in said[0]
    assert "CC BY 4.0" in said[0]
    assert ("SHA-256" in said[-1]) == (place == "/files")
    if place == "/all.tar":
        whole = [asked for asked in handler.asked if asked[1] is None]
        assert not whole
        assert len(handler.asked) == 3, "the headers of the first two members, and the second one"
    handler.asked.clear()
    assert fetch_weights(["model_2_ptm"], tmp_path / "kept", address + place, said.append) == [path]
    assert not handler.asked


@pytest.mark.parametrize("place", ["/all.tar", "/files"])
def test_what_was_interrupted_is_continued(server: tuple[type[Server], str], tmp_path: Path, place: str) -> None:
    """Catches a connection that ends early and costs what has arrived, and bytes appended in the wrong place."""
    handler, address = server
    handler.cut = 20_000
    (path,) = fetch_weights(["model_1"], tmp_path / "kept", address + place, lambda line: None)
    assert path.read_bytes() == published(tmp_path, FILES[0])
    begins = [int(found[1]) for _, text in handler.asked if text and (found := re.match(r"bytes=(\d+)", text))]
    first = 512 if place == "/all.tar" else 0
    assert first + 20_000 in begins


def test_a_server_that_sends_whole_files_only(server: tuple[type[Server], str], tmp_path: Path) -> None:
    """Catches a file that begins anew behind what was there, and an archive taken for one of its files."""
    handler, address = server
    handler.parts, handler.cut = False, 20_000
    (path,) = fetch_weights(["model_1"], tmp_path / "kept", f"{address}/files", lambda line: None)
    assert path.read_bytes() == published(tmp_path, FILES[0])
    with pytest.raises(UserError, match="does not send parts of files"):
        fetch_weights(["model_2_ptm"], tmp_path / "kept", f"{address}/all.tar", lambda line: None)


def _npz(**arrays: list[float]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def _flip(content: bytes) -> bytes:
    return content[:9000] + bytes([content[9000] ^ 1]) + content[9001:]


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        ("/files", {f"/files/{FILES[0]}": _flip}, "its SHA-256 is"),
        (
            "/files",
            {f"/files/{FILES[0]}": _flip, "/files/SHA256SUMS": None},
            r"array alphafold.layer.+ is damaged \(CRC-32\)",
        ),
        (
            "/files",
            {f"/files/{FILES[0]}": lambda _: b"<html>sign in</html>", "/files/SHA256SUMS": None},
            "no .npz file",
        ),
        ("/files", {f"/files/{FILES[0]}": lambda _: _npz(x=[1.0]), "/files/SHA256SUMS": None}, "no array of a model"),
        ("/files", {f"/files/{FILES[0]}": None}, "Not Found"),
        ("/all.tar", {"/all.tar": lambda content: content[100:]}, "not an uncompressed tar archive"),
        ("/all.tar", {"/all.tar": lambda _: bytes(2048)}, "the archive has no params_model_1.npz"),
    ],
    ids=["sum", "array", "page", "other", "missing", "no_archive", "empty_archive"],
)
def test_what_is_wrong_is_named_and_not_kept(
    server: tuple[type[Server], str], tmp_path: Path, place: str, change: dict[str, object], words: str
) -> None:
    """Catches a damaged file under the name of a good one, and a message without the address."""
    handler, address = server
    for name, how in change.items():
        if how is None:
            del handler.content[name]
        else:
            handler.content[name] = how(handler.content[name])  # type: ignore[operator]
    with pytest.raises(UserError, match=words) as raised:
        fetch_weights(["model_1"], tmp_path / "kept", address + place, lambda line: None)
    assert address in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "kept" / FILES[0]).exists()


def test_processes_that_want_the_same_file(server: tuple[type[Server], str], tmp_path: Path) -> None:
    """Catches two writers of one file: the second waits and takes what the first has fetched."""
    handler, address = server

    def fetch(_: int) -> Path:
        return fetch_weights(["model_1"], tmp_path / "kept", f"{address}/all.tar", lambda line: None)[0]

    with ThreadPoolExecutor(4) as threads:
        assert {path.read_bytes() for path in threads.map(fetch, range(4))} == {published(tmp_path, FILES[0])}
    assert len(handler.asked) == 2, "one header and one file"


def test_places_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches files that lie as AlphaFold's own script leaves them and are not found, and a default that ignores the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("EVODSP_WEIGHTS", raising=False)
    assert weights_folder() == tmp_path / "cache" / "evodsp" / "weights"
    monkeypatch.setenv("EVODSP_WEIGHTS", str(tmp_path))
    assert find_weights("model_1") is None
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / FILES[0]).touch()
    assert find_weights("model_1") == tmp_path / "params" / FILES[0]
    with pytest.raises(UserError, match=r"no params_model_3.npz; get it with `evodsp weights fetch model_3`"):
        need_weights(["model_1", "model_3"])
    with pytest.raises(UserError, match=r"called 'model_1_pmt'. Did you mean 'model_1_ptm'\?"):
        find_weights("model_1_pmt")
    with pytest.raises(UserError, match="'elsewhere' is no address"):
        fetch_weights(["model_2"], tmp_path, "elsewhere", lambda line: None)


def test_a_model_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a name that is taken for a file, and a missing file without the command that gets it."""
    monkeypatch.setenv("EVODSP_WEIGHTS", str(tmp_path))
    assert main(["weights", "random", "--preset", "test", "--output", str(tmp_path / "params_model_2.npz")]) == 0
    model = load_model("model_2", preset="test")
    assert model.config.evoformer.blocks == ModelConfig.preset("test").evoformer.blocks
    with pytest.raises(UserError, match="evodsp weights fetch model_3_ptm"):
        load_model("model_3_ptm")


def test_a_folder_that_cannot_be_written(server: tuple[type[Server], str], tmp_path: Path) -> None:
    """Catches a message that names an option which the user has not given."""
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"file: parameters cannot be kept there \(File exists\); choose another folder"
    ):
        fetch_weights(["model_1"], tmp_path / "file", f"{server[1]}/all.tar", lambda line: None)


def test_a_full_disk_is_known_before(
    server: tuple[type[Server], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a fetch that fills the disk before it fails."""
    monkeypatch.setattr("evodsp.weights.by_name.free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"MiB are needed and 0 MiB are free"):
        fetch_weights(["model_1"], tmp_path / "kept", f"{server[1]}/all.tar", lambda line: None)
    assert not list((tmp_path / "kept").glob("*.partial"))


def fetch_from(answers: Answer, folder: Path, place: str = "", hours: float = 1.0) -> str:
    """Why a model cannot be fetched from a server, in one line without passwords."""
    with raw_server(answers) as address:
        login = address.replace("http://", "http://me:secret@")
        said: list[str] = []
        with pytest.raises(UserError) as raised:
            fetch_weights(["model_1"], folder, login + place, said.append, hours)
    assert not any("secret" in line for line in (*said, str(raised.value)))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 700
    assert not list(folder.glob("*.npz"))
    return str(raised.value)


NEGATIVE = tarfile.TarInfo("x").tobuf()[:124] + b"\xff" * 12 + tarfile.TarInfo("x").tobuf()[136:]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (answer(b"", "302 Found", Location="file:///etc/passwd"), "no address to follow"),
        (answer(b"", "403 \x1b[31mred"), r"\\x1b\[31mred"),
        (answer(b"x" * 100), "not an uncompressed tar archive"),
        (answer(NEGATIVE), "tar"),
        (b"FOO BAR\r\n\r\n", "FOO BAR"),
    ],
    ids=["redirection", "forbidden", "short", "negative", "no_http"],
)
def test_an_archive_of_a_hostile_server(sent: bytes, words: str, tmp_path: Path) -> None:
    """Catches tracebacks, and words of a server that act on the terminal."""
    assert re.search(words, fetch_from(lambda first, rest, send: send(sent), tmp_path, "/all.tar"))


@pytest.mark.parametrize("length", ["9" * 400, "-5", "²"])
def test_a_size_that_is_none(length: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tracebacks of a size that is no number, or that no number can hold."""
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)

    def serve(first: str, rest: str, send: Send) -> None:
        if first.startswith("HEAD"):
            send(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode("latin-1"))
        else:
            send(answer(b"", "404 Not Found") if "SHA256" in first else answer(b"nothing"))

    assert "no .npz file" in fetch_from(serve, tmp_path)


def test_more_than_the_size_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that fills the disk, and a rest that the next fetch would go on behind."""
    monkeypatch.setattr("evodsp.reading.answers._HEAD", 1000)
    monkeypatch.setattr(download, "BLOCK", 1000)

    def serve(first: str, rest: str, send: Send) -> None:
        if first.startswith("HEAD"):
            send(b"HTTP/1.1 200 OK\r\nContent-Length: 3000\r\n\r\n")
        elif "SHA256" in first:
            send(answer(b"", "404 Not Found"))
        else:
            send(b"HTTP/1.1 200 OK\r\n\r\n")
            for _ in range(500):
                send(bytes(100_000))

    assert "answers more than" in fetch_from(serve, tmp_path)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("place", ["/all.tar", ""])
def test_a_fetch_ends_in_its_time(place: str, tmp_path: Path) -> None:
    """Catches a server that sends a byte now and then, for days."""

    def slowly(first: str, rest: str, send: Send) -> None:
        send(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(300):
            send(b"x")
            time.sleep(0.01)

    begun = time.monotonic()
    assert "has not sent its whole answer" in fetch_from(slowly, tmp_path, place, hours=0.2 / 3600)
    assert time.monotonic() - begun < 2.5


def test_damage_is_a_line_whatever_the_archive_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches what the standard library raises for archives with a password, of an unknown method or of terabytes."""
    np.savez(tmp_path / "a.npz", **{"alphafold/x": np.arange(10.0)})
    content = (tmp_path / "a.npz").read_bytes()
    local, central = content.index(b"PK\3\4"), content.index(b"PK\1\2")
    for name, places, value in (("password", (6, 8), b"\1\0"), ("method", (8, 10), b"\x63\0")):
        changed = bytearray(content)
        for begin, place in zip((local, central), places, strict=True):
            changed[begin + place : begin + place + 2] = value
        (tmp_path / f"{name}.npz").write_bytes(changed)
        assert "no .npz file" in str(by_name._damage(tmp_path / f"{name}.npz", None)), name
    assert by_name._damage(tmp_path / "a.npz", None) is None
    monkeypatch.setattr(by_name, "LARGEST", 100)
    assert "more than any model" in str(by_name._damage(tmp_path / "a.npz", None))
