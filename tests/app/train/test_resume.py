"""What may change between two attempts, what needs consent, and what is rejected with both
values."""

import io
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged import resign
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    status,
    train,
)
from raising import raises
from torch import nn

from phasetrain.app.api import run
from phasetrain.app.setup import resolve_config
from phasetrain.app.train.resume import (
    describe_environment,
    list_code_changes,
    list_packages,
    match_machine,
)
from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.cli import main
from phasetrain.distributed import World
from phasetrain.errors import ChangedError
from phasetrain.runtime.environment import describe_platform
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Supervised

IN_EPOCHS = "OPTIMIZER.SCHEDULES.lr={name: multistep, milestones: [1 epochs]}"


def kill(folder: Path, step: int, *words: str) -> None:
    """Kill a run after `step` steps of this attempt, with a checkpoint of that very step."""
    run_until_killed(folder, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(step)})


def run_and_capture(folder: Path, *words: str) -> str:
    stream = io.StringIO()
    run([*SMALL, f"RUN.dir={folder}", *words], terminal=Terminal(stream, live=False))
    return stream.getvalue()


def steps(folder: Path) -> list[tuple[int, int, int, int]]:
    """Return (epoch, updates, samples, step) of every logged update."""
    return [
        (r["epoch"], r["updates"], r["samples"], r["step"])
        for r in records(folder)
        if r["kind"] == "step"
    ]


