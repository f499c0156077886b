"""What an attempt records about values that no checkpoint contains."""

from typing import Any

import pytest

from phasetrain.addons.experiments.certify.attempt import HeldValues
from phasetrain.hooks.hidden_state import NOT_WATCHED


class Lines(list[dict[str, Any]]):
    """A trace in memory."""

    write = list.append


def test_without_a_search_nothing_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "phasetrain.addons.experiments.certify.attempt.find_service", lambda name: None
    )
    lines: Any = Lines()
    run: Any = None
    HeldValues(lines).on_end(run)
    assert lines == [{"lost": [], "unchanged": [NOT_WATCHED]}]
