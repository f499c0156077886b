"""DATA.TRAIN.exclude: samples without a part in their updates, exactly, whatever happens."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    ledger_bytes,
    newest,
    run_until_killed,
    train,
)
from processes import Launcher
from raising import raises

from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.hooks import Hook
from phasetrain.runs.ledger import parse_ledger
from phasetrain.runtime.storage import Storage
from phasetrain.testing import differences

MODULE = '''
from phasetrain.data import DATASETS


@DATASETS.register("torn_digits")
class TornDigits:
    """Digits of which some cannot be read."""

    def __init__(self, bad: list[int], split: str = "train") -> None:
        self.bad = bad
        self.digits = DATASETS.build("digits", {"split": split})

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> object:
        if index in self.bad:
            raise OSError("torn")
        return self.digits[index]

    def facts(self) -> dict[str, object]:
        return self.digits.facts()

    def fingerprint(self) -> str:
        return self.digits.fingerprint()
'''
SHORT = ("PHASES.epochs=2", "PHASES.limit.train=3")


@pytest.fixture(autouse=True, scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "torn_digits.py").write_text(MODULE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield
        sys.modules.pop("torn_digits", None)


class Ids(Hook):
    """Records the ids of each update."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def on_batch(self, run: Any, phase: Any, batch: Any) -> Any:
        if phase.is_train:
            self.seen.setdefault(run.state.updates + 1, []).extend(batch.ids.tolist())
        return batch


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[int]]]:
    """Return the folder of a run with all samples, and the ids of each update."""
    ids = Ids()
    folder = tmp_path_factory.mktemp("base") / "run"
    train(folder, *SHORT, hooks={"ids": ids})
    return folder, ids.seen


@pytest.fixture(scope="module")
def chosen(base: tuple[Path, dict[int, list[int]]]) -> list[int]:
    """Return a sample of the second update, another one of the fourth, and one of no update."""
    ids = base[1]
    used = {one for update in ids.values() for one in update}
    return [ids[2][5], ids[4][0], next(i for i in range(1442) if i not in used)]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, chosen: list[int]) -> Path:
    """Return the folder of an uninterrupted run without the chosen samples."""
    folder = tmp_path_factory.mktemp("without") / "run"
    train(folder, *SHORT, f"DATA.TRAIN.exclude={chosen}")
    return folder


def weights(folder: Path) -> Any:
    return newest(folder).state["task"]["model"]


@pytest.mark.feature(
    "data.exclude",
    "samples left out of their updates, with the order of all others unchanged",
    "`DATA.TRAIN.exclude`",
)
def test_other_samples_keep_their_updates_and_places(
    base: tuple[Path, dict[int, list[int]]], chosen: list[int], tmp_path: Path
) -> None:
    ids = Ids()
    train(tmp_path, *SHORT, f"DATA.TRAIN.exclude={chosen}", hooks={"ids": ids})
    expected = {
        update: [one for one in seen if one not in chosen] for update, seen in base[1].items()
    }
    assert ids.seen == expected
    assert [len(ids.seen[update]) for update in (1, 2)] == [24, 23]
    assert differences(weights(base[0]), weights(tmp_path), "model") != []
    samples = parse_ledger(ledger_bytes(tmp_path))
    before = parse_ledger(ledger_bytes(base[0]))
    assert samples[1] == before[1]
    assert (samples[2].samples, before[2].samples) == (23, 24)


def test_a_sample_of_no_update_changes_nothing(
    base: tuple[Path, dict[int, list[int]]], chosen: list[int], tmp_path: Path
) -> None:
    train(tmp_path, *SHORT, f"DATA.TRAIN.exclude=[{chosen[2]}]")
    assert differences_of_runs(base[0], tmp_path) == []


@pytest.mark.parametrize(
    "accumulate", [1, pytest.param(3, marks=pytest.mark.slow)], ids=lambda n: f"accumulate-{n}"
)
def test_weights_are_those_of_a_run_in_which_the_samples_cannot_be_read(
    tmp_path: Path, chosen: list[int], accumulate: int
) -> None:
    words = (*SHORT, "RUN.imports=[torn_digits]", f"OPTIMIZER.accumulate={accumulate}")
    torn = f"DATA.TRAIN={{dataset: torn_digits, bad: {chosen}, on_bad_sample: drop}}"
    train(tmp_path / "dropped", *words, torn)
    whole = "DATA.TRAIN={dataset: torn_digits, bad: []}"
    train(tmp_path / "excluded", *words, whole, f"DATA.TRAIN.exclude={chosen}")
    one, other = tmp_path / "dropped", tmp_path / "excluded"
    assert differences(weights(one), weights(other), "model") == []
    assert ledger_bytes(one) == ledger_bytes(other)


