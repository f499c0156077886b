"""From two configs or revisions to the difference, with runs that take no time."""

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_runs import FakeRuns, cached_facts
from raising import raises

from phasetrain.addons.experiments.bisect.bisect import Bisection, bisect
from phasetrain.addons.experiments.judge.contenders import FACTS
from phasetrain.addons.experiments.judge.facts import Facts, Order
from phasetrain.addons.experiments.judge.processes import StoppedError, WorkingFolder
from phasetrain.addons.experiments.options import BisectOptions
from phasetrain.errors import ConfigError
from phasetrain.runs.ledger import LedgerRecord, encode_ledger

HARMLESS = (
    *("MODEL.width=16", "OPTIMIZER.clip_value=9", "DATA.TRAIN.subset.seed=1", "MODEL.dropout=0.2"),
    *("OPTIMIZER.momentum=0.8", "DATA.TRAIN.batch_size=32", "DATA.TEST.batch_size=64"),
)
LR = "OPTIMIZER.lr=0.5"
SLIGHT = "OPTIMIZER.lr=0.1001"
LATE = "OPTIMIZER.weight_decay=0.3"


class Runs(FakeRuns):
    """Runs in which `OPTIMIZER.weight_decay` acts after the first updates, and lowers the accuracy
    to 0.6; a learning rate above 5 is an error, as is the file `broken` in the working directory.

    Attributes:
        until_stop: number of runs after which a signal comes; None: none comes.
        spread: standard deviation of the accuracy over seeds with a learning rate of 0.5.
    """

    until_stop: int | None = None
    spread = 0.0

    def __call__(
        self, words: Sequence[str], working_folder: WorkingFolder, output: Path, **how: Any
    ) -> int:
        if words[0] == FACTS:
            return super().__call__(words, working_folder, output)
        if self.until_stop is not None:
            self.until_stop -= 1
            if self.until_stop < 0:
                raise StoppedError(15)
        given = dict(word.split("=", 1) for word in words if "=" in word)
        lr = Path(working_folder.path, "lr.txt")
        words = [*words, f"OPTIMIZER.lr={lr.read_text()}"] if lr.exists() else words
        is_broken = Path(working_folder.path, "broken").exists()
        if is_broken or float(given.get("OPTIMIZER.lr", 0)) > 5:
            output.write_text("SyntaxError: invalid syntax\n" if is_broken else "lr: too large\n")
            return 1
        return super().__call__(words, working_folder, output)

    def write_run(self, folder: Path, given: dict[str, str]) -> None:
        # Whole or not at all, as a real run finishes.
        unfinished = folder.with_suffix(".unfinished")
        self._write_run(unfinished, given)
        unfinished.rename(folder)

    def _write_run(self, folder: Path, given: dict[str, str]) -> None:
        super().write_run(folder, given)
        decay = float(given.get("OPTIMIZER.weight_decay", 0))
        path = folder / "metrics.jsonl"
        if not path.exists():
            return
        line = json.loads(path.read_text())
        seed = int(given["RUN.seed"])
        if given.get("OPTIMIZER.lr") == "0.5":
            line["metrics"]["accuracy"] += random.Random(seed).gauss(0, self.spread)
        if decay:
            line["metrics"]["accuracy"] = max(line["metrics"]["accuracy"] - decay, 0.6)
        path.write_text(json.dumps(line) + "\n")
        if not decay:
            return
        records = [LedgerRecord(n, 0, n, 4, 0, n, 0, seed, decay, 0.0, 0.1) for n in range(1, 11)]
        (folder / "steps.ledger").write_bytes(encode_ledger(records))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Return a launcher, in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def collect(order: Order) -> Facts:
        return cached_facts(order)

    monkeypatch.setattr("phasetrain.addons.experiments.judge.facts.collect_facts", collect)
    return Runs()


def find(runs: Runs, *words: str, **options: Any) -> Bisection:
    return bisect(words, BisectOptions(**{"short": 4} | options), launch=runs)


def list_keys(found: Bisection) -> list[list[str]]:
    return [[each["key"] for each in cause] for cause in found.causes]


def read_verdicts(found: Bisection) -> list[list[str]]:
    """Return subject and kind of each line of the log, without lines that a kill has torn."""
    verdicts = []
    for line in Path(found.log).read_text().splitlines():
        with suppress(ValueError):
            content = json.loads(line)
            verdicts.append([content.get("subject", ""), content.get("kind", "")])
    return verdicts


