"""Renamed keys and names work, warn with the replacement, and do not outlive their version."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from damaged import resign
from harness import KillAfter, differences_of_runs, run_until_killed, train
from raising import raises

import phasetrain
from phasetrain.app.setup import resolve_config
from phasetrain.config import deprecations
from phasetrain.config.changes import compare_configs
from phasetrain.config.deprecations import (
    DEPRECATIONS,
    Deprecation,
    find_python_name,
    rename_keys,
    restore_name,
)
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError

PUBLIC = Path(__file__).parents[1] / "data" / "public_names.json"
TABLE = (
    Deprecation("OPTIMIZER.learning_rate", "OPTIMIZER.lr", "0.2", "0.4"),
    Deprecation("DATA.*.batch", "DATA.*.batch_size", "0.2", "0.4"),
    Deprecation("LOSS.name=softmax_loss", "LOSS.name=cross_entropy", "0.2", "0.4"),
    Deprecation("phasetrain.learn", "phasetrain.train", "0.2", "0.4"),
)
OLD = ("OPTIMIZER.learning_rate=0.5", "DATA.TRAIN.batch=16", "LOSS.name=softmax_loss")


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecations, "DEPRECATIONS", TABLE)


def outlived(table: tuple[Deprecation, ...], version: str) -> list[str]:
    """Return the old names that should be gone, or that go after less than two minor versions."""

    def minor(text: str) -> tuple[int, int]:
        major, minor, *_ = text.split(".")
        return int(major), int(minor)

    wrong = []
    for entry in table:
        since, removed = minor(entry.since), minor(entry.removed_in)
        is_short = removed[0] == since[0] and removed[1] - since[1] < 2
        if minor(version) >= removed or is_short:
            wrong.append(entry.old)
    return wrong


class TestTable:
    @pytest.mark.feature("deprecations")
    def test_no_entry_outlives_its_version(self) -> None:
        assert outlived(DEPRECATIONS, phasetrain.__version__) == []

    def test_entry_that_is_due_or_too_short_is_found(self) -> None:
        short = Deprecation("RUN.a", "RUN.b", "0.3", "0.4")
        assert outlived((*TABLE, short), "0.3.9") == ["RUN.a"]
        assert outlived(TABLE[:1], "0.4.0") == ["OPTIMIZER.learning_rate"]

    def test_new_names_exist(self) -> None:
        schema = default_schema()
        for entry in DEPRECATIONS:
            name = entry.new.removeprefix("phasetrain.")
            assert name in phasetrain.__all__ or schema.has(entry.new.partition("=")[0])


@pytest.mark.usefixtures("_table")
class TestConfig:
    def test_old_names_on_the_command_line_work_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            config = resolve_config(OLD).config
        assert (config.OPTIMIZER.lr, config.DATA.TRAIN.batch_size) == (0.5, 16)
        assert config.LOSS.name == "cross_entropy"
        assert TABLE[0].warning == (
            "OPTIMIZER.learning_rate: renamed to OPTIMIZER.lr in 0.2; the old name works until 0.4"
        )
        warned = [record.message for record in caplog.records]
        assert [entry.warning for entry in TABLE[:3]] == warned

    def test_old_names_in_files_work(self, tmp_path: Path) -> None:
        file = tmp_path / "old.yaml"
        file.write_text("defaults: [digits, _self_]\nOPTIMIZER: {learning_rate: 0.25}\n")
        assert resolve_config([str(file)]).config.OPTIMIZER.lr == 0.25

    def test_new_name_beside_the_old_one_is_a_mistake(self) -> None:
        with raises(ConfigError, key="OPTIMIZER.learning_rate", code="config.unknown_parameter"):
            resolve_config(["OPTIMIZER.learning_rate=0.5", "OPTIMIZER.lr=0.5"])

    def test_consent_may_name_the_old_key(self) -> None:
        values = {"RUN": {"allow": ["OPTIMIZER.learning_rate"]}, "OPTIMIZER": {"learning_rate": 1}}
        renamed, used = rename_keys(values)
        assert renamed == {"RUN": {"allow": ["OPTIMIZER.lr"]}, "OPTIMIZER": {"lr": 1}}
        assert used == [TABLE[0]]

    def test_digest_of_the_default_folder_counts_the_old_name(self) -> None:
        assert restore_name("OPTIMIZER.lr", 0.5) == ("OPTIMIZER.learning_rate", 0.5)
        assert restore_name("DATA.TEST.batch_size", 4) == ("DATA.TEST.batch", 4)
        assert restore_name("LOSS.name", "cross_entropy") == ("LOSS.name", "softmax_loss")
        assert restore_name("LOSS.name", "mse") == ("LOSS.name", "mse")

    def test_records_are_compared_by_new_names(self) -> None:
        old, new = {"OPTIMIZER": {"learning_rate": 0.5}}, {"OPTIMIZER": {"lr": 0.5}}
        assert compare_configs(old, new, default_schema()) == []

    @pytest.mark.feature(
        "deprecations",
        "renamed keys, parts and Python names work for two minor versions, with a warning",
        "[stability.md](stability.md)",
    )
    def test_killed_run_with_old_names_resumes_to_the_same_bits_without_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, resumed = tmp_path / "whole", tmp_path / "resumed"
        words = ("PHASES.epochs=1", "OPTIMIZER.lr=0.05", "CHECKPOINT.every_updates=2")
        with monkeypatch.context() as before:
            before.setattr(deprecations, "DEPRECATIONS", ())
            train(whole, *words)
            run_until_killed(resumed, *words, hooks={"kill": KillAfter(4)})
        for path in resumed.glob("checkpoints/*/promised.json"):
            promised = json.loads(path.read_text())
            rename_rate(promised["config"])
            path.write_text(json.dumps(promised))
            resign(path.parent)
        with caplog.at_level(logging.WARNING):
            train(resumed, *words)
        assert [one for one in caplog.messages if "renamed" in one] == []
        assert differences_of_runs(whole, resumed) == []


def rename_rate(config: dict[str, Any]) -> None:
    """Give the learning rate of a stored config its old name."""
    config["OPTIMIZER"]["learning_rate"] = config["OPTIMIZER"].pop("lr")


class TestPython:
    def test_old_name_works_with_a_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deprecations, "DEPRECATIONS", TABLE)
        with pytest.warns(FutureWarning, match="phasetrain.train in 0.2"):
            found = phasetrain.learn
        assert found is phasetrain.train
        assert find_python_name("train") is None

    @pytest.mark.feature("deprecations")
    @pytest.mark.addon("deploy")
    def test_no_public_name_has_gone(self) -> None:
        stored = json.loads(PUBLIC.read_text("utf-8"))
        documented = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
        assert sorted(phasetrain.__all__) == stored["names"]
        for name in stored["names"]:
            assert name.startswith("__") or f".{name}\n" in documented, name
