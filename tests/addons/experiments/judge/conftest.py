"""Fixtures of judged runs."""

from pathlib import Path

import pytest
from fake_runs import FakeRuns, cached_facts

from phasetrain.addons.experiments.judge.facts import Facts, Order


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    """Return a launcher, in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def collect(order: Order) -> Facts:
        return cached_facts(order)  # composing a config takes longer than all else

    monkeypatch.setattr("phasetrain.addons.experiments.judge.facts.collect_facts", collect)
    return FakeRuns()
