"""What making the features of a sample would launch and move on a GPU, counted without one. Limits lie at what was counted."""

from __future__ import annotations

from tests.builders.fake_cuda import measure_features


def test_features_of_one_sample() -> None:
    """Catches launches for each sequence, cluster or iteration, a table that is copied from the host for each sample, and a
    size that is read from the device, for which the host waits."""
    sizes = {"columns": 40, "crop": 32, "clusters": 12, "extra": 20}
    one, four = (measure_features(rows=180, cycles=cycles, **sizes) for cycles in (1, 4))
    assert (one.host, four.host) == ({}, {})
    assert one.launches <= 240
    assert four.launches <= 254
    deeper, shallow = (measure_features(rows=rows, cycles=4, **sizes) for rows in (360, 90))
    assert deeper.launches == four.launches
    assert shallow.launches <= 264  # zeros where an iteration has fewer rows than another
    full = {"rows": 16_384, "columns": 300, "crop": 256, "clusters": 128, "extra": 1024}
    assert measure_features(cycles=4, **full).launches <= 276
