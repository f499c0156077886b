"""The record of objects that were given in Python."""

from collections.abc import Mapping
from typing import Any

from phasetrain.app.setup import Setup
from phasetrain.checkpoint import LoadedCheckpoint

SHOWN_DIGITS = 12


def describe_objects(setup: Setup, loaded: LoadedCheckpoint | None) -> dict[str, dict[str, Any]]:
    """Return name -> key, class, text and digest of initial weights of each object of the config,
    as at the start of the run.

    Args:
        setup: the resolved config.
        loaded: the checkpoint to resume from, with the record of the first attempt.
    """
    before: Mapping[str, Any] = {} if loaded is None else loaded.promised.get("objects", {})
    now = {
        name: {"key": given_object.key, **given_object.facts}
        for name, given_object in setup.given.by_name.items()
        if name in str(setup.asked)
    }
    return {name: dict(before.get(name, facts)) for name, facts in now.items()}


def list_object_lines(setup: Setup, objects: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each object, and for each property of them that no config records."""
    return [*map(_describe_line, objects.values()), *setup.given.notes]


def list_inexact_lines(setup: Setup, objects: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the sentences about everything that config and seed do not decide, to print
    before the first step."""
    weighted = [_describe_line(facts) for facts in objects.values() if "sha256" in facts]
    return [*weighted, *setup.given.notes]


def _describe_line(facts: Mapping[str, Any]) -> str:
    line = f"{facts['key']}: {facts['class']} is given in Python"
    if "sha256" not in facts:
        return line
    digest = facts["sha256"][:SHOWN_DIGITS]
    return f"{line}; its initial weights (sha256 {digest}...) do not depend on RUN.seed"


def list_other_weights(setup: Setup, loaded: LoadedCheckpoint) -> list[str]:
    """Return a sentence for each object whose weights are not those with which the run began."""
    before: Mapping[str, Any] = loaded.promised.get("objects", {})
    return [
        f"{given_object.key}: the run in {setup.config.RUN.dir!r} began with other weights (sha256 "
        f"{before[name]['sha256'][:SHOWN_DIGITS]}...) than those of this call "
        f"({given_object.facts['sha256'][:SHOWN_DIGITS]}...), which have no effect; to train "
        "these, set RUN.dir to another folder"
        for name, given_object in setup.given.by_name.items()
        if "sha256" in given_object.facts
        and name in before
        and before[name].get("sha256") != given_object.facts["sha256"]
    ]
