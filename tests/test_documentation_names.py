"""What the documentation names exists: commands, options, settings, modules, files, links, versions, pages of the site.

`tests/test_documentation.py` executes its commands and code blocks.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import evodsp
from evodsp.config import EvoformerConfig
from evodsp.parallel.config import WHEN_TO_RAISE
from scripts.benchmarks.traffic import StackSizes, inner_block
from scripts.examples.synthetic.config import SynthesisConfig
from tests.builders.pages import INCLUDED, PAGES, ROOT, UNLISTED, check_make, extras, prose, run_quietly, spans, text_of

OPTIONS_OF_OTHERS = {
    "--trainer.help",
    "--complete",
    "--help",
    "--master-port",
    "--max-restarts",
    "--net",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--cpu",
    "--base",
    "--dry-run",
    "--jobs",
    "--limit",
    "--only",
    "--backends",
    "--minutes",
    "--print_config",
    "--nproc-per-node",
    "--standalone",
    "--bind-to",
    "--container-image",
    "--ipc",
    "--mpi",
    "--nnodes",
    "--nv",
    "--rdzv-id",
    "--shm-size",
    "--ulimit",
    "--volume",
}
"""Options of torchrun, SLURM, MPI, containers and of scripts, and those that `--help` does not show."""
OPTIONS_OF_OPENFOLD = {
    "--checkpoint_every_epoch",
    "--config_preset",
    "--deepspeed_config_path",
    "--distillation_alignment_dir",
    "--distillation_chain_data_cache_path",
    "--distillation_data_dir",
    "--distillation_filter_path",
    "--gpus",
    "--num_nodes",
    "--obsolete_pdbs_file_path",
    "--precision",
    "--resume_from_ckpt",
    "--resume_from_jax_params",
    "--resume_model_weights_only",
    "--seed",
    "--train_chain_data_cache_path",
    "--train_epoch_len",
    "--train_filter_path",
    "--val_alignment_dir",
    "--val_data_dir",
}
"""Of its training program; the migration page says what stands in their place."""

ELSEWHERE = {
    *("fit.sbatch", "build.sbatch"),
    *(
        "config.yaml",
        "train.txt",
        "chains.txt",
        "templates.txt",
        "judgement.md",
        "downloaded/missing.txt",
        "video.py",
        "train_monomer_demo_bp.sh",
    ),
    *("fastfold/distributed/comm.py", "megatron/core/pipeline_parallel/schedules.py"),
    *("deepspeed/runtime/zero/stage_1_and_2.py", "duplicate_pdb_chains.txt", "clusters-by-entity-40.txt"),
    *("model.safetensors", "config.json"),
}
"""Files that a run or the reader writes, and files of other programs."""


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """`--help` of every command."""
    names = (
        "fit",
        "validate",
        "predict",
        "estimate",
        "search",
        "replay",
        "data fetch",
        "data index",
        "data doctor",
        "data build",
        "plan",
        "selftest",
        "slurm",
        "report",
        "score",
        "weights fetch",
        "weights random",
        "weights import",
        "weights export",
    )
    return {name: run_quietly([*name.split(), "--help"]) for name in names}


@cache
def options_of_scripts() -> set[str]:
    """What the programs in scripts/ take."""
    programs = (path.read_text() for path in (ROOT / "scripts").rglob("*.py"))
    found = {option for text in programs for option in re.findall(r'add_argument\(\s*"(--[\w-]+)"', text)}
    return found | {f"--{field.name}" for field in dataclasses.fields(SynthesisConfig)}


@pytest.mark.parametrize("page", [*PAGES, *INCLUDED, *UNLISTED])
def test_names_in_the_prose_exist(page: str, help_texts: dict[str, str]) -> None:
    """Commands, options, settings, make targets and modules between backticks: a name that was changed or never was."""
    everything = "".join(help_texts.values())
    options = set(re.findall(r"--[\w.]+", everything)) | OPTIONS_OF_OTHERS
    options |= OPTIONS_OF_OPENFOLD if page == "docs/migration.md" else set()
    for span in spans(page):
        words = span.split()
        if words[0] == "make":
            check_make([word for word in words[1:] if "…" not in word])
        if words[0] == "evodsp" and len(words) > 1:
            name = " ".join(words[1:3]) if words[1] in ("data", "weights") else words[1]
            assert name in {*help_texts, "test"}, f"no command `{span}`"
        known = options | options_of_scripts() if words[0] == "python" else options
        for word in re.findall(r"(?<![\w-])--[A-Za-z][\w.-]*", span):
            assert word in known, f"`{span}`: no command has the option {word}"
        if setting := re.fullmatch(r"((?:model|data|parallel|plan|trainer)\.[a-z_]\w*(?:\.\w+)*)(?::.*)?", span):
            assert f"--{setting[1]}" in options or span in ELSEWHERE, f"no setting `{span}`"
        if re.fullmatch(r"evodsp(\.\w+)+", span) and page not in ("docs/migration.md", "CHANGELOG.md"):
            assert resolves(span), f"`{span}` cannot be imported"


def test_template_searches_are_named_with_all_their_names() -> None:
    """Catches a page or a help text that names hmmsearch's result as one program writes it and hides those of others."""
    settings = [ROOT / "evodsp" / name for name in ("training/config.py", "inference/config.py", "data/config.py")]
    texts = [text_of(page) for page in PAGES if page != "docs/changelog.md"] + [path.read_text() for path in settings]
    parts = [
        part for text in texts for part in re.split(r"\n\s*\n|(?<=\.) (?=[A-Z])|\n- ", text) if "hmm_output.sto" in part
    ]
    assert len(parts) >= 6
    for part in parts:
        assert {"hmmsearch_output.sto", "pdb_hits.sto", ".hhr"} <= set(re.findall(r"[\w.]+\w", part)), part


