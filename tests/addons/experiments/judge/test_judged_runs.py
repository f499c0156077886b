"""Real runs are judged: what changes no bit, what does, and a judgement that is killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import SMALL
from judge_forks import launch_fork

from phasetrain.addons.experiments.judge.judge import JudgeOptions, judge
from phasetrain.addons.experiments.judge.judgement import Judgement
from phasetrain.runs.view import read_status

SHORT = (*SMALL, "PHASES.epochs=1", "MACHINE.threads=1", "HOOKS.report=null")

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.one = nn.Linear(64, 8)
        self.two = nn.Linear(8, classes)

    def forward(self, images):
        return self.two(self.one(images.flatten(1)).relu())
"""


def judge_runs(*words: str, most_pairs: int = 2, short: int = 3) -> Judgement:
    settings = JudgeOptions(short=short, most_pairs=most_pairs)
    return judge(words, settings, launch=launch_fork, say=lambda line: None)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_harmless_changes_are_identical_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("net.py").write_text(NET)
    Path("renamed.py").write_text("# a remark\n" + NET.replace("one", "first"))
    Path("other.py").write_text(NET.replace("relu", "tanh"))
    model = "digits MODEL=null MODEL.name"
    overrides = [word for word in SHORT if not word.startswith("MODEL")]
    candidates = [f"{model}=renamed.Net", f"{model}=net.Net DATA.TRAIN.workers=1"]
    found = judge_runs(f"{model}=net.Net", *candidates, f"{model}=other.Net", *overrides)
    bits = [trial.bits for trial in found.trials]
    assert [trial.is_identical for trial in found.trials] == [True, True, False]
    assert [one and (one.update, one.is_renamed) for one in bits] == [
        (0, True),
        (0, False),
        (1, False),
    ]
    assert len(found.trials[2].pairs) == 2


@pytest.mark.feature("judge")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_judgement_resumes_to_the_same_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("digits", "digits OPTIMIZER.lr=0.05", *SHORT, "CHECKPOINT.every_updates=1")
    (tmp_path / "killed").mkdir()
    monkeypatch.chdir(tmp_path / "killed")
    pid = os.fork()
    if pid == 0:
        os.setpgrp()
        judge_runs(*words, most_pairs=1, short=0)
        os._exit(0)
    while not list(Path("runs").glob("judge-*/seed0/checkpoints/p*")):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = Path("runs").glob("judge-*/seed0")
    assert read_status(left).state == "running"
    resumed = judge_runs(*words, most_pairs=1, short=0).to_json()
    digests = {path.parent.name: read_status(path).digest for path in Path("runs").glob("*/seed*")}
    (tmp_path / "unbroken").mkdir()
    monkeypatch.chdir(tmp_path / "unbroken")
    unbroken = judge_runs(*words, most_pairs=1, short=0).to_json()
    assert resumed == unbroken
    assert digests == {
        path.parent.name: read_status(path).digest for path in Path("runs").glob("*/seed*")
    }
