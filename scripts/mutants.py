"""Breaks the package on purpose, one line at a time, and checks that the test named beside each break fails.

    python -m scripts.mutants [--list] [--only NAME] [--share I/N]

Every entry of `MUTANTS` once survived the whole test suite. The script copies the package into a temporary folder, runs all
named tests there unbroken (they must pass), then applies one break after another and expects the named test to fail. A break
that cannot be imported does not count as found. Exit code 1: a mutant survived, or could not be tried.

`--share I/N` tries every N-th mutant, starting with number I (from 0).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300.0
"""Seconds after which a test that hangs is ended."""


@dataclass(frozen=True)
class Mutant:
    """One break and the test that must find it."""

    name: str
    file: str
    """Path of the broken file, relative to the repository."""
    text: str
    """What is replaced. It must occur exactly once in the file."""
    broken: str
    test: str
    """Test id. Without parameters it stands for every parametrisation; one failure is enough."""


_DROPOUT = "tests/model/test_dropout_rules.py"
_REMOVED = f"{_DROPOUT}::test_every_element_that_dropout_removes"
_TEMPLATES = f"{_DROPOUT}::test_every_element_that_dropout_removes_from_templates"
_TWICE = f"{_DROPOUT}::test_structure_module_drops_out_twice_in_each_iteration"
_WEIGHTS = "tests/model/test_initial_weights.py"
_FUSED_QKV = f"{_WEIGHTS}::test_fused_queries_keys_and_values_have_the_limit_of_one_of_them"
_FUSED_KV = f"{_WEIGHTS}::test_fused_keys_and_values_have_the_limit_of_one_of_them"
_TRANSITIONS = f"{_WEIGHTS}::test_transitions_start_with_he_and_end_with_zero"
_IPA = f"{_WEIGHTS}::test_invariant_point_attention_starts_as_the_identity"
_ZERO = f"{_WEIGHTS}::test_every_residual_update_starts_at_zero_and_every_gate_open"
_NEGATIVE = "tests/parallel/test_negative_dims.py::test_a_negative_dim_counts_from_the_end"

_ALPHAFOLD = "evodsp/model/alphafold.py"
_BLOCK = "evodsp/model/block.py"
_EVOFORMER = "evodsp/model/evoformer.py"
_FUNCTIONAL = "evodsp/parallel/functional.py"
_MSA = "evodsp/model/msa_ops.py"
_PRIMITIVES = "evodsp/model/primitives.py"
_SCHEDULE = "evodsp/model/schedule.py"
_STRUCTURE = "evodsp/model/structure_module.py"
_TEMPLATE = "evodsp/model/templates.py"
_MODULE = "evodsp/training/module.py"

MUTANTS = (
    # Addresses of dropout.
    Mutant("one address: pair halves of all blocks", _EVOFORMER, '[d.at("block", number - 1) for d in draws]', "list(draws)", _REMOVED),
    Mutant("one address: MSA halves of all blocks", _EVOFORMER, '[d.at("block", number) for d in draws]', "list(draws)", _REMOVED),
    Mutant("pair half has the address of the next block", _EVOFORMER, 'd.at("block", number - 1)', 'd.at("block", number)', _REMOVED),
    Mutant("one address: both stacks", _ALPHAFOLD, 'd.at("extra")', 'd.at("evoformer")', _REMOVED),
    Mutant("one address: all cycles", _ALPHAFOLD, 'd.at("cycle", cycle)', 'd.at("cycle", 0)', _REMOVED),
    Mutant("one address: all samples", _MODULE, "self._dropout.at(index)", "self._dropout.at(0)", _REMOVED),
    Mutant("one address: all layers", _BLOCK, "d.at(step.layer)", 'd.at("layer")', _REMOVED),
    Mutant("one address: all samples of a batch", _PRIMITIVES, "d.uniform_at(positions) for d in draws", "draws[0].uniform_at(positions) for d in draws", _REMOVED),
    Mutant("one address: all templates", _TEMPLATE, 'd.at("template", number)', 'd.at("template", 0)', _TEMPLATES),
    Mutant("one address: all blocks of templates", _TEMPLATE, 'd.at("block", number)', 'd.at("block", 0)', _TEMPLATES),
    # Masks of dropout.
    Mutant("what is kept is not rescaled", _PRIMITIVES, "to(x.dtype) / (1.0 - self.rate)", "to(x.dtype)", _REMOVED),
    Mutant("MSA mask differs between sequences", _SCHEDULE, 'msa="seq", pair="j", shared="seq"),\n    Step("column_attention", "msa", msa="res")', 'msa="seq", pair="j", shared="res"),\n    Step("column_attention", "msa", msa="res")', _REMOVED),
    Mutant("extra MSA mask differs between sequences", _SCHEDULE, 'msa="seq", pair="j", shared="seq"),\n    Step("column_attention", "msa", msa="seq")', 'msa="seq", pair="j", shared="res"),\n    Step("column_attention", "msa", msa="seq")', _REMOVED),
    Mutant("outgoing update's mask shared along columns", _SCHEDULE, 'PAIR_HALF = (\n    Step("triangle_outgoing", "pair", pair="j", shared="i")', 'PAIR_HALF = (\n    Step("triangle_outgoing", "pair", pair="j", shared="j")', _REMOVED),
    Mutant("starting node's mask shared along columns", _SCHEDULE, 'Step("triangle_incoming", "pair", pair="j", result="i", shared="i"),\n    Step("attention_starting", "pair", pair="i", shared="i")', 'Step("triangle_incoming", "pair", pair="j", result="i", shared="i"),\n    Step("attention_starting", "pair", pair="i", shared="j")', _REMOVED),
    Mutant("ending node's mask shared along rows", _SCHEDULE, 'Step("attention_ending", "pair", pair="j", shared="j"),\n    Step("transition"', 'Step("attention_ending", "pair", pair="j", shared="i"),\n    Step("transition"', _REMOVED),
    Mutant("templates: ending node's mask shared along rows", _SCHEDULE, 'Step("attention_ending", "pair", pair="j", shared="j"),\n    Step("triangle', 'Step("attention_ending", "pair", pair="j", shared="i"),\n    Step("triangle', _TEMPLATES),
    Mutant("MSA and pair rates exchanged", _BLOCK, '{"msa": msa_dropout, "pair": pair_dropout}', '{"msa": pair_dropout, "pair": msa_dropout}', _REMOVED),
    # The structure module.
    Mutant("structure module's two masks are one", _STRUCTURE, 'd.at("transition", iteration)', 'd.at("attention", iteration)', _TWICE),
    Mutant("structure module's masks of all iterations are one", _STRUCTURE, 'd.at("attention", iteration)', 'd.at("attention", 0)', _TWICE),
    Mutant("structure module does not rescale", _STRUCTURE, "keep.to(s.dtype) / (1.0 - self.config.dropout)", "keep.to(s.dtype)", _TWICE),
    # Weights at the start.
    Mutant("fused queries, keys and values count as one", _PRIMITIVES, 'init="glorot", parts=3', 'init="glorot"', _FUSED_QKV),
    Mutant("the number of parts is ignored", _PRIMITIVES, "self.out_features // self._parts", "self.out_features", _FUSED_QKV),
    Mutant("global attention's keys and values count as one", _MSA, 'init="glorot", parts=2', 'init="glorot"', _FUSED_KV),
    Mutant("template attention's keys and values count as one", _TEMPLATE, 'init="glorot", parts=2', 'init="glorot"', _FUSED_KV),
    Mutant("transitions widen by LeCun's rule", _PRIMITIVES, 'factor * channels, init="relu"', "factor * channels", _TRANSITIONS),
    Mutant("transitions do not end in zero", _PRIMITIVES, 'self.narrow = Linear(factor * channels, channels, init="final")', "self.narrow = Linear(factor * channels, channels)", _TRANSITIONS),
    Mutant("structure module's transition does not end in zero", _STRUCTURE, '"final" if n == last else "relu"', '"relu"', _TRANSITIONS),
    Mutant("invariant point attention does not end in zero", _STRUCTURE, '(e + 4 * v + c_z), c_s, init="final")', "(e + 4 * v + c_z), c_s)", _IPA),
    Mutant("attention does not end in zero", _PRIMITIVES, 'self.output = Linear(width, channels, init="final")', "self.output = Linear(width, channels)", _ZERO),
    Mutant("gates start half open", _PRIMITIVES, 'fill_(1.0 if self._init == "gate" else 0.0)', "fill_(0.0)", _ZERO),
    # The four functions.
    Mutant("split takes a negative dim for another axis", _FUNCTIONAL, "shard(x, dim % x.ndim,", "shard(x, abs(dim),", _NEGATIVE),
    Mutant("switch takes a negative dim as it is", _FUNCTIONAL, "from_dim % x.ndim, to_dim % x.ndim", "from_dim, to_dim", _NEGATIVE),
    Mutant("gather takes a negative dim for another axis", _FUNCTIONAL, "Gather(group, dim % x.ndim,", "Gather(group, abs(dim) - 1,", _NEGATIVE),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant."""

    mutant: Mutant
    result: str
    """`caught`, `SURVIVED`, or why it could not be tried."""
    seconds: float


