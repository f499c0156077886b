import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from phasetrain.commands.sweep import Check, hash_overrides, sweep
from phasetrain.config.attrdict import AttrDict
from phasetrain.errors import ConfigError, FolderInUseError


def accept(overrides: Sequence[str]) -> None: ...


def started(folder: str) -> dict[str, list[list[str]]]:
    """Return name of the run folder -> the words of each start."""
    return {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in Path(folder).glob("*/starts.jsonl")
    }


def test_each_combination_is_a_process_with_a_folder_of_its_own(program: list[str]) -> None:
    words = [
        "OPTIMIZER.lr=0.1,0.01",
        "LOSS=a,b",
        "~OPTIMIZER.momentum",
        "RUN.name=x",
        "hydra.sweep.dir=out",
    ]
    assert sweep(words, "my/options", check=accept, command=program) == 0
    fixed = ["~OPTIMIZER.momentum", "RUN.name=x"]
    combinations = [
        [f"OPTIMIZER.lr={lr}", f"LOSS={loss}"] for lr in ("0.1", "0.01") for loss in ("a", "b")
    ]
    assert started("out") == {
        hash_overrides([*fixed, *c]): [["--config-dir", "my/options", *fixed, *c]]
        for c in combinations
    }


class TestTheSameCommandAgain:
    def test_starts_nothing_that_has_finished(self, program: list[str], settled: Check) -> None:
        for _ in range(2):
            assert sweep(["OPTIMIZER.lr=1,2"], check=settled, command=program) == 0
        (folder,) = Path("runs").iterdir()
        assert folder.name == f"sweep-{hash_overrides(['OPTIMIZER.lr=1,2'])}"
        assert [len(starts) for starts in started(str(folder)).values()] == [1, 1]

    def test_starts_what_has_finished_with_another_config(
        self, program: list[str], settled: Check
    ) -> None:
        assert sweep(["A.x=1,2", "hydra.sweep.dir=out"], check=settled, command=program) == 0

        def changed(overrides: Sequence[str]) -> AttrDict:
            return AttrDict({**settled(overrides), "more": "A.x=2" in overrides})

        assert sweep(["A.x=1,2", "hydra.sweep.dir=out"], check=changed, command=program) == 0
        assert [len(starts) for starts in started("out").values()] == [2, 2]

    def test_starts_in_its_folder_what_has_not(self, program: list[str], settled: Check) -> None:
        words = ["LOSS=bad,good", "hydra.sweep.dir=out"]
        assert [sweep(words, check=settled, command=program) for _ in range(2)] == [1, 1]
        starts = {name: len(found) for name, found in started("out").items()}
        assert starts == {hash_overrides(["LOSS=bad"]): 2, hash_overrides(["LOSS=good"]): 1}

    def test_starts_only_what_was_added(self, program: list[str], settled: Check) -> None:
        assert (
            sweep(["OPTIMIZER.lr=0.1,0.2", "hydra.sweep.dir=out"], check=settled, command=program)
            == 0
        )
        assert (
            sweep(
                ["OPTIMIZER.lr=0.1,0.2,0.4", "hydra.sweep.dir=out"], check=settled, command=program
            )
            == 0
        )
        assert [len(starts) for starts in started("out").values()] == [1, 1, 1]
        assert len(json.loads(Path("out/results.json").read_text())["runs"]) == 3


