"""A run followed while it goes on."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from raising import raises
from run_folders import write

from phasetrain.addons.observe.follow import follow_run, watch_run
from phasetrain.errors import ConfigError


@pytest.mark.feature("runs")
def test_until_the_end(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "running")
    log = folder / "log.txt"
    log.write_text("".join(f"line {number}\n" for number in range(30)) + "half")
    said: list[str] = []
    shown: list[str] = []

    def go_on() -> None:
        time.sleep(0.15)
        with log.open("a") as file:
            file.write(" a line\nlast\n")
        write(tmp_path / "b", "failed", reason="no")
        (tmp_path / "b" / "status.json").replace(folder / "status.json")

    thread = threading.Thread(target=go_on)
    thread.start()
    ended = follow_run(str(folder), said.append, shown.append, every_seconds=0.02, lines=3)
    thread.join()
    assert said == ["line 27", "line 28", "line 29", "half a line", "last"]
    assert ended.state == "failed"
    assert shown[0].startswith("running  update 40/100 40 %  best test/loss 0.5 at 20  ")


def test_one_whose_folder_is_taken_away(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "running")
    ended = follow_run(
        str(folder), str, lambda line: folder.exists() and shutil.rmtree(folder), every_seconds=0.01
    )
    assert (ended.state, ended.error) == ("no run", f"{str(folder)!r} has been deleted")


def test_one_that_is_killed(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "running")

    def kill(line: str) -> None:
        if line.startswith("running"):
            write(tmp_path / "b", "running", age=1000)
            (tmp_path / "b" / "status.json").replace(folder / "status.json")

    assert follow_run(str(folder), str, kill, every_seconds=0.01).state == "killed"


def test_one_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch_run(str(write(tmp_path / "a"))) == 0
    assert watch_run(str(write(tmp_path / "b", "failed", reason="no"))) == 1
    assert capsys.readouterr().out.splitlines()[1].endswith(": no")
    with raises(ConfigError, code="runs.no_run"):
        watch_run(str(tmp_path))


def test_output_that_nobody_reads_any_more(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", "failed", reason="no")
    code = (
        f"from phasetrain.addons.observe.follow import watch_run; exit(watch_run({str(folder)!r}))"
    )
    read, write_end = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (0, b"")
