"""A rank's place among the ranks, read from the environment, and the batch scripts that `evodsp slurm` writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from evodsp.cli import main
from evodsp.errors import UserError
from evodsp.launch.environment import STARTERS, RankAddress, Starter, first_host, number_of_rank, place, under_launcher
from tests.builders.processes import ROOT


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that a launcher would set."""
    for name in list(os.environ):
        if name.startswith(
            ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PM", "MPI_")
        ):
            monkeypatch.delenv(name)


def given(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


TORCHRUN = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "MASTER_ADDR": "gpu003", "MASTER_PORT": 29500}
STEP = {
    "SLURM_PROCID": 5,
    "SLURM_STEP_NUM_TASKS": 8,
    "SLURM_LOCALID": 1,
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": 7,
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 1,
    "OMPI_COMM_WORLD_SIZE": 2,
    "OMPI_COMM_WORLD_LOCAL_RANK": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
    "PMIX_NAMESPACE": "prterun-gpu003-21657@1",
    "PMIX_RANK": 1,
}
"""What mpirun of Open MPI 5.0 sets on one machine."""
MPICH = {"PMI_RANK": 1, "PMI_SIZE": 2, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2, "PMI_FD": 9}
"""What mpirun of MPICH 5.0 sets on one machine."""


def test_a_process_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a process without a launcher that is taken for a rank."""
    assert not under_launcher()
    with pytest.raises(UserError, match="no launcher started this process as a rank"):
        place()


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wrong host, port or rank under torchrun, and a second store on the port of the agent's."""
    given(monkeypatch, **TORCHRUN)
    assert place() == RankAddress(5, 8, 1, "gpu003", 29500, hosts_store=False)
    given(monkeypatch, RANK=0)
    assert place().hosts_store
    given(monkeypatch, TORCHELASTIC_USE_AGENT_STORE=True)
    assert not place().hosts_store, "the agent has it; a second one cannot listen on that port"


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks of `srun` without torchrun that do not agree on one address and port."""
    given(monkeypatch, **{**STEP, "SLURM_JOB_ID": 123456, "SLURM_STEP_ID": 0})
    one = place()
    assert (one.rank, one.ranks, one.local_rank, one.host, one.hosts_store) == (5, 8, 1, "gpu003", False)
    given(monkeypatch, SLURM_PROCID=0)
    assert (place().port, place().hosts_store) == (one.port, True)
    assert 15000 <= one.port < 30000
    given(monkeypatch, SLURM_STEP_ID=1)
    assert place().port != one.port


def test_a_step_on_one_node_meets_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks of one machine whose store every machine of the network reaches, and nodes that do not meet."""
    given(monkeypatch, **STEP, SLURM_STEP_NUM_NODES=1)
    assert place().host == "localhost"
    given(monkeypatch, SLURM_STEP_NUM_NODES=2)
    assert place().host == "gpu003"
    given(monkeypatch, SLURM_STEP_NUM_NODES=1, MASTER_ADDR="10.0.0.1")
    assert place().host == "10.0.0.1", "the user's word counts"


def test_ranks_derive_one_port_whatever_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a port that each process makes anew, as `hash` of a text is: ranks of `srun` and mpirun never meet then."""
    given(monkeypatch, **{**STEP, "SLURM_JOB_ID": 123456, "SLURM_STEP_ID": 0})
    assert place().port == 15000 + 0xF3BFB85 % 15000, "CRC-32 of 123456.0"


def test_torchrun_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches Slurm's variables used under `srun torchrun`: the step has one task per node, torchrun has more ranks."""
    given(monkeypatch, **STEP, **TORCHRUN)
    assert place().port == 29500


def test_mpirun_of_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks of mpirun that each train for themselves, and two runs on one machine that meet at one port."""
    given(monkeypatch, **OPEN_MPI)
    one = place()
    assert (one.rank, one.ranks, one.local_rank, one.host, one.hosts_store) == (1, 2, 1, "localhost", False)
    assert 15000 <= one.port < 30000
    given(monkeypatch, OMPI_COMM_WORLD_RANK=0)
    assert (place().port, place().hosts_store) == (one.port, True)
    given(monkeypatch, PMIX_NAMESPACE="prterun-gpu003-21999@1")
    assert place().port != one.port


def test_mpirun_of_mpich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a rank of the run beside this one that comes to this one's store: Hydra tells ranks no name of their run."""
    given(monkeypatch, **MPICH)
    with pytest.raises(UserError, match="does not tell its ranks where they meet: set MASTER_PORT for all of them"):
        place()
    given(monkeypatch, MASTER_PORT=29511)
    assert place() == RankAddress(1, 2, 1, "localhost", 29511, hosts_store=False, told_by="PMI_SIZE")


