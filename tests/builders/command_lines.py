"""Command lines of tests, made of a page's or a default's options and what a test sets instead."""

from __future__ import annotations


def last_options(words: list[str]) -> list[str]:
    """The words without options that a later word sets again; evodsp refuses repeated options. `--config` may repeat."""
    kept: list[str] = []
    for place, word in enumerate(words):
        name = word.partition("=")[0]
        later = {other.partition("=")[0] for other in words[place + 1 :]}
        if word.startswith("--"):
            dropped = name != "--config" and name in later
        else:
            before = words[place - 1] if place else ""
            dropped = before.startswith("--") and "=" not in before and before != "--config" and before in later
        if not dropped:
            kept.append(word)
    return kept
