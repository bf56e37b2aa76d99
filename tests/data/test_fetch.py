"""`evodsp data fetch` on local folders and on a server of this machine: whole, resumed, damaged and missing files."""

from __future__ import annotations

import gzip
import hashlib
import re
import shlex
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from evodsp.cli import main
from evodsp.data import fetch
from evodsp.data.index.data_index import DataIndex
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.reading import answers
from tests.builders.builds import letters_of, write_chain
from tests.builders.pages import ROOT

KEY = "1abc_A"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """OpenProteinSet's and the PDB's layouts of one chain."""
    write_chain(tmp_path / "plain", KEY, letters_of(3))
    root = tmp_path / "mirror"
    (folder := root / "pdb" / KEY / "a3m").mkdir(parents=True)
    (tmp_path / "plain" / "alignments" / KEY / "hits.a3m").rename(folder / "bfd_uniclust_hits.a3m")
    (root / "ab").mkdir()
    (root / "ab" / "1abc.cif.gz").write_bytes(
        gzip.compress((tmp_path / "plain" / "mmcif_files" / "1abc.cif").read_bytes())
    )
    (root / "duplicate_pdb_chains.txt").write_text(f"{KEY} 2abc_B\n")
    (root / "clusters-by-entity-40.txt").write_text("1ABC_1 7ABC_2 AF_AFP12345F1_1\n2ABC_1\n")
    (root / "obsolete.dat").write_text("OBSLTE    31-JUL-94 116L     216L\n")
    (tmp_path / "chains.txt").write_text(f"{KEY}\n")
    return root


class Bucket(BaseHTTPRequestHandler):
    """A bucket of S3: listings of one object a page, and ranges. `served` are the ranges that were asked for."""

    root: Path
    served: list[str | None]
    sum_of: dict[str, str]

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        name = unquote(urlsplit(self.path).path)[1:]
        if query:
            token = query.get("continuation-token", ["0"])[0]
            self.answer(200, self.listing(query["prefix"][0], int(token) if token.isdigit() else 0))
        elif not (self.root / name).is_file():
            self.answer(404, b"")
        else:
            self.served.append(self.headers["Range"])
            start = int((self.headers["Range"] or "bytes=0-")[6:-1])
            self.answer(206 if start else 200, (self.root / name).read_bytes()[start:])

    def listing(self, prefix: str, page: int) -> bytes:
        paths = sorted(path for path in (self.root / prefix).rglob("*") if path.is_file())
        entries = ""
        for path in paths[page : page + 1]:
            name = path.relative_to(self.root).as_posix()
            digest = self.sum_of.get(name) or hashlib.md5(path.read_bytes()).hexdigest()
            tags = f"<Key>{name}</Key><Size>{path.stat().st_size}</Size><ETag>&quot;{digest}&quot;</ETag>"
            entries += f"<Contents>{tags}</Contents>"
        more = f"<NextContinuationToken>{page + 1}</NextContinuationToken>" if page + 1 < len(paths) else ""
        return f'<ListBucketResult xmlns="{fetch._S3[1:-1]}">{entries}{more}</ListBucketResult>'.encode()

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def bucket(mirror: Path) -> Iterator[type[Bucket]]:
    class Handler(Bucket):
        root, served, sum_of = mirror, [], {}

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Handler.address = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield Handler
        server.shutdown()
        thread.join()


def run(what: str, base: str, folder: Path) -> int:
    chains = [] if what == "lists" else ["--chains", str(folder / "chains.txt")]
    return main(["data", "fetch", what, *chains, "--output", str(folder / "got"), "--base", base])


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_what_is_fetched_can_be_read(mirror: Path, bucket: type[Bucket], tmp_path: Path, kind: str) -> None:
    """Catches files in places where no reader looks, a second page of a listing forgotten, and lists left out."""
    (mirror / "pdb" / KEY / "hhr").mkdir()
    (mirror / "pdb" / KEY / "hhr" / "pdb70_hits.hhr").write_text("x")
    base = str(mirror) if kind == "folder" else bucket.address  # type: ignore[attr-defined]
    assert [run(what, base, tmp_path) for what in ("alignments", "structures", "lists")] == [0, 0, 0]
    store = ChainFiles(tmp_path / "got" / "alignments", tmp_path / "got" / "mmcif_files")
    assert store.parsed(KEY, with_hits=False).assembly.chains[0].sequence == letters_of(3)
    assert (tmp_path / "got" / "alignments" / KEY / "hhr" / "pdb70_hits.hhr").read_text() == "x"
    assert all((tmp_path / "got" / name).read_text() == (mirror / name).read_text() for name in fetch.LISTS)


def test_half_a_file_is_completed_and_a_whole_one_kept(mirror: Path, bucket: type[Bucket], tmp_path: Path) -> None:
    """Catches everything fetched again, and the second half put in the wrong place."""
    folder = tmp_path / "got" / "alignments" / KEY / "a3m"
    folder.mkdir(parents=True)
    whole = (mirror / "pdb" / KEY / "a3m" / "bfd_uniclust_hits.a3m").read_bytes()
    (folder / ".bfd_uniclust_hits.a3m.partial").write_bytes(whole[:20])
    for _ in range(2):
        assert run("alignments", bucket.address, tmp_path) == 0  # type: ignore[attr-defined]
    assert bucket.served == ["bytes=20-"]
    assert [path.name for path in folder.iterdir()] == ["bfd_uniclust_hits.a3m"]
    assert (folder / "bfd_uniclust_hits.a3m").read_bytes() == whole