def broken_text(mutant: Mutant, root: Path = ROOT) -> str:
    """The whole broken file. Raises ValueError if the text to replace is not there exactly once."""
    source = (root / mutant.file).read_text()
    if (count := source.count(mutant.text)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.text!r} occurs {count} times in {mutant.file}, expected once")
    return source.replace(mutant.text, mutant.broken)


def share_of(mutants: Sequence[Mutant], share: str) -> list[Mutant]:
    """Every N-th mutant from number I on. `share`: "I/N", I from 0."""
    number, _, shares = share.partition("/")
    return list(mutants[int(number) :: int(shares)])


def try_mutants(mutants: Sequence[Mutant], say: Callable[[str], None] = print) -> list[Outcome]:
    """Run every mutant's test, unbroken and broken, and print a line for each. Takes about 5 s a mutant."""
    texts = {mutant: broken_text(mutant) for mutant in mutants}
    with _copy() as copy:
        tests = list(dict.fromkeys(mutant.test for mutant in mutants))
        passed = _run_tests(copy, tests)
        outcomes = []
        for mutant in mutants:
            begin = time.monotonic()
            unbroken = _of(passed, mutant.test)
            if not unbroken or set(unbroken) != {"passed"}:
                result = f"NOT TRIED: unbroken, its test came to {sorted(set(unbroken)) or 'nothing'}"
            else:
                path = copy / mutant.file
                source = path.read_text()
                path.write_text(texts[mutant])
                found = _of(_run_tests(copy, [mutant.test]), mutant.test)
                path.write_text(source)
                result = (
                    "caught"
                    if "failed" in found
                    else "SURVIVED"
                    if set(found) == {"passed"}
                    else "NOT TRIED: no test ran"
                )
            outcomes.append(Outcome(mutant, result, time.monotonic() - begin))
            say(f"{result:9} {outcomes[-1].seconds:5.1f} s  {mutant.name}  ({mutant.test})")
    return outcomes


