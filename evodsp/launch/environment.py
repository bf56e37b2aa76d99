"""Place of this process among the ranks, by the variables of the program that started it, and messages from and to `evodsp`'s
launcher.

`STARTERS` is the table of these programs. Of several, the first that tells everything counts: torchrun may run in a step of
`srun` or under `mpirun`, and `mpirun` starts its daemons with `srun`. No torch is imported here, because the command reads
its rank at once.

A rank ends when the `evodsp` that started it is gone. The launcher ends its ranks itself, unless it is killed (SIGKILL, or
out of memory). Then nobody would end them, and they would keep the cores or GPUs. No torch is imported here: the watch
begins before the slow imports.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from evodsp.errors import UserError
from evodsp.printing import tell

Environment = Mapping[str, str]


@dataclass(frozen=True)
class RankAddress:
    """The rank of this process and the address where the ranks meet."""

    rank: int
    ranks: int
    local_rank: int
    """The rank's number on its machine."""
    host: str
    """Host of the store through which the ranks meet."""
    port: int
    hosts_store: bool
    """Whether this process has to create the store."""
    told_by: str = "WORLD_SIZE"
    """The variable that tells the number of ranks."""

    @property
    def hint(self) -> str:
        """Advice if the others do not come."""
        alone = (
            f" (in an interactive step, `srun --pty`, only task 0 runs: unset {self.told_by} to train in one process)"
        )
        return f"check that all of them were started{alone if self.told_by.startswith('SLURM') else ''}"


@dataclass(frozen=True)
class Starter:
    """A program that starts ranks, and the variables by which it tells each of them its place."""

    name: str
    rank: str
    ranks: str
    """Variable with the number of ranks."""
    local_rank: str
    needs: tuple[str, ...]
    """Variables beside `rank` and `ranks` without which this is not a whole address."""
    host: Callable[[Environment], str | None] = lambda _: None
    """Meeting place of the ranks if MASTER_ADDR names none; None: there is no place that all of them know."""
    job: tuple[str, ...] = ()
    """Variables that are equal for all ranks and differ between runs on a machine: the port is made of them."""
    starts_one: bool = False
    """Whether a single process of this program is a rank. A batch script is a single process of its program, but no rank."""

    def began(self, environment: Environment) -> bool:
        """Whether this program seems to have started this process as a rank."""
        return self.rank in environment and (self.starts_one or _number(environment, self.ranks, "1") > 1)

    def missing(self, environment: Environment) -> list[str]:
        """Variables that are not set."""
        return [name for name in (self.rank, self.ranks, *self.needs) if name not in environment]

    def address(self, environment: Environment) -> RankAddress:
        """This process's address. Raises UserError if a variable is not a number, or if the ranks know no place to meet."""
        rank, port = _number(environment, self.rank), environment.get("MASTER_PORT")
        host = environment.get("MASTER_ADDR") or self.host(environment)
        job = [environment[name] for name in self.job if name in environment]
        unknown = [*([] if host else ["MASTER_ADDR"]), *([] if port or job else ["MASTER_PORT"])]
        if host is None or unknown:
            raise UserError(
                f"{self.name} does not tell its ranks where they meet: set {' and '.join(unknown)} for all of them "
                "(the first rank's host, and a free port there)"
            )
        return RankAddress(
            rank,
            _number(environment, self.ranks),
            _number(environment, self.local_rank, str(rank)),
            host,
            # All ranks must derive the same port, and two runs on one machine should get different ones.
            _number(environment, "MASTER_PORT") if port else 15000 + zlib.crc32(".".join(job).encode()) % 15000,
            hosts_store=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            told_by=self.ranks,
        )


def first_host(nodes: str) -> str:
    """The first host of SLURM's node list: 'gpu[003-007,010],cpu1' -> 'gpu003'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def _first_of_step(environment: Environment) -> str:
    """Meeting place of the ranks of an `srun` step: its first host. If it has no other, nobody outside has to reach it."""
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return "localhost"
    return first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))


def _this_machine(local_ranks: str, ranks: str) -> Callable[[Environment], str | None]:
    """Meeting place of ranks that are all on one machine. mpirun names no hosts, so ranks of several are to be told one."""
    return lambda environment: "localhost" if environment.get(local_ranks) == environment[ranks] else None


STARTERS = (
    Starter("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("MASTER_ADDR", "MASTER_PORT"), starts_one=True),
    Starter(
        "mpirun of Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        _this_machine("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    # Hydra, of MPICH and Intel MPI. `srun --mpi=pmi2` sets the same first two variables, but not the third.
    Starter(
        "mpirun of MPICH",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        ("MPI_LOCALRANKID",),
        _this_machine("MPI_LOCALNRANKS", "PMI_SIZE"),
        job=("SLURM_JOB_ID", "PBS_JOBID"),
    ),
    # The step's variable: SLURM_NTASKS is also set in a batch script, which is a single process.
    Starter(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        (),
        _first_of_step,
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
)
"""Programs that start ranks, the innermost first."""


def under_launcher() -> bool:
    """Whether torchrun, mpirun, srun or `evodsp` started this process as a rank."""
    return _place(os.environ) is not None


def place() -> RankAddress:
    """This process's address among the ranks, from the environment. Raises UserError if no launcher started it as a rank."""
    found = _place(os.environ)
    if found is None:
        raise UserError(
            "no launcher started this process as a rank; use torchrun, srun, mpirun, or --parallel.sequence on one machine"
        )
    return found