def test_damaged_and_missing_files_are_listed(
    mirror: Path, bucket: type[Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a damaged file kept under its name, and a missing chain that ends the fetch or is not told."""
    monkeypatch.setattr(answers.time, "sleep", lambda seconds: None)
    (tmp_path / "chains.txt").write_text(f"{KEY}\n2abc_B\n")
    bucket.sum_of["pdb/1abc_A/a3m/bfd_uniclust_hits.a3m"] = "0" * 32
    assert run("alignments", bucket.address, tmp_path) == 1  # type: ignore[attr-defined]
    missing = (tmp_path / "got" / "missing.txt").read_text()
    assert "2abc_B: no alignments in" in missing
    assert "bfd_uniclust_hits.a3m: has another MD5 sum" in missing
    assert len(bucket.served) == answers.ATTEMPTS
    assert not any(path.is_file() for path in (tmp_path / "got" / "alignments").rglob("*"))
    (mirror / "ab" / "1abc.cif.gz").write_bytes((mirror / "ab" / "1abc.cif.gz").read_bytes()[:-9])
    assert run("structures", str(mirror), tmp_path) == 1
    missing = (tmp_path / "got" / "missing.txt").read_text()
    assert "ab/1abc.cif.gz: is a broken gzip archive" in missing
    assert "2abc.cif.gz: " in missing


@pytest.mark.parametrize("name", ["../../x_A", "/x_A", "..", "a/b_A"])
@pytest.mark.parametrize("what", ["alignments", "structures"])
def test_a_list_does_not_leave_the_folder(
    mirror: Path, tmp_path: Path, name: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a name that is a path: files were written beside the folder to fill, from somebody else's list; and a name
    that has to be looked for in a long list."""
    (tmp_path / "chains.txt").write_text(f"# mine\n{KEY}\n\n{name}\n")
    before = sorted(tmp_path.rglob("*"))
    assert run(what, str(mirror), tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(rf"chains\.txt:4: '{re.escape(name)}' is no name of a chain", line)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("listing", "said"),
    [
        ("<Contents><Key>etc/passwd</Key></Contents>", "'etc/passwd', which is not below pdb/2abc_B/"),
        ("<Contents><Key>pdb/2abc_B/../../x</Key></Contents>", "which is not below"),
        ("<Contents><Key>pdb/2abc_B/a</Key><Size>xyz</Size></Contents>", "'xyz' as the size of"),
        (f"<Contents><Key>pdb/2abc_B/a</Key><Size>{'9' * 5000}</Size></Contents>", "as the size of"),
        ("<NextContinuationToken>abc</NextContinuationToken>", "its listing does not end (page 2,"),
        ("<NextContinuationToken>NEW</NextContinuationToken>", "its listing does not end (page 100,"),
        ('<?xml version="1.0" encoding="x-foo"?>', "does not list it"),
    ],
    ids=["foreign", "outside", "size", "long size", "the same page", "ever new pages", "encoding"],
)
def test_a_bad_listing_costs_one_chain(
    bucket: type[Bucket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str, said: str
) -> None:
    """Catches a mirror's answer that ends the fetch of all chains, never ends, or names files outside of the chain's folder."""
    good, asked = Bucket.listing, list[str]()

    def of(self: Bucket, prefix: str, page: int) -> bytes:
        if "2abc_B" not in prefix:
            return good(self, prefix, page)
        asked.append(prefix)
        head = f'<ListBucketResult xmlns="{fetch._S3[1:-1]}">'
        body = listing.replace("NEW", f"t{len(asked)}")
        return (listing if listing.startswith("<?xml") else f"{head}{body}</ListBucketResult>").encode()

    monkeypatch.setattr(Bucket, "listing", of)
    (tmp_path / "chains.txt").write_text(f"2abc_B\n{KEY}\n")
    assert run("alignments", bucket.address, tmp_path) == 1  # type: ignore[attr-defined]
    (line,) = (tmp_path / "got" / "missing.txt").read_text().splitlines()
    assert line.startswith("2abc_B: ")
    assert said in line
    assert (tmp_path / "got" / "alignments" / KEY / "a3m" / "bfd_uniclust_hits.a3m").is_file()


def test_a_wrong_base_is_one_line(mirror: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lists", str(tmp_path / "nowhere"), tmp_path) == 2
    assert "no such folder; give a folder, or an address" in capsys.readouterr().err


@pytest.mark.verify
def test_from_nothing_to_fit(mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches folders that one of docs/data.md's commands fills and the next does not read, and lists no index takes."""
    page = (ROOT / "docs" / "data.md").read_text().replace("\\\n", " ")
    section = page.partition("\n## Get public data\n")[2].partition("\n## ")[0]
    commands = [shlex.split(line) for line in re.findall(r"^evodsp .*$", section, re.MULTILINE)]
    (*fetches, fit, index) = commands
    monkeypatch.chdir(tmp_path)
    for words in fetches:
        assert main([*words[1:], "--base", str(mirror)]) == 0
    assert main(index[1:]) == 0
    opened = DataIndex("downloaded/index")
    assert opened.table.cluster_sizes[opened.row(KEY)] == 1
    assert opened.obsolete == {"116l": "216l"}
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert main([*fit[1:], "--data.index=downloaded/index", "--trainer.max_steps=1"]) == 0
    assert (tmp_path / "runs" / "downloaded" / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["alignmnts", "--chains=x"], "Did you mean 'alignments'?"),
        (["structures"], "name them with --chains FILE"),
        (["lists", "--jobs=0"], "--jobs is 0, but must be at least 1"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a name that fetches nothing without a word, and a traceback of a list that is not given."""
    assert main(["data", "fetch", *words, f"--output={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