@contextmanager
def _copy() -> Iterator[Path]:
    """A copy of what tests need, in a temporary folder; golden numbers beside it, where there are any."""
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Path(folder) / "checkout"
        for name in ("evodsp", "tests", "scripts"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "configs", "data"):
            (copy / name).symlink_to(ROOT / name)
        if (ROOT.parent / "shared").is_dir():
            (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
        yield copy


class _Record:
    """A pytest plugin that keeps the outcome of every test's call."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = (
                report.outcome if report.when == "call" else f"{report.outcome} in {report.when}"
            )


def _of(outcomes: dict[str, str], test: str) -> list[str]:
    """Outcomes of a test, of all its parametrisations."""
    return [outcome for name, outcome in outcomes.items() if name == test or name.startswith(f"{test}[")]


def _run_tests(copy: Path, tests: Sequence[str]) -> dict[str, str]:
    """Outcome by test id, of tests run in `copy` by a forked process: torch is imported once, evodsp anew each time."""
    result = copy.parent / "outcomes.json"
    result.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _child(copy, tests, result)
    deadline = time.monotonic() + TIMEOUT * (1 if len(tests) == 1 else 4)
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.05)
    return json.loads(result.read_text()) if result.is_file() else {}


def _child(copy: Path, tests: Sequence[str], result: Path) -> None:
    """Run pytest in `copy`, write the outcomes, and end this process."""
    os.setsid()
    os.chdir(copy)
    quiet = os.open(copy.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.dont_write_bytecode = True  # a file that is broken twice within a second would be taken for the first one
    sys.path[:] = [str(copy), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("evodsp", "tests", "scripts")]:
        del sys.modules[name]
    import pytest

    record = _Record()
    pytest.main([*tests, "-q", "-p", "no:cacheprovider", "--tb=short", f"--rootdir={copy}"], plugins=[record])
    evodsp = sys.modules.get("evodsp")
    assert evodsp is None or Path(str(evodsp.__file__)).is_relative_to(copy), "not the copy was tested"
    result.write_text(json.dumps(record.outcomes))
    os._exit(0)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, run nothing")
    parser.add_argument("--only", metavar="NAME", help="try the mutants whose name contains NAME")
    parser.add_argument(
        "--share", metavar="I/N", default="0/1", help="try every N-th mutant, starting with number I (from 0)"
    )
    options = parser.parse_args(words)
    chosen = [mutant for mutant in share_of(MUTANTS, options.share) if (options.only or "") in mutant.name]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}  {mutant.file}  {mutant.test}")
        return 0
    outcomes = try_mutants(chosen)
    bad = [outcome for outcome in outcomes if outcome.result != "caught"]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} mutants caught")
    return 1 if bad or not outcomes else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import pytest  # noqa: F401  (these three take seconds; forked processes have them already)
    import torch  # noqa: F401
    from jaxtyping import install_import_hook  # noqa: F401

    sys.exit(main())