def test_the_new_names_of_the_migration_page_exist() -> None:
    rows = [row.split("|")[1:3] for row in text_of("docs/migration.md").splitlines() if row.startswith("| `")]
    assert len(rows) > 20
    for old, new in rows:
        for name in re.findall(r"`(evodsp(?:\.\w+)+)`", new):
            assert resolves(name), f"{name}, the new name of {old.strip()}"
        for name in re.findall(r"`(evodsp(?:\.\w+)+)`", old):
            assert name in new or not resolves(name), f"{name} is still there"


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", [*PAGES, *INCLUDED, *UNLISTED])
def test_links_and_files_named_in_the_prose_exist(page: str) -> None:
    """Relative links with their anchors; files and folders between backticks that a run does not write."""
    here = (ROOT / page).parent
    package_files = {path.name for path in (ROOT / "evodsp").rglob("*.py")}
    for link in re.findall(r"\[[^\]]*\]\((?!https?:)([^)\s]+)\)", prose(page)):
        name, _, anchor = link.partition("#")
        target = here / name if name else ROOT / page
        assert target.exists(), f"{page}: the link to {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {name} has no heading #{anchor}"
    for name in spans(page):
        if re.fullmatch(r"[\w./-]+\.(?:md|yaml|py|txt|sh|sbatch|ipynb|cff|css)", name) and name not in ELSEWHERE:
            places = (ROOT, here, ROOT / "evodsp", ROOT / "evodsp" / "parallel")
            found = any((folder / name).exists() for folder in places) or ("/" not in name and name in package_files)
            assert found, f"{page}: `{name}`"
        if re.match(r"(?:evodsp|scripts|tests|notebooks|configs|data)/", name) and not set(name) & set("*<> …"):
            assert (ROOT / name).exists() or (ROOT / "evodsp" / name).exists(), f"{page}: `{name}`"


