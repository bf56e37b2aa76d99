"""The option that limits the release dates of templates, as training and prediction read it."""

from __future__ import annotations

from datetime import date

from evodsp.errors import UserError


def parse_latest_date(option: str, text: str | None) -> date | None:
    """The date that `text` gives, None for None. Raises UserError, naming the option, for anything but year-month-day."""
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{option} is '{text}', but must be a date such as 2020-05-14") from error