def epochs_of_tests(folder: Path) -> list[int]:
    """Return the epoch of every logged test."""
    return [r["epoch"] for r in records(folder) if (r["kind"], r.get("split")) == ("phase", "test")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run, for reading only."""
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was killed after 3 steps, to be copied."""
    folder = tmp_path_factory.mktemp("killed")
    kill(folder, 3)
    return folder


@pytest.fixture
def killed(tmp_path: Path, killed_once: Path) -> Path:
    """Return a folder of this test alone, of a run that was killed after 3 steps."""
    shutil.copytree(killed_once, tmp_path / "killed")
    return tmp_path / "killed"


@pytest.fixture
def finished(tmp_path: Path, unbroken: Path) -> Path:
    """Return a folder of this test alone, of a run that was not killed."""
    shutil.copytree(unbroken, tmp_path / "finished")
    return tmp_path / "finished"


def rejected(error: ChangedError) -> dict[str, tuple[str, str, str]]:
    """Return key -> code, value of the checkpoint, value now."""
    return {one.key: (one.code, one.expected, one.given) for one in error.problems}


class TestForbidden:
    @pytest.mark.feature(
        "5", "config saved with the run and compared on resume", "`config.yaml`, `RUN.allow`"
    )
    def test_both_values_are_shown(self, killed: Path) -> None:
        before = newest(killed).path
        words = ("RUN.seed=1", "MODEL.width=8", "OPTIMIZER.momentum=0.5")
        with pytest.raises(ChangedError) as caught:
            train(killed, *words, "MACHINE.precision=bf16", "METERS.accuracy=null")
        assert rejected(caught.value) == {
            key: ("resume.forbidden_key", then, now)
            for key, then, now in (
                ("RUN.seed", "0", "1"),
                ("MODEL.width", "4", "8"),
                ("OPTIMIZER.momentum", "0.9", "0.5"),
                ("MACHINE.precision", "'fp32'", "'bf16'"),
                ("METERS.accuracy", "{}", "absent"),
            )
        }
        assert newest(killed).path == before
        found = status(killed)
        assert (found["state"], found["exit_code"], found["attempt"]) == ("failed", 1, 1)

    def test_consent_does_not_help(self, killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = [*SMALL, f"RUN.dir={killed}", "MODEL.width=8", "RUN.allow=[PHASES]"]
        assert main(words) == 3
        assert re.search(r"MODEL\.width: .* 4, .* 8", capsys.readouterr().err)

    def test_finished_run_is_not_mistaken_for_another(self, finished: Path) -> None:
        with raises(ChangedError, key="RUN.seed"):
            train(finished, "RUN.seed=1")


class TestFree:
    def test_writing_down_a_derived_value_is_no_change(self, killed: Path, unbroken: Path) -> None:
        with raises(ChangedError, code="resume.forbidden_key", key="OPTIMIZER.accumulate"):
            train(killed, "OPTIMIZER.accumulate=2")
        train(killed, "OPTIMIZER.accumulate=1")
        assert differences_of_runs(unbroken, killed) == []

    def test_it_changes_nothing(self, unbroken: Path, killed: Path) -> None:
        words = (
            "CHECKPOINT.keep_last=2",
            "HOOKS.console={}",
            "DATA.TRAIN.prefetch=5",
            "RUN.name=other",
        )
        train(killed, *words)
        assert differences_of_runs(unbroken, killed) == []


class TestAdjustable:
    @pytest.mark.feature(
        "B10", "a resume that reports changes; every key has a resume class", "`RUN.allow`"
    )
    def test_it_needs_consent(self, killed: Path) -> None:
        with pytest.raises(ChangedError) as caught:
            train(killed, "PHASES.epochs=5", "DATA.TRAIN.batch_size=40", "OPTIMIZER.lr=0.5")
        assert {one.key: (one.code, one.suggestion) for one in caught.value.problems} == {
            "PHASES.epochs": ("resume.adjustable_key", "RUN.allow=PHASES"),
            "DATA.TRAIN.batch_size": ("resume.adjustable_key", "RUN.allow=DATA.TRAIN.batch_size"),
            "OPTIMIZER.lr": ("resume.adjustable_key", "RUN.allow=OPTIMIZER.lr"),
        }

    @pytest.mark.by_default("7", "21")
    @pytest.mark.parametrize("step", [3, 5, 6, 7, 21])
    def test_more_epochs_are_trained_after_those_of_the_checkpoint(
        self, unbroken: Path, tmp_path: Path, step: int
    ) -> None:
        if step == 21:
            shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
        else:
            kill(tmp_path, step)
        text = run_and_capture(tmp_path, "PHASES.epochs=5", "RUN.allow=[PHASES.epochs]")
        assert re.search(r"PHASES\.epochs: .* 3, .* 5", text)
        found = steps(tmp_path)
        assert [(epoch, updates, samples) for epoch, updates, samples, _ in found] == [
            (n // 5, n + 1, 24 * (n + 1)) for n in range(25)
        ]
        assert epochs_of_tests(tmp_path) == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize(
        "words",
        [
            pytest.param(("DATA.TRAIN.sampler=reading_parts.Heavy",), id="split"),
            pytest.param(
                (
                    "DATA.TRAIN.sampler={name: stratified, classes_per_batch: 4}",
                    "DATA.TRAIN.subset={samples: 300}",
                ),
                id="stratified",
                marks=[pytest.mark.slow, pytest.mark.addon("vision")],
            ),
        ],
    )
    def test_batch_size_of_an_order_made_for_one_changes_between_epochs_only(
        self, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        words = (*words, "MODEL.channels=1", "MODEL.classes=10", "PHASES.epochs=2")
        kill(tmp_path, 3, *words)
        before = newest(tmp_path)
        with raises(ChangedError, key="DATA.TRAIN.batch_size", given="12"):
            train(tmp_path, *words, "DATA.TRAIN.batch_size=12", "RUN.allow=[DATA.TRAIN.batch_size]")
        after = newest(tmp_path)
        assert (after.path, after.promised["config"]["DATA"]["TRAIN"]["batch_size"]) == (
            before.path,
            24,
        )
        kill(tmp_path, 4, *words)  # the old size goes on, up to the end of the epoch
        result = train(
            tmp_path, *words, "DATA.TRAIN.batch_size=12", "RUN.allow=[DATA.TRAIN.batch_size]"
        )
        assert (result.state, result.updates) == ("finished", 10)

    @pytest.mark.by_default("5")
    @pytest.mark.parametrize("step", [2, 5, 6, 9])
    def test_another_batch_size_repeats_and_skips_no_sample(
        self, tmp_path: Path, step: int
    ) -> None:
        words = ("PHASES.limit.train=null", "DATA.TRAIN.batch_size=200", "PHASES.epochs=2")
        kill(tmp_path, step, *words)
        train(tmp_path, *words, "DATA.TRAIN.batch_size=100", "RUN.allow=[DATA.TRAIN.batch_size]")
        found = steps(tmp_path)
        ends = {epoch: samples for epoch, _, samples, _ in found}
        assert ends == {0: 1400, 1: 2800}
        assert [updates for _, updates, _, _ in found] == list(range(1, len(found) + 1))
        assert sorted({b - a for (_, _, a, _), (_, _, b, _) in itertools.pairwise(found)}) == [
            100,
            200,
        ]
        assert epochs_of_tests(tmp_path) == [0, 1]

    def test_consent_to_a_section_lasts_and_the_cut_phase_reports_what_it_has_seen(
        self, killed: Path
    ) -> None:
        kill(killed, 4, "PHASES.epochs=4", "RUN.allow=[PHASES]")
        train(killed, "PHASES.epochs=4")
        assert steps(killed)[-1][1] == 20
        phases = [
            (r["phase"], r["split"], r["updates"]) for r in records(killed) if r["kind"] == "phase"
        ]
        assert phases[:3] == [(0, "train", 3), (1, "train", 5), (2, "test", 5)]
        with raises(ChangedError, code="resume.adjustable_key", key="PHASES.epochs", given="3"):
            train(killed)

    @pytest.mark.slow
    def test_spliced_run_is_resumed_exactly(self, tmp_path: Path) -> None:
        words = ("DATA.TRAIN.batch_size=30", "RUN.allow=[DATA.TRAIN.batch_size]")
        for name, kills in (("unbroken", ()), ("killed", (2, 5))):
            kill(tmp_path / name, 3)
            for step in kills:
                kill(tmp_path / name, step, *words)
            train(tmp_path / name, *words)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []

    @pytest.mark.feature("phases.extend")
    @pytest.mark.parametrize(
        ("extend", "rate"),
        [("stretch", 0.0654508), pytest.param("cycle", 0.1, marks=pytest.mark.slow)],
    )
    def test_extended_run_trains_again_and_is_resumed_exactly(
        self, tmp_path: Path, extend: str, rate: float
    ) -> None:
        words = (
            "PHASES.epochs=6", f"PHASES.extend={extend}", "RUN.allow=[PHASES]",
            "OPTIMIZER.SCHEDULES.lr.warmup=1 epochs",
        )  # fmt: skip
        train(tmp_path / "unbroken", words[-1])
        shutil.copytree(tmp_path / "unbroken", tmp_path / "killed")
        for name, kills in (("unbroken", ()), ("killed", (4, 9))):
            for step in kills:
                kill(tmp_path / name, step, *words)
            train(tmp_path / name, *words)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
        rates = {r["updates"]: r["lr"] for r in records(tmp_path / "killed") if r["kind"] == "step"}
        assert max(lr for updates, lr in rates.items() if updates > 15) == pytest.approx(
            rate, rel=1e-5
        )

    @pytest.mark.addon("observe")
    def test_schedule_that_has_run_out_is_reported_and_can_be_stretched_later(
        self, tmp_path: Path
    ) -> None:
        train(tmp_path, "PHASES.epochs=1", "PHASES.limit.train=20")
        words = ("PHASES.epochs=2", "PHASES.limit.train=20", "RUN.allow=[PHASES]")
        stopped = run_and_capture(tmp_path, *words, "RUN.verbosity=normal")
        assert "PHASES.extend = 'continue'" in stopped
        again = run_and_capture(tmp_path, *words, "PHASES.extend=stretch")
        assert "PHASES.extend = " not in again
        assert "completed after 40 updates" in again

    @pytest.mark.addon("observe")
    def test_refused_longer_training_says_how_low_the_learning_rate_would_be(
        self, tmp_path: Path
    ) -> None:
        words = ("PHASES.limit.train=10", "DATA.TEST=null")
        train(tmp_path, "PHASES.epochs=1", *words)
        with raises(ChangedError, code="resume.adjustable_key") as low:
            train(tmp_path, "PHASES.epochs=2", *words)
        assert low.value.problems[0].suggestion == "RUN.allow=PHASES PHASES.extend=stretch"
        assert "% of its peak" in str(low.value)
        with raises(ChangedError, code="resume.adjustable_key") as stretched:
            train(tmp_path, "PHASES.epochs=2", "PHASES.extend=stretch", *words)
        assert stretched.value.problems[0].suggestion == "RUN.allow=PHASES"

    def test_another_learning_rate_holds_from_the_checkpoint_on(
        self, killed: Path, unbroken: Path
    ) -> None:
        train(killed, "OPTIMIZER.lr=0.2", "RUN.allow=[OPTIMIZER.lr]")
        before, after = (
            {r["updates"]: r["lr"] for r in records(folder) if r["kind"] == "step"}
            for folder in (unbroken, killed)
        )
        assert [after[n] / before[n] for n in (3, 4, 15)] == [
            1.0,
            pytest.approx(2.0),
            pytest.approx(2.0),
        ]


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (("DATA.TRAIN.drop_last=false", IN_EPOCHS), 1),
        (("DATA.TRAIN.drop_last=false",), 0),
        (("DATA.TRAIN.drop_last=true", IN_EPOCHS), 0),
    ],
)
def test_resume_names_epochs_that_an_earlier_version_counted_shorter(
    tmp_path: Path, words: tuple[str, ...], lines: int
) -> None:
    words = ("DATA.TRAIN.subset.samples=80", "PHASES.limit.train=null", "PHASES.epochs=2", *words)
    kill(tmp_path, 3, *words)
    for path in tmp_path.glob("checkpoints/*/promised.json"):
        promised = json.loads(path.read_text())
        assert promised.pop("whole_epochs")
        path.write_text(json.dumps(promised))
        resign(path.parent)
    assert train(tmp_path, *words).state == "finished"
    told = "durations in epochs count the update of a short last batch"
    assert (tmp_path / "log.txt").read_text().count(told) == lines
    differences = newest(tmp_path).promised["departures"]
    assert str(differences).count(told) == lines


def test_only_packages_that_affect_bits_are_compared() -> None:
    setup = resolve_config(SMALL)
    packages = {**list_packages(), "numpy": "1.0", "rich": "1.0"}  # earlier versions recorded rich
    promised = {"config": setup.asked, "packages": packages, "whole_epochs": True}
    lines = list_code_changes(setup, LoadedCheckpoint("there", None, promised, {}))  # type: ignore[arg-type]
    assert lines == [f"package numpy: 1.0 -> {np.__version__}"]


class Annealed(Supervised):
    def __init__(self, parts: Any, updates: int, classes: int) -> None:
        super().__init__(parts)


class AnnealedLoss(nn.CrossEntropyLoss):
    def __init__(self, epochs: int) -> None:
        super().__init__()


@pytest.mark.addon("observe")
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (f"TASK.name={__name__}.Annealed", "TASK.updates is 6 from here on, and was built for"),
        (f"LOSS.name={__name__}.AnnealedLoss", "LOSS.epochs is 3 from here on, and was built for"),
    ],
)
def test_longer_run_names_what_was_built_with_its_length(
    words: str, line: str, tmp_path: Path
) -> None:
    short = (words, "PHASES.epochs=2", "PHASES.limit.train=2", "PHASES.limit.test=1")
    kill(tmp_path, 1, *short)
    train(tmp_path, *short)
    log = tmp_path / "log.txt"
    assert "from here on" not in log.read_text()
    train(tmp_path, *short, "PHASES.epochs=3", "RUN.allow=PHASES")
    assert log.read_text().count("from here on") == log.read_text().count(line) == 1
    assert "schedules are computed for 6 updates" in log.read_text()