def was_restarted() -> bool:
    """Whether torchrun restarted this rank after a failure on this machine. Ranks of other machines may not know of it."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def number_of_rank(environment: Environment = os.environ) -> int:
    """This process's rank, for what it prints: 0 for a process that is none, or whose variables are not understood."""
    set_ones = (environment[starter.rank] for starter in STARTERS if environment.get(starter.rank))
    rank = next(set_ones, "0")
    return int(rank) if rank.isdecimal() else 0


def _place(environment: Environment) -> RankAddress | None:
    """The address that the first whole row of the table tells. Raises UserError if rows are partial or contradictory."""
    began = [starter for starter in STARTERS if starter.began(environment)]
    whole = [starter for starter in began if not starter.missing(environment)]
    if not whole:
        if began:
            given, lacking = began[0], " and ".join(began[0].missing(environment))
            raise UserError(
                f"{given.rank} is set, as {given.name} does, but {lacking} is not; start the ranks with torchrun, or unset "
                f"{given.rank} if this is a process by itself"
            )
        return None
    if whole[0] is STARTERS[0] and "TORCHELASTIC_RUN_ID" not in environment:
        _check_same(environment, whole)  # torchrun's variables, but not by torchrun
    return whole[0].address(environment)


def _check_same(environment: Environment, whole: list[Starter]) -> None:
    """Raise UserError if variables that were set by hand name another rank than those of the program that started it."""
    told = {starter.name: f"{environment[starter.rank]} of {environment[starter.ranks]}" for starter in whole}
    first, *others = told.items()
    for name, rank in others:
        if rank != first[1]:
            raise UserError(
                f"RANK and WORLD_SIZE say that this is rank {first[1]}, but {name} started it as rank {rank}; unset RANK and "
                f"WORLD_SIZE, or set them from the variables of {name}"
            )


def _number(environment: Environment, name: str, default: str | None = None) -> int:
    """The number in a variable. Raises UserError if there is none in it."""
    value = environment[name] if default is None else environment.get(name, default)
    try:
        return int(value)
    except ValueError:
        raise UserError(
            f"the variable {name} of the launcher is not a number ({value}); start the ranks with torchrun, srun or mpirun"
        ) from None


OWN_RUN = "evodsp"
"""The name that the launcher of `evodsp` gives its runs, where torchrun gives them a number."""

LAUNCHER = "EVODSP_LAUNCHER_PID"
"""Variable in which the launcher passes its process id to the ranks that it starts."""

GIVEN_UP = 3
"""Exit code of a rank that ended because of another process."""

STOPPED = 75
"""Exit code of a training run that was asked to stop, has saved, and can go on (EX_TEMPFAIL of sysexits.h: try again later)."""

STOPPED_FILE = "EVODSP_STOPPED_FILE"
"""Variable in which a batch script names a file that a run makes which was asked to stop: torchrun hides the code STOPPED. It
should be in the run's output folder, which a container sees as the script does."""

_POLL_S = 1.0


def launched_by_evodsp(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher of `evodsp` started this process as a rank: it shows the output of one rank only."""
    return environment.get("TORCHELASTIC_RUN_ID") == OWN_RUN


def starts_again(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a torchrun started this process as a rank, and would start all ranks again if it failed."""
    if launched_by_evodsp(environment):
        return False
    used, most = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return used.isdecimal() and most.isdecimal() and int(used) < int(most)


def tell_stopped(environment: Mapping[str, str] = os.environ) -> None:
    """Make the batch script's file STOPPED_FILE. Its folder may be on one machine only: ranks of others make none."""
    if name := environment.get(STOPPED_FILE):
        with contextlib.suppress(OSError):
            Path(name).touch()


@contextmanager
def same_handlers() -> Iterator[None]:
    """For a program that goes on after a command: signals are handled as before. Otherwise a run that was asked to stop keeps
    its handlers, so that one more signal, before the process has ended, does not change the exit code."""
    former = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in former.items():
                if handler is not None and signal.getsignal(number) is not handler:
                    signal.signal(number, handler)


def end_with_launcher() -> None:
    """In a rank that `evodsp` started: end this process within seconds after the launcher. In other processes: do nothing."""
    launcher = os.environ.pop(LAUNCHER, None)  # not for the processes that this one starts
    if launcher is not None:
        threading.Thread(target=_wait_for_end_of, args=[int(launcher)], name="evodsp parent", daemon=True).start()


def _wait_for_end_of(parent: int) -> None:
    """Poll until this process has another parent: a process whose parent has died is adopted."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    tell(f"evodsp: error: the launcher (pid {parent}) is gone; this rank is ended")
    os._exit(GIVEN_UP)