def test_mpirun_on_several_machines_is_told_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks of another machine that look for the first rank on their own."""
    given(monkeypatch, **{**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": 4})
    with pytest.raises(UserError, match=r"mpirun of Open MPI does not tell .* set MASTER_ADDR for all"):
        place()
    given(monkeypatch, MASTER_ADDR="gpu003", MASTER_PORT=29500)
    assert place() == RankAddress(1, 4, 1, "gpu003", 29500, hosts_store=False, told_by="OMPI_COMM_WORLD_SIZE")


@pytest.mark.parametrize("ranks", ["OMPI_COMM_WORLD", "PMI"])
def test_mpirun_of_one_process_starts_no_rank(monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    """Catches `mpirun -n 1 evodsp fit --parallel.sequence 2` being refused: it starts its own ranks, as in a batch script."""
    given(monkeypatch, **{f"{ranks}_RANK": 0, f"{ranks}_SIZE": 1})
    assert not under_launcher()


@pytest.mark.parametrize(
    ("inner", "outer"), [(OPEN_MPI, STEP), (TORCHRUN, OPEN_MPI), (TORCHRUN, STEP)], ids=["mpirun", "torchrun", "srun"]
)
def test_the_innermost_program_counts(
    monkeypatch: pytest.MonkeyPatch, inner: dict[str, object], outer: dict[str, object]
) -> None:
    """Catches the place of a daemon: mpirun starts one on each machine with srun, and srun and mpirun start torchrun."""
    given(monkeypatch, **inner, TORCHELASTIC_RUN_ID="run")
    alone = place()
    given(monkeypatch, **{name: value for name, value in outer.items() if name not in inner})
    assert (place().rank, place().ranks, place().local_rank) == (alone.rank, alone.ranks, alone.local_rank)


def test_srun_that_speaks_pmi2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `srun --mpi=pmi2` taken for MPICH's mpirun: it sets two of its variables, but no rank on the machine."""
    given(monkeypatch, **STEP, PMI_RANK=5, PMI_SIZE=8)
    assert (place().local_rank, place().host) == (1, "gpu003")


def test_a_partial_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ranks that each train the whole run for themselves, because one variable of torchrun's was not passed on."""
    given(monkeypatch, RANK=1, WORLD_SIZE=2, MASTER_ADDR="gpu003")
    with pytest.raises(UserError, match=r"RANK is set, as torchrun does, but MASTER_PORT is not; .* or unset RANK"):
        under_launcher()
    monkeypatch.delenv("RANK")
    assert not under_launcher(), "a batch script prepares variables for the ranks that it starts"


def test_ranks_set_by_hand_contradict_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `mpirun -x RANK=0`, where all ranks would be the first and wait for the others."""
    given(monkeypatch, **OPEN_MPI, **{**TORCHRUN, "RANK": 0, "WORLD_SIZE": 2})
    with pytest.raises(
        UserError, match=r"this is rank 0 of 2, but mpirun of Open MPI started it as rank 1 of 2; unset RANK"
    ):
        place()
    given(monkeypatch, RANK=1)
    assert place().port == 29500


@pytest.mark.parametrize("starter", STARTERS, ids=lambda starter: starter.name)
def test_the_rank_that_prints(monkeypatch: pytest.MonkeyPatch, starter: Starter) -> None:
    """Catches a mistake that each rank of mpirun prints at once."""
    assert number_of_rank() == 0
    given(monkeypatch, **{starter.rank: 3})
    assert number_of_rank() == 3


def test_a_batch_script_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a batch script taken for a rank: SLURM_NTASKS is set there too, but the other ranks were never started."""
    given(monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_LOCALID=0, SLURM_JOB_ID=3)
    assert not under_launcher()


def test_an_environment_that_makes_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback for a launcher variable that is not a number."""
    given(monkeypatch, **{**TORCHRUN, "WORLD_SIZE": "many"})
    with pytest.raises(UserError, match=r"is not a number .*many"):
        place()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[003-007,010],cpu1", "gpu003"), ("a,b[1-2]", "a"), ("rack[2,5]-n[01-04]", "rack2-n01"), ("alone", "alone")],
)
def test_the_first_host_of_a_node_list(nodes: str, first: str) -> None:
    """Catches Slurm node lists read wrongly: ranges, several prefixes, or a single name."""
    assert first_host(nodes) == first


SLURM = ROOT / "scripts" / "examples" / "slurm"


def test_the_scripts_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a script that is not written, that sbatch's users cannot start, or that a second call refuses."""
    for _ in range(2):
        assert main(["slurm", "--output", str(tmp_path / "scripts")]) == 0
    names = ["build.sbatch", "fit.sbatch", "README.md"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "scripts" / name) for name in names] * 2
    for name in names:
        written = tmp_path / "scripts" / name
        assert written.read_bytes() == (SLURM / name).read_bytes()
        assert os.access(written, os.X_OK) == name.endswith(".sbatch")
        named = re.findall(r"scripts/examples/slurm/|\]\((?!https:)\S+", written.read_text())
        assert named == [], "which a reader without a clone does not have"


def test_a_changed_script_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a user's settings that are lost because the command was given again."""
    (tmp_path / "fit.sbatch").write_text("mine")
    assert main(["slurm", "--output", str(tmp_path)]) == 2
    assert "fit.sbatch: has another content than the fit.sbatch of this evodsp" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["fit.sbatch"]
    assert main(["slurm", "--output", str(tmp_path), "--overwrite", "true"]) == 0
    assert (tmp_path / "fit.sbatch").read_text() != "mine"
