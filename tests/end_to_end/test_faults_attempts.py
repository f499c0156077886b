"""Differences between two attempts of a run: data, batch size, and whether there is progress."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from failing_calls import Fault
from faulty import ONE, Starter
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    leftovers,
    newest,
    run_until_killed,
    status,
    train,
)

from phasetrain.data import DATASETS
from phasetrain.data.datasets.digits import load_digits
from phasetrain.engine.batch import Batch
from phasetrain.engine.plan import Phase
from phasetrain.errors import ChangedError
from phasetrain.hooks import Hook, Run

WORDS = (*SMALL, ONE)


class Ids(Hook):
    """Records the ids of the samples of each train step."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, int], list[int]] = {}

    def on_batch(self, run: Run, phase: Phase, batch: Batch) -> Batch:
        """Record ids by epoch and update, so that a repeated step counts once."""
        if phase.is_train:
            self.seen[phase.epoch, run.state.updates] = batch.ids.tolist()
        return batch

    def of(self, epoch: int) -> Counter[int]:
        """Return how often each sample was shown in an epoch."""
        return Counter(i for (found, _), ids in self.seen.items() if found == epoch for i in ids)


class Picked:
    """A subset of the digits in a given order."""

    def __init__(self, indices: list[int]) -> None:
        self.inner, self.indices = load_digits(split="train"), indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.inner[self.indices[index]]

    def facts(self) -> Any:
        return self.inner.facts()

    def fingerprint(self) -> str:
        return f"digits {len(self.indices)} {hash(tuple(self.indices))}"


INDICES: list[int] = []


