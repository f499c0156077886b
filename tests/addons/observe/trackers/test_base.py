"""Trackers: names, what happens when they fail, and records that reach a backend once after any
kills."""

import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import KillAfter, records, status
from raising import raises

from phasetrain.addons.observe.trackers import spooled
from phasetrain.addons.observe.trackers.base import Record
from phasetrain.addons.observe.trackers.spooled import Sender, Spool, SpooledTracker, Target
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook

QUICK = ("HOOKS.report=null", "HOOKS.ledger=null")
KEPT = ("kind", "split", "phase", "epoch", "step", "updates", "samples", "values")


class Journal:
    """A backend: a file of lines, each with the number of the record.

    Args:
        path: the file.
        broken: while it holds anything, every call fails.
        forgetful: it does not tell what it has.
    """

    def __init__(
        self, path: Path, broken: list[int] | None = None, *, forgetful: bool = False
    ) -> None:
        self.path, self.broken, self.forgetful = (
            path,
            broken if broken is not None else [],
            forgetful,
        )
        self.notes: dict[str, str] = {}
        self.ending = ""

    def lines(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self.path.read_text().splitlines()]
            if self.path.exists()
            else []
        )

    def connect(self) -> int:
        self.fail()
        return 0 if self.forgetful else len(self.lines())

    def send(self, first: int, records: Sequence[Record]) -> None:
        for number, record in enumerate(records, first):
            self.fail()
            with open(self.path, "a") as file:
                file.write(json.dumps({"number": number, **vars(record)}) + "\n")

    def note(self, name: str, value: str) -> None:
        self.notes[name] = value

    def close(self, ending: str) -> None:
        self.fail()
        self.ending = ending

    def abandon(self) -> None:
        pass

    def fail(self) -> None:
        if self.broken:
            self.broken[0] -= 1
            if not self.broken[0]:
                self.broken.clear()
            raise ConnectionError("nobody answers")


class Noted(SpooledTracker):
    """Sends to a journal."""

    kind = "noted"

    def __init__(self, journal: Any, **settings: Any) -> None:
        super().__init__(every_updates=1, **settings)
        self.journal = journal

    def make_backend(self, target: Target) -> Any:
        self.target = target
        return self.journal


def train(folder: Path, *overrides: str, hooks: Any = None) -> Any:
    """Run a small training with few hooks."""
    return harness.train(folder, *QUICK, *overrides, hooks=hooks)


def run_until_killed(folder: Path, hooks: Any) -> None:
    """Run it until it is killed."""
    harness.run_until_killed(folder, *QUICK, hooks=hooks)


