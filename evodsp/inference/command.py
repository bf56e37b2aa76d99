"""`evodsp predict`: run in this process, start several ranks, or be one of the ranks that a launcher started."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from evodsp.inference.config import PredictConfig
from evodsp.inference.devices import AttemptNotes, RankOutOfMemoryError, device_of
from evodsp.inference.groups import Groups
from evodsp.inference.jobs import check_launch
from evodsp.inference.predict import predict_records
from evodsp.inference.results import FAILURES, run_log
from evodsp.inference.targets import as_files
from evodsp.launch.environment import launched_by_evodsp, place, under_launcher
from evodsp.launch.launcher import launch
from evodsp.launch.process_group import guarded, mesh_of, start, stop
from evodsp.parallel.group import data_ranks, whole_group
from evodsp.printing import show


def run(config: PredictConfig, words: list[str]) -> int:
    """Predict and return the exit code: 1 if a record failed.

    `words`: the command line, repeated for every rank that has to be started. Raises KeyboardInterrupt with a message that
    says how to go on.
    """
    try:
        return _run(config, words)
    except KeyboardInterrupt as interrupt:
        again = "the same command without --overwrite" if config.overwrite else "the same command again"
        raise KeyboardInterrupt(f"{again} keeps what is finished") from interrupt


def _run(config: PredictConfig, words: list[str]) -> int:
    if not under_launcher():
        if config.parallel.sequence > 1:
            with as_files(config.sources, words) as (inputs, same_words):
                check_launch(replace(config, inputs=inputs, fasta=None))
                return launch(config.parallel.sequence, same_words) or int((config.output / FAILURES).exists())
        with run_log(config.output, words, _say) as say:
            return 1 if predict_records(config, say).failures else 0
    here, ranks = place(), config.parallel.sequence
    data_ranks(here.ranks, ranks)
    with guarded():
        backend = "gloo" if device_of(config.device).type == "cpu" else "nccl"
        start(backend, config.parallel.timeout, together=ranks > 1)
        mesh = mesh_of(config.parallel)
        group = mesh.sequence_group() if ranks > 1 else None
        groups = Groups(whole_group(), group) if here.ranks > ranks else None
        with run_log(config.output, words, _say) if here.rank == 0 else nullcontext(_silent) as say:
            try:
                outcome = predict_records(config, say, group, groups)
            except RankOutOfMemoryError as error:
                again = "the same command without --overwrite" if config.overwrite else "the same command"
                AttemptNotes(config.output, config.memory_options).give_up(error.failure, again)
        stop()
    # evodsp's own launcher would take 1 for a rank that died; it looks for the list of failures itself.
    return 1 if outcome.failures and not launched_by_evodsp() else 0


def _say(line: str) -> None:
    """Print at once: a log file that the output is redirected to shows how far the run is."""
    show(line, flush=True)


def _silent(line: str) -> None:
    """Print nothing: only rank 0 reports."""
