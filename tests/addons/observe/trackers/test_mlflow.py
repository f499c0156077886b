"""MLflow gets each record once, in one run over all attempts, and cannot stop a training."""

import importlib
import json
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, records, run_until_killed, train
from raising import raises

import phasetrain
from phasetrain.addons.observe.trackers.base import Record
from phasetrain.addons.observe.trackers.mlflow import (
    COUNT_METRIC,
    MLflow,
    MLflowRun,
    sanitize_names,
)
from phasetrain.addons.observe.trackers.spooled import Target
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook

WORDS = (
    "HOOKS.mlflow.every_updates=1",
    "HOOKS.mlflow.wait_seconds=60",
    "HOOKS.report=null",
    "HOOKS.ledger=null",
)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a data base of MLflow without runs, which takes seconds to make."""
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    client = MlflowClient(f"sqlite:///{path}")
    client.create_experiment("phasetrain", artifact_location=str(path.parent / "artifacts"))
    return path


@pytest.fixture
def folder(tmp_path: Path, empty: Path) -> Path:
    """Return a run folder with such a data base."""
    (tmp_path / "run").mkdir()
    shutil.copy(empty, tmp_path / "run" / "mlflow.db")
    return tmp_path / "run"


def history(path: Path, name: str) -> list[tuple[int, float]]:
    """Return (updates, value) of every metric of this name, straight from the data base."""
    with sqlite3.connect(path) as base:
        return base.execute(
            "select step, value from metrics where key = ? order by step", (name,)
        ).fetchall()


def complete(folder: Path, path: Path) -> bool:
    """See that a data base has each step and test of a run once, in one run."""
    logged = records(folder)
    steps = [(record["updates"], record["loss"]) for record in logged if record["kind"] == "step"]
    tests = [
        (one["updates"], one["metrics"]["accuracy"]) for one in logged if one.get("split") == "test"
    ]
    assert history(path, "train/step_loss") == steps
    assert history(path, "test/accuracy") == tests
    with sqlite3.connect(path) as base:
        assert base.execute("select count(*), min(status) from runs").fetchall() == [
            (1, "FINISHED")
        ]
    return True


@pytest.mark.slow
@pytest.mark.parametrize("live", ["false", "true"])
@pytest.mark.parametrize("kills", [(9,), (3, 12)])
def test_each_step_once_in_one_run(folder: Path, kills: tuple[int, ...], live: str) -> None:
    words = (*WORDS, f"HOOKS.mlflow.live={live}")
    for steps in kills:
        run_until_killed(folder, *words, hooks={"kill": KillAfter(steps)})
    train(folder, *words)
    assert complete(folder, folder / "mlflow.db")
    with sqlite3.connect(folder / "mlflow.db") as base:
        params = dict(base.execute("select key, value from params"))
    assert (params["OPTIMIZER.lr"], params["MODEL.name"], params["DATA.TRAIN.drop_last"]) == (
        "0.1",
        "small_cnn",
        "true",
    )


@pytest.mark.slow
def test_what_is_sent_twice_is_there_once(tmp_path: Path, empty: Path) -> None:
    shutil.copy(empty, tmp_path / "mlflow.db")
    run = MLflowRun(Target("x", tmp_path), f"sqlite:///{tmp_path}/mlflow.db", "phasetrain", "run")
    one = Record("step", "train", 0, 0, 1, 1, 24, {"loss": float("nan"), "lr": 0.1}, 1000.0)
    assert run.connect() == 0
    run.send(0, [one])
    run.send(0, [one])
    assert run.connect() == 1
    assert history(tmp_path / "mlflow.db", "optimizer/lr") == [(1, 0.1)]
    assert history(tmp_path / "mlflow.db", COUNT_METRIC) == [(1, 1.0)]


@pytest.mark.slow
def test_names_and_values_that_mlflow_does_not_take(
    tmp_path: Path, empty: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRUNCATE_LONG_VALUES", "false")
    shutil.copy(empty, tmp_path / "mlflow.db")
    config = {
        "METERS.acc@1.name": "accuracy",
        "METERS.acc_1.name": "x",
        **{f"a.{n}": n for n in range(98)},
        "b": "x" * 7000,
    }
    target = Target("x", tmp_path, config)
    run = MLflowRun(target, f"sqlite:///{tmp_path}/mlflow.db", "phasetrain", "run")
    run.connect()
    run.send(
        0, [Record("phase", "test", 0, 0, 1, 1, 24, {"acc@1": 0.5, "acc_1": 0.25, "": 1.0}, 1000.0)]
    )
    assert run.connect() == 1
    assert history(tmp_path / "mlflow.db", "test/acc_1_2") == [(1, 0.5)]
    assert history(tmp_path / "mlflow.db", "test/acc_1") == [(1, 0.25)]
    assert history(tmp_path / "mlflow.db", "test/_") == [(1, 1.0)]
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        params = dict(base.execute("select key, value from params"))
    assert (len(params), params["METERS.acc_1.name_2"], params["METERS.acc_1.name"]) == (
        100,
        "accuracy",
        "x",
    )
    assert caplog.messages == ["HOOKS.mlflow: MLflow rejects these values of the config: b"]


@pytest.mark.slow
def test_a_data_base_that_breaks_in_the_middle_stops_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, aside = folder / "mlflow.db", folder / "aside.db"

    class Break(Hook):
        """Puts a folder in the place of the data base while the second epoch runs."""

        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == 8 and phase.is_train:
                sender = run.hooks.by_label["mlflow"]._sender
                for _ in range(400):
                    if sender.sent:
                        break
                    time.sleep(0.05)
                path.rename(aside)
                path.write_text("this is no data base")

    result = train(folder, *WORDS, "HOOKS.mlflow.wait_seconds=20", hooks={"break": Break()})
    assert result.state == "finished"
    told = (folder / "log.txt").read_text()
    assert "of 21 records are not sent" in told
    assert "mlflow.jsonl" in told
    assert "Traceback" not in capsys.readouterr().err
    shutil.copy(aside, path)
    program = f"from phasetrain.addons.observe.trackers.mlflow import MLflow; print(MLflow(wait_seconds=60).deliver({str(folder)!r}))"
    sent = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert sent.stdout.endswith("21\n")
    assert complete(folder, path)


@pytest.fixture
def server(tmp_path: Path, empty: Path) -> Iterator["Server"]:
    """Return a tracking server on this machine."""
    shutil.copy(empty, tmp_path / "served.db")
    found = Server(tmp_path / "served.db")
    found.start()
    yield found
    found.stop()


class Server:
    """A process that answers MLflow's REST calls from a data base.

    Args:
        path: the data base.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.port = path, 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        program = [
            sys.executable,
            str(Path(__file__).with_name("mlflow_server.py")),
            str(self.path),
            str(self.port),
        ]
        self.process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.port = json.loads(self.process.stdout.readline())

    def stop(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None


@pytest.mark.slow
def test_server_gets_the_files_of_logged_items(tmp_path: Path, server: Server, empty: Path) -> None:
    class LogNote(Hook):
        def on_phase_end(self, run: Any, phase: Any, metrics: Any) -> None:
            phasetrain.log_text("note", phase.split)

    words = (*WORDS, "PHASES.epochs=1", f"HOOKS.mlflow.uri=http://127.0.0.1:{server.port}")
    train(tmp_path / "run", *words, hooks={"log": LogNote()})
    sent = {path.name: path.read_text() for path in empty.parent.glob("artifacts/**/media/*")}
    assert sent == {
        "note-u00000005-p0-s5-end.txt": "train",
        "note-u00000005-p1-s2-end.txt": "test",
    }


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_server_that_is_killed_in_the_middle(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")

    class Kill(Hook):
        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == 8 and phase.is_train:
                sender = run.hooks.by_label["mlflow"]._sender
                for _ in range(400):
                    if sender.sent:
                        break
                    time.sleep(0.05)
                server.stop()

        def on_end(self, run: Any) -> None:
            if comes_back:
                server.start()

    run = tmp_path / "run"
    words = (
        *WORDS,
        f"HOOKS.mlflow.uri=http://127.0.0.1:{server.port}",
        "HOOKS.mlflow.wait_seconds=120",
    )
    assert train(run, *words, hooks={"kill": Kill()}).state == "finished"
    if comes_back:
        assert complete(run, server.path)
        return
    assert "of 21 records are not sent" in (run / "log.txt").read_text()
    server.start()
    assert MLflow(uri=f"http://127.0.0.1:{server.port}", wait_seconds=60).deliver(str(run)) == 21
    assert complete(run, server.path)


def test_names_become_those_that_mlflow_takes() -> None:
    given = [
        "test/acc@1",
        "test/acc_1",
        "test/acc%1",
        "test/Größe (m)",
        "/a//b/..",
        "",
        "x" * 251,
        "x" * 250 + "y",
    ]
    assert list(sanitize_names(given).values()) == [
        "test/acc_1_2", "test/acc_1", "test/acc_1_3", "test/Größe _m_", "_/a/_/b/_", "_", "x" * 249 + "_",
        "x" * 242 + "_2",
    ]  # fmt: skip
    assert sanitize_names(given).keys() == set(given)


def test_mlflow_takes_those_names() -> None:
    pytest.importorskip("mlflow")
    check: Any = importlib.import_module("mlflow.utils.validation")
    exceptions: Any = importlib.import_module("mlflow.exceptions")
    for raw, name in sanitize_names(["acc@1", "/a//b/..", "", "x" * 251, "a/" * 200]).items():
        check._validate_param(name, "1")
        check._validate_metric(name, 1.0, 0, 0)
        with pytest.raises(exceptions.MlflowException):
            check._validate_metric(raw, 1.0, 0, 0)


def test_errors_of_the_data_base_are_left_to_the_warning(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    MLflow().make_backend(Target("x", tmp_path))
    assert not logging.getLogger("mlflow.store.db.utils").isEnabledFor(logging.ERROR)


def test_run_folder_with_question_mark_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "lr?"
    with pytest.raises(ConfigError) as caught:
        MLflow().make_backend(Target("x", folder))
    assert (caught.value.code, caught.value.key) == ("config.conflict", "RUN.dir")
    pytest.importorskip("mlflow")
    assert MLflow(uri="http://127.0.0.1:1").make_backend(Target("x", folder))


def test_without_mlflow_it_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with raises(ConfigError, code="config.missing_package"):
        train(tmp_path, *WORDS)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every_updates = 0"):
        MLflow(every_updates=0)
