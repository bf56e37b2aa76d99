"""What stands around the package: versions and addresses agree in all files, and others accept its packages and workflows."""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from evodsp import version
from scripts.release import NOTEBOOK, lines, notebook, with_lines, written
from tests.builders.pages import ROOT, check_make, text_of

HERE, PAGES = "https://github.com/somebody/evodsp", "https://somebody.github.io/evodsp"
SCHEMAS = {
    "vendor.github-workflows": ".github/workflows/*.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.citation-file-format": "CITATION.cff",
}
CONDA = {"torch": "pytorch", "docstring-parser": "docstring_parser"}
"""Packages whose names are others at conda-forge."""


def test_no_file_is_stale() -> None:
    """Catches a version, an address or a page of the navigation that was changed without `python -m scripts.release`."""
    for name, text in written(version.REPOSITORY, version.DOCUMENTATION, version.__version__).items():
        assert text_of(name) == text, f"{name}: run python -m scripts.release"


def test_addresses_are_written_everywhere_and_taken_back() -> None:
    """Catches a file that says where evodsp is in its own way, one that is no longer valid with an address, and a second run
    that adds a second line."""
    files = written(HERE, PAGES, version.__version__)
    assert tomllib.loads(files["pyproject.toml"])["project"]["urls"].items() >= {
        ("Repository", HERE), ("Documentation", PAGES), ("Issues", f"{HERE}/issues"),
    }  # fmt: skip
    citation, site, recipe, forms = (
        yaml.safe_load(files[name])
        for name in ("CITATION.cff", "mkdocs.yml", "conda/recipe.yaml", ".github/ISSUE_TEMPLATE/config.yml")
    )
    assert (citation["repository-code"], citation["url"]) == (HERE, PAGES)
    assert site["site_url"] == PAGES
    assert HERE in site["copyright"]
    assert (recipe["about"]["repository"], recipe["about"]["documentation"]) == (HERE, PAGES)
    assert [contact["url"] for contact in forms["contact_links"]] == [PAGES]
    links = re.findall(r"\((\S+)\): ", files["docs/llms.txt"])
    assert len(links) > 25
    assert all(re.fullmatch(rf"{PAGES}/[\w/]+\.html", link) for link in links)
    first, parameters = json.loads(files[NOTEBOOK])["cells"][:2]
    assert f"/github/somebody/evodsp/blob/v{version.__version__}/{NOTEBOOK})" in first["source"][1]
    assert f'evodsp_source = "git+{HERE}@v{version.__version__}"\n' in parameters["source"]
    day = str(citation["date-released"])
    unknown = lines(version.REPOSITORY, version.DOCUMENTATION, version.__version__, day)
    for name, values in lines(HERE, PAGES, version.__version__, day).items():
        assert with_lines(files[name], values) == files[name]
        assert with_lines(files[name], unknown[name]) == text_of(name)
    for address, text in ((HERE, files[NOTEBOOK]), (version.REPOSITORY, text_of(NOTEBOOK))):
        assert notebook(files[NOTEBOOK], address, version.__version__) == text
    with pytest.raises(ValueError, match="0 lines begin with 'url: '"):
        with_lines("uri: x\n", {"url: ": "y"})


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    """Catches a dependency or a lower bound that was changed in pyproject.toml alone."""
    project, recipe = tomllib.loads(text_of("pyproject.toml"))["project"], yaml.safe_load(text_of("conda/recipe.yaml"))
    wanted = dict(re.fullmatch(r"([\w.-]+)(?:\[.*\])?>=(\S+)", one).groups() for one in project["dependencies"])
    asked = dict(one.split(" >=") for one in recipe["requirements"]["run"])
    assert asked.pop("python") == "${{ python_min }}"
    assert f">={recipe['context']['python_min']}" == project["requires-python"]
    assert asked.pop(
        "typeshed-client"
    )  # of jsonargparse[signatures], which asks for a newer docstring-parser than evodsp
    assert asked.pop("docstring_parser") >= wanted.pop("docstring-parser")
    assert asked == {CONDA.get(name, name): least for name, least in wanted.items()}
    [script] = recipe["build"]["python"]["entry_points"]
    assert script.split(" = ") == ["evodsp", project["scripts"]["evodsp"]]


def test_workflows_run_what_a_developer_runs() -> None:
    """Catches a workflow with commands of its own, which nobody tries, and Pythons that are not the same everywhere."""
    runs, pythons = set(), set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"].values()
        runs |= {step["run"] for job in jobs for step in job["steps"] if "run" in step}
        pythons |= {one for job in jobs for one in job.get("strategy", {}).get("matrix", {}).get("python", ())}
    assert {".ci/run", "make docs", "make dist"} <= runs
    for command in runs:
        assert not command.startswith("make ") or check_make(command.split()[1:]) is None
    classified = re.findall(r'"Programming Language :: Python :: ([\d.]+)"', text_of("pyproject.toml"))
    resolved = re.search(r"^PYTHONS +\?= (.*)$", text_of("Makefile"), re.MULTILINE)
    assert resolved
    assert sorted(pythons) == classified == [name.removesuffix(".0") for name in resolved[1].split()]


@pytest.mark.verify
@pytest.mark.parametrize(("schema", "files"), SCHEMAS.items())
def test_hosts_would_accept_the_files(schema: str, files: str) -> None:
    """Catches a misspelt key of a workflow, a form or the citation, which the host ignores or refuses. Asks a package index."""
    names = sorted(ROOT.glob(files))
    assert names
    done = subprocess.run(uvx("check-jsonschema", "--builtin-schema", schema, *names), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.verify
def test_the_conda_recipe_can_be_rendered() -> None:
    """Catches a key or an expression that rattler-build does not know. Asks a package index."""
    program = """
import sys, rattler_build as r
print(r.Stage0Recipe.from_file(sys.argv[1]).render(r.VariantConfig())[0].recipe.to_dict())
"""
    words = [sys.executable, "-m", "uv", "run", "--no-project", "--with", "py-rattler-build", "python", "-c", program]
    done = subprocess.run([*words, ROOT / "conda" / "recipe.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"'version': '{version.__version__}'" in done.stdout


def uvx(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "uv", "tool", "run", *words]


@pytest.mark.verify
def test_the_packages_pass_their_checks_and_name_no_file(tmp_path: Path) -> None:
    """`make dist` with an address. Catches packages that an index refuses, a source distribution that cannot make the wheel,
    and links on the index's page that lead nowhere. Asks a package index."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = [name for name in listed.split("\0") if name]
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    for name, text in written(HERE, PAGES, version.__version__).items():
        (tmp_path / name).write_text(text)
    file = tmp_path / "evodsp" / "version.py"
    file.write_text(re.sub(r'^REPOSITORY = ".*"', f'REPOSITORY = "{HERE}"', file.read_text(), flags=re.MULTILINE))
    words = ["make", "dist", "READY=", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (source,) = ((tmp_path / "dist").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"evodsp-{version.__version__}.dist-info/METADATA"))
        held = {name for name in archive.namelist() if name.startswith("evodsp/packaged/data/")}
        assert held == {f"evodsp/packaged/{name}" for name in tracked if name.startswith("data/")}
    assert f"Repository, {HERE}" in metadata.get_all("Project-URL", [])
    page = metadata.get_payload()
    links = re.findall(r'(?:\]\(|(?:src|srcset|href)=")([^)"\s]+)', page)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert f"{HERE}/raw/v{version.__version__}/docs/assets/" in page
    with tarfile.open(source) as archive:
        assert not any("/tests/" in name for name in archive.getnames())