def test_optuna_and_the_table_go_by_the_metric_that_the_sampler_is_given(
    program: list[str], settled: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    words = [
        "OPTIMIZER.lr=interval(0,1)",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweep.dir=out",
    ]
    assert (
        sweep([*words, "hydra.sweeper.monitor=-test/accuracy"], check=settled, command=program) == 0
    )
    assert "3 runs in out: 3 finished" in capsys.readouterr().out
    found = json.loads(Path("out/results.json").read_text())
    bests = [one["best"] for one in found["runs"]]
    assert (found["monitor"], bests) == ("-test/accuracy", sorted(bests))
    assert "FAIL" not in Path("out/study.journal").read_text()


class TestTheTable:
    def test_has_a_row_per_run_the_best_one_first(
        self, program: list[str], settled: Check, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert (
            sweep(["OPTIMIZER.lr=0.1,0.3,1", "hydra.sweep.dir=out"], check=settled, command=program)
            == 0
        )
        names = [hash_overrides([f"OPTIMIZER.lr={lr}"]) for lr in ("0.3", "0.1", "1")]
        rows = capsys.readouterr().out.splitlines()
        start = rows.index("3 runs in out: 3 finished")
        assert rows[start + 1].split("  ")[0] == "OPTIMIZER.lr"
        assert [row.split() for row in rows[start + 3 : start + 6]] == [
            ["0.3", "1.0000", "2", "0.8750", "4/4", "2.0", "s", "finished", names[0]],
            ["0.1", "0.8000", "2", "0.6750", "4/4", "2.0", "s", "finished", names[1]],
            ["1", "0.3000", "2", "0.1750", "4/4", "2.0", "s", "finished", names[2]],
        ]

    def test_tells_what_has_failed_and_why(
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

    def test_is_there_again_with_the_same_command(
        self, program: list[str], settled: Check, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for _ in range(2):
            assert (
                sweep(
                    ["OPTIMIZER.lr=0.1,0.3", "hydra.sweep.dir=out"], check=settled, command=program
                )
                == 0
            )
        first, second = capsys.readouterr().out.split("2 runs in out: 2 finished")[1:]
        assert second.startswith(", 2 of them before this command\n")
        assert first.splitlines()[1:5] == second.splitlines()[1:5]

    def test_stands_in_files_too(self, program: list[str], settled: Check) -> None:
        assert (
            sweep(["OPTIMIZER.lr=0.1,0.3", "hydra.sweep.dir=out"], check=settled, command=program)
            == 0
        )
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
        assert f'<a href="{hash_overrides(["OPTIMIZER.lr=0.3"])}/report.html">' in page


def test_a_group_and_a_key_below_it_are_swept_together(program: list[str]) -> None:
    assert (
        sweep(["LOSS=a,b", "LOSS.gamma=1,2", "hydra.sweep.dir=out"], check=accept, command=program)
        == 0
    )
    assert sorted(words for ((words),) in started("out").values()) == [
        [f"LOSS={loss}", f"LOSS.gamma={gamma}"] for loss in "ab" for gamma in "12"
    ]


def test_values_arrive_as_they_were_meant(program: list[str]) -> None:
    words = [
        "A.list=[1,2],[3]",
        "A.text='a,b','c=d'",
        "A.other=choice(x,y)",
        "A.n=range(1,3)",
        "hydra.sweep.dir=out",
    ]
    assert sweep([*words, "B.keep=${A.n}"], check=accept, command=program) == 0
    found = started("out")
    assert len(found) == 16
    assert ["B.keep=${A.n}", "A.list=[1,2]", "A.text='c=d'", "A.other=y", "A.n=2"] in [
        s[0] for s in found.values()
    ]


def test_a_failed_job_is_named_and_the_others_still_run(
    program: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep(["LOSS=good,bad,fine", "hydra.sweep.dir=out"], check=accept, command=program) == 1
    assert len(started("out")) == 3
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("exit code")]
    assert told == [f"exit code 3: LOSS=bad in out/{hash_overrides(['LOSS=bad'])}"]
    result = json.loads(Path(f"out/{hash_overrides(['LOSS=bad'])}.json").read_text())
    assert (result["exit_code"], result["overrides"]) == (3, ["LOSS=bad"])


def test_failures_of_an_earlier_sweep_do_not_count(program: list[str]) -> None:
    assert sweep(["LOSS=bad,good", "hydra.sweep.dir=out"], check=accept, command=program) == 1
    assert sweep(["LOSS=good,fine", "hydra.sweep.dir=out"], check=accept, command=program) == 0


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


def test_one_run_is_a_sweep_too(program: list[str]) -> None:
    assert sweep(["A.x=1", "hydra.sweep.dir=out"], check=accept, command=program) == 0
    assert list(started("out").values()) == [[["A.x=1"]]]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("RUN.dir=runs/x", "RUN.dir=runs/x: all runs of a sweep would share this folder"),
        ("RUN.dir=a,b", "would share this folder"),
        ("A.x=3,4", "A.x is swept twice; give all its values in one place"),
        ("A.y=interval(0,1)", "A.y=interval(0,1): only a sampler can choose from an interval"),
        ("LOSS=glob(*)", "list the values, as in LOSS=a,b"),
        ("hydra.sweep.dir='${no.such}'", "hydra.sweep.dir="),
    ],
)
def test_what_a_sweep_refuses(program: list[str], word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep(["A.x=1,2", word], check=accept, command=program)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "word", ["hydra/launcher=no_such", "hydra.launcher.no_such=2", "hydra/sweeper=no_such"]
)
def test_a_bad_setting_of_hydra_is_told_and_leaves_nothing(
    program: list[str], capfd: pytest.CaptureFixture[str], word: str
) -> None:
    assert sweep(["A.x=1,2", word], check=accept, command=program) == 2
    assert "no_such" in capfd.readouterr().err
    assert not list(Path("runs").iterdir())


def test_two_sweeps_in_one_folder(program: list[str]) -> None:
    Path("out").mkdir()
    with open("out/.sweep.lock", "ab") as file:
        holding = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import fcntl, sys, time; fcntl.lockf(0, fcntl.LOCK_EX); print(); time.sleep(60)",
            ],
            stdin=file,
            stdout=subprocess.PIPE,
        )
    try:
        assert holding.stdout is not None
        holding.stdout.readline()
        with pytest.raises(
            FolderInUseError, match=r"hydra.sweep.dir = 'out' is in use by another sweep"
        ):
            sweep(["A.x=1,2", "hydra.sweep.dir=out"], check=accept, command=program)
    finally:
        holding.kill()
        holding.communicate()
    assert sweep(["A.x=1,2", "hydra.sweep.dir=out"], check=accept, command=program) == 0


