"""The command `profile` trains some updates and tries keys, in temporary folders."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from raising import raises

from phasetrain.addons.observe.profiling.limits import Shares
from phasetrain.addons.observe.profiling.profile_command import run_profile
from phasetrain.cli import main
from phasetrain.cli.parsing import Call, parse_flags
from phasetrain.cli.table import find_command
from phasetrain.errors import ConfigError

SMALL = ("PHASES.epochs=1", "MACHINE.threads=1", "OPTIMIZER.lr=0.01")


def make_call(*words: str) -> Call:
    return Call("profile", parse_flags(find_command("profile"), words))


@pytest.mark.slow  # four new processes; test_limits.py has the rules
@pytest.mark.feature(
    "profile", "what limits a run, and the measured gain of keys that help", "`phasetrain profile`"
)
def test_parts_add_up_and_keys_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tried: list[Mapping[str, float]] = []

    def choose(shares: Shares, setup: object) -> list[tuple[str, ...]]:
        tried.append(shares.seconds)
        return [("DATA.TRAIN.workers=1",), ("OPTIMIZER.lr=1e30",)]

    module = "phasetrain.addons.observe.profiling.profile_run.list_candidates"
    monkeypatch.setattr(module, choose)
    assert main(["profile", "--json", "--updates", "8", *SMALL, "RUN.dir=mine"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["seconds_per_update"] == tried[0]
    assert min(tried[0][part] for part in ("data", "device", "tests")) > 0
    assert content["limit"] in tried[0]
    assert len(content["step_seconds"]) == 2
    workers, failed = content["tried"]
    assert workers["step_seconds"] > 0
    assert (workers["changes_bits"], failed["changes_bits"]) == (False, True)
    assert (failed["step_seconds"], "is not finite" in failed["problem"]) == (None, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--updates", "7"), "cli.value"), (("PHASES.epochs=0",), "config.value")],
)
def test_rejected(words: tuple[str, ...], code: str) -> None:
    with raises(ConfigError, code=code):
        run_profile(make_call(*words))
