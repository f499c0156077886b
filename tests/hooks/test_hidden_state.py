"""A run without a search for hidden state says so."""

from pathlib import Path

import pytest
from harness import train

from phasetrain.hooks.hidden_state import NOT_WATCHED


def test_run_without_a_search_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasetrain.hooks.hidden_state.find_service", lambda name: None)
    train(tmp_path, "PHASES.epochs=1", "PHASES.limit.train=2", "DATA.TEST=null")
    assert NOT_WATCHED in (tmp_path / "log.txt").read_text()
