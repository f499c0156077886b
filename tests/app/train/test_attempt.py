"""Attempts are counted, refused where they lead nowhere, and told what all of them together have
cost."""

import io
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, Killed, run_until_killed, train

from phasetrain.app.engines import print_log
from phasetrain.app.train.attempt import Attempt, log_to_folder
from phasetrain.checkpoint import Checkpointer
from phasetrain.engine.position import RunState
from phasetrain.errors import NoProgressError
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.records import StatusRecord
from phasetrain.runtime.clock import KINDS, Clock
from phasetrain.runtime.terminal import Terminal

SPENT = {
    "start": 2.0,
    "train": 80.0,
    "test": 8.0,
    "data": 5.0,
    "save": 4.0,
    "redone": 0.0,
    "end": 1.0,
}


class Fixed(Clock):
    """A clock that has counted these seconds."""

    def __init__(self, spent: Mapping[str, float]) -> None:
        super().__init__()
        self.spent = dict.fromkeys(KINDS, 0.0) | dict(spent)
        self.start_parts = {"data": 1.5}

    def seconds(self) -> dict[str, float]:
        return self.spent


def begin(
    path: Path,
    sequence: int,
    give_up_after: int | None = 3,
    *,
    tried: str = "",
    trained: int = 1,
    **ended: Any,
) -> dict[str, Any]:
    """Start an attempt whose newest checkpoint is of that commit, and end it as is said; return its
    status.json."""
    folder = RunFolder(str(path))
    folder.open()
    try:
        attempt = Attempt(folder.read_status(), Clock())
        attempt.clock.redo_until = trained
        attempt.check_progress(folder, sequence, give_up_after, tried)
        begun = dict(folder.read_status().content)
        if ended:
            folder.write_status(**ended)
        return begun
    finally:
        folder.close()


FAILED = {"state": "failed", "exit_code": 1, "reason": "RuntimeError: out of memory"}
STOPPED = {"state": "preempted", "exit_code": 143, "reason": "SIGTERM"}
KILLED: dict[str, Any] = {}