def fork_process(call: Callable[[], object]) -> int:
    """Call a function in a fork of this process, and return its pid."""
    pid = os.fork()
    if not pid:
        try:
            call()
        finally:
            os._exit(0)
    return pid


BAD = " ".join(["digits", *HARMLESS[:4], LR, *HARMLESS[4:]])


class TestConfigs:
    @pytest.mark.feature(
        "bisect",
        "the smallest set of key changes, or the first commit, that makes the difference, by the "
        "bits of short runs and by `judge`; resumes after a kill",
        "`phasetrain bisect`",
    )
    @pytest.mark.parametrize("is_bits", [True, False])
    def test_planted_key_is_found(self, runs: Runs, is_bits: bool) -> None:
        found = find(runs, "digits", BAD, is_bits=is_bits)
        assert list_keys(found) == [["OPTIMIZER.lr"]]
        assert (found.exit_code, found.by, found.suspects) == (0, "bits", 8)
        (change,) = found.causes[0]
        assert (change["good"], change["bad"], change["override"]) == (0.1, 0.5, LR)
        assert "OPTIMIZER.lr: 0.1 -> 0.5" in found.to_text()
        # The runs of GOOD and BAD stay, those of the candidates do not.
        assert len(list(Path("runs").glob("bisect-*/judge-*"))) == 2

    def test_killed_call_resumes_to_the_same_answer(self, runs: Runs) -> None:
        complete = find(runs, "digits", BAD)
        count = len(runs.launched)
        trained = find(runs, "digits", BAD)
        assert (trained.runs, trained.made, trained.causes) == (0, 0, complete.causes)
        for stop in range(0, count, 3):
            for path in Path("runs").glob("bisect-*"):
                path.rename(Path(f"old-{stop}"))
            runs.launched.clear()
            runs.until_stop = stop
            with raises(StoppedError, code="judge.stopped"):
                find(runs, "digits", BAD)
            runs.until_stop = None
            assert find(runs, "digits", BAD).causes == complete.causes
            assert len(runs.launched) == count

    @pytest.mark.slow
    def test_killed_at_random_moments(self, runs: Runs) -> None:
        runs.noise = 0.0001
        bad = f"{BAD} PHASES.epochs=2"
        began = time.perf_counter()
        complete = find(runs, "digits", bad, is_full=True)
        duration = time.perf_counter() - began
        expected = read_verdicts(complete)
        shutil.rmtree("runs")
        generator = random.Random(0)
        killed = 0
        while killed < 10:
            child = fork_process(lambda: find(runs, "digits", bad, is_full=True))
            # Within the first part of what is left, so that the kills spread over the whole search.
            time.sleep(generator.uniform(0, duration / 4))
            os.kill(child, signal.SIGKILL)
            if os.waitpid(child, 0)[1] == signal.SIGKILL:
                killed += 1
            else:  # it had ended: once more from the start
                assert read_verdicts(complete) == expected
                shutil.rmtree("runs")
        assert find(runs, "digits", bad, is_full=True).causes == complete.causes
        assert read_verdicts(complete) == expected

    def test_torn_line_of_the_log_is_decided_again(self, runs: Runs) -> None:
        complete = find(runs, "digits", BAD)
        log = Path(complete.log)
        log.write_bytes(log.read_bytes()[:-20])
        again = find(runs, "digits", BAD)
        assert (again.causes, again.made) == (complete.causes, 1)
        assert len(log.read_text().splitlines()) == complete.decided + 2
        assert find(runs, "digits", BAD).made == 0

    def test_metric_decides_about_sets_with_other_bits(self, runs: Runs) -> None:
        runs.noise = 0.0001
        bad = f"{BAD} PHASES.epochs=2"
        found = find(runs, "digits", bad, is_full=True)
        assert list_keys(found) == [["OPTIMIZER.lr"]]
        assert found.by == "test/accuracy"
        assert list_keys(find(runs, "digits", bad, is_full=True, is_bits=True)) == [
            ["OPTIMIZER.lr", "PHASES.epochs"]
        ]

    def test_accuracy_that_spreads_over_seeds_is_compared_seed_by_seed(self, runs: Runs) -> None:
        runs.noise = 0.0001
        runs.spread = 0.07
        found = find(runs, "digits", f"{BAD} PHASES.epochs=2", is_full=True)
        assert list_keys(found) == [["OPTIMIZER.lr"]]
        assert (found.by, found.undecided) == ("test/accuracy", [])

    def test_each_of_two_keys_that_suffice_is_found(self, runs: Runs) -> None:
        runs.noise = 0.0001
        found = find(runs, "digits", f"{BAD} {LATE}", is_full=True)
        assert sorted(list_keys(found)) == [["OPTIMIZER.lr"], ["OPTIMIZER.weight_decay"]]

    def test_key_that_acts_late_is_not_hidden_by_an_early_one(self, runs: Runs) -> None:
        runs.noise = 0.0001
        found = find(runs, "digits", f"digits {SLIGHT} {LATE}")
        assert list_keys(found) == [["OPTIMIZER.weight_decay"]]
        assert found.extent == "in whole runs"
        # Negative control: bits of short runs alone name the early one.
        early = find(runs, "digits", f"digits {SLIGHT} {LATE}", is_bits=True)
        assert list_keys(early) == [["OPTIMIZER.lr"]]

    def test_whole_runs_follow_if_short_ones_are_equal(self, runs: Runs) -> None:
        found = find(runs, "digits", f"digits {LATE} {HARMLESS[0]}")
        assert (list_keys(found), found.extent) == ([["OPTIMIZER.weight_decay"]], "in whole runs")

    def test_key_with_which_runs_fail(self, runs: Runs) -> None:
        found = find(runs, "digits", BAD.replace(LR, "OPTIMIZER.lr=7"))
        assert (list_keys(found), found.by) == ([["OPTIMIZER.lr"]], "failure")

    @pytest.mark.parametrize(
        ("words", "options", "code"),
        [
            (["digits"], {}, "cli.usage"),
            (["digits", "digits MODEL.width=4", "text_tiny"], {}, "cli.usage"),
            (["digits", "digits CHECKPOINT.every_updates=3"], {}, "bisect.no_difference"),
            (["digits", "digits MODEL.width=4"], {}, "bisect.no_difference"),
            (["digits OPTIMIZER.lr=7", "digits"], {}, "bisect.good_fails"),
            (["digits", "digits RUN.seed=1"], {}, "judge.own_key"),
            (["digits", BAD], {"metric": "test/accurcy", "is_full": True}, "judge.no_metric"),
        ],
    )
    def test_mistakes(self, runs: Runs, words: list[str], options: Any, code: str) -> None:
        if "metric" in options:
            words = [words[0], f"{words[1]} {LATE}"]
        with raises(ConfigError, code=code):
            find(runs, *words, **options)

    @pytest.mark.parametrize("options", [{"short": 0}, {"most_pairs": 2}, {"error_rate": 1}])
    def test_option_out_of_range(self, options: dict[str, Any]) -> None:
        with raises(ConfigError, code="cli.usage"):
            BisectOptions(**options)

    def test_second_call_at_the_same_time(self, runs: Runs) -> None:
        log = Path(find(runs, "digits", BAD).log)
        with log.open("ab") as file, raises(ConfigError, code="bisect.in_use"):
            fcntl.flock(file, fcntl.LOCK_EX)
            find(runs, "digits", BAD)


