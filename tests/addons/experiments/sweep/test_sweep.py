import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest
from raising import raises

from phasetrain.addons.experiments.sweep import Check, ComparisonSettings, hash_overrides, sweep
from phasetrain.addons.experiments.sweep.prune.rungs import TrialPlan
from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError, FolderInUseError


def accept(overrides: Sequence[str]) -> None: ...


def started(folder: str) -> dict[str, list[list[str]]]:
    """Return name of the run folder -> the words of each start."""
    return {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in Path(folder).glob("*/starts.jsonl")
    }


def test_each_combination_is_a_process_in_its_own_folder(program: list[str]) -> None:
    words = ["LOSS=a,b", "LOSS.gamma=1,2", "~OPTIMIZER.momentum", "RUN.name=x"]
    words += ["hydra.sweep.dir=out"]
    assert sweep(words, "my/options", check=accept, command=program) == 0
    fixed = ["~OPTIMIZER.momentum", "RUN.name=x"]
    combinations = [[f"LOSS={loss}", f"LOSS.gamma={gamma}"] for loss in "ab" for gamma in "12"]
    assert started("out") == {
        hash_overrides([*fixed, *c]): [["--config-dir", "my/options", *fixed, *c]]
        for c in combinations
    }


class TestTheSameCommandAgain:
    @pytest.mark.feature("sweep")
    def test_starts_nothing_that_has_finished(
        self, program: list[str], settled: Check, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for _ in range(2):
            assert sweep(["OPTIMIZER.lr=1,2"], check=settled, command=program) == 0
        (folder,) = Path("runs").iterdir()
        assert folder.name == f"sweep-{hash_overrides(['OPTIMIZER.lr=1,2'])}"
        assert [len(starts) for starts in started(str(folder)).values()] == [1, 1]
        first, second = capsys.readouterr().out.split(f"2 runs in {folder}: 2 finished")[1:]
        assert second.startswith(", 2 of them")
        assert first.splitlines()[1:5] == second.splitlines()[1:5]

    def test_starts_what_has_finished_with_another_config(
        self, program: list[str], settled: Check
    ) -> None:
        assert sweep(["A.x=1", "hydra.sweep.dir=out"], check=settled, command=program) == 0

        def changed(overrides: Sequence[str]) -> AttrDict:
            return AttrDict({**settled(overrides), "more": 1})

        assert sweep(["A.x=1", "hydra.sweep.dir=out"], check=changed, command=program) == 0
        assert [len(starts) for starts in started("out").values()] == [2]

    def test_starts_what_has_failed_or_was_added(
        self, program: list[str], settled: Check, capfd: pytest.CaptureFixture[str]
    ) -> None:
        words = ["LOSS=bad,good", "hydra.sweep.dir=out"]
        assert [sweep(words, check=settled, command=program) for _ in range(2)] == [1, 1]
        bad, good, fine = [hash_overrides([f"LOSS={loss}"]) for loss in ("bad", "good", "fine")]
        assert {name: len(found) for name, found in started("out").items()} == {bad: 2, good: 1}
        told = [line for line in capfd.readouterr().err.splitlines() if "LOSS=bad" in line]
        assert told == [f"exit code 3: LOSS=bad in out/{bad}"] * 2
        result = json.loads(Path(f"out/{bad}.json").read_text())
        assert (result["exit_code"], result["overrides"]) == (3, ["LOSS=bad"])
        # Failures of an earlier sweep do not count.
        words = ["LOSS=good,fine", "hydra.sweep.dir=out"]
        assert sweep(words, check=settled, command=program) == 0
        starts = {name: len(found) for name, found in started("out").items()}
        assert starts == {bad: 2, good: 1, fine: 1}


def test_optuna_and_the_table_go_by_the_metric_that_the_sampler_is_given(
    program: list[str], settled: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    words = [
        "OPTIMIZER.lr=interval(0,1)",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweep.dir=out",
    ]
    assert (
        sweep([*words, "hydra.sweeper.monitor=-test/accuracy"], check=settled, command=program) == 0
    )
    assert "2 runs in out: 2 finished" in capsys.readouterr().out
    found = json.loads(Path("out/results.json").read_text())
    bests = [one["best"] for one in found["runs"]]
    assert (found["monitor"], bests) == ("-test/accuracy", sorted(bests))
    assert "FAIL" not in Path("out/study.journal").read_text()


class TestTheTable:
    @pytest.mark.feature(
        "sweep",
        "sweeps with results, any Hydra launcher, Optuna",
        "`phasetrain sweep`, `hydra/launcher=joblib`, `hydra/sweeper=optuna`",
    )
    @pytest.mark.addon("report")
    def test_has_a_row_per_run_the_best_one_first(
        self,
        program: list[str],
        settled: Check,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from phasetrain.addons.report.page.png import write_charts

        monkeypatch.setattr("phasetrain.addons.experiments.sweep.page.write_charts", write_charts)
        words = ["OPTIMIZER.lr=0.1,0.3", "hydra.sweep.dir=out"]
        assert sweep(words, check=settled, command=program) == 0
        names = [hash_overrides([f"OPTIMIZER.lr={lr}"]) for lr in ("0.3", "0.1")]
        rows = capsys.readouterr().out.splitlines()
        start = rows.index("2 runs in out: 2 finished")
        assert rows[start + 1].split("  ")[0] == "OPTIMIZER.lr"
        assert [row.split() for row in rows[start + 3 : start + 5]] == [
            ["0.3", "1.0000", "2", "0.8750", "4/4", "2.0", "s", "finished", names[0]],
            ["0.1", "0.8000", "2", "0.6750", "4/4", "2.0", "s", "finished", names[1]],
        ]
        self.check_files(names[0])

    @staticmethod
    def check_files(best: str) -> None:
        """Compare results.json, results.csv and sweep.html with the two runs."""
        found = json.loads(Path("out/results.json").read_text())
        assert (found["monitor"], found["swept"]) == ("test/accuracy", ["OPTIMIZER.lr"])
        assert [(one["swept"], one["best"], one["exit_code"]) for one in found["runs"]] == [
            ({"OPTIMIZER.lr": "0.3"}, 1.0, 0),
            ({"OPTIMIZER.lr": "0.1"}, 0.8, 0),
        ]
        with open("out/results.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["OPTIMIZER.lr"], row["best"], row["seconds"]) for row in rows] == [
            ("0.3", "1.0", "2.0"),
            ("0.1", "0.8", "2.0"),
        ]
        page = Path("out/sweep.html").read_text()
        assert 'id="chart-by-OPTIMIZER-lr"' in page
        assert f'<a href="{best}/report.html">' in page
        assert Path("out/plots").is_dir()

    @pytest.mark.slow
    def test_names_failed_runs_with_their_exit_code(
        self, program: list[str], settled: Check, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = [
            "LOSS=bad,good",
            "hydra.sweep.dir=out",
            "hydra/launcher=joblib",
            "hydra.launcher.n_jobs=1",
        ]
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
        assert sweep(words, check=settled, command=program) == 1
        out = capsys.readouterr().out
        assert "2 runs in out: 1 finished, 1 failed" in out
        assert f"{hash_overrides(['LOSS=bad'])} (LOSS=bad): exit code 3" in out


def test_configs_with_seeds_are_compared_on_one_screen(
    program: list[str], settled: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["OPTIMIZER.lr=0.1,0.3,0.2", "RUN.seed=seeds(2)", "hydra.sweep.dir=out"]
    assert sweep(words, check=settled, command=program) == 0
    text = capsys.readouterr().out
    lines = text[text.index("6 runs in out: 6 finished") :].splitlines()
    assert len(lines) <= 25
    start = lines.index("difference from OPTIMIZER.lr=0.3, paired by RUN.seed")
    assert [line.split()[:2] for line in lines[start + 3 : start + 5]] == [
        ["0.2", "-0.1000"],
        ["0.1", "-0.2000"],
    ]
    found = json.loads(Path("out/results.json").read_text())["groups"]
    assert [group["count"] for group in found] == [2, 2, 2]
    with open("out/configs.csv", newline="") as file:
        assert [row["OPTIMIZER.lr"] for row in csv.DictReader(file)] == ["0.3", "0.2", "0.1"]


def test_baseline_that_is_no_config_of_the_sweep_is_rejected_before_it_starts(
    program: list[str], settled: Check
) -> None:
    words = ["OPTIMIZER.lr=0.1,0.3", "RUN.seed=seeds(2)", "hydra.sweep.dir=out"]
    settings = ComparisonSettings(("OPTIMIZER.lr=0.2",))
    with raises(ConfigError, code="sweep.baseline"):
        sweep(words, check=settled, command=program, comparison=settings)
    assert not Path("out").exists()


def test_values_keep_their_type_and_quotes(program: list[str]) -> None:
    words = ["A.list=[1,2],[3]", "A.text='a,b=c'", "A.other=choice(x,y)", "A.n=range(1,2)"]
    words += ["hydra.sweep.dir=out", "B.keep=${A.n}"]
    assert sweep(words, check=accept, command=program) == 0
    found = [starts[0] for starts in started("out").values()]
    assert len(found) == 4
    expected = ["A.text='a,b=c'", "B.keep=${A.n}", "A.list=[1,2]", "A.other=y", "A.n=1"]
    assert sorted(expected) in [sorted(one) for one in found]


def test_every_value_is_checked_before_any_job_starts(program: list[str]) -> None:
    seen: list[list[str]] = []

    def check(overrides: Sequence[str]) -> None:
        seen.append(list(overrides))
        if "LOSS=focl" in overrides:
            raise ConfigError("LOSS=focl: no such file")

    with pytest.raises(ConfigError, match="LOSS=focl"):
        sweep(["A.x=1,2", "B.y=3", "LOSS=a,b,focl", "~C.z"], check=check, command=program)
    assert seen == [
        ["B.y=3", "~C.z", "A.x=1", "LOSS=a"],
        ["B.y=3", "~C.z", "A.x=2", "LOSS=b"],
        ["B.y=3", "~C.z", "A.x=1", "LOSS=focl"],
    ]
    assert not Path("runs").exists()


def test_what_cannot_be_read_is_left_to_the_check(program: list[str]) -> None:
    def check(overrides: Sequence[str]) -> None:
        raise ConfigError(f"seen {overrides}")

    with pytest.raises(ConfigError, match=r"A.x=\[1"):
        sweep(["A.x=[1"], check=check, command=program)


def test_single_run_in_a_folder_with_date_and_spaces(program: list[str]) -> None:
    before = list(sys.argv)
    words = ["A.x=1", "hydra.sweep.dir='my out/${now:%Y}'"]
    assert sweep(words, check=accept, command=program) == 0
    assert list(started(f"my out/{time.strftime('%Y')}").values()) == [[["A.x=1"]]]
    assert sys.argv == before


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("RUN.dir=runs/x", "RUN.dir=runs/x: "),
        ("RUN.dir=a,b", "RUN.dir="),
        ("A.x=3,4", "A.x is swept twice"),
        ("A.y=interval(0,1)", "A.y=interval(0,1): "),
        ("LOSS=glob(*)", "LOSS=a,b"),
        ("hydra.sweep.dir='${no.such}'", "hydra.sweep.dir="),
    ],
)
def test_override_that_cannot_be_swept_is_rejected(
    program: list[str], word: str, named: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(["A.x=1,2", word], check=accept, command=program)
    assert named in str(caught.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "word", ["hydra/launcher=no_such", "hydra.launcher.no_such=2", "hydra/sweeper=no_such"]
)
def test_bad_setting_of_hydra_is_named_and_leaves_no_folder(
    program: list[str], capfd: pytest.CaptureFixture[str], word: str
) -> None:
    assert sweep(["A.x=1,2", word], check=accept, command=program) == 2
    assert "no_such" in capfd.readouterr().err
    assert not list(Path("runs").iterdir())


def test_folder_in_use_by_another_sweep_is_rejected(program: list[str]) -> None:
    Path("out").mkdir()
    with open("out/.sweep.lock", "ab") as file:
        holding = subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-c",
                "import fcntl, sys, time; fcntl.lockf(0, fcntl.LOCK_EX); print(); time.sleep(60)",
            ],
            stdin=file,
            stdout=subprocess.PIPE,
        )
    try:
        assert holding.stdout is not None
        holding.stdout.readline()
        with pytest.raises(FolderInUseError, match=r"hydra.sweep.dir = 'out'"):
            sweep(["A.x=1", "hydra.sweep.dir=out"], check=accept, command=program)
    finally:
        holding.kill()
        holding.communicate()
    assert sweep(["A.x=1", "hydra.sweep.dir=out"], check=accept, command=program) == 0


def test_equal_values_are_one_run(program: list[str]) -> None:
    words = ["OPTIMIZER.lr=0.1,0.10,1e-1", "A.text=a,'a',b", "hydra.sweep.dir=out"]
    assert sweep(words, check=accept, command=program) == 0
    assert sorted(words[0] + " " + words[1] for ((words),) in started("out").values()) == [
        f"OPTIMIZER.lr=0.1 A.text={text}" for text in "ab"
    ]


# Takes a while to save when SIGTERM comes, and runs for long otherwise.
LONG = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("RUN.dir=").strip("'"))
folder.mkdir(parents=True, exist_ok=True)
def stop(*_):
    time.sleep(0.2)
    (folder / "saved").write_text("")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(folder / "started").write_text("")
time.sleep(60)
"""


def fork_sweep(words: list[str], program: str, printed: Path) -> int:
    """Sweep in a fork of this process, which ends with the exit code of the sweep; return its
    id."""
    if pid := os.fork():
        return pid
    code = 70
    try:
        output = os.open(printed, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pytest has replaced both by its own files.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        code = sweep(words, check=accept, command=[sys.executable, "-S", program])
    except BaseException:  # noqa: BLE001 - a fork must not continue with the tests
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.parametrize(
    ("launcher", "at_once"), [("basic", 1), pytest.param("joblib", 2, marks=pytest.mark.slow)]
)
def test_sigterm_reaches_the_jobs_which_save_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, at_once: int
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["A.x=1,2,3", "hydra.sweep.dir=out", f"hydra/launcher={launcher}"]
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
        words.append("hydra.launcher.n_jobs=2")
    Path("program.py").write_text(LONG)
    pid = fork_sweep(words, "program.py", Path("printed"))
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("out/*/started"))) < at_once and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(pid, signal.SIGTERM)
    _, ended = os.waitpid(pid, 0)
    text = Path("printed").read_text()
    assert os.waitstatus_to_exitcode(ended) == 143, text
    assert (
        len(list(tmp_path.glob("out/*/started")))
        == len(list(tmp_path.glob("out/*/saved")))
        == at_once
    )
    assert "SIGTERM" in text
    assert re.search(rf"3 runs in out: .*\b{3 - at_once} waiting", text)
    assert "Traceback" not in text
    assert not list(tmp_path.glob("out/.stop-*"))


@pytest.mark.slow
def test_killed_worker_of_joblib_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "program.py").write_text(
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    )
    (tmp_path / "main.py").write_text(
        "import sys\n"
        "from phasetrain.addons.experiments.sweep import sweep\n"
        "words = ['A.x=1,2', 'hydra.sweep.dir=out', 'hydra/launcher=joblib']\n"
        "sys.exit(sweep(words, check=lambda one: None, command=[sys.executable, 'program.py']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    # Either job may end the pool before the other one has started.
    assert re.search(r": A\.x=[12] in out/", done.stderr)
    assert "2 runs in out:" in done.stdout


class TestPruning:
    # The plan of the program: 4 updates, tested after each one.
    PLAN = TrialPlan(4, (1, 2, 3, 4), (2, 4))

    @pytest.fixture(autouse=True)
    def plan(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def plan_trial(overrides: Sequence[str], monitor: str, config_dir: str | None) -> TrialPlan:
            return self.PLAN

        monkeypatch.setattr("phasetrain.addons.experiments.sweep.plan_trial", plan_trial)

    @pytest.mark.addon("report")
    @pytest.mark.by_default("basic")
    @pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
    def test_runs_are_started_with_the_update_at_which_they_pause(
        self,
        program: list[str],
        settled: Check,
        capfd: pytest.CaptureFixture[str],
        launcher: str,
    ) -> None:
        if launcher != "basic":
            plugin = launcher.partition("_")[0]
            pytest.importorskip(f"hydra_plugins.hydra_{plugin}_launcher")
        words = ["OPTIMIZER.lr=0.1,0.2,0.3", "hydra.sweep.dir=out", f"hydra/launcher={launcher}"]
        words.append("hydra.sweeper.prune={eta: 3, min: 2 updates}")
        assert sweep(words, check=settled, command=program) == 0
        names = {hash_overrides([f"OPTIMIZER.lr={lr}"]): lr for lr in ("0.1", "0.2", "0.3")}
        # The program ends each run at once, and has nothing left to do after the first rung.
        assert {names[name]: starts for name, starts in started("out").items()} == {
            lr: [[f"OPTIMIZER.lr={lr}", "RUN.pause_at=2"]] for lr in names.values()
        }
        told = capfd.readouterr().out
        assert "halving with eta 3: runs are compared by test/accuracy at updates 2, 4" in told
        assert "rung 1 of 2: 1 of 3 runs continue" in told
        content = json.loads(Path("out/results.json").read_text())
        assert content["prune"]["decisions"][0]["promoted"] == [
            hash_overrides(["OPTIMIZER.lr=0.3"])
        ]
        assert "Rungs" in Path("out/sweep.html").read_text()

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (["OPTIMIZER.lr=1,2", "hydra.sweeper.prune.eta=1"], "sweep.prune_value"),
            (["OPTIMIZER.lr=1,2", "hydra.sweeper.prune=halving"], "sweep.prune_runs"),
            (["OPTIMIZER.lr=1,2,3", "hydra.sweeper.prune.min=3 epochs"], "sweep.prune_no_test"),
            (["RUN.seed=1,2,3", "hydra.sweeper.prune=halving"], "sweep.prune_repeats"),
            (
                ["A.x=1,2,3", "hydra/sweeper=nevergrad", "hydra.sweeper.prune=halving"],
                "sweep.prune_sweeper",
            ),
        ],
    )
    def test_bad_settings_are_rejected_before_anything_starts(
        self, program: list[str], settled: Check, words: list[str], code: str
    ) -> None:
        with raises(ConfigError, code=code):
            sweep([*words, "hydra.sweep.dir=out"], check=settled, command=program)
        assert not Path("out").exists()

    def test_without_a_metric_it_is_rejected(self, program: list[str]) -> None:
        words = ["OPTIMIZER.lr=1,2,3", "hydra.sweep.dir=out", "hydra.sweeper.prune=halving"]
        with raises(ConfigError, code="sweep.no_monitor"):
            sweep(words, check=accept, command=program)
        assert not Path("out").exists()