class TestBreaker:
    @pytest.mark.parametrize(
        "ended", [KILLED, FAILED, STOPPED, {"state": "preempted", "exit_code": 138}]
    )
    def test_attempts_without_a_new_checkpoint_are_counted(
        self, tmp_path: Path, ended: dict[str, Any]
    ) -> None:
        assert [begin(tmp_path, 0, **ended)["idle_attempts"] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(NoProgressError):
            begin(tmp_path, 0)

    @pytest.mark.parametrize(
        "ended",
        [
            {"state": "preempted", "exit_code": 130, "reason": "SIGINT"},
            {"state": "failed", "exit_code": 2},
            {"state": "failed", "exit_code": 3},
            {"state": "failed", "exit_code": 5},
            {"state": "finished", "exit_code": 0},
        ],
        ids=["Ctrl-C", "config", "changed", "no valid", "finished"],
    )
    def test_what_says_nothing_about_the_run_is_not(
        self, tmp_path: Path, ended: dict[str, Any]
    ) -> None:
        assert [begin(tmp_path, 0, **ended)["idle_attempts"] for _ in range(5)] == [0] * 5

    def test_a_new_checkpoint_begins_anew(self, tmp_path: Path) -> None:
        counts = [
            begin(tmp_path, sequence)["idle_attempts"] for sequence in (0, 0, 0, 1, 1, 1, 4, 4)
        ]
        assert counts == [0, 1, 2, 0, 1, 2, 0, 1]

    def test_a_limit_of_ones_own_or_none(self, tmp_path: Path) -> None:
        for _ in range(9):
            begin(tmp_path, 0, None)
        with pytest.raises(NoProgressError, match=" 9 "):
            begin(tmp_path, 0, 9)
        assert begin(tmp_path, 0, 99)["idle_attempts"] == 9

    def test_attempts_before_a_fix_do_not_count(self, tmp_path: Path) -> None:
        found = [begin(tmp_path, 0, tried=tried) for tried in ("a", "a", "b", "b", "a")]
        assert [one["idle_attempts"] for one in found] == [0, 1, 0, 1, 0]

    def test_attempts_before_the_first_update_do_not_count(self, tmp_path: Path) -> None:
        found = [begin(tmp_path, 0, trained=trained) for trained in (0, 0, 0, 1, 1)]
        assert [one["idle_attempts"] for one in found] == [0, 0, 0, 1, 2]

    def test_error_names_the_cause_of_the_first_failure(self, tmp_path: Path) -> None:
        begin(tmp_path, 0, **FAILED)
        sentences = set()
        for _ in range(3):  # it stays the same, and the attempts that gave up do not count
            with pytest.raises(NoProgressError) as caught:
                begin(tmp_path, 0, 1)
            sentences.add(str(caught.value))
            assert (caught.value.code, caught.value.key) == ("run.no_progress", "RUN.give_up_after")
            assert "(the last one: RuntimeError: out of memory)" in str(caught.value)
            assert caught.value.exit_code == 6
        assert len(sentences) == 1

    def test_a_run_that_was_killed_without_a_word(self, tmp_path: Path) -> None:
        begin(tmp_path, 0)
        with pytest.raises(NoProgressError, match="killed"):
            begin(tmp_path, 0, 1)

    def test_a_status_that_was_damaged_counts_as_none(self, tmp_path: Path) -> None:
        (tmp_path / "status.json").write_text(
            '{"idle_attempts": "x", "started_from": null, "time": [1], "upda'
        )
        assert begin(tmp_path, 0)["idle_attempts"] == 0
        (tmp_path / "status.json").write_text(
            '{"idle_attempts": "x", "started_from": null, "time": [1]}'
        )
        assert begin(tmp_path, 0)["idle_attempts"] == 0


class TestWholeRuns:
    def test_a_run_that_is_killed_before_its_first_save_is_refused_in_the_end(
        self, tmp_path: Path
    ) -> None:
        for _ in range(2):
            run_until_killed(tmp_path, "RUN.give_up_after=2", hooks={"kill": KillAfter(2)})
        with pytest.raises(NoProgressError):
            train(tmp_path, "RUN.give_up_after=2")
        status = json.loads((tmp_path / "status.json").read_text())
        assert (status["state"], status["exit_code"], status["attempt"]) == ("failed", 1, 2)
        assert train(tmp_path, "RUN.give_up_after=null").state == "finished"

    def test_one_that_dies_while_it_reads_its_checkpoint_is_counted_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train(tmp_path, "PHASES.epochs=1", "CHECKPOINT.at_end=false")

        def killed(made: Checkpointer) -> None:
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(Checkpointer, "load_newest", killed)
            for _ in range(2):
                with pytest.raises(Killed):
                    train(tmp_path, "RUN.give_up_after=2", "PHASES.epochs=1")
                (tmp_path / "status.json").write_text(
                    json.dumps(
                        json.loads((tmp_path / "status.json").read_text()) | {"state": "running"}
                    )
                )
            with pytest.raises(NoProgressError):
                train(tmp_path, "RUN.give_up_after=2", "PHASES.epochs=1")

    def test_a_stop_right_after_a_resume_is_no_progress(self, tmp_path: Path) -> None:
        run_until_killed(tmp_path, hooks={"kill": KillAfter(9)})
        before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        again = train(tmp_path, hooks={"stop": StopAtOnce()})
        assert again.state == "preempted"
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before

    def test_checkpoints_whose_model_is_lost_are_no_progress(self, tmp_path: Path) -> None:
        words = ("OPTIMIZER.lr=1e30", "OPTIMIZER.SCHEDULES=null", "OPTIMIZER.on_nonfinite=ignore")
        words = (*words, "CHECKPOINT.every_updates=1", "RUN.give_up_after=2")
        for _ in range(3):
            run_until_killed(tmp_path, *words, hooks={"kill": KillAfter(4)})
        with pytest.raises(NoProgressError, match=" 2 "):
            train(tmp_path, *words)

    def test_redone_steps_and_the_time_of_all_attempts(self, tmp_path: Path) -> None:
        run_until_killed(
            tmp_path, hooks={"kill": KillAfter(9)}
        )  # the checkpoint is of update 5, the kill after update 7
        (tmp_path / "status.json").write_text(
            json.dumps(
                json.loads((tmp_path / "status.json").read_text()) | {"updates": 7, "reached": 7}
            )
        )
        train(tmp_path)
        status = json.loads((tmp_path / "status.json").read_text())
        time = status["time"]
        assert (status["updates"], status["reached"], time["broken"]) == (15, 15, 1)
        assert time["attempt"]["redone"] > 0
        assert all(time["run"][kind] >= time["attempt"][kind] for kind in KINDS)
        assert time["run"]["start"] > time["attempt"]["start"]


class StopAtOnce(KillAfter):
    """Asks the run to stop before its first step."""

    def __init__(self) -> None:
        super().__init__(0)

    def on_start(self, run: Any) -> None:
        run.stop("enough for now", interrupted=True)


class TestTime:
    @pytest.mark.feature("B7", "time by kind, per attempt and in total", "`status.json`")
    def test_facts_add_up_over_attempts(self) -> None:
        before = {
            "time": {"run": {"train": 10.0, "save": 1.0}, "broken": 2},
            "state": "running",
            "updates": 5,
        }
        attempt = Attempt(StatusRecord.from_json(before), Fixed(SPENT))
        facts = attempt.facts(RunState(updates=4))
        assert (facts["updates"], facts["reached"]) == (4, 5)
        assert facts["time"]["broken"] == 3
        assert facts["time"]["attempt"] == SPENT
        assert facts["time"]["run"] == SPENT | {"train": 90.0, "save": 5.0}
        assert facts["time"]["start"] == {"data": 1.5}

    def test_steps_up_to_the_furthest_an_earlier_attempt_got_are_redone(self) -> None:
        for before, until in (({}, 0), ({"updates": 5}, 5), ({"updates": 5, "reached": 9}, 9)):
            clock = Clock()
            Attempt(StatusRecord.from_json(before), clock)
            assert clock.redo_until == until

    def shown(self, before: dict[str, Any], saves: int = 4, updates: int = 40) -> str:
        text = io.StringIO()
        terminal = Terminal(text, live=False, verbosity="verbose")
        with print_log(terminal):
            Attempt(StatusRecord.from_json(before), Fixed(SPENT)).show(terminal, saves, updates)
        return " ".join(text.getvalue().split())

    def test_the_lines(self) -> None:
        text = io.StringIO()
        terminal = Terminal(text, live=False)
        with print_log(terminal):
            Attempt(StatusRecord(), Fixed(SPENT)).show(terminal, 4, 40)
            Attempt(
                StatusRecord(attempt=2, run_seconds={"redone": 100.0}, broken=1), Fixed(SPENT)
            ).show(terminal, 4, 40)
        lines = [line[9:] for line in text.getvalue().splitlines()]
        line = "time    1 min 40 s, 88 % in steps; data 5 %, save 4 %, startup 2 %, end 1 %"
        whole = "total   3 min 20 s, 44 % in steps; redone 50 %, data 2 %, save 2 %, startup 1 %, in 3 attempts"
        assert lines == [line, line, whole]

    def test_the_table_of_a_first_attempt(self) -> None:
        found = self.shown({})
        assert "where the time went" in found
        assert "startup: data 1.5 s" in found
        assert "this attempt" in found
        assert "the run" not in found
        assert "88 %" in found

    def test_the_table_of_a_later_attempt(self) -> None:
        assert "the run" in self.shown({"time": {"run": {"redone": 100.0}, "broken": 1}})

    def test_the_advice(self) -> None:
        # a save costs 4 s / 4; sqrt(2 * 1 s * 86,400 s) = 415.7 s, at 2 s an update 208 updates
        shown = self.shown({})
        assert all(part in shown for part in ("1000.0 ms", "6 min 56 s", "208 updates", "(Young)"))

    def test_the_advice_after_broken_attempts(self) -> None:
        # 200 s in all and two broken attempts: sqrt(2 * 1 s * 100 s) = 14.1 s, or 7 updates
        before = {"time": {"run": {"train": 100.0}, "broken": 1}, "state": "running"}
        shown = self.shown(before)
        assert all(part in shown for part in ("2 interrupted attempts", "14.1 s", "7 updates"))

    @pytest.mark.parametrize(("saves", "updates"), [(0, 5), (5, 0)])
    def test_without_saves_or_updates_there_is_none(self, saves: int, updates: int) -> None:
        assert "Young" not in self.shown({}, saves, updates)


class TestLog:
    def test_lines_are_appended_and_a_torn_one_is_ended(self, tmp_path: Path) -> None:
        (tmp_path / "log.txt").write_text("whole\ntorn by a k")
        folder = RunFolder(str(tmp_path))
        with log_to_folder(folder):
            logging.getLogger("phasetrain.x").warning("after %s", "it")
            text = (tmp_path / "log.txt").read_text()  # written at once
        folder.close()
        assert text.startswith("whole\ntorn by a k\n")
        assert text.endswith(" WARNING after it\n")
        logging.getLogger("phasetrain.x").warning("and nothing more")
        assert (tmp_path / "log.txt").read_text() == text

    def test_a_path_that_is_no_text_is_escaped(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = RunFolder(str(tmp_path))
        folder.open()
        with log_to_folder(folder):
            logging.getLogger("phasetrain.x").warning("in b%s", "\udcff")
        folder.close()
        assert (tmp_path / "log.txt").read_text().endswith(" WARNING in b\\udcff\n")
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize(
        ("rank", "terminal", "goes"),
        [(1, True, "log-1.txt"), (1, False, "screen"), (0, True, "screen")],
    )
    def test_what_others_than_the_main_process_print_stays_off_its_screen(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, terminal: bool, goes: str
    ) -> None:
        screen = io.StringIO()
        monkeypatch.setattr(screen, "isatty", lambda: terminal)
        monkeypatch.setattr("sys.stdout", screen)
        folder = RunFolder(str(tmp_path), rank=rank)
        with log_to_folder(folder):
            sys.stdout.write("of a loss\nand ")
            sys.stdout.write("more")
        folder.close()
        assert sys.stdout is screen
        log = tmp_path / ("log-1.txt" if rank else "log.txt")
        found = {"screen": screen.getvalue(), log.name: log.read_text().rstrip("\n")}
        assert found == {**dict.fromkeys(found, ""), goes: "of a loss\nand more"}