@pytest.fixture
def picked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Register a dataset of the samples whose indices the test writes into this list."""
    monkeypatch.setitem(DATASETS._own, "picked", lambda: Picked(INDICES))
    INDICES[:] = range(200)
    return INDICES


class TestOtherData:
    WORDS = (ONE, "DATA.TRAIN.dataset=picked", "PHASES.limit.train=null", "PHASES.epochs=2")

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize("change", ["shrunk", "grown", "reordered"])
    def test_changed_data_is_rejected_with_both_fingerprints_and_may_be_allowed(
        self, picked: list[int], tmp_path: Path, change: str
    ) -> None:
        run_until_killed(
            tmp_path, *self.WORDS, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        before = Picked(INDICES).fingerprint()
        picked[:] = {"shrunk": range(150), "grown": range(250), "reordered": reversed(range(200))}[
            change
        ]
        after = Picked(INDICES).fingerprint()
        with pytest.raises(ChangedError) as caught:
            train(tmp_path, *self.WORDS)
        assert caught.value.exit_code == 3
        message = str(caught.value)
        assert all(part in message for part in ("DATA.TRAIN", before, after, "RUN.allow=data")), (
            message
        )
        assert newest(tmp_path).manifest.state["updates"] == 3
        assert leftovers(tmp_path) == []
        ids = Ids()
        assert (
            train(tmp_path, *self.WORDS, "RUN.allow=[data]", hooks={"ids": ids}).state == "finished"
        )
        assert set(ids.of(1).values()) == {1}
        assert sum(ids.of(1).values()) == len(picked) // 24 * 24

    @pytest.mark.slow
    def test_equal_data_resumes(self, picked: list[int], tmp_path: Path) -> None:
        run_until_killed(
            tmp_path, *self.WORDS, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        picked[:] = list(range(200))
        assert train(tmp_path, *self.WORDS).state == "finished"


class TestAnotherBatchSize:
    WORDS = (
        ONE,
        "DATA.TRAIN.dataset=picked",
        "DATA.TRAIN.drop_last=false",
        "PHASES.limit.train=null",
        "PHASES.epochs=2",
    )

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        ("first", "second", "at"), [(25, 16, 5), (16, 25, 7), (25, 7, 8), (75, 2, 2)]
    )
    def test_nothing_is_repeated_or_skipped_within_the_epoch(
        self, picked: list[int], tmp_path: Path, first: int, second: int, at: int
    ) -> None:
        before, after = Ids(), Ids()
        size = "DATA.TRAIN.batch_size"
        hooks = {"ids": before, "save": SaveEachStep(), "kill": KillAfter(at)}
        run_until_killed(tmp_path, *self.WORDS, f"{size}={first}", hooks=hooks)
        done = newest(tmp_path).manifest.state["updates"]
        assert done == min(at, -(-200 // first))
        before.seen = {
            key: ids for key, ids in before.seen.items() if key[1] < done
        }  # the killed step was not saved
        train(
            tmp_path, *self.WORDS, f"{size}={second}", f"RUN.allow=[{size}]", hooks={"ids": after}
        )
        for epoch in (0, 1):
            shown = before.of(epoch) + after.of(epoch)
            assert (set(shown), set(shown.values())) == (set(range(200)), {1})

    @pytest.mark.slow
    def test_position_counted_in_batches_is_detected(
        self, picked: list[int], tmp_path: Path
    ) -> None:
        """The control: 5 batches of 25 are not 5 batches of 16."""
        one, other = Ids(), Ids()
        train(tmp_path / "one", *self.WORDS, "DATA.TRAIN.batch_size=25", hooks={"ids": one})
        train(tmp_path / "other", *self.WORDS, "DATA.TRAIN.batch_size=16", hooks={"ids": other})
        mixed = {key: ids for key, ids in one.seen.items() if key[0] == 0 and key[1] < 5}
        mixed |= {key: ids for key, ids in other.seen.items() if key[0] == 0 and key[1] >= 5}
        ids = Ids()
        ids.seen = mixed
        assert max(ids.of(0).values()) == 2


class TestARestartLoop:
    """A run that is killed before its first save, again and again."""

    KILL = (Fault("mkdir", "/checkpoints", "KILL"),)

    def attempt(
        self, starter: Starter, folder: Path, *words: str, kill: bool = True
    ) -> tuple[int, str]:
        ended = starter.run(
            folder, *WORDS, "RUN.give_up_after=2", *words, faults=self.KILL if kill else ()
        )
        assert (ended.alive, ended.segments) == ([], [])
        return ended.code, ended.output

    @pytest.mark.feature("B3")
    def test_restart_loop_is_rejected_after_too_many_attempts(
        self, starter: Starter, unbroken: Path, tmp_path: Path
    ) -> None:
        if not starter.faults:
            pytest.skip(
                "a kill within a system call needs a library that gcc compiles, and there is no gcc"
            )
        folder = tmp_path / "run"
        assert [self.attempt(starter, folder)[0] for _ in range(2)] == [-signal.SIGKILL] * 2
        for _ in range(2):  # a refusal counts neither for nor against it
            code, output = self.attempt(starter, folder, kill=False)
            assert code == 6, output
            assert "RUN.give_up_after = 2" in output
            assert status(folder)["attempt"] == 2
            assert leftovers(folder) == []
        assert self.attempt(starter, folder, "RUN.give_up_after=null", kill=False)[0] == 0
        assert differences_of_runs(unbroken, folder) == []

    def test_a_checkpoint_resets_the_count(
        self, starter: Starter, unbroken: Path, tmp_path: Path
    ) -> None:
        if not starter.faults:
            pytest.skip(
                "a kill within a system call needs a library that gcc compiles, and there is no gcc"
            )
        folder = tmp_path / "run"
        words = ("CHECKPOINT.every_updates=5", "CHECKPOINT.background=false")
        for number in (1, 2, 1):  # killed at its first save, or at the second one
            fault = Fault("mkdir", ".tmp-", "KILL", number, number)
            ended = starter.run(folder, *WORDS, "RUN.give_up_after=2", *words, faults=(fault,))
            assert ended.code == -signal.SIGKILL, ended.output
        code, output = self.attempt(starter, folder, *words, kill=False)
        assert code == 0, output
        assert differences_of_runs(unbroken, folder) == []


def test_no_number_of_preemptions_with_a_save_is_a_loop(tmp_path: Path) -> None:
    class Stop(Hook):
        def on_forward(self, run: Run, phase: Phase, out: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    for attempt in range(1, 4):
        result = train(tmp_path, ONE, "RUN.give_up_after=2", hooks={"stop": Stop()})
        assert (
            result.exit_code,
            json.loads((tmp_path / "status.json").read_text())["attempt"],
        ) == (143, attempt)
    assert newest(tmp_path).manifest.state["updates"] == 3