def test_equal_values_are_one_run(program: list[str]) -> None:
    words = ["OPTIMIZER.lr=0.1,0.10,1e-1,0.2", "A.text=a,'a',b", "hydra.sweep.dir=out"]
    assert sweep(words, check=accept, command=program) == 0
    assert sorted(words[0] + " " + words[1] for ((words),) in started("out").values()) == [
        f"OPTIMIZER.lr={lr} A.text={text}" for lr in ("0.1", "0.2") for text in "ab"
    ]


def test_the_folder_may_hold_the_date_and_spaces(program: list[str]) -> None:
    assert (
        sweep(["A.x=1,2", "hydra.sweep.dir='my out/${now:%Y}'"], check=accept, command=program) == 0
    )
    assert len(started(f"my out/{time.strftime('%Y')}")) == 2


def test_arguments_of_the_process_are_left_as_they_were(program: list[str]) -> None:
    before = list(sys.argv)
    sweep(["A.x=1", "hydra.sweep.dir=out"], check=accept, command=program)
    assert sys.argv == before


# Saves for half a second when SIGTERM comes, and is long at work otherwise.
LONG = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[-1].removeprefix("RUN.dir=").strip("'"))
folder.mkdir(parents=True, exist_ok=True)
def stop(*_):
    time.sleep(0.5)
    (folder / "saved").write_text("")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
(folder / "started").write_text("")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("launcher", "at_once"), [("basic", 1), pytest.param("joblib", 2, marks=pytest.mark.slow)]
)
def test_sigterm_reaches_the_jobs_which_end_by_themselves_and_no_other_starts(
    tmp_path: Path, launcher: str, at_once: int
) -> None:
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    words = ["A.x=1,2,3,4", "hydra.sweep.dir=out", f"hydra/launcher={launcher}"]
    words += ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    (tmp_path / "program.py").write_text(LONG)
    (tmp_path / "main.py").write_text(
        "import sys\n"
        "from phasetrain.commands.sweep import sweep\n"
        f"sys.exit(sweep({words}, check=lambda one: None, command=[sys.executable, 'program.py']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with open(tmp_path / "printed", "wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "main.py"],
            cwd=tmp_path,
            env=environment,
            stdout=printed,
            stderr=printed,
        )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("out/*/started"))) < at_once and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143, (tmp_path / "printed").read_text()
    assert (
        len(list(tmp_path.glob("out/*/started")))
        == len(list(tmp_path.glob("out/*/saved")))
        == at_once
    )
    text = (tmp_path / "printed").read_text()
    assert "stopped by SIGTERM; re-run the command to resume" in text
    assert f"4 runs in out: {4 - at_once} waiting" in text or f", {4 - at_once} waiting" in text
    assert "Traceback" not in text
    assert not list(tmp_path.glob("out/.stop-*"))


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_of(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "program.py").write_text(
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    )
    (tmp_path / "main.py").write_text(
        "import sys\n"
        "from phasetrain.commands.sweep import sweep\n"
        "words = ['A.x=1,2', 'hydra.sweep.dir=out', 'hydra/launcher=joblib']\n"
        "sys.exit(sweep(words, check=lambda one: None, command=[sys.executable, 'program.py']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
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
    assert "its end was not seen: A.x=" in done.stderr
    assert "2 runs in out:" in done.stdout
