"""The templates of pages and charts: jinja2 puts values into them, and every text among these is escaped.

Only what a template of ours has made (`markupsafe.Markup`) is markup; any other text is shown as it is, and cannot act.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from evodsp.printing import printable


def render(template: str, **values: Any) -> Markup:
    """The markup that a template, named by its path below `evodsp/`, makes of the values."""
    return Markup(_environment().get_template(template).render(values))


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("evodsp", ""),
        autoescape=True,
        finalize=lambda value: printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