def test_an_update_without_samples_leaves_the_weights(
    base: tuple[Path, dict[int, list[int]]], tmp_path: Path
) -> None:
    words = (*SHORT, "CHECKPOINT={every_updates: 1, keep_last: 50}")
    train(tmp_path, *words, f"DATA.TRAIN.exclude={base[1][2]}")
    ledger = parse_ledger(ledger_bytes(tmp_path))
    assert [ledger[update].samples for update in (1, 2, 3)] == [24, 0, 24]
    assert ledger[2].loss == 0.0
    assert ledger[2].lr == parse_ledger(ledger_bytes(base[0]))[2].lr
    states = [checkpoint_after(tmp_path, update) for update in (1, 2, 3)]
    assert differences(states[0], states[1], "model") == []
    assert differences(states[1], states[2], "model") != []


def checkpoint_after(folder: Path, updates: int) -> Any:
    reader = CheckpointReader(f"{folder}/checkpoints", Storage())
    found = {one.manifest.state["updates"]: one.name for one in reader.list_checkpoints()}
    return reader.load(f"{reader.root}/{found[updates]}").state["task"]["model"]


@pytest.mark.feature("data.exclude")
@pytest.mark.by_default("4")
@pytest.mark.parametrize(
    "step", [pytest.param(n, marks=[] if n == 4 else pytest.mark.slow) for n in range(10)]
)
def test_killed_and_resumed(without: Path, chosen: list[int], tmp_path: Path, step: int) -> None:
    words = (*SHORT, f"DATA.TRAIN.exclude={chosen}")
    run_until_killed(tmp_path, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(step)})
    assert train(tmp_path, *words, hooks={"save": SaveEachStep()}).state == "finished"
    assert differences_of_runs(without, tmp_path) == []


@pytest.mark.slow
def test_same_bits_with_workers(without: Path, chosen: list[int], tmp_path: Path) -> None:
    train(tmp_path, *SHORT, f"DATA.TRAIN.exclude={chosen}", "DATA.TRAIN.workers=2")
    assert differences_of_runs(without, tmp_path) == []


@pytest.mark.slow
def test_same_bits_for_any_world_size_with_ordered_reduction(
    launcher: Launcher,
    base: tuple[Path, dict[int, list[int]]],
    tmp_path: Path,
) -> None:
    # All of the second update, and one of the third.
    ids = [*base[1][2], base[1][3][7]]
    words = (*SHORT, f"DATA.TRAIN.exclude={ids}", "DISTRIBUTED.reduction=ordered")
    threads = "MACHINE.threads=1"
    train(tmp_path / "one", *words, threads)
    ended = launcher.run(tmp_path / "two", 2, *SMALL, *words, threads)
    assert ended.codes == [0, 0], ended.outputs
    for part in ("model", "updater"):
        states = [newest(tmp_path / name).state["task"][part] for name in ("one", "two")]
        assert differences(states[0], states[1], part) == []
    ledgers = [parse_ledger(ledger_bytes(tmp_path / name)) for name in ("one", "two")]
    assert [row.samples for row in ledgers[0].values()] == [24, 0, 23, 24, 24, 22]
    assert [row.samples for row in ledgers[1].values()] == [24, 0, 23, 24, 24, 22]


def test_other_ids_cannot_resume_a_run(tmp_path: Path) -> None:
    ids = tmp_path / "ids.txt"
    ids.write_text("3\n")
    words = ("PHASES.epochs=1", "PHASES.limit.train=2", f"DATA.TRAIN.exclude={ids}")
    run_until_killed(tmp_path / "run", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(1)})
    ids.write_text("4\n")
    with raises(ChangedError, code="resume.data_changed"):
        train(tmp_path / "run", *words)


@pytest.mark.parametrize(
    "words",
    [
        "DATA.TRAIN.on_bad_sample=substitute",
        "DATA.TRAIN={loader: torch.utils.data.DataLoader, transforms: [], fast_forward: true}",
    ],
)
def test_splits_that_cannot_exclude_are_rejected(tmp_path: Path, words: str) -> None:
    with raises(ConfigError, key="DATA.TRAIN.exclude", code="config.conflict"):
        train(tmp_path, words, "DATA.TRAIN.exclude=[1]")
