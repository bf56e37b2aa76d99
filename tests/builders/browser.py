"""Pages in a browser without a screen: what a script finds there, and what a narrow window cuts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

NEEDS_CHROMIUM = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs chromium (Debian's package), to open the page"
)


def answer_of(page: str, script: str, folder: Path) -> Any:
    """Open a page with one more script at its end, and return the JSON that the script leaves between ANSWER and END as the
    page's only text. Files go to `folder`. An error of any script fails the test."""
    path = folder / "probe.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--use-gl=angle", "--use-angle=swiftshader",
        "--enable-unsafe-swiftshader", "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1200,900", "--virtual-time-budget=30000", "--dump-dom", path.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "GL Driver Message" not in line]
    assert not messages
    found = re.search("ANSWER(.*)END", done.stdout)
    assert found is not None, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


def cut(pages: Mapping[str, str], width: int, folder: Path) -> list[str]:
    """What cannot be read in windows of `width` pixels, by the names of the pages: text that leaves its picture or covers other
    text there, and elements that leave the window without a box of their own that scrolls."""
    frames = "".join(
        f'<iframe name="{escape(name)}" width="{width}" height="900" style="border:0" srcdoc="{escape(page)}"></iframe>'
        for name, page in pages.items()
    )
    script = (Path(__file__).parent / "browser_cut.js").read_text()
    return answer_of(f"<!doctype html><html><body>{frames}</body></html>", script, folder)
