import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from phasetrain.addons.experiments.sweep.jobs import (
    Job,
    JobRecord,
    StopRequest,
    read_job_records,
)
from phasetrain.addons.experiments.sweep.override_text import hash_overrides
from phasetrain.runs.owner import Owner, process_start
from phasetrain.runtime.terminal import IN_SWEEP


def record(folder: Path, **known: object) -> JobRecord:
    return JobRecord(
        **{
            "sweep": "s",
            "overrides": ["A.x=1"],
            "swept": {"A.x": "1"},
            "folder": f"{folder}/run",
            **known,
        }
    )


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = record(tmp_path, exit_code=3, pid=7, host="here", passed_over=True)
    one.write(str(tmp_path))
    assert read_job_records(str(tmp_path)) == [one]
    assert (tmp_path / f"{hash_overrides(['A.x=1'])}.json").is_file()


ODD = (
    '"overrides": 5',
    '"overrides": [1]',
    '"overrides": ["a=1"], "pid": "x"',
    '"overrides": [], "swept": {"a": 1}',
)


@pytest.mark.parametrize("content", ['{"sweep": "s", "folder": "f", ' + odd + "}" for odd in ODD])
def test_a_record_with_odd_values_is_left_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "0123abcd.json").write_text(content)
    assert read_job_records(str(tmp_path)) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sweep": "s"}', '{"other": 1}', "\x00"])
def test_a_record_that_is_broken_or_of_another_version_is_left_out(
    tmp_path: Path, content: str
) -> None:
    record(tmp_path).write(str(tmp_path))
    (tmp_path / "0123abcd.json").write_text(content)
    (tmp_path / "results.json").write_text("{}")
    assert len(read_job_records(str(tmp_path))) == 1


def test_a_record_of_an_older_version_has_no_swept_values(tmp_path: Path) -> None:
    old = {"sweep": "s", "overrides": ["A.x=1"], "folder": "out/1", "exit_code": 0}
    (tmp_path / "0123abcd.json").write_text(json.dumps(old))
    assert read_job_records(str(tmp_path)) == [JobRecord("s", ["A.x=1"], {}, "out/1", 0)]


class TestStop:
    def test_is_heard_in_every_process(self, tmp_path: Path) -> None:
        stop = StopRequest(str(tmp_path), "s")
        assert stop.signal_number() == 0
        stop.send(signal.SIGTERM)
        assert StopRequest(str(tmp_path), "s").signal_number() == signal.SIGTERM
        assert StopRequest(str(tmp_path), "other").signal_number() == 0
        stop.clear()
        assert stop.signal_number() == 0

    def test_passes_the_signal_on_to_those_of_this_sweep_that_run_here(
        self, tmp_path: Path
    ) -> None:
        sleeping = [
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            for _ in range(4)
        ]
        here, pids = socket.gethostname(), [one.pid for one in sleeping]
        known = [
            {"overrides": ["a=1"], "pid": pids[0], "host": here},
            {"overrides": ["a=2"], "pid": pids[1], "host": "elsewhere"},
            {"overrides": ["a=3"], "pid": pids[2], "host": here, "exit_code": 0},
            {"overrides": ["a=4"], "pid": pids[3], "host": here, "sweep": "other"},
        ]
        try:
            for one in known:
                record(tmp_path, **one).write(str(tmp_path))
            StopRequest(str(tmp_path), "s").send(signal.SIGTERM)
            assert sleeping[0].wait(timeout=30) == -signal.SIGTERM
            assert [one.poll() for one in sleeping[1:]] == [None, None, None]
            StopRequest(str(tmp_path), "s").wait()
        finally:
            for one in sleeping:
                one.kill()
                one.wait()


