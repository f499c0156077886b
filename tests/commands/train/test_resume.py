"""What may change between two attempts, what needs consent, and what is refused with both
values."""

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, KillAfter, SaveEachStep, die, newest, parted, records, train
from raising import raises

from phasetrain.checkpoint import LoadedCheckpoint
from phasetrain.commands.api import run
from phasetrain.commands.cli import main
from phasetrain.commands.setup import resolve_config
from phasetrain.commands.train.resume import describe_environment, match_machine
from phasetrain.distributed import World
from phasetrain.errors import ChangedError
from phasetrain.runtime.terminal import Terminal


def killed(folder: Path, step: int, *words: str) -> None:
    """Kill a run after so many steps, with a checkpoint of that very step."""
    die(folder, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(step)})


def printed(folder: Path, *words: str) -> str:
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


class TestForbidden:
    @pytest.mark.parametrize(
        ("word", "line"),
        [
            ("RUN.seed=1", "RUN.seed: the checkpoint has 0, now 1 (forbidden)"),
            ("MODEL.width=8", "MODEL.width: the checkpoint has 4, now 8 (forbidden)"),
            (
                "OPTIMIZER.momentum=0.5",
                "OPTIMIZER.momentum: the checkpoint has 0.9, now 0.5 (forbidden)",
            ),
            (
                "MACHINE.precision=bf16",
                "MACHINE.precision: the checkpoint has 'fp32', now 'bf16' (forbidden)",
            ),
            (
                "METERS.accuracy=null",
                "METERS.accuracy: the checkpoint has {}, now absent (forbidden)",
            ),
        ],
    )
    def test_both_values_are_shown(self, tmp_path: Path, word: str, line: str) -> None:
        killed(tmp_path, 3)
        before = newest(tmp_path).path
        with pytest.raises(ChangedError) as caught:
            train(tmp_path, word)
        assert line in str(caught.value)
        assert str(caught.value).startswith(f"'{tmp_path}' holds a run with another config")
        assert newest(tmp_path).path == before
        status = json.loads((tmp_path / "status.json").read_text())
        assert (status["state"], status["exit_code"], status["attempt"]) == ("failed", 3, 2)

    def test_no_consent_helps(self, tmp_path: Path) -> None:
        killed(tmp_path, 3)
        with pytest.raises(ChangedError, match=r"MODEL\.width: .* \(forbidden\)"):
            train(tmp_path, "MODEL.width=8", "RUN.allow=[PHASES]")

    def test_the_exit_code(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        killed(tmp_path, 3)
        assert main([*SMALL, f"RUN.dir={tmp_path}", "RUN.seed=1"]) == 3
        assert "RUN.seed: the checkpoint has 0, now 1 (forbidden)" in capsys.readouterr().err

    def test_a_finished_run_is_not_taken_for_another(self, tmp_path: Path) -> None:
        train(tmp_path, "PHASES.epochs=1")
        with pytest.raises(ChangedError, match=r"RUN\.seed"):
            train(tmp_path, "PHASES.epochs=1", "RUN.seed=1")


class TestFree:
    def test_it_changes_nothing(self, tmp_path: Path) -> None:
        train(tmp_path / "unbroken")
        killed(tmp_path / "killed", 9)
        words = (
            "CHECKPOINT.keep_last=2",
            "HOOKS.console={}",
            "DATA.TRAIN.prefetch=5",
            "RUN.name=other",
        )
        train(tmp_path / "killed", *words)
        assert parted(tmp_path / "unbroken", tmp_path / "killed") == []


class TestAdjustable:
    @pytest.mark.parametrize(
        ("word", "key"),
        [
            ("PHASES.epochs=5", "PHASES.epochs"),
            ("DATA.TRAIN.batch_size=40", "DATA.TRAIN.batch_size"),
            ("OPTIMIZER.lr=0.5", "OPTIMIZER.lr"),
        ],
    )
    def test_it_needs_consent(self, tmp_path: Path, word: str, key: str) -> None:
        killed(tmp_path, 3)
        with pytest.raises(
            ChangedError,
            match=rf"{key}: the checkpoint has .*\(adjustable: allow it with RUN.allow=\[",
        ):
            train(tmp_path, word)

    @pytest.mark.parametrize("step", [3, 5, 6, 7, 21])
    def test_more_epochs(self, tmp_path: Path, step: int) -> None:
        if step == 21:
            train(tmp_path)
        else:
            killed(tmp_path, step)
        text = printed(tmp_path, "PHASES.epochs=5", "RUN.allow=[PHASES.epochs]")
        assert "PHASES.epochs: the checkpoint has 3, now 5 (allowed by RUN.allow)" in text
        assert "the rest of the plan is rebuilt; `where` continues at 0." in text
        found = steps(tmp_path)
        assert [(epoch, updates, samples) for epoch, updates, samples, _ in found] == [
            (n // 5, n + 1, 24 * (n + 1)) for n in range(25)
        ]
        tests = [
            r["epoch"] for r in records(tmp_path) if r["kind"] == "phase" and r["split"] == "test"
        ]
        assert tests == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize(
        "words",
        [
            (
                "DATA.TRAIN={dataset: reading_parts.Named, inputs: image, targets: label}",
                "DATA.TRAIN.sampler={name: length_bucketed, pool: 3}",
            ),
            (
                "DATA.TRAIN.sampler={name: stratified, classes_per_batch: 4}",
                "DATA.TRAIN.subset={samples: 300}",
            ),
        ],
    )
    def test_another_batch_size_where_the_order_is_made_for_one(
        self, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        words = (*words, "MODEL.channels=1", "MODEL.classes=10")
        killed(tmp_path, 3, *words)
        before = newest(tmp_path)
        with raises(ChangedError, key="DATA.TRAIN.batch_size", given="12"):
            train(tmp_path, *words, "DATA.TRAIN.batch_size=12", "RUN.allow=[DATA.TRAIN.batch_size]")
        after = newest(tmp_path)
        assert (after.path, after.promised["config"]["DATA"]["TRAIN"]["batch_size"]) == (
            before.path,
            24,
        )
        killed(tmp_path, 4, *words)  # the old size goes on, up to the end of the epoch
        result = train(
            tmp_path, *words, "DATA.TRAIN.batch_size=12", "RUN.allow=[DATA.TRAIN.batch_size]"
        )
        assert (result.state, result.updates) == ("finished", 15)

    @pytest.mark.parametrize("step", [2, 5, 6, 9])
    def test_another_batch_size(self, tmp_path: Path, step: int) -> None:
        words = ("PHASES.limit.train=null", "DATA.TRAIN.batch_size=200", "PHASES.epochs=2")
        killed(tmp_path, step, *words)
        train(tmp_path, *words, "DATA.TRAIN.batch_size=100", "RUN.allow=[DATA.TRAIN.batch_size]")
        found = steps(tmp_path)
        ends = {epoch: samples for epoch, _, samples, _ in found}
        assert ends == {0: 1400, 1: 2800}
        assert [updates for _, updates, _, _ in found] == list(range(1, len(found) + 1))
        assert sorted({b - a for (_, _, a, _), (_, _, b, _) in itertools.pairwise(found)}) == [
            100,
            200,
        ]
        tests = [
            r["epoch"] for r in records(tmp_path) if r["kind"] == "phase" and r["split"] == "test"
        ]
        assert tests == [0, 1]

    def test_a_phase_that_is_cut_reports_what_it_has_seen(self, tmp_path: Path) -> None:
        killed(tmp_path, 3)
        train(tmp_path, "PHASES.epochs=4", "RUN.allow=[PHASES]")
        phases = [
            (r["phase"], r["split"], r["updates"])
            for r in records(tmp_path)
            if r["kind"] == "phase"
        ]
        assert phases[:3] == [(0, "train", 3), (1, "train", 5), (2, "test", 5)]

    def test_the_change_stands_from_then_on(self, tmp_path: Path) -> None:
        killed(tmp_path, 3)
        die(
            tmp_path,
            "PHASES.epochs=4",
            "RUN.allow=[PHASES]",
            hooks={"save": SaveEachStep(), "kill": KillAfter(4)},
        )
        train(tmp_path, "PHASES.epochs=4")
        assert steps(tmp_path)[-1][1] == 20
        with pytest.raises(ChangedError, match=r"PHASES\.epochs: the checkpoint has 4, now 3"):
            train(tmp_path)

    def test_a_spliced_run_is_resumed_exactly(self, tmp_path: Path) -> None:
        words = ("DATA.TRAIN.batch_size=30", "RUN.allow=[DATA.TRAIN.batch_size]")
        for name, kills in (("unbroken", ()), ("killed", (2, 5))):
            killed(tmp_path / name, 3)
            for step in kills:
                killed(tmp_path / name, step, *words)
            train(tmp_path / name, *words)
        assert parted(tmp_path / "unbroken", tmp_path / "killed") == []

    def test_another_learning_rate(self, tmp_path: Path) -> None:
        killed(tmp_path, 3)
        train(tmp_path, "OPTIMIZER.lr=0.2", "RUN.allow=[OPTIMIZER.lr]")
        train(tmp_path / "before")
        before, after = (
            {r["updates"]: r["lr"] for r in records(folder) if r["kind"] == "step"}
            for folder in (tmp_path / "before", tmp_path)
        )
        assert [after[n] / before[n] for n in (3, 4, 15)] == [
            1.0,
            pytest.approx(2.0),
            pytest.approx(2.0),
        ]

    def test_consent_to_a_section_is_consent_to_its_keys(self, tmp_path: Path) -> None:
        killed(tmp_path, 3)
        train(tmp_path, "PHASES.epochs=2", "PHASES.limit.test=1", "RUN.allow=[PHASES]")
        assert steps(tmp_path)[-1][0] == 1


QUICK = [(100, 9), (1024, 3), (2000, 5)]
"""Fewer, as many and more samples than before, and each step, once."""


class TestData:
    WORDS = (
        "DATA.TRAIN.dataset=synthetic",
        "DATA.TRAIN.input_shape=[1,8,8]",
        "DATA.TRAIN.classes=10",
    )

    def test_changed_data_is_rejected_with_both_fingerprints(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        killed(tmp_path, 3, *self.WORDS)
        then = newest(tmp_path).promised["data"]["train"]
        other_data(monkeypatch)
        with pytest.raises(ChangedError) as caught:
            train(tmp_path, *self.WORDS)
        now = str(caught.value).partition(" and is ")[2].partition(";")[0]
        assert len(now) == 64 != now
        assert (caught.value.code, caught.value.key) == ("resume.data_changed", "DATA.TRAIN")
        assert f"its fingerprint was {then} and is {now}" in str(caught.value)
        assert caught.value.exit_code == 3

    @pytest.mark.parametrize(
        ("samples", "step"),
        [
            pytest.param(samples, step, marks=() if (samples, step) in QUICK else pytest.mark.slow)
            for samples in (100, 1024, 2000)
            for step in (3, 5, 9)
        ],
    )
    def test_with_consent_the_run_goes_on_and_finishes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int, step: int
    ) -> None:
        words = (*self.WORDS, "PHASES.limit.train=null", "DATA.TRAIN.batch_size=128")
        killed(tmp_path, step, *words)
        other_data(monkeypatch, samples)
        words += ("DATA.TRAIN.batch_size=50", "RUN.allow=[data, DATA.TRAIN.batch_size]")
        result = train(tmp_path, *words)
        assert result.state == "finished"
        found = steps(tmp_path)
        assert max(epoch for epoch, _, _, _ in found) == 2
        assert all(samples > 0 for _, _, samples, _ in found)
        last = [b - a for (e, _, a, _), (_, _, b, _) in itertools.pairwise(found) if e == 2]
        assert sum(last) <= samples

    def test_consent_without_a_change_changes_nothing(self, tmp_path: Path) -> None:
        train(tmp_path / "unbroken", *self.WORDS)
        killed(tmp_path / "killed", 3, *self.WORDS)
        train(tmp_path / "killed", *self.WORDS, "RUN.allow=[data]")
        assert parted(tmp_path / "unbroken", tmp_path / "killed") == []


def other_data(monkeypatch: pytest.MonkeyPatch, samples: int = 1024) -> None:
    """Let the data set `synthetic` be made of another seed and size, as files that were exchanged
    would be."""
    from phasetrain.data import DATASETS

    made = DATASETS["synthetic"]

    def exchanged(input_shape: list[int], classes: int, part: str = "train") -> Any:
        return made(samples=samples, input_shape=input_shape, classes=classes, seed=9, part=part)

    monkeypatch.setitem(DATASETS._own, "synthetic", exchanged)


class TestEnvironment:
    def test_a_difference_is_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        killed(tmp_path, 3)
        monkeypatch.setattr("torch.__version__", "9.9.9")
        text = printed(tmp_path)
        found = [line for line in text.splitlines() if "warning: " in line]
        assert len(found) == 1
        assert (
            "equal bits are promised on equal machines only; since the checkpoint: torch 2."
            in found[0]
        )
        assert found[0].endswith("-> 9.9.9")

    def test_the_number_of_threads_is_taken_over(self, tmp_path: Path) -> None:
        train(tmp_path / "unbroken", "MACHINE.threads=2")
        killed(tmp_path / "killed", 3, "MACHINE.threads=2")
        text = printed(tmp_path / "killed", "MACHINE.threads=null")
        assert "2 threads" in text
        assert "warning" not in text
        assert parted(tmp_path / "unbroken", tmp_path / "killed") == []

    def test_another_number_of_threads_is_a_warning(self, tmp_path: Path) -> None:
        killed(tmp_path, 3, "MACHINE.threads=2")
        assert "since the checkpoint: threads 2 -> 1" in printed(tmp_path, "MACHINE.threads=1")


class TestShares:
    """What a resume says of the processes, and of how they share the work."""

    def warnings(self, before: dict[str, Any], *words: str, processes: int = 1) -> list[str]:
        """Return the warnings of so many processes that go on from a checkpoint made in another
        environment."""
        setup = resolve_config([*SMALL, "MACHINE.threads=1", *words])
        setup = replace(setup, world=World(0, processes))
        told = {**describe_environment(setup, setup.machine), **before}
        promised = {"environment": {key: value for key, value in told.items() if value is not None}}
        return match_machine(setup, LoadedCheckpoint("there", None, promised, {}))[1]  # type: ignore[arg-type]

    def test_an_equal_number_says_nothing(self) -> None:
        assert self.warnings({"processes": 3, "strategy": "ddp"}, processes=3) == []

    def test_another_number(self) -> None:
        assert self.warnings({"processes": 2, "strategy": "ddp"}, processes=3) == [
            "equal bits are promised for an equal number of processes with an equal strategy only, or with "
            "DISTRIBUTED.reduction=ordered; the samples of each update stay the same; since the checkpoint: "
            "processes 2 -> 3"
        ]

    def test_another_strategy_and_other_parameters(self) -> None:
        word = "DISTRIBUTED.bucket_cap_mb=1"
        found = self.warnings({"processes": 2, "strategy": "zero"}, word, processes=2)
        assert found[0].endswith("since the checkpoint: strategy zero -> ddp(bucket_cap_mb=1)")
        (found,) = self.warnings({"processes": 2, "strategy": "ddp(bucket_cap_mb=1)"})
        assert found.endswith(
            "since the checkpoint: processes 2 -> 1, strategy ddp(bucket_cap_mb=1) -> none"
        )

    def test_ordered_promises_them_for_any_number(self) -> None:
        words = ("DISTRIBUTED.reduction=ordered",)
        assert self.warnings({"processes": 4, "strategy": "ordered"}, *words, processes=2) == []

    def test_a_checkpoint_of_an_earlier_version_tells_nothing_of_it(self) -> None:
        assert self.warnings({"processes": None, "strategy": None}, processes=2) == []

    def test_both_kinds_of_difference(self) -> None:
        first, second = self.warnings({"python": "2.7", "processes": 2, "strategy": "none"})
        assert first.startswith(
            "equal bits are promised on equal machines only; since the checkpoint: python 2.7 -> "
        )
        assert second.endswith("since the checkpoint: processes 2 -> 1")

    def test_a_checkpoint_tells_them(self, tmp_path: Path) -> None:
        killed(tmp_path, 1)
        told = newest(tmp_path).promised["environment"]
        assert (told["processes"], told["strategy"]) == (1, "none")