def test_the_map_of_algorithms_leads_to_each() -> None:
    """Catches an algorithm without a row, a class, function or test that has moved, and a row that leads to another algorithm:
    the docstring there must name its number."""
    rows = re.findall(
        r"^\| (\d+) \| \w+ \| `([\w/]+)\.py` \| `([\w.]+)` \| `(\S+\.py)` `(\w+)(?:\[(\w+)\])?` \|$",
        text_of("docs/algorithms.md"),
        re.MULTILINE,
    )
    assert [int(row[0]) for row in rows] == list(range(1, 33))
    for number, module, name, test_file, test, case in rows:
        there = inspect.getdoc(pkgutil.resolve_name(f"{module.replace('/', '.')}:{name}")) or ""
        named = re.findall(r"algorithms? (\d+(?:(?:, | and )\d+)*)", there)
        assert number in re.findall(r"\d+", " ".join(named)), (
            f"the docstring of {name} does not name algorithm {number}"
        )
        assert f"def {test}(" in text_of(test_file), f"{test_file} has no {test}"
        cases = [re.sub(r"\{\w+\}", r"\\w*", one) for one in re.findall(r'"([\w{}]+)"', text_of(test_file))]
        assert not case or any(re.fullmatch(one, case) for one in cases), f"{test} has no case {case}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as MkDocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_site_has_all_pages_and_each_says_what_it_is_for() -> None:
    """A page outside the navigation, a page that these tests do not read, an API page of a module that moved."""

    def files(entries: object) -> list[str]:
        if isinstance(entries, str):
            return [entries]
        return [
            file
            for entry in entries
            for file in files(next(iter(entry.values())) if isinstance(entry, dict) else entry)
        ]

    pages = {f"docs/{name}" for name in files(yaml.safe_load(text_of("mkdocs.yml"))["nav"])}
    assert (
        pages
        == {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
        == set(PAGES) - {"README.md"}
    )
    for page in pages:
        title, opening = [line for line in text_of(page).splitlines() if line][:2]
        assert title.startswith("# ")
        assert opening.startswith("*After this page you "), page
        for module in re.findall(r"^::: ([\w.]+)$", text_of(page), re.MULTILINE):
            assert find_spec(module), f"{page}: {module}"


def test_placeholders_of_the_api_pages_stand_between_backticks() -> None:
    """Catches `<output>/seed_<k>.cif` without backticks in a docstring: the page takes it for HTML and shows `/seed_.cif`."""
    modules = [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", text_of(page), re.MULTILINE)]
    assert len(modules) > 20
    for module in modules:
        spec = find_spec(module)
        assert spec
        assert spec.origin
        for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                text = re.sub(
                    r"^ {4}.*$", "", inspect.cleandoc(node.value.value), flags=re.MULTILINE
                )  # code in Markdown
                found = re.search(r"<\w+>", re.sub(r"`[^`]*`", "", text))
                assert not found, f"{spec.origin}:{node.lineno}: {found[0]} without backticks"


def test_the_changelog_has_this_version() -> None:
    """A bump that forgot it. `tests/test_shop.py` compares the other places."""
    newest = re.search(r"^## (\S+) - \S+$", text_of("CHANGELOG.md"), re.MULTILINE)
    assert newest
    assert newest[1] == evodsp.__version__


def test_the_extras_are_those_of_the_package() -> None:
    rows = text_of("README.md").partition("| extra | for |\n")[2].partition("\n\n")[0].splitlines()
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert named == extras()


@pytest.mark.parametrize(
    ("extra", "targets"), [("docs", "docs|docs-serve|verify"), ("compat", "test|verify"), ("triton", "test|verify")]
)
def test_packages_that_the_demo_does_without_are_pinned_and_added_later(extra: str, targets: str) -> None:
    """`make demo` installs the extra `dev`. Catches a package of another extra in it, and a target that forgets its extra."""
    wanted = tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"]
    pinned = {line.partition("==")[0].lower() for line in text_of("constraints.txt").splitlines()}
    names = {re.split(r"[\[<>=;]", requirement)[0] for requirement in wanted[extra]}
    assert names <= pinned
    assert names & {re.split(r"[\[<>=]", requirement)[0] for requirement in wanted["dev"]} <= {"ruff"}
    found = re.findall(rf"^({targets}):(.*)$", text_of("Makefile"), re.MULTILINE)
    assert len(found) == targets.count("|") + 1
    assert all(f"$({extra.upper()}_READY)" in needs for _, needs in found)


@pytest.mark.verify
def test_the_site_builds_without_warnings_and_asks_no_network(tmp_path: Path) -> None:
    """Needs the extra `docs` (`make docs` installs it)."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed; `make docs` installs it")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        fetched = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not fetched, f"{page}: {fetched}"


def test_the_table_of_a_block_is_what_it_communicates() -> None:
    """Catches a page that says other collectives or bytes than those of the schedule."""
    page = text_of("docs/dsp.md")
    table = page.partition("| sub-layer | needs |")[2].partition("\n\n")[0]
    written = [float(x) for row in table.splitlines()[2:] for x in re.findall(r"[\d.]+", row.split("|")[-2])]
    calls = inner_block(StackSizes(4, 0, 1, 128, 256, 256, 128, EvoformerConfig()))
    moved = [2 * call.elements / 2**20 for call in calls]  # in bf16
    assert sorted(written) == sorted(moved)
    assert f"Twelve collectives and {sum(moved):.0f} MiB" in page
    assert len(moved) == 12


def test_examples_begin_with_one_gpu_a_sample() -> None:
    """Catches an example that spreads a sample over GPUs where one GPU a sample is up to 19 times as fast, one without the
    sentence that says when to spread it, and a second wording of that sentence."""
    folders = (("configs", "*.yaml"), ("scripts/examples/slurm", "README.md"), ("scripts/examples/slurm", "fit.sbatch"))
    files = [path.relative_to(ROOT).as_posix() for folder, name in folders for path in (ROOT / folder).glob(name)]
    advised = []
    for name in [*PAGES, *files]:
        text = text_of(name).replace("\\\n", " ")
        options = r"--(?:parallel\.sequence|config (?:C|(?:configs/)?X|configs/(?:af2|multimer)))"
        examples = re.findall(rf"^.*(?:evodsp fit|fit\.sbatch) .*{options}.*$", text, re.MULTILINE)
        if not (examples := [one for one in examples if "EVODSP_COMMAND=predict" not in one]) or name.endswith(
            "/dimers.yaml"
        ):
            continue
        advised.append(name)
        spread = [one for one in examples if re.search(r"--parallel\.sequence (?!1\b)", one)]
        assert all("configs/quickstart.yaml" in one for one in spread), f"{name}: {spread}"
        said = " ".join(re.sub(r"[`#]", "", text).split())
        assert said.lower().count(WHEN_TO_RAISE.lower()) == said.lower().count("raise parallel.sequence above") == 1, (
            name
        )
    assert {"README.md", "docs/cluster.md", "docs/training.md", *files[-2:]} < set(advised)
    assert {f"configs/{recipe}.yaml" for recipe in ("af2_initial", "af2_finetune", "multimer")} < set(advised)


def test_the_search_of_the_docs_works_from_the_disk() -> None:
    """Catches docs whose search needs a server, or loads a script from one where it runs from the disk."""
    text = text_of(ROOT / "mkdocs.yml")
    assert re.search(r"^  - offline\b", text, re.MULTILINE)
    assert re.search(r"^use_directory_urls: false", text, re.MULTILINE)
    (polyfill,) = re.findall(r"polyfills: \[(.*)\]", text)
    assert "iframe-worker" in polyfill, "the plugin adds one from a server unless a script has this name"
    assert (ROOT / "docs" / polyfill).is_file()
