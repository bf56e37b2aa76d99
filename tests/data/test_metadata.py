"""Tables of what is known of chains: OpenFold's caches, clusters, identical chains."""

from __future__ import annotations

import json
import math
import os
import random
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evodsp.data.index.metadata import (
    UNKNOWN_CLUSTER,
    ChainFacts,
    ClusterSizes,
    EntityClusters,
    PackedTexts,
    are_entities,
    read_chain_cache,
    read_entry_cache,
    read_sets,
)
from evodsp.errors import FileFormatError

DAY = (date(2020, 1, 8) - date(1970, 1, 1)).days


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_cache_of_entries(tmp_path: Path) -> None:
    """Catches a field that is dropped, and facts of an entry that its chains do not have."""
    entry = {
        "release_date": "2020-01-08",
        "chain_ids": ["A", "b"],
        "seqs": ["AC", "G"],
        "resolution": 2.5,
        "no_chains": 2,
    }
    of_entry = read_entry_cache(written(tmp_path / "b", {"1abc": entry}))
    assert of_entry == {"1abc_A": ChainFacts("AC", 2.5, DAY), "1abc_b": ChainFacts("G", 2.5, DAY)}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"release_date": "soon"}, "the release_date of '1abc_A' is 'soon', not a date"),
        ({"resolution": "2.5"}, "the resolution of '1abc_A' is '2.5'"),
        ({"resolution": math.inf}, "the resolution of '1abc_A' is inf"),
        ({"resolution": -1}, "the resolution of '1abc_A' is -1"),
        ({"seq": ["A"] * 1000}, "the sequence of '1abc_A' is"),
        ({"seq": "AC-D"}, "the sequence of '1abc_A' is 'AC-D'"),
        ({"cluster_size": 2**70}, "the cluster_size of '1abc_A' is 118"),
        ({"cluster_size": 0}, "the cluster_size of '1abc_A' is 0"),
        ([], "'1abc_A' is []"),
    ],
)
def test_a_broken_cache_is_one_line(tmp_path: Path, entry: Any, message: str) -> None:
    """Catches a traceback, and a number that no column can hold."""
    with pytest.raises(FileFormatError) as caught:
        read_chain_cache(written(tmp_path / "cache.json", {"1abc_A": entry}))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_entry_with_more_chains_than_sequences(tmp_path: Path) -> None:
    """Catches sequences shifted to other chains."""
    path = written(tmp_path / "cache.json", {"1abc": {"chain_ids": ["A", "B"], "seqs": ["AC"]}})
    with pytest.raises(FileFormatError, match="lists of equal length"):
        read_entry_cache(path)


def test_clusters_in_either_case(tmp_path: Path) -> None:
    """Catches clusters of the PDB (upper case) that match no chain folder, and chains a and A of one entry mixed up."""
    sets = read_sets(written(tmp_path / "clusters", "1ABC_A 2abc_B 3ABC_C\n# comment\n1ABC_a\n4abc_D 5abc_e\n"))
    sizes = ClusterSizes(sets)
    assert [sizes.of(key) for key in ("1abc_A", "1abc_a", "2abc_B", "5abc_E", "9abc_A")] == [
        3,
        1,
        3,
        2,
        UNKNOWN_CLUSTER,
    ]
    with pytest.raises(FileFormatError, match="no chain names"):
        read_sets(written(tmp_path / "none", "\n# nothing\n"))


def test_clusters_of_entities() -> None:
    """Catches entities counted instead of chains, and a file of chains taken for one of entities."""
    clusters = [["1ABC_1", "2ABC_2", "AF_AFP12345F1_1"], ["1ABC_2"]]
    assert are_entities(clusters)
    assert not are_entities([["1ABC_1", "2ABC_B"]])
    chains = ["1abc_1", "1abc_1", "1abc_2", "2abc_2", "2abc_1", ""]
    assert EntityClusters(clusters).sizes(chains) == [3, 3, 1, 3, UNKNOWN_CLUSTER, UNKNOWN_CLUSTER]


# Texts in two arrays.


def test_texts_are_found_as_in_a_sorted_list() -> None:
    """Catches a bisection that misses the first, the last, an empty or a non-ASCII text, or finds one that is not there."""
    generator = random.Random(0)
    texts = sorted({"".join(generator.choices("abZé_9\U0001f600", k=generator.randrange(6))) for _ in range(300)})
    packed = PackedTexts.of(texts)
    assert list(packed) == packed[:] == texts
    assert [packed.find(text) for text in texts] == list(range(len(texts)))
    for absent in ("aa!", "~", "Z\U0001f601"):
        assert packed.find(absent) is None
    assert packed[-1] == texts[-1]
    with pytest.raises(IndexError):
        packed[len(texts)]


def test_names_of_any_bytes_and_none() -> None:
    """Catches a file name that is not UTF-8 ending in a traceback, and an index without any text."""
    name = os.fsdecode(b"1abc\xff_A")
    assert PackedTexts.of([name])[0] == name
    assert len(PackedTexts.of([])) == 0
    assert PackedTexts.of([]).find("a") is None
    with pytest.raises(ValueError, match="do not end"):
        PackedTexts(np.array([0, 5]), np.zeros(4, np.uint8))
