"""The hook `gradient_norm` logs the norm that the ledger records."""

import json
from pathlib import Path

import pytest
from raising import raises

import phasetrain
from phasetrain.errors import ConfigError
from phasetrain.runs.ledger import parse_ledger

WORDS = ("PHASES.epochs=1", "PHASES.limit.train=4", "DATA.TEST=null", "HOOKS.gradient_norm={}")


@pytest.mark.feature(
    "hooks.gradient_norm", "the gradient norm in metrics and trackers", "`HOOKS.gradient_norm`"
)
def test_norm_of_each_update_and_its_mean_are_logged(tmp_path: Path) -> None:
    words = (*WORDS, "OPTIMIZER.clip_norm=1e9", "HOOKS.metrics.every_updates=1")
    result = phasetrain.run([*words, f"RUN.dir={tmp_path}"])
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    logged = [line["logs"]["gradient_norm"] for line in lines if line["kind"] == "step"]
    ledger = parse_ledger((tmp_path / "steps.ledger").read_bytes())
    assert logged == [ledger[update].norm for update in range(1, 5)]
    assert result.last["train/gradient_norm"] == pytest.approx(sum(logged) / 4)


def test_run_without_a_norm_is_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, key="HOOKS.gradient_norm", code="config.conflict"):
        phasetrain.run([*WORDS, f"RUN.dir={tmp_path}"])
