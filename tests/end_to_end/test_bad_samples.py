"""Runs with unreadable samples are exact: identical bits with any number of workers and after any
kill."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    STEPS,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    leftovers,
    newest,
    run_until_killed,
    train,
)
from raising import raises

from phasetrain.cli import main
from phasetrain.data import SampleError
from phasetrain.errors import ChangedError
from phasetrain.hooks import Hook

MODULE = '''
import torch

from phasetrain.data import DATASETS


@DATASETS.register("faulty_digits")
class FaultyDigits:
    """Digits with a little noise; some are bad in four different ways."""

    def __init__(self, bad: list[int], samples: int, split: str = "train") -> None:
        self.bad, self.samples = bad, samples
        self.digits = DATASETS.build("digits", {"split": split})

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> object:
        value, target = self.digits[index]
        value = value + 0.01 * torch.randn(value.shape)
        if index not in self.bad:
            return value, target
        way = self.bad.index(index) % 4
        if way == 0:
            raise OSError(f"digit {index} is gone, {id(object()):#x}")
        return [None, (value[:, :4], target), (value[:0], target)][way - 1]

    def facts(self) -> dict[str, object]:
        return self.digits.facts()

    def fingerprint(self) -> str:
        return self.digits.fingerprint()
'''
FAULTY = (
    "RUN.imports=[faulty_digits]",
    "DATA.TRAIN={dataset: faulty_digits, samples: 130, bad: [3, 50, 51, 97]}",
    "DATA.TEST={dataset: faulty_digits, samples: 64, bad: [1, 40], on_bad_sample: drop}",
)
POLICIES = ["substitute", "drop"]
QUICK = {1, 5, 6, 13}  # within an epoch, at its end, in a test, in the test of the next epoch
LONGER = [(0, 2, 9), (2, 1, 13)]

SHORT = ("PHASES.epochs=1", "PHASES.limit.train=1")


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "faulty_digits.py").write_text(MODULE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield
        sys.modules.pop("faulty_digits", None)


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return f"DATA.TRAIN.on_bad_sample={request.param}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of a finished run for each policy."""
    folder = tmp_path_factory.mktemp("unbroken")
    for name in POLICIES:
        result = train(folder / name, *FAULTY, f"DATA.TRAIN.on_bad_sample={name}")
        assert (result.state, result.updates) == ("finished", 15)
    return {name: folder / name for name in POLICIES}


@pytest.fixture(scope="module")
def unbroken(finished: dict[str, Path], policy: str) -> Path:
    return finished[policy.partition("=")[2]]


