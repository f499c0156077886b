"""The processes of judged runs."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phasetrain.addons.experiments.judge import processes
from phasetrain.addons.experiments.judge.processes import WorkingFolder, launch_process


def test_contenders_have_different_seeds_of_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = []

    def start(command: list[str], environment: Any, *, group: str, **_: Any) -> Any:
        groups.append(group)
        return subprocess.Popen([sys.executable, "-S", "-c", ""])

    monkeypatch.setattr(processes, "start_process", start)
    for name in ("a/seed0.log", "a/seed1.log", "b/seed0.log"):
        output = tmp_path / name
        output.parent.mkdir(exist_ok=True)
        assert launch_process(["phasetrain"], WorkingFolder(str(tmp_path)), output) == 0
    assert groups == [f"{tmp_path}/a", f"{tmp_path}/a", f"{tmp_path}/b"]