class TestData:
    WORDS = (
        "DATA.TRAIN.dataset=synthetic",
        "DATA.TRAIN.input_shape=[1,8,8]",
        "DATA.TRAIN.classes=10",
    )

    def test_changed_data_is_rejected_with_both_fingerprints(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kill(tmp_path, 3, *self.WORDS)
        then = newest(tmp_path).promised["data"]["train"]
        other_data(monkeypatch)
        with pytest.raises(ChangedError) as caught:
            train(tmp_path, *self.WORDS)
        assert len(set(re.findall(r"\b[0-9a-f]{64}\b", str(caught.value)))) == 2
        assert (caught.value.code, caught.value.key) == ("resume.data_changed", "DATA.TRAIN")
        assert "set RUN.dir to another folder" in str(caught.value)
        assert then in str(caught.value)
        assert caught.value.exit_code == 3

    def test_another_config_is_not_reported_as_changed_data(
        self, killed: Path, unbroken: Path
    ) -> None:
        for folder in (killed, unbroken):
            with pytest.raises(ChangedError) as caught:
                train(folder, *self.WORDS)
            keys = {problem.key for problem in caught.value.problems}
            assert "DATA.TRAIN.dataset" in keys, caught.value
            assert {problem.code for problem in caught.value.problems} == {"resume.forbidden_key"}

    @pytest.mark.by_default("9-100")
    @pytest.mark.parametrize("samples", [100, 1024, 2000], ids=str)
    @pytest.mark.parametrize("step", [3, 5, 9], ids=str)
    def test_run_with_consent_resumes_and_finishes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int, step: int
    ) -> None:
        words = (*self.WORDS, "PHASES.limit.train=null", "DATA.TRAIN.batch_size=128")
        kill(tmp_path, step, *words)
        other_data(monkeypatch, samples)
        words += ("DATA.TRAIN.batch_size=50", "RUN.allow=[data, DATA.TRAIN.batch_size]")
        result = train(tmp_path, *words)
        assert result.state == "finished"
        found = steps(tmp_path)
        assert max(epoch for epoch, _, _, _ in found) == 2
        assert all(samples > 0 for _, _, samples, _ in found)
        last = [b - a for (e, _, a, _), (_, _, b, _) in itertools.pairwise(found) if e == 2]
        assert sum(last) <= samples

    def test_consent_without_a_change_changes_nothing(self, killed: Path, unbroken: Path) -> None:
        train(killed, "RUN.allow=[data]")
        assert differences_of_runs(unbroken, killed) == []