class Ids(Hook):
    """Records the ids of each micro-batch."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"train": [], "test": []}

    def on_batch(self, run: Any, phase: Any, batch: Any) -> Any:
        self.seen[phase.split] += batch.ids.tolist()
        return batch


def bad_samples(folder: Path, split: str = "train") -> list[int]:
    """Return the indices of bad samples in the newest checkpoint."""
    return [index for index, _ in newest(folder).state["task"][f"data.{split}"]["samples"]]


def test_all_four_kinds_of_bad_samples_are_reported_once(unbroken: Path) -> None:
    assert bad_samples(unbroken) == [3, 50, 51, 97]
    assert bad_samples(unbroken, "test") == [1, 40]
    text = (unbroken / "log.txt").read_text("utf-8")
    assert text.count("DATA.TRAIN: sample ") == 4
    assert text.count("DATA.TEST: sample ") == 2
    assert text.count("OSError: digit 1 is gone, 0x...") == 1


@pytest.mark.feature(
    "113",
    "unreadable samples: raise, substitute or drop, with a budget",
    "`DATA.*.on_bad_sample`, `DATA.*.bad_sample_budget`",
)
@pytest.mark.by_default("substitute-6", "drop-6")
@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=[] if step in QUICK else pytest.mark.slow) for step in range(STEPS)],
)
def test_killed_at_every_step_and_resumed(
    unbroken: Path, policy: str, tmp_path: Path, step: int
) -> None:
    overrides = (*FAULTY, policy)
    run_until_killed(tmp_path, *overrides, hooks={"save": SaveEachStep(), "kill": KillAfter(step)})
    assert train(tmp_path, *overrides, hooks={"save": SaveEachStep()}).state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []
    assert leftovers(tmp_path) == []


@pytest.mark.by_default("substitute-2-0-4")
@pytest.mark.parametrize(
    ("before", "after", "step"),
    [(2, 0, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in LONGER)],
)
def test_the_number_of_workers_may_change(
    unbroken: Path, policy: str, tmp_path: Path, before: int, after: int, step: int
) -> None:
    overrides = (*FAULTY, policy)
    hooks = {"save": SaveEachStep(), "kill": KillAfter(step)}
    run_until_killed(tmp_path, *overrides, f"DATA.TRAIN.workers={before}", hooks=hooks)
    train(tmp_path, *overrides, f"DATA.TRAIN.workers={after}", "DATA.TEST.workers=1")
    assert differences_of_runs(unbroken, tmp_path) == []


def test_policies_give_different_weights(finished: dict[str, Path]) -> None:
    assert "task.model.features.0.weight" in differences_of_runs(
        finished["drop"], finished["substitute"]
    )


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("drop", {0: 2, 2: 2, 4: 2, 6: 2, 8: 2, 9: 2}),
        ("substitute", {0: 2, 2: 5, 4: 3, 6: 4, 8: 2, 9: 4}),
    ],
)
def test_ids_of_an_epoch_are_the_expected_multiset(
    tmp_path: Path, workers: int, policy: str, expected: dict[int, int]
) -> None:
    ids = Ids()
    tiny = (
        "DATA.TRAIN.batch_size=5",
        "DATA.TRAIN.samples=10",
        "DATA.TRAIN.bad=[1, 3, 5, 7]",
        "PHASES.epochs=2",
    )
    words = (*FAULTY, *tiny, "PHASES.limit.train=null", f"DATA.TRAIN.on_bad_sample={policy}")
    train(tmp_path, *words, f"DATA.TRAIN.workers={workers}", hooks={"ids": ids})
    assert Counter(ids.seen["train"]) == expected
    assert Counter(ids.seen["test"]) == {index: 2 for index in range(64) if index not in (1, 40)}


def test_a_micro_batch_of_nothing_weighs_nothing(tmp_path: Path) -> None:
    words = (
        *FAULTY,
        "DATA.TRAIN.bad=[0, 2, 129, 5]",
        "DATA.TRAIN.on_bad_sample=drop",
        "DATA.TRAIN.sampler=sequential",
    )
    plain = ("DATA.TRAIN.batch_size=6", "DATA.TRAIN.transforms=[]", "DATA.TEST=null", *SHORT)
    model = ("~MODEL.width", "MODEL.name=mlp", "MODEL.dropout=0")
    found = {}
    for micro in (6, 2, 1):
        folder, ids = tmp_path / str(micro), Ids()
        train(
            folder,
            *words,
            *plain,
            *model,
            f"DATA.TRAIN.micro_batch_size={micro}",
            hooks={"ids": ids},
        )
        assert ids.seen["train"] == [1, 3, 4]
        found[micro] = newest(folder).state["task"]["model"]
    for micro in (2, 1):
        for name, value in found[6].items():
            torch.testing.assert_close(found[micro][name], value)


class TestBudget:
    def test_sample_beyond_the_budget_ends_the_run_with_exit_code_1(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = [
            *FAULTY,
            "DATA.TRAIN.on_bad_sample=drop",
            "DATA.TRAIN.bad_sample_budget=3",
            f"RUN.dir={tmp_path}",
        ]
        assert (
            main([*words, "DATA.TRAIN.batch_size=10", "PHASES.epochs=1", "MODEL.name=small_cnn"])
            == 1
        )
        assert re.search(r"DATA\.TRAIN\.bad_sample_budget = 3: 4 ", capsys.readouterr().err)
        status = json.loads((tmp_path / "status.json").read_text("utf-8"))
        assert (status["state"], status["exit_code"]) == ("failed", 1)

    def test_the_count_survives_a_resume(self, tmp_path: Path) -> None:
        words = (*FAULTY, "DATA.TRAIN.on_bad_sample=drop")
        with pytest.raises(SampleError) as unbroken:
            train(tmp_path / "unbroken", *words, "DATA.TRAIN.bad_sample_budget=3")
        run_until_killed(
            tmp_path / "killed", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        counted = bad_samples(tmp_path / "killed")
        assert 0 < len(counted) < 4
        with pytest.raises(SampleError) as resumed:
            train(tmp_path / "killed", *words, "DATA.TRAIN.bad_sample_budget=3")
        for caught in (unbroken, resumed):
            assert str(caught.value).startswith("DATA.TRAIN.bad_sample_budget = 3: 4 ")

    @pytest.mark.slow
    def test_run_over_its_budget_resumes_with_a_larger_one(self, tmp_path: Path) -> None:
        words = (*FAULTY, "DATA.TRAIN.on_bad_sample=drop")
        train(tmp_path / "unbroken", *words)
        with pytest.raises(SampleError):
            train(
                tmp_path / "over",
                *words,
                "DATA.TRAIN.bad_sample_budget=2",
                hooks={"save": SaveEachStep()},
            )
        assert train(tmp_path / "over", *words).state == "finished"
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "over") == []


def test_bad_samples_raise_by_default(tmp_path: Path) -> None:
    with raises(SampleError, key="DATA.TRAIN"):
        train(tmp_path, *FAULTY)


def test_error_names_the_test_split_before_the_first_step(tmp_path: Path) -> None:
    words = (*FAULTY, "DATA.TRAIN.bad=[129]", "DATA.TEST.bad=[0]", "DATA.TEST.on_bad_sample=raise")
    with raises(SampleError, code="data.unreadable_sample", key="DATA.TEST") as caught:
        train(tmp_path, *words, "DATA.TRAIN.samples=129")
    assert str(caught.value).endswith("DATA.TEST.on_bad_sample=drop")
    assert not hasattr(caught.value, "__notes__")


def test_error_asks_for_consent_if_the_run_has_a_checkpoint(tmp_path: Path) -> None:
    words = (*FAULTY, "DATA.TRAIN.bad=[129]", "DATA.TEST.bad=[41]", "DATA.TEST.on_bad_sample=raise")
    with raises(SampleError, code="data.unreadable_sample", key="DATA.TEST") as caught:
        train(tmp_path, *words, "DATA.TRAIN.samples=129", hooks={"save": SaveEachStep()})
    [note] = caught.value.__notes__
    assert "RUN.allow=DATA.TEST.on_bad_sample" in note


def test_the_policy_may_change_on_a_resume_with_consent(tmp_path: Path) -> None:
    good = (*FAULTY, "DATA.TRAIN.bad=[129]", "DATA.TRAIN.samples=129")
    run_until_killed(tmp_path, *good, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    assert "data.train" not in newest(tmp_path).state["task"]
    with pytest.raises(ChangedError, match=r"RUN\.allow=DATA\.TRAIN\.on_bad_sample"):
        train(tmp_path, *good, "DATA.TRAIN.on_bad_sample=drop")
    allowed = "RUN.allow=[DATA.TRAIN.on_bad_sample]"
    assert train(tmp_path, *good, "DATA.TRAIN.on_bad_sample=drop", allowed).state == "finished"
    assert bad_samples(tmp_path) == []


@pytest.mark.slow
def test_unsaved_count_is_detected(unbroken: Path, policy: str, tmp_path: Path) -> None:
    from phasetrain.data.bad_samples import BadSamples

    overrides = (*FAULTY, policy)
    run_until_killed(tmp_path, *overrides, hooks={"save": SaveEachStep(), "kill": KillAfter(12)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BadSamples, "load_state_dict", lambda self, state: None)
        train(tmp_path, *overrides)
    assert any(path.startswith("task.data.") for path in differences_of_runs(unbroken, tmp_path))


@pytest.mark.slow
def test_substitute_that_is_no_function_of_the_draw_is_detected(tmp_path: Path) -> None:
    from phasetrain.data.loading import reader

    overrides = (*FAULTY, "DATA.TRAIN.on_bad_sample=substitute")
    train(tmp_path / "unbroken", *overrides)
    run_until_killed(
        tmp_path / "killed", *overrides, hooks={"save": SaveEachStep(), "kill": KillAfter(4)}
    )
    calls = iter(range(10**6))

    def counted(seed: int, *purpose: str | int) -> int:
        return next(calls) if purpose[0] == "substitute" else seed_of(seed, *purpose)

    seed_of = reader.seed_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "seed_of", counted)
        train(tmp_path / "killed", *overrides)
    assert any(
        path.startswith("task.model")
        for path in differences_of_runs(tmp_path / "unbroken", tmp_path / "killed")
    )