class TestJob:
    def job(self, folder: Path, code: str) -> Job:
        return Job(
            (sys.executable, "-c", code),
            ("A.y=2",),
            str(folder),
            "s",
            batch=((1, ("A.x=1",)),),
            total=1,
        )

    def test_notes_the_end_of_its_process(self, tmp_path: Path) -> None:
        self.job(tmp_path, "import sys; sys.exit(5)")({"run": 0})
        (found,) = read_job_records(str(tmp_path))
        assert (found.exit_code, found.overrides, found.swept) == (
            5,
            ["A.y=2", "A.x=1"],
            {"A.x": "1"},
        )
        assert found.host == socket.gethostname()

    def test_a_process_that_a_signal_has_ended_has_the_code_that_a_shell_gives(
        self, tmp_path: Path
    ) -> None:
        self.job(tmp_path, "import os; os.kill(os.getpid(), 9)")({"run": 0})
        assert read_job_records(str(tmp_path))[0].exit_code == 137

    def test_is_not_started_once_the_sweep_was_asked_to_end(self, tmp_path: Path) -> None:
        job = self.job(tmp_path, "pass")
        job.stop.send(signal.SIGTERM)
        job({"run": 0})
        assert read_job_records(str(tmp_path)) == []

    def test_waits_for_what_a_killed_sweep_has_left_in_its_folder(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        job = self.job(tmp_path, "pass")
        (one,) = [job.make_record(words) for _, words in job.batch]
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        Path(one.folder).mkdir()
        owner = Owner(socket.gethostname(), left.pid, process_start(left.pid), None, 1, time.time())
        Path(one.folder, "owner.json").write_text(json.dumps(asdict(owner)))
        replace(one, sweep="killed", pid=left.pid).write(str(tmp_path))
        thread = threading.Thread(target=job, args=({"run": 0},))
        thread.start()
        try:
            thread.join(0.5)
            assert thread.is_alive()
            assert read_job_records(str(tmp_path))[0].sweep == "killed"
        finally:
            left.communicate(b"\n")
            thread.join(30)
        assert (
            read_job_records(str(tmp_path))[0].sweep,
            read_job_records(str(tmp_path))[0].exit_code,
        ) == ("s", 0)
        assert f" process {left.pid}, " in capfd.readouterr().out

    def test_is_not_started_where_the_sweep_is_asked_to_end_while_it_waits(
        self, tmp_path: Path
    ) -> None:
        job = self.job(tmp_path, "pass")
        (one,) = [job.make_record(words) for _, words in job.batch]
        Path(one.folder).mkdir()
        owner = Owner(
            socket.gethostname(), os.getpid(), process_start(os.getpid()), None, 1, time.time()
        )
        Path(one.folder, "owner.json").write_text(json.dumps(asdict(owner)))
        timer = threading.Timer(0.3, job.stop.send, [signal.SIGTERM])
        timer.start()
        job({"run": 0})
        timer.join()
        assert read_job_records(str(tmp_path)) == []

    def test_is_not_started_by_a_worker_whose_sweep_was_killed(self, tmp_path: Path) -> None:
        job = replace(self.job(tmp_path, "pass"), launcher=(socket.gethostname(), os.getpid(), 1))
        job({"run": 0})
        assert read_job_records(str(tmp_path)) == []

    def test_leaves_the_record_to_a_later_sweep(self, tmp_path: Path) -> None:
        job = self.job(tmp_path, "pass")
        later = replace(job.make_record(job.batch[0][1]), sweep="later", pid=1)
        path, text = f"{later.folder}.json", json.dumps(asdict(later))
        code = f"import pathlib; pathlib.Path({path!r}).write_text({text!r})"
        replace(job, command=(sys.executable, "-c", code))({"run": 0})
        assert read_job_records(str(tmp_path)) == [later]

    def test_what_it_prints_in_another_process_goes_to_a_file(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        job = self.job(tmp_path, "print('so it is')")
        job({"run": 0})
        assert capfd.readouterr().out == "run 1 of 1: A.x=1\nso it is\n"
        elsewhere = replace(job, launcher=("another machine", 1, 1))
        elsewhere({"run": 0})
        assert capfd.readouterr().out == "run 1 of 1: A.x=1: exit code 0\n"
        assert (tmp_path / f"{hash_overrides(['A.y=2', 'A.x=1'])}.log").read_text() == "so it is\n"

    def test_only_a_run_that_prints_among_others_is_told_so(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        job = self.job(tmp_path, f"import os; print({IN_SWEEP!r} in os.environ)")
        job({"run": 0})
        assert capfd.readouterr().out.endswith("True\n")
        replace(job, launcher=("another machine", 1, 1))({"run": 0})
        assert (tmp_path / f"{hash_overrides(['A.y=2', 'A.x=1'])}.log").read_text() == "False\n"
