"""A run folder of an install with more add-ons: what they have left in its config is ignored, and
mistakes of the user are not."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from damaged import resign
from harness import (
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    run_until_killed,
    train,
)
from raising import raises

from phasetrain.app.setup import resolve_config
from phasetrain.app.stored.stored_config import StoredConfig, read_newest_command
from phasetrain.cli import main
from phasetrain.errors import ConfigError

LEFT = "RUN.spikes, SPIKES, HOOKS.spike_alarm"


def add_leftovers(config: dict[str, Any]) -> dict[str, Any]:
    """Add a section, a key of RUN and a default hook of an add-on that is not installed."""
    config["SPIKES"] = {"limit": 3, "window": [1, 2]}
    config["RUN"] = {**config["RUN"], "spikes": True}
    config["HOOKS"] = {**config["HOOKS"], "spike_alarm": {}}
    return config


def leave(folder: Path, *, observers: tuple[str, ...]) -> None:
    """Write a run folder as if the add-on had been installed."""
    for path in folder.glob("checkpoints/*/promised.json"):
        promised = json.loads(path.read_text())
        add_leftovers(promised["config"])
        promised["observers"] += observers
        path.write_text(json.dumps(promised))
        resign(path.parent)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(add_leftovers(config)))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed") / "run"
    run_until_killed(folder, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    return folder


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def stored(killed: Path) -> StoredConfig:
    stored = read_newest_command(str(killed))
    return replace(stored, values=add_leftovers(dict(stored.values)))


def test_killed_run_resumes_exactly(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(copy, observers=("spike_alarm",))
    assert main(["resume", str(copy)]) == 0
    assert f"{copy}: ignored, since no installed add-on knows them: " in capsys.readouterr().out
    train(tmp_path / "unbroken")
    assert differences_of_runs(tmp_path / "unbroken", copy) == []


def test_same_command_again_names_what_is_ignored(copy: Path) -> None:
    leave(copy, observers=("spike_alarm",))
    checkpoint = newest(copy).path
    train(copy)
    _, log = (copy / "log.txt").read_text().split(f"WARNING {checkpoint}: ")
    ignored = log.splitlines()[0].rpartition(": ")[2]
    assert set(ignored.split(", ")) == {"RUN.spikes", "SPIKES"}


def test_missing_hook_that_may_have_changed_the_training_needs_consent(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(copy, observers=())
    assert main(["resume", str(copy), "--json"]) == 3
    errors = json.loads(capsys.readouterr().out)["errors"]
    assert [one["key"] for one in errors] == ["HOOKS.spike_alarm"]


def test_one_line_names_what_is_ignored(
    stored: StoredConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = resolve_config([], stored=stored).config
    lines = [one.args[1] for one in caplog.records if one.args and stored.path in one.args]  # type: ignore[index]
    assert len(lines) == 1
    assert set(lines[0].split(", ")) == set(LEFT.split(", "))
    assert not {"SPIKES", "spikes", "spike_alarm"} & {*config, *config.RUN, *config.HOOKS}


def test_config_without_leftovers_is_not_mentioned(
    killed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        resolve_config([], stored=read_newest_command(str(killed)))
    assert [one for one in caplog.records if "ignored" in one.getMessage()] == []


@pytest.mark.parametrize(
    ("word", "key", "code"),
    [
        ("SPIKES.limit=4", "SPIKES.limit", "config.unknown_section"),
        ("RUN.spikes=false", "RUN.spikes", "config.unknown_key"),
        ("HOOKS.spike_alarm={}", "HOOKS.spike_alarm", "config.unknown_part"),
        ("HOOKS.spike_alarm.limit=3", "HOOKS.spike_alarm", "config.unknown_part"),
    ],
)
def test_user_cannot_set_what_is_not_installed(
    stored: StoredConfig, word: str, key: str, code: str
) -> None:
    with raises(ConfigError, key=key, code=code):
        resolve_config([word], stored=stored)


def test_hook_with_parameters_and_keys_of_other_sections_are_not_ignored(
    stored: StoredConfig,
) -> None:
    stored.values["HOOKS"]["spike_alarm"] = {"limit": 3}
    with raises(ConfigError, key="HOOKS.spike_alarm", code="config.unknown_part"):
        resolve_config([], stored=stored)
    del stored.values["HOOKS"]["spike_alarm"]
    stored.values["PHASES"]["spikes"] = 3
    with raises(ConfigError, key="PHASES.spikes", code="config.unknown_key"):
        resolve_config([], stored=stored)
