"""One Evoformer block as a picture: what the device and the link do, and when."""

from __future__ import annotations

from collections.abc import Sequence

from evodsp.planner.simulate import Interval
from evodsp.reading.quoting import escape_html

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 920, 120, 60, 10
_LANES = {"device": 14, "link": 56}
_BAR = 30


def timeline(intervals: Sequence[Interval]) -> str:
    """What the device computes, and below it what the link carries, as SVG. Where the device waits, its lane is empty."""
    drawn = [one for one in intervals if one.what != "wait"]
    begin = min((one.begin for one in drawn), default=0.0)
    end = max((one.end for one in drawn), default=1e-6)
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)
    bars = []
    for one in drawn:
        lane, colour = ("device", 0) if one.what == "compute" else ("link", 1)
        x, width = _LEFT + (one.begin - begin) * scale, max((one.end - one.begin) * scale, 0.5)
        tip = f"{one.what}: {(one.end - one.begin) * 1e6:.0f} us"
        bars.append(
            f'<rect class="dot s{colour}" x="{x:.1f}" y="{_LANES[lane]}" width="{width:.1f}" height="{_BAR}">'
            f"<title>{escape_html(tip)}</title></rect>"
        )
    labels = "".join(
        f'<text x="{_LEFT - 8}" y="{y + _BAR / 2 + 4}" text-anchor="end">{lane}</text>' for lane, y in _LANES.items()
    )
    ends = (
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">0</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 8}" text-anchor="end">{(end - begin) * 1e6:,.0f}</text>'
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="time line of an Evoformer block">'
        f"{''.join(bars)}{labels}{ends}</svg>"
    )
