"""The readers that are tried, and sound files for each of them."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch

from evodsp.data.formats.mmcif import read_chain, read_confidence, read_header, read_structure
from evodsp.data.formats.template_hits import parse_obsolete
from evodsp.data.index.data_index import DataIndex
from evodsp.data.index.metadata import cached_table, read_entry_cache, read_sets
from evodsp.data.records import ProteinSequence
from evodsp.data.samples.selection import chain_list
from evodsp.data.sources.chain_files import ChainFiles
from evodsp.data.sources.feature_store import FeatureStore, decode_chain, decode_record
from evodsp.data.sources.layout import parse_alignment_file, parse_search_result
from evodsp.data.sources.structures import StructureFolder
from evodsp.data.templates.source import TemplateSource
from evodsp.inference.pages.target_page import batch_page
from evodsp.inference.prediction import Prediction
from evodsp.inference.target_msas import ComplexMsa
from evodsp.inference.targets import find_targets, read_inputs
from evodsp.model.alphafold import AlphaFold
from evodsp.packaged import read_run_config
from evodsp.planner.device import load_device, load_link
from evodsp.report.run_command import page
from evodsp.report.runs import read_runs
from evodsp.search.config import ServerLimits
from evodsp.search.server import MsaServer
from evodsp.training.bad_samples import replay
from evodsp.training.loader import read_quarantine
from evodsp.training.run_folder import damage
from evodsp.weights.checkpoint import load_features, load_model
from evodsp.weights.deepmind import read_npz
from evodsp.weights.initial import initialise
from evodsp.weights.openfold import read_openfold
from scripts.fuzz import seeds
from scripts.fuzz.seeds import DATA, ROOT, Files

Read = Callable[[Path], object]
"""Reads the files of a folder."""
_QUERY, _CHAINS = ProteinSequence("q", "MKTA"), ["MKT", "MK"]


@dataclass(frozen=True)
class Subject:
    """Readers of one kind of file, and sound files to change."""

    name: str
    inputs: list[Files]
    readers: tuple[Read, ...]


def subjects(work: Path) -> list[Subject]:
    """All subjects. `work`: a folder for what evodsp writes for them."""
    a3m, sto = (
        seeds.beginning(DATA / "alignments/s001_A" / name) for name in ("bfd_uniclust_hits.a3m", "uniref90_hits.sto")
    )
    sto += b"//\n"
    structures, run = seeds.structures(), seeds.run()
    index, store = seeds.data_set(work)
    checkpoint, openfold = seeds.checkpoint(work), seeds.openfold(work)
    hits: list[Files] = [{"a.hhr": seeds.HHR.format(name).encode()} for name in ("1abc_A", "AF-P1-F1-model_v4_A")]
    template = {"q_A/a.hhr": seeds.HHR.format("1abc_A").encode(), "structures/1abc.cif": structures[0]["1abc.cif"]}
    database = {"s001_A": {"db": "a.db", "files": [["b.a3m", 0, len(a3m)], ["u.sto", len(a3m), len(sto)]]}}
    small_a3m = b">q\nMKTA\n>h x\nM-tK.TX*\n>ss_pred\nHHH\n"
    fasta = b">s1 d\nMKTAYI\nAKQR\n>s2|x\nmkt *\n"
    chains, table = b">s1\nMKT:AYI\n:MKT\n>s2\nMKT\n", b'id,sequence\ns1,MKT:AYI\ns2,"M\nKT"\n'
    complex_a3m = b"#3,4\t2,1\n>101\t102\nMKTAYIA\n>a\tb\nMk-RAYI-\n>u\nMK-----\n>v\n---aAYIA\n"
    obsolete = b"OBSLTE    31-JUL-94 116L     216L\nOBSLTE    29-JAN-96 125D     1AW6\n"
    quarantine = b'{"chain": "a", "sample": 3, "reason": "x", "time": "t"}\n'
    configs: list[Files] = [
        {"c.yaml": (ROOT / "configs/quickstart.yaml").read_bytes()},
        {"c.yaml": run["run/config.yaml"]},
    ]
    atoms = (
        each(read_structure),
        each(read_header),
        each(lambda p: read_confidence(p, "A")),
        each(lambda p: read_chain(p, "")),
    )
    alignments = [{"a.a3m": a3m}, {"a.sto": sto}, {"a.a3m": small_a3m}, seeds.preparsed(), seeds.preparsed()]
    return [
        Subject("alignment", alignments, (each(parse_alignment_file),)),
        Subject("input", [{"a.fasta": fasta}, {"a.a3m": a3m}], (each(lambda p: read_inputs([p])),)),
        Subject("complex", [{"a.fasta": chains}, {"a.csv": table}, {"a.a3m": complex_a3m}], (each(_complexes),)),
        Subject("hits", [*hits, {"hmm_output.sto": seeds.HMM}], (each(lambda p: parse_search_result(p, _QUERY)),)),
        Subject("templates", [template], (lambda f: TemplateSource.open(f / "structures").find(f / "q_A", _QUERY),)),
        Subject("obsolete.dat", [{"obsolete.dat": obsolete}], (each(parse_obsolete),)),
        Subject("structure", structures, atoms),
        Subject("foreign structure", seeds.foreign_structures(), atoms),
        Subject("chain list", [{"chains.txt": b"s001_A\ns002_A # x\n"}], (each(lambda p: chain_list(str(p))),)),
        Subject("sets", [{"sets.txt": b"1abc_1 2xyz_2\n# c\n3abc_1\n"}], (each(read_sets),)),
        Subject("chain cache", [seeds.first_entries("chain_data_cache.json")], (each(cached_table), _release_date)),
        Subject("entry cache", [seeds.first_entries("mmcif_cache.json")], (each(read_entry_cache), _release_date)),
        Subject("alignment database", [{"x.index": json.dumps(database).encode(), "a.db": a3m + sto}], (_database,)),
        Subject("index", [_files(index)], (lambda f: _index(f, work), lambda f: DataIndex(f).check())),
        Subject("store", [_files(store)], (_store,)),
        Subject("record", _records(store), (each(_record),)),
        Subject("quarantine", [{"q.jsonl": quarantine}], (each(read_quarantine),)),
        Subject("config", configs, (each(read_run_config),)),
        Subject("device", [_files(ROOT / "evodsp/planner/devices", "h100.yaml")], (each(lambda p: load_device(str(p))),)),
        Subject("link", [_files(ROOT / "evodsp/planner/links", "pcie.yaml")], (each(lambda p: load_link(str(p))),)),
        Subject("run", [run], (lambda f: page(read_runs([f / "run"])).html(),)),
        Subject("result", [_files(seeds.prediction(work))], (lambda f: batch_page(f, []).html(), _prediction)),
        Subject("checkpoint", [_members(checkpoint)], (each(load_model), each(load_features), each(damage), each(_replay))),
        Subject("model's folder", [_files(seeds.pretrained(checkpoint))], (load_model, load_features, _initialised)),
        Subject("OpenFold's weights", [_members(openfold)], (each(read_openfold),)),
        Subject("DeepMind's weights", [seeds.weights()], (each(read_npz),)),
        Subject("server", [seeds.answers()], (lambda f: _Server(f).search(_CHAINS, _mute), _paired, _templates)),
    ]  # fmt: skip


def write(rng: Random, change: Callable[[str, bytes], bytes], files: Files, folder: Path) -> None:
    """Write the files, with a change in one of them: of an archive's member, or of the archive."""
    names = sorted(files)
    chosen = rng.choice(names)
    archives: dict[str, Files] = {}
    whole = {name: change(name, data) if name == chosen else data for name, data in files.items()}
    for name in names:
        archive = next((str(p) for p in Path(name).parents if p.suffix in _PACKERS), None)
        if archive is not None:
            archives.setdefault(archive, {})[name.removeprefix(f"{archive}/")] = whole.pop(name)
    for archive, members in archives.items():
        whole[archive] = _PACKERS[Path(archive).suffix](rng, members)
        if chosen.startswith(f"{archive}/") and rng.random() < 0.3:
            whole[archive] = change(archive, whole[archive])
    for name, data in whole.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _zip(rng: Random, members: Files) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(
        file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()


def _tar(rng: Random, members: Files) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=rng.choice((tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT))) as archive:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    content = bytearray(file.getvalue())
    if rng.random() < 0.3:  # a header with a valid checksum
        at = rng.randrange(148)
        content[at] = rng.randrange(256)
        content[148:156] = b" " * 8
        content[148:156] = b"%06o\0 " % sum(content[:512])
    return gzip.compress(bytes(content), 1, mtime=0)