def comparable_fields(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what does not differ between equal runs."""
    return [{"number": line["number"], **{key: line[key] for key in KEPT}} for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what a backend has of a run that nobody killed."""
    folder = tmp_path_factory.mktemp("unbroken")
    journal = Journal(folder / "journal")
    train(folder / "run", hooks={"noted": Noted(journal)})
    assert journal.ending == "finished"
    return comparable_fields(journal.lines())


def test_each_step_and_phase_is_a_record(unbroken: list[dict[str, Any]]) -> None:
    assert [line["number"] for line in unbroken] == list(range(21))
    assert [line["updates"] for line in unbroken if line["kind"] == "step"] == list(range(1, 16))
    assert [(line["split"], line["updates"]) for line in unbroken if line["kind"] == "phase"] == [
        ("train", 5), ("test", 5), ("train", 10), ("test", 10), ("train", 15), ("test", 15),
    ]  # fmt: skip


def test_values_are_named_by_split_and_kind() -> None:
    values, speeds = {"loss": 2.0, "lr": 0.1, "norm": 3.0}, {"samples_per_second": 5}
    step = Record("step", "train", 0, 0, 2, 2, 48, values, 7.0, speeds)
    assert step.values_by_name() == {
        "train/step_loss": 2.0, "optimizer/lr": 0.1, "train/step_norm": 3.0, "time/samples_per_second": 5,
    }  # fmt: skip
    phase = Record("phase", "test@ema", 1, 0, 4, 2, 48, {"accuracy": 0.5, "loss": 1.0}, 8.0)
    assert phase.values_by_name() == {"test@ema/accuracy": 0.5, "test@ema/loss": 1.0}
    assert Record(**json.loads(json.dumps(vars(step)))) == step


class TestExactlyOnce:
    @pytest.mark.feature(
        "109",
        "trackers: each step once, never ending a run",
        "`HOOKS.console`, `metrics`, `csv`, `tensorboard`, `wandb`, `mlflow`",
    )
    @pytest.mark.parametrize(
        ("kills", "live"),
        [
            ((3, 12), False),
            pytest.param((9,), True, marks=pytest.mark.slow),
            pytest.param((2,), False, marks=pytest.mark.slow),
            pytest.param((9, 9), False, marks=pytest.mark.slow),
            pytest.param((3, 12), True, marks=pytest.mark.slow),
            pytest.param((9, 9), True, marks=pytest.mark.slow),
        ],
    )
    def test_records_are_sent_exactly_once_over_kills(
        self, tmp_path: Path, unbroken: list[dict[str, Any]], kills: tuple[int, ...], live: bool
    ) -> None:
        path, run = tmp_path / "journal", tmp_path / "run"
        for steps in kills:
            run_until_killed(
                run, hooks={"noted": Noted(Journal(path), live=live), "kill": KillAfter(steps)}
            )
        last = Journal(path)
        train(run, hooks={"noted": Noted(last, live=live)})
        assert comparable_fields(last.lines()) == unbroken
        assert bool(last.notes) == (live and kills != (3, 12))

    @pytest.mark.slow
    def test_a_backend_that_does_not_tell_what_it_has_gets_records_twice(
        self, tmp_path: Path
    ) -> None:
        path, run = tmp_path / "journal", tmp_path / "run"
        run_until_killed(run, hooks={"noted": Noted(Journal(path)), "kill": KillAfter(9)})
        last = Journal(path, forgetful=True)
        train(run, hooks={"noted": Noted(last)})
        assert (
            len(last.lines()) == 21 + 6
        )  # those of the first epoch, which the first checkpoint covers

    def test_nothing_is_sent_before_a_checkpoint_covers_it(self, tmp_path: Path) -> None:
        journal = Journal(tmp_path / "journal")
        run_until_killed(tmp_path / "run", hooks={"noted": Noted(journal), "kill": KillAfter(9)})
        assert [line["updates"] for line in journal.lines() if line["kind"] == "step"] == [
            1,
            2,
            3,
            4,
            5,
        ]

    def test_the_identity_stays_and_a_lost_spool_begins_another_run(self, tmp_path: Path) -> None:
        hooks = [Noted(Journal(tmp_path / f"journal{number}")) for number in range(3)]
        run_until_killed(tmp_path / "run", hooks={"noted": hooks[0], "kill": KillAfter(9)})
        run_until_killed(tmp_path / "run", hooks={"noted": hooks[1], "kill": KillAfter(3)})
        (tmp_path / "run" / "noted.jsonl").unlink()
        train(tmp_path / "run", hooks={"noted": hooks[2]})
        first, second, third = (hook.target.identity for hook in hooks)
        assert first == second != third
        assert hooks[2].journal.lines()[0]["number"] == 0


class TestFailing:
    def test_a_backend_that_fails_for_a_while_gets_everything(
        self, tmp_path: Path, unbroken: Any
    ) -> None:
        journal = Journal(tmp_path / "journal", [1])
        assert train(tmp_path / "run", hooks={"noted": Noted(journal)}).state == "finished"
        assert comparable_fields(journal.lines()) == unbroken
        assert (tmp_path / "run" / "log.txt").read_text().count(
            "HOOKS.noted: the backend failed"
        ) >= 1

    @pytest.mark.parametrize("has", [0, 3])
    def test_only_what_was_there_before_counts_as_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: int
    ) -> None:
        class Flaky(Journal):
            sent = 0

            def send(self, first: int, records: Sequence[Record]) -> None:
                self.sent += 1
                super().send(first, records if self.sent != 2 else records[:4])
                if self.sent == 2:
                    raise ConnectionError("in the middle")

        monkeypatch.setattr(spooled, "BATCH_SIZE", 5)
        monkeypatch.setattr(spooled, "FIRST_DELAY", 0.01)
        made = [Record("step", "train", 0, 0, n, n, n, {"loss": 1.0}, 0.0) for n in range(1, 21)]
        (tmp_path / "spool").write_text(
            "".join(f"{json.dumps(line)}\n" for line in [{}, *(vars(r) for r in made)])
        )
        journal = Flaky(tmp_path / "journal")
        Journal(tmp_path / "journal").send(0, made[:has])
        sender = Sender("noted", journal, Spool(tmp_path / "spool"), 1)
        sender.offer(20)
        sender.start()
        assert sender.close("finished", 10.0) == 0
        assert [line["number"] for line in journal.lines()] == list(range(20))
        assert ("1 to 2" in journal.notes.get("redone", "")) == bool(has)
        assert set(journal.notes) == ({"redone"} if has else set())
        assert journal.sent > 2

    def test_tracker_that_always_fails_loses_no_record(self, tmp_path: Path, unbroken: Any) -> None:
        journal = Journal(tmp_path / "journal", [10**6])
        result = train(tmp_path / "run", hooks={"noted": Noted(journal, wait_seconds=20.0)})
        assert result.state == "finished"
        assert result.seconds < 15
        told = (tmp_path / "run" / "log.txt").read_text()
        assert re.search(r"21 of 21 .*\(ConnectionError: nobody answers\).* noted\.jsonl", told)
        journal.broken.clear()
        assert Noted(journal).deliver(str(tmp_path / "run")) == 21
        assert comparable_fields(journal.lines()) == unbroken
        assert Noted(journal).deliver(str(tmp_path / "run")) == 21
        assert comparable_fields(journal.lines()) == unbroken

    def test_the_next_attempt_sends_what_this_one_could_not(
        self, tmp_path: Path, unbroken: Any
    ) -> None:
        journal = Journal(tmp_path / "journal", [10**6])
        run_until_killed(
            tmp_path / "run",
            hooks={"noted": Noted(journal, wait_seconds=0.0), "kill": KillAfter(9)},
        )
        assert "6 of 9 records are not sent" in (tmp_path / "run" / "log.txt").read_text()
        again = Journal(tmp_path / "journal")
        train(tmp_path / "run", hooks={"noted": Noted(again)})
        assert comparable_fields(again.lines()) == unbroken

    def test_hanging_tracker_does_not_block_the_end(self, tmp_path: Path) -> None:
        class Stuck(Journal):
            def connect(self) -> int:
                gate.wait(30)
                return 0

        gate = threading.Event()
        began = time.monotonic()
        result = train(
            tmp_path / "run", hooks={"noted": Noted(Stuck(tmp_path / "journal"), wait_seconds=0.2)}
        )
        assert result.state == "finished"
        assert time.monotonic() - began < 15
        text = (tmp_path / "run" / "log.txt").read_text()
        assert re.search(r"21 of 21 .* 0\.2 s\)", text)
        gate.set()

    def test_only_finished_runs_are_delivered(self, tmp_path: Path) -> None:
        with raises(ConfigError, code="tracker.no_spool"):
            Noted(Journal(tmp_path / "journal")).deliver(str(tmp_path))

    def test_a_run_folder_without_files_is_refused(self, tmp_path: Path) -> None:
        class Elsewhere:
            keeps_files = False

        run: Any = type(
            "R", (), {"folder": type("F", (), {"storage": Elsewhere, "path": "mem://x"})}
        )
        with raises(ConfigError, code="config.conflict"):
            Noted(Journal(tmp_path / "journal")).on_start(run)


