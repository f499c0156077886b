"""Weights & Biases gets each record once, offline, over kills of the run and of its service."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, records, run_until_killed, train
from raising import raises

import phasetrain
from phasetrain.addons.observe.trackers.spooled import Target
from phasetrain.addons.observe.trackers.wandb import WandB, count_offline, history_rows
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook

pytest.importorskip("wandb")

WORDS = ("HOOKS.wandb.every_updates=1", "HOOKS.report=null", "HOOKS.ledger=null")


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return what the offline folders of a run hold, in their order."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    return [row for file in files for row in history_rows(file.read_bytes())]


def services() -> list[int]:
    """Return the processes of W&B's service that this process has started."""
    listed = subprocess.run(
        ["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    mine = [
        line
        for line in listed.splitlines()
        if "wandb-core" in line and f"--pid {os.getpid()}" in line
    ]
    return [int(line.split()[0]) for line in mine]


class KillService(Hook):
    """Kills W&B's service after the checkpoint of the second epoch, when it has records of the
    first."""

    def __init__(self) -> None:
        self.killed: list[int] = []

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if run.state.updates == 11 and phase.is_train:
            sender = run.hooks.by_label["wandb"]._sender
            for _ in range(200):
                if sender.sent:
                    break
                sender._thread.join(0.05)
            self.killed = services()
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)


class LogMedia(Hook):
    """Logs an image and a text after each test."""

    observe_only = True

    def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
        if not phase.is_train:
            phasetrain.log_image("grey", torch.full((2, 3), 0.5))
            phasetrain.log_text("note", f"after {run.state.updates}")


@pytest.mark.usefixtures("own_home")
class TestOffline:
    @pytest.mark.feature("media")
    @pytest.mark.slow
    def test_images_and_texts_are_sent_once(self, tmp_path: Path) -> None:
        words = ("PHASES.epochs=2", *WORDS)
        run_until_killed(tmp_path, *words, hooks={"log": LogMedia(), "kill": KillAfter(9)})
        train(tmp_path, *words, hooks={"log": LogMedia()})
        found = rows(tmp_path)
        images = [row for row in found if "test/grey/_type" in row]
        assert [row["updates"] for row in images] == [5, 10]
        assert {row["test/grey/_type"] for row in images} == {"image-file"}
        notes = [row["test/note"] for row in found if "test/note" in row]
        assert notes == ["after 5", "after 10"]

    @pytest.mark.feature("109")
    @pytest.mark.slow
    def test_each_record_once_though_run_and_service_are_killed(self, tmp_path: Path) -> None:
        run_until_killed(tmp_path, *WORDS, hooks={"kill": KillAfter(9)})
        service = KillService()
        assert train(tmp_path, *WORDS, hooks={"service": service}).state == "finished"
        assert service.killed
        found = rows(tmp_path)
        assert [row["_step"] for row in found] == list(range(21))
        logged = records(tmp_path)
        steps = [
            (record["updates"], record["loss"]) for record in logged if record["kind"] == "step"
        ]
        assert [
            (row["updates"], row["train/step_loss"]) for row in found if "train/step_loss" in row
        ] == steps
        tests = [
            record["metrics"]["accuracy"] for record in logged if record.get("split") == "test"
        ]
        assert [row["test/accuracy"] for row in found if "test/accuracy" in row] == tests
        assert (
            "HOOKS.wandb: the backend failed and will be retried"
            in (tmp_path / "log.txt").read_text()
        )
        assert len({path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")}) == 1


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep W&B's caches and keys of this machine out of it."""
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def test_torn_file_counts_only_complete_records(tmp_path: Path) -> None:
    assert count_offline(tmp_path, "x") == 0
    folder = tmp_path / "wandb" / "offline-run-1-x"
    folder.mkdir(parents=True)
    (folder / "run-x.wandb").write_bytes(b":W&B\xe1\xbe\x00" + b"\0\0\0\0\x40")
    assert count_offline(tmp_path, "x") == 0


@pytest.mark.usefixtures("own_home")
def test_online_mode_without_api_key_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        WandB(mode="online").make_backend(Target("x", tmp_path))
    assert (caught.value.code, caught.value.key) == ("config.missing_api_key", "HOOKS.wandb.mode")


def test_without_wandb_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with raises(ConfigError, code="config.missing_package"):
        train(tmp_path, *WORDS)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="mode = 'on'"):
        WandB(mode="on")  # type: ignore[arg-type]
