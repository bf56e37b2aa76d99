"""Templates that a server finds."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.inference.predict import predict
from tests.builders.msa_server import StandIn
from tests.builders.prediction import read_json, silent
from tests.builders.training_chains import write_chain

from .test_complexes import multimer, settings  # noqa: F401
from .test_server_pairs import TRIMER, A, B, address, stand_in  # noqa: F401

HITS = {A: "1abc_A:1e-3 2abc_A:1E-9 9xyz_B:2e-12 7bad_C:1e-5", B: "3ABC_B:0.1"}


@pytest.fixture
def server(stand_in: StandIn, tmp_path: Path) -> StandIn:  # noqa: F811
    """A server with templates of both sequences: one without a structure, one that is broken; and files nobody asked for."""
    chains = {"1abc_A": (A[2:-1], 2001), "2abc_A": (A[4:], 2021), "3abc_B": (B[:4] + "A" + B[5:], 2011)}
    for key, (letters, year) in chains.items():
        write_chain(tmp_path / "pdb", key, letters, date(year, 1, 1))
    files = {path.name: path.read_bytes() for path in (tmp_path / "pdb" / "mmcif_files").iterdir()}
    stand_in.hits = HITS
    evil = {
        "../../3abc.cif/../2abc.cif": b"",
        "/tmp/0abc.cif": b"",
        "pdb70_a3m.ffdata": b"x",
        "7bad.cif": b"data_x\nloop_",
    }
    stand_in.structures = {**evil, **files}
    return stand_in


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "pdb").mkdir()


def test_each_chain_has_the_servers_templates(
    server: StandIn,
    address: str,  # noqa: F811
    multimer: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Catches templates of another chain, in the order of the table, of files that were not asked for, or that cost the record
    because one is broken; a log and a page without them; and a second run that asks again or has other ones."""
    said: list[str] = []
    config = settings(tmp_path, multimer, TRIMER, msa_server=address, msa_server_templates=True)
    (result,) = predict(config, said.append)
    assert server.templates == ["3ABC_B", "9xyz_B,2abc_A,7bad_C,1abc_A"]
    made = read_json(result.folder / "ranking.json")["settings"]
    assert made["templates"] == ["A:3ABC_B", "B:2abc_A", "B:1abc_A"]
    lines = [line.strip() for line in said if "templates of" in line]
    assert lines[0] == (
        f"templates of x_A: 1 template of 1 hit; the best 1 are used: 3ABC_B; hits and structures by {address}"
    )
    assert lines[1].startswith(
        "templates of x_B: 2 templates of 4 hits; 2 hits: no structure (9xyz_B, 7bad_C); the best 2 "
    )
    page = (result.folder / "report.html").read_text()
    assert "templates found by the server" in page
    kept = config.output / "_alignments" / "x_B"
    assert sorted(path.name for path in (kept / "templates").iterdir()) == ["1abc.cif", "2abc.cif", "7bad.cif"]
    assert (kept / "templates" / "2abc.cif").read_bytes() == (tmp_path / "pdb/mmcif_files/2abc.cif").read_bytes()
    before = {path: path.read_bytes() for path in result.folder.glob("seed_0*")}
    (more,) = predict(replace(config, seeds=2), silent)
    assert len(more.mean_plddt) == 2
    assert before == {path: path.read_bytes() for path in before}
    assert (len(server.asked), len(server.templates)) == (1, 2)
    with pytest.raises(UserError, match=r"another run \(templates: .* there, \[\] now"):
        predict(replace(config, msa_server_templates=False), silent)


def test_a_latest_date_of_the_servers_templates(
    server: StandIn,
    address: str,  # noqa: F811
    multimer: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Catches a date that does not limit what the server has found, and a hit left out because the record has its name."""
    said: list[str] = []
    config = settings(tmp_path, multimer, f">1abc_A\n{A}\n", msa_server=address, msa_server_templates=True)
    (result,) = predict(replace(config, max_template_date="2011-01-01"), said.append)
    assert read_json(result.folder / "ranking.json")["settings"]["templates"] == ["1abc_A"]
    assert any("1 hit: released too late (2abc_A)" in line for line in said)


@pytest.mark.parametrize("answer", [404, {"1abc.cif": b""}], ids=["none", "empty"])
def test_a_server_without_structures_costs_no_record(
    server: StandIn,
    address: str,  # noqa: F811
    multimer: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    answer: int | dict[str, bytes],
) -> None:
    """Catches a record that fails for its templates, in silence or when it is predicted again with others."""
    structures, server.structures = server.structures, answer
    config = settings(tmp_path, multimer, f">x\n{A}\n", msa_server=address, msa_server_templates=True)
    (result,) = predict(config, silent)
    assert read_json(result.folder / "ranking.json")["settings"]["templates"] == []
    assert ("x gets no templates: " in capsys.readouterr().err) == (answer == 404)
    assert "templates found by the server" not in (result.folder / "report.html").read_text()
    server.structures = structures
    assert predict(config, silent)[0].kept
    assert len(server.templates) == 1
    with pytest.raises(UserError, match=r"another run \(templates_from: server there, None now"):
        predict(replace(config, msa_server_templates=False), silent)


def test_templates_are_found_on_a_machine_with_a_network_and_used_on_another(
    server: StandIn,
    address: str,  # noqa: F811
    multimer: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a search whose structures a prediction without the server does not find, and hits that are lost where the
    structures are fetched later."""
    config = settings(tmp_path, multimer, TRIMER, alignments=tmp_path / "kept", msa_server_templates=True)
    words = ["search", str(tmp_path / "given.fasta"), "--output", str(tmp_path / "kept"), "--msa_server", address]
    assert main(words) == 0
    said: list[str] = []
    (result,) = predict(config, said.append)
    assert any("templates of x_B: none; structures of 4 hits have not been fetched" in line for line in said)
    assert main([*words, "--msa_server_templates", "true"]) == 0
    assert len(server.asked) == 1
    (result,) = predict(replace(config, overwrite=True), silent)
    assert read_json(result.folder / "ranking.json")["settings"]["templates"] == ["A:3ABC_B", "B:2abc_A", "B:1abc_A"]
    assert main(["predict", "x.fasta", "--checkpoint", "x", "--output", "y", "--msa_server_templates", "true"]) == 2
    assert "--msa_server_templates is given without --msa_server; add" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--msa_server_templates is given beside --templates x; leave"):
        replace(config, templates=Path("x"))