class Broken(Hook):
    """Raises in each step from the third on, and when it is closed."""

    observe_only = True
    heard = 0

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        self.heard += 1
        if self.heard >= 3:
            raise OSError(f"step {self.heard}")

    def close(self) -> None:
        if self.policy != "raise":
            raise OSError("at the end")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run, for reading only."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


class TestPolicy:
    def test_by_default_the_error_ends_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="step 3"):
            train(tmp_path, hooks={"broken": Broken()})

    def test_ignored_error_changes_no_record(self, tmp_path: Path, whole: Path) -> None:
        hook = Broken()
        hook.policy = "ignore"
        assert train(tmp_path / "run", hooks={"broken": hook}).state == "finished"
        told = (tmp_path / "run" / "log.txt").read_text()
        assert "HOOKS.broken failed: OSError: step 3" in told
        assert "HOOKS.broken failed 20 times" in told  # in 19 of 21 steps, and at its end
        assert not any("WARNING" in line and "step 4" in line for line in told.splitlines())
        assert records(tmp_path / "run") == records(whole)

    def test_error_stops_the_run_which_resumes_exactly(self, tmp_path: Path, whole: Path) -> None:
        hook = Broken()
        hook.policy = "stop"
        result = train(tmp_path / "run", hooks={"broken": hook})
        assert (result.state, result.updates) == ("preempted", 3)
        assert result.reason == "an error in HOOKS.broken (OSError: step 3)"
        assert status(tmp_path / "run")["state"] == "preempted"
        assert train(tmp_path / "run").state == "finished"
        assert records(tmp_path / "run") == records(whole)

    def test_on_exception_is_read_from_the_config(self, tmp_path: Path) -> None:
        """A file in the place of its folder makes the csv hook fail at its start."""
        for name in ("ignored", "raised"):
            (tmp_path / name / "csv").parent.mkdir()
            (tmp_path / name / "csv").write_text("")
        assert train(tmp_path / "ignored", "HOOKS.csv={}").state == "finished"
        assert "HOOKS.csv failed: " in (tmp_path / "ignored" / "log.txt").read_text()
        with raises((OSError, ConfigError), key="RUN.dir"):
            train(tmp_path / "raised", "HOOKS.csv.on_exception=raise")

    def test_a_mistake_in_the_config_is_never_ignored(self, tmp_path: Path) -> None:
        class Mistaken(Hook):
            policy = "ignore"

            def on_start(self, run: Any) -> None:
                raise ConfigError("HOOKS.mistaken: no")

        with raises(ConfigError, key="HOOKS.mistaken"):
            train(tmp_path, hooks={"mistaken": Mistaken()})

    def test_unknown_on_exception_is_rejected(self, tmp_path: Path) -> None:
        with raises(
            ConfigError, code="config.wrong_type", key="HOOKS.csv.on_exception", given="'retry'"
        ):
            train(tmp_path, "HOOKS.csv.on_exception=retry")


def test_on_saved_is_heard_once_for_each_checkpoint_after_it_is_there(tmp_path: Path) -> None:
    heard: list[tuple[int, bool]] = []

    class Look(Hook):
        def on_saved(self, run: Any) -> None:
            state: RunState = run.state
            heard.append((state.updates, any((tmp_path / "checkpoints").glob("p*/manifest.json"))))

    train(
        tmp_path,
        "CHECKPOINT.every_updates=5",
        "CHECKPOINT.background=false",
        hooks={"look": Look()},
    )
    assert heard == [
        (5, True),
        (5, True),
        (10, True),
        (10, True),
        (15, True),
        (15, True),
        (15, True),
    ]


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="wait_seconds = -1"):
        Noted(Journal(tmp_path), wait_seconds=-1)