def _zstandard(rng: Random, members: Files) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=1).compress(members["record"])


_PACKERS = {".npz": _zip, ".ckpt": _zip, ".pt": _zip, ".gz": _tar, ".zst": _zstandard}


def _files(folder: Path, pattern: str = "*") -> Files:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob(pattern)) if p.is_file()}


def _members(path: Path) -> Files:
    with zipfile.ZipFile(path) as archive:
        return {f"{path.name}/archive/{name.partition('/')[2]}": archive.read(name) for name in archive.namelist()}


def _initialised(folder: Path) -> None:
    initialise(AlphaFold(seeds.SMALLEST), folder)


def _records(store: Path) -> list[Files]:
    import zstandard

    records = [FeatureStore(str(store))._records.read(key) for key in ("s001_A", "s007_A")]
    return [{"r.zst/record": zstandard.ZstdDecompressor().decompress(record)} for record in records if record]


def each(read: Callable[[Path], object]) -> Read:
    """A reader of a single file, for the only file of a folder."""
    return lambda folder: read(next(path for path in sorted(folder.rglob("*")) if path.is_file()))


def _record(path: Path) -> None:
    for decode in (lambda data: decode_record(data, with_hits=True), decode_chain):
        with suppress(ValueError):  # as documented: the store's message names the record
            decode(path.read_bytes())


