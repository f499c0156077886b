"""Runs as their folders tell of them, broken, half-written and foreign ones included."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from raising import raises
from run_folders import write

from phasetrain.app import list_runs as runs
from phasetrain.cli import main
from phasetrain.errors import ConfigError


class TestSummary:
    def test_of_a_run_under_way(self, tmp_path: Path) -> None:
        found = runs.summarize_run(write(tmp_path / "a", "running"))
        assert (found.state, found.attempt, found.updates, found.planned) == ("running", 2, 40, 100)
        assert (found.metric, found.best, found.best_updates) == ("test/loss", 0.5, 20)
        assert found.left_seconds == pytest.approx(
            55, abs=2
        )  # 60 updates at one a second, 5 seconds ago
        assert found.error == ""

    def test_of_one_that_failed(self, tmp_path: Path) -> None:
        found = runs.summarize_run(write(tmp_path / "a", "failed", reason="OSError: disk\nis full"))
        assert (found.state, found.error, found.left_seconds) == (
            "failed",
            "OSError: disk\nis full",
            None,
        )
        assert found.format_cells(str(tmp_path), time.time())[-1] == "OSError: disk"

    def test_of_one_that_was_killed(self, tmp_path: Path) -> None:
        with subprocess.Popen(["true"]) as gone:
            pass
        assert (
            runs.summarize_run(write(tmp_path / "here", "running", pid=gone.pid)).state == "killed"
        )
        silent = runs.summarize_run(write(tmp_path / "silent", "running", age=1000))
        assert silent.state == "killed"
        assert silent.error.startswith("no sign of life since ")

    @pytest.mark.parametrize(
        ("content", "state"),
        [(b'{"state": "ru', "unreadable"), (b"\xff\xfe", "unreadable"), (b"[1]", "unreadable"), (b"{}", "unknown"),
         (b'{"state": "finished", "updates": "x", "attempt": null, "heartbeat": 3}', "finished"),
         (b'{"version": 9, "phase": "training"}', "unknown")],
    )  # fmt: skip
    def test_of_a_broken_status(self, tmp_path: Path, content: bytes, state: str) -> None:
        folder = write(tmp_path / "a", None)
        (folder / "status.json").write_bytes(content)
        assert runs.summarize_run(folder).state == state

    @pytest.mark.parametrize(
        "beat",
        [{"at": -1e18, "pid": 3, "host": "vm"}, {"at": 1e18, "pid": 10**20, "host": socket.gethostname()},
         {"at": time.time(), "pid": 10**20, "host": socket.gethostname()}, {"at": 10**400}, {"at": "x"}, {}],
    )  # fmt: skip
    def test_of_a_heartbeat_that_cannot_be(self, tmp_path: Path, beat: Any) -> None:
        folder = write(tmp_path / "a", None)
        status = {
            "state": "running",
            "updates": 10**400,
            "heartbeat": beat,
            "time": {"run": {"train": 10**400}},
        }
        (folder / "status.json").write_text(json.dumps(status))
        found = runs.summarize_run(folder)
        assert (found.state, found.updates, found.seconds) == ("killed", 0, 0.0)
        assert found.error.startswith("no sign of life")

    def test_of_what_is_half_written(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "a", None)
        assert runs.summarize_run(folder).state == "incomplete"
        (folder / "metrics.jsonl").unlink()
        assert runs.summarize_run(folder).state == "planned"
        for name in ("plan.json", "config.yaml", "metrics.jsonl"):
            (folder / name).write_bytes(b'\xff{"kind": "phase", \n3\n')
        found = runs.summarize_run(folder)
        assert (found.planned, found.best) == (0, None)

    def test_best_of_a_long_file(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "a")
        line = (
            json.dumps({"kind": "step", "updates": 41, "loss": 1.0, "time": {"at": time.time()}})
            + "\n"
        )
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(line * 20_000)
        assert runs.summarize_run(folder).best == 0.5


class TestList:
    @pytest.mark.feature("runs", "runs listed, followed and compared", "`phasetrain runs`")
    def test_every_kind_of_folder(self, tmp_path: Path) -> None:
        write(tmp_path / "sweep" / "b")
        write(tmp_path / "a", "running")
        (tmp_path / "photos" / "2020").mkdir(parents=True)
        (tmp_path / ".git").mkdir()
        (tmp_path / "notes.txt").touch()
        (tmp_path / "loop").symlink_to(tmp_path)
        found = [
            (Path(one.folder).relative_to(tmp_path).as_posix(), one.state)
            for one in runs.list_runs(str(tmp_path))
        ]
        assert found[0] == ("a", "running")
        assert found[-2:] == [("photos", "no run"), ("sweep/b", "finished")]
        text = runs.format_table(runs.list_runs(str(tmp_path / "sweep")), str(tmp_path / "sweep"))
        assert text.splitlines()[0] == f"1 folder in {tmp_path / 'sweep'}: 1 finished"
        assert text.splitlines()[3].split()[:5] == ["b", "finished", "2", "40/100", "40"]
        assert "test/loss 0.5 at 20" in text

    def test_a_damaged_run_does_not_hide_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tmp_path / "a")
        write(tmp_path / "b")

        def read_tail(path: Path) -> bytes:
            if path.parent.name == "a":
                raise OverflowError("too large")
            return b""

        monkeypatch.setattr(runs, "_read_metrics_tail", read_tail)
        found = [
            (Path(one.folder).name, one.state, one.error) for one in runs.list_runs(str(tmp_path))
        ]
        assert found == [("a", "unreadable", "OverflowError: too large"), ("b", "finished", "")]

    def test_every_run_has_a_row_of_one_line(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "a\nb", None)
        (folder / "status.json").write_text(
            json.dumps({"state": "do\nne\x1b[31m", "reason": "no\tdisk\nat all"})
        )
        lines = runs.format_table(runs.list_runs(str(tmp_path)), str(tmp_path)).splitlines()
        assert len(lines) == 4
        assert lines[0].endswith(": 1 do ne [31m")
        assert lines[3].startswith("a b  do ne [31m  ")
        assert lines[3].endswith("no disk")

    def test_a_run_itself_and_nothing(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "a")
        assert [one.state for one in runs.list_runs(str(folder))] == ["finished"]
        (tmp_path / "none").mkdir()
        assert (
            runs.format_table(runs.list_runs(str(tmp_path / "none")), "none")
            == "none contains no runs"
        )
        with raises(ConfigError, code="runs.no_folder"):
            runs.list_runs(str(tmp_path / "absent"))

    def test_rows_have_typed_fields(self, tmp_path: Path) -> None:
        write(tmp_path / "a")
        (row,) = runs.list_runs(str(tmp_path))
        assert (row.state, row.best, row.planned) == ("finished", 0.5, 100)

    @pytest.mark.serial
    def test_a_thousand_runs(self, tmp_path: Path, record_property: Any) -> None:
        first = write(tmp_path / "r0")
        for number in range(1, 1000):
            (tmp_path / f"r{number}").symlink_to(first)
        began = time.perf_counter()
        assert len(runs.list_runs(str(tmp_path))) == 1000
        spent = time.perf_counter() - began
        record_property("summary", f"tools/runs.py list: 1,000 runs in {spent:.2f} s")
        assert spent < 10


class TestCommandLine:
    def test_commands_have_exit_codes(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(tmp_path / "a")
        assert main(["runs", "list", str(tmp_path)]) == 0
        assert "1 finished" in capsys.readouterr().out
        assert main(["runs", "list", "--json", str(tmp_path)]) == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "finished"
        assert main(["runs", "list", "--json", str(tmp_path / "none")]) == 2
        assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "runs.no_folder"

    @pytest.mark.parametrize(
        "words", [["list"], pytest.param(["follow", "a"], marks=pytest.mark.addon("observe"))]
    )
    def test_listing_and_following_need_no_torch(self, tmp_path: Path, words: list[str]) -> None:
        write(tmp_path / "a")
        code = (
            f"import sys; from phasetrain.cli.main import main; assert main({['runs', *words]}) == 0; "
            "sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
        assert done.returncode == 0


def test_folder_with_a_plan_alone_is_planned(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").write_text('{\n "name": "a",\n "updates": 22,\n "epochs": 1\n}')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "plan.json").write_text('{"steps": ["of another program"]}')
    found = [(row.state, row.planned) for row in runs.list_runs(str(tmp_path))]
    assert found == [("planned", 22), ("no run", 0)]