def other_data(monkeypatch: pytest.MonkeyPatch, samples: int = 1024) -> None:
    """Let the dataset `synthetic` have another seed and size, as if its files had been replaced."""
    from phasetrain.data import DATASETS

    made = DATASETS["synthetic"]

    def exchanged(input_shape: list[int], classes: int, part: str = "train") -> Any:
        return made(samples=samples, input_shape=input_shape, classes=classes, seed=9, part=part)

    monkeypatch.setitem(DATASETS._own, "synthetic", exchanged)


# Threads that wait for each other keep cores busy: the fewer steps, the better.
TWO_STEPS = ("PHASES.epochs=1", "PHASES.limit.train=2", "PHASES.limit.test=1")


@pytest.fixture(scope="module")
def killed_with_two_threads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("threads")
    kill(folder, 1, *TWO_STEPS, "MACHINE.threads=2")
    return folder


class TestEnvironment:
    def test_difference_is_a_warning(self, killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.__version__", "9.9.9")
        (found,) = [line for line in run_and_capture(killed).splitlines() if "warning: " in line]
        assert re.search(r"torch 2\.\S+ -> 9\.9\.9$", found)

    @pytest.mark.feature("machine.cpu_capability")
    def test_another_cpu_is_a_warning(self, killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = describe_platform("cpu")
        other = {**before, "cpu": "Other 9000", "cpu_capability": "DEFAULT"}
        monkeypatch.setattr("phasetrain.app.train.resume.describe_platform", lambda kind: other)
        first, second = [
            line for line in run_and_capture(killed).splitlines() if "warning: " in line
        ]
        assert first.endswith(
            f"cpu {before['cpu']!r} -> 'Other 9000', "
            f"cpu_capability {before['cpu_capability']!r} -> 'DEFAULT'"
        )
        assert second.endswith("MACHINE.cpu_capability=AVX2")

    def test_the_number_of_threads_is_taken_over(
        self, tmp_path: Path, killed_with_two_threads: Path
    ) -> None:
        train(tmp_path / "unbroken", *TWO_STEPS, "MACHINE.threads=2")
        shutil.copytree(killed_with_two_threads, tmp_path / "killed")
        text = run_and_capture(tmp_path / "killed", *TWO_STEPS, "MACHINE.threads=null")
        assert "2 threads" in text
        assert "warning" not in text
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []

    def test_another_number_of_threads_is_a_warning(
        self, tmp_path: Path, killed_with_two_threads: Path
    ) -> None:
        shutil.copytree(killed_with_two_threads, tmp_path / "killed")
        text = run_and_capture(tmp_path / "killed", *TWO_STEPS, "MACHINE.threads=1")
        assert "threads 2 -> 1" in text


class TestSharedWork:
    """The warnings of a resume about the world size and the strategy."""

    def warnings(self, before: dict[str, Any], *words: str, processes: int = 1) -> list[str]:
        """Return the warnings of `processes` ranks that resume from a checkpoint of another
        environment."""
        setup = resolve_config([*SMALL, "MACHINE.threads=1", *words])
        setup = replace(setup, world=World(0, processes))
        told = {**describe_environment(setup, setup.machine), **before}
        promised = {"environment": {key: value for key, value in told.items() if value is not None}}
        return match_machine(setup, LoadedCheckpoint("there", None, promised, {}))[1]  # type: ignore[arg-type]

    def changes(self, before: dict[str, Any], *words: str, processes: int = 1) -> list[str]:
        """Return the differences that each warning lists."""
        found = self.warnings(before, *words, processes=processes)
        return [line.partition("since the checkpoint: ")[2] for line in found]

    def test_equal_world_size_gives_no_warning(self) -> None:
        assert self.warnings({"processes": 3, "strategy": "ddp"}, processes=3) == []

    def test_another_world_size_is_a_warning(self) -> None:
        found = self.changes({"processes": 2, "strategy": "ddp"}, processes=3)
        assert found == ["processes 2 -> 3"]

    def test_another_strategy_or_parameter_is_a_warning(self) -> None:
        word = "DISTRIBUTED.bucket_cap_mb=1"
        found = self.changes({"processes": 2, "strategy": "zero"}, word, processes=2)
        assert found == ["strategy zero -> ddp(bucket_cap_mb=1)"]
        found = self.changes({"processes": 2, "strategy": "ddp(bucket_cap_mb=1)"})
        assert found == ["processes 2 -> 1, strategy ddp(bucket_cap_mb=1) -> none"]

    def test_ordered_reduction_allows_any_world_size(self) -> None:
        words = ("DISTRIBUTED.reduction=ordered",)
        assert self.warnings({"processes": 4, "strategy": "ordered"}, *words, processes=2) == []

    def test_checkpoint_without_these_facts_gives_no_warning(self) -> None:
        assert self.warnings({"processes": None, "strategy": None}, processes=2) == []

    def test_differences_of_machine_and_world_size_are_two_warnings(self) -> None:
        first, second = self.changes({"python": "2.7", "processes": 2, "strategy": "none"})
        assert first.startswith("python 2.7 -> ")
        assert second == "processes 2 -> 1"

    def test_checkpoint_records_world_size_and_strategy(self, killed_once: Path) -> None:
        told = newest(killed_once).promised["environment"]
        assert (told["processes"], told["strategy"]) == (1, "none")