def _release_date(folder: Path) -> object:
    return StructureFolder(folder).release_date("s001")


def _complexes(path: Path) -> None:
    """The records of a file, and the MSA of each."""
    targets, _ = find_targets([path], None)
    for target in targets:
        assert len(ComplexMsa.read(target).merged.msa) > 0


def _database(folder: Path) -> None:
    store = ChainFiles(folder)
    for key in store.keys()[:3]:
        store.alignments(key)


def _index(folder: Path, work: Path) -> None:
    index = DataIndex(folder)
    _ = index.sources, index.obsolete, index.command, index.has_alignments(), index.stale_sources()
    store = ChainFiles(work / "alignments", DATA / "mmcif_files", index)
    for key in store.keys()[:3]:
        _ = store.has_structure(key), store.alignments(key), index.differs(key, store.alignment_dir)


def _store(folder: Path) -> None:
    store = FeatureStore(str(folder))
    store.template_source()
    for key in store.keys()[:3]:
        store.parsed(key, True)


def _prediction(folder: Path) -> None:
    result = Prediction.read(folder / "x")
    for one in result.ranked:
        _ = one.positions, one.plddt, one.pae, one.contacts


def _replay(path: Path) -> object:
    return replay(path, torch.device("cpu"))


class _Server(MsaServer):
    """A server whose answers are the files of a folder."""

    def __init__(self, folder: Path) -> None:
        limits = ServerLimits(search_s=1000.0, answer_mib=64)
        super().__init__("https://x", limits, sleep=lambda _: None, clock=iter(range(10**6)).__next__)
        self._folder = folder

    def _ask(self, path: str, *_: object) -> bytes:
        name = path.partition("/")[0]
        return (self._folder / ("ticket.json" if name == "ticket" else f"{name}.tar.gz")).read_bytes()


def _paired(folder: Path) -> None:
    with TemporaryDirectory() as kept:
        _Server(folder).keep_pairs(_CHAINS, Path(kept) / "pairs", _mute)


def _templates(folder: Path) -> None:
    with TemporaryDirectory() as kept:
        _Server(folder).keep_templates(["1abc_A", "2xyz_B"], Path(kept) / "templates", _mute)


def _mute(line: str) -> None:
    """Drops what a server is said to do."""
