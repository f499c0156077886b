import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from phasetrain.errors import ConfigError
from phasetrain.sweep import digest, sweep

# Stands for the program: notes how it was started in its RUN.dir, and ends with code 3 where LOSS=bad.
PROGRAM = """
import json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[-1].removeprefix("RUN.dir=").strip("'"))
folder.mkdir(parents=True, exist_ok=True)
with (folder / "starts.jsonl").open("a") as file:
    file.write(json.dumps(words[:-1]) + "\\n")
sys.exit(3 if "LOSS=bad" in words else 0)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return [sys.executable, str(tmp_path / "program.py")]


def accept(overrides: Sequence[str]) -> None: ...


def started(folder: str) -> dict[str, list[list[str]]]:
    """Return name of the run folder -> the words of each start."""
    return {
        path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in Path(folder).glob("*/starts.jsonl")
    }


def test_each_combination_is_a_process_with_a_folder_of_its_own(program: list[str]) -> None:
    words = ["OPTIMIZER.lr=0.1,0.01", "LOSS=a,b", "~OPTIMIZER.momentum", "RUN.name=x", "hydra.sweep.dir=out"]
    assert sweep(words, "my/options", check=accept, command=program) == 0
    fixed = ["~OPTIMIZER.momentum", "RUN.name=x"]
    combinations = [[f"OPTIMIZER.lr={lr}", f"LOSS={loss}"] for lr in ("0.1", "0.01") for loss in ("a", "b")]
    assert started("out") == {digest([*fixed, *c]): [["--config-dir", "my/options", *fixed, *c]] for c in combinations}


def test_the_same_command_again_starts_each_job_in_its_folder(program: list[str]) -> None:
    for _ in range(2):
        assert sweep(["OPTIMIZER.lr=1,2"], check=accept, command=program) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name == f"sweep-{digest(['OPTIMIZER.lr=1,2'])}"
    assert [len(starts) for starts in started(str(folder)).values()] == [2, 2]


def test_a_group_and_a_key_below_it_are_swept_together(program: list[str]) -> None:
    assert sweep(["LOSS=a,b", "LOSS.gamma=1,2", "hydra.sweep.dir=out"], check=accept, command=program) == 0
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
    assert ["B.keep=${A.n}", "A.list=[1,2]", "A.text='c=d'", "A.other=y", "A.n=2"] in [s[0] for s in found.values()]


def test_a_failed_job_is_named_and_the_others_still_run(program: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert sweep(["LOSS=good,bad,fine", "hydra.sweep.dir=out"], check=accept, command=program) == 1
    assert len(started("out")) == 3
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("exit code")]
    assert told == [f"exit code 3: LOSS=bad in out/{digest(['LOSS=bad'])}"]
    result = json.loads(Path(f"out/{digest(['LOSS=bad'])}.json").read_text())
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
        ("LOSS=glob(*)", "list the values, as in LOSS=a,b"),
        ("hydra.sweep.dir='${no.such}'", "hydra.sweep.dir="),
    ],
)
def test_what_a_sweep_refuses(program: list[str], word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sweep([word, "A.x=1,2"], check=accept, command=program)
    assert message in str(caught.value)


def test_a_bad_setting_of_hydra_is_an_exit_code(program: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert sweep(["A.x=1,2", "hydra/launcher=no_such"], check=accept, command=program) == 1
    assert "no_such" in capfd.readouterr().err


def test_the_folder_may_hold_the_date_and_spaces(program: list[str]) -> None:
    assert sweep(["A.x=1,2", "hydra.sweep.dir='my out/${now:%Y}'"], check=accept, command=program) == 0
    assert len(started(f"my out/{time.strftime('%Y')}")) == 2


def test_arguments_of_the_process_are_left_as_they_were(program: list[str]) -> None:
    before = list(sys.argv)
    sweep(["A.x=1", "hydra.sweep.dir=out"], check=accept, command=program)
    assert sys.argv == before


def test_sigterm_reaches_the_job_which_ends_by_itself_and_no_other_starts(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        "    time.sleep(0.5)\n"  # saving
        "    pathlib.Path('saved').write_text('')\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "with open('starts', 'a') as file: file.write('x')\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "main.py").write_text(
        "import sys\n"
        "from phasetrain.sweep import sweep\n"
        "sys.exit(sweep(['A.x=1,2'], check=lambda one: None, command=[sys.executable, 'program.py']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 30
    while not (tmp_path / "starts").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "starts").read_text() == "x"
