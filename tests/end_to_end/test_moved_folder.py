"""A run whose working directory changes writes to its folder; one whose folder is gone says so."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import REPORT, REPORT_FILES, differences_of_runs, train
from raising import raises

from phasetrain.errors import FolderInUseError
from phasetrain.hooks import Hook

SAVES = ("PHASES.epochs=1", "CHECKPOINT.every_updates=2", "CHECKPOINT.background=false")


class AtUpdate(Hook):
    """Does something after an update."""

    observe_only = True

    def __init__(self, number: int, act: Any) -> None:
        self.number = number
        self.act = act

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if phase.is_train and run.state.updates == self.number:
            self.act()


def test_changed_working_directory_does_not_scatter_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole", *SAVES)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    act = AtUpdate(3, lambda: os.chdir(tmp_path / "elsewhere"))
    assert train(Path("run"), *SAVES, *REPORT, hooks={"act": act}).state == "finished"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "checkpoints", "status.json", *REPORT_FILES} <= names
    assert "run.lock" not in names


@pytest.mark.parametrize("is_deleted", [False, True])
def test_folder_that_is_gone_ends_the_run_at_the_next_save(
    tmp_path: Path, is_deleted: bool
) -> None:
    def act() -> None:
        if is_deleted:
            shutil.rmtree(tmp_path / "run")
        else:
            (tmp_path / "run").rename(tmp_path / "moved")

    with raises(FolderInUseError, key="RUN.dir", code="folder.moved"):
        train(tmp_path / "run", *SAVES, hooks={"act": AtUpdate(3, act)})
    assert not (tmp_path / "run").exists()
    if not is_deleted:
        train(tmp_path / "whole", *SAVES)
        # Its owner would be dead by now, and this process is not.
        (tmp_path / "moved" / "owner.json").unlink()
        train(tmp_path / "moved", *SAVES)
        assert differences_of_runs(tmp_path / "whole", tmp_path / "moved") == []