def git(*words: str) -> str:
    flags = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *flags, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(lr: str, *, broken: bool = False) -> str:
    """Commit a learning rate, perhaps with a mistake that the next commit fixes."""
    Path("lr.txt").write_text(lr)
    Path("README").write_text(git("rev-list", "--count", "--all"))
    Path("broken").unlink(missing_ok=True)
    if broken:
        Path("broken").touch()
    git("add", "-A")
    git("commit", "-q", "-m", f"lr {lr}")
    return git("rev-parse", "HEAD")


@pytest.fixture
def project(runs: Runs) -> Runs:
    """Return a launcher; the working directory is an empty repository."""
    git("init", "-q", "-b", "main")
    Path(".gitignore").write_text("runs/\n")
    return runs


class TestCommits:
    @pytest.mark.feature("bisect")
    def test_first_commit_is_found_and_broken_ones_are_skipped(self, project: Runs) -> None:
        first = commit("0.1")
        commit("0.1", broken=True)
        commit("0.1")
        commit("0.1")
        planted = commit("0.5")
        for number in range(4):
            commit("0.5", broken=number == 0)
        found = find(project, "experiment=digits", range=f"{first}..", is_bits=True)
        assert [each["commit"] for each in found.causes[0]] == [planted]
        assert (found.exit_code, found.suspects) == (0, 8)
        assert len(git("worktree", "list").splitlines()) == 1
        assert find(project, "experiment=digits", range=f"{first}..", is_bits=True).runs == 0

    def test_metric_tells_the_commit_from_one_that_changes_bits(self, project: Runs) -> None:
        project.noise = 0.0001
        first = commit("0.1")
        slight = commit("0.1001")
        commit("0.1001")
        planted = commit("0.5")
        commit("0.5")
        found = find(project, "experiment=digits", range=f"{first}..main")
        assert [each["commit"] for each in found.causes[0]] == [planted]
        found = find(project, "experiment=digits", range=f"{first}..main", is_bits=True)
        assert [each["commit"] for each in found.causes[0]] == [slight]

    def test_commit_on_a_merged_branch(self, project: Runs) -> None:
        first = commit("0.1")
        git("checkout", "-q", "-b", "side")
        planted = commit("0.5")
        git("checkout", "-q", "main")
        Path("other").touch()
        commit("0.1")
        git("merge", "-q", "side", "-X", "theirs", "-m", "merge")
        found = find(project, "experiment=digits", range=f"{first}..main", is_bits=True)
        assert [each["commit"] for each in found.causes[0]] == [planted]

    @pytest.mark.by_default("add", "said")
    @pytest.mark.parametrize("moment", ["add", "prune", "said"])
    def test_signal_outside_of_a_run_leaves_no_worktree(
        self, project: Runs, monkeypatch: pytest.MonkeyPatch, moment: str
    ) -> None:
        first = commit("0.1")
        for lr in ("0.1", "0.1", "0.5"):
            commit(lr)
        run = subprocess.run

        def run_git(words: list[str], **how: Any) -> Any:
            if moment in words:
                signal.raise_signal(signal.SIGTERM)
            return run(words, **how)

        def log_line(*_words: object) -> None:
            if moment == "said":
                signal.raise_signal(signal.SIGTERM)

        options = BisectOptions(range=f"{first}..", is_bits=True, short=4)
        # Without the handler of the command, the signal would have no effect.
        before = signal.signal(signal.SIGTERM, lambda *_call: None)
        try:
            with monkeypatch.context() as patch, raises(StoppedError, code="judge.stopped") as info:
                patch.setattr(subprocess, "run", run_git)
                patch.setattr("phasetrain.addons.experiments.bisect.bisect.log.info", log_line)
                bisect(["experiment=digits"], options, launch=project)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert info.value.exit_code == 143
        assert len(git("worktree", "list").splitlines()) == 1
        assert find(project, "experiment=digits", range=f"{first}..", is_bits=True).is_certain

    def test_several_commits_remain_if_those_before_cannot_be_run(self, project: Runs) -> None:
        first = commit("0.1")
        broken = commit("0.1", broken=True)
        last = commit("0.5")
        found = find(project, "experiment=digits", range=f"{first}..main", is_bits=True)
        assert [each["commit"] for each in found.causes[0]] == [broken, last]
        assert found.exit_code == 9
        assert len(found.undecided) == 1

    def test_commit_that_cannot_be_run_is_the_difference(self, project: Runs) -> None:
        first = commit("0.1")
        commit("0.1")
        planted = commit("0.1", broken=True)
        commit("0.1", broken=True)
        found = find(project, "experiment=digits", range=f"{first}..main")
        assert [each["commit"] for each in found.causes[0]] == [planted]
        assert found.by == "failure"

    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("main", "bisect.range"),
            ("..main", "bisect.range"),
            ("main...main", "bisect.range"),
            ("main..main", "bisect.range"),
            ("main..main~1", "bisect.range"),
            ("mian..main", "judge.unknown_revision"),
        ],
    )
    def test_mistakes(self, project: Runs, text: str, code: str) -> None:
        commit("0.1")
        commit("0.5")
        with raises(ConfigError, code=code):
            find(project, "experiment=digits", range=text)

    def test_folder_without_a_repository(
        self, runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
        with raises(ConfigError):
            find(runs, "experiment=digits", range="a..b")
