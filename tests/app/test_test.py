"""Testing a checkpoint gives the numbers of the run, and touches nothing of it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    train,
)
from raising import raises

from phasetrain.app.api import run
from phasetrain.app.engines import run_engine
from phasetrain.app.result import RunResult
from phasetrain.app.stored.stored_config import use_folder
from phasetrain.checkpoint import Checkpointer
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.position import Position
from phasetrain.errors import ChangedError, ConfigError, NoValidCheckpointError
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import TASKS, Supervised
from phasetrain.tasks.parts import StepEvents


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, train(folder, "HOOKS.metrics.every_updates=1")


def test(folder: Path, *words: str) -> RunResult:
    return train(folder, "RUN.engine=test", *words)


test.__test__ = False  # type: ignore[attr-defined] # a function that tests a run, not a test


@pytest.mark.feature("21", "testing a checkpoint", "`phasetrain test`, `RUN.checkpoint`")
def test_metrics_are_those_of_the_last_test_of_the_run(trained: tuple[Path, RunResult]) -> None:
    folder, before = trained
    found = test(folder)
    assert before.last is not None
    assert found.last == {
        name: value for name, value in before.last.items() if name.startswith("test/")
    }
    assert (found.state, found.exit_code, found.updates, found.digest) == (
        "tested",
        0,
        15,
        before.digest,
    )


def test_random_transforms_of_all_tests_draw_the_same_numbers(tmp_path: Path) -> None:
    words = ("DATA.TEST.transforms=[{name: noise, std: 2.0}]", "MODEL={name: mlp, hidden: [4]}")
    short = ("OPTIMIZER.lr=0", "PHASES={epochs: 2, limit: {train: 1}}", f"RUN.dir={tmp_path}")
    run([*words, *short, "DATA.TEST.sampler=shuffled"])
    measured = [row["metrics"] for row in records(tmp_path) if row["split"] == "test"]
    found = run([*words, *short, "RUN.engine=test", "DATA.TEST.workers=1"])
    assert found.last is not None
    # The order of samples changes, and with it the last bits of a sum.
    losses = [found.last["test/loss"], *(metrics["loss"] for metrics in measured)]
    assert losses == [pytest.approx(losses[0], rel=1e-6)] * 3
    assert measured[0]["accuracy"] == measured[1]["accuracy"] == found.last["test/accuracy"]


@TASKS.register("noisy_tests")
class Noisy(Supervised):
    """Measures noise: of torch in each pass, of NumPy in training and in the last test step."""

    def forward(self, batch: Batch) -> StepOutput:
        out = super().forward(batch)
        out.logs = {"noise": torch.rand(())}
        if self.model.training:
            np.random.rand()
        return out

    def test_step(self, batches: list[Batch], at: Position, events: StepEvents) -> StepOutput:
        out = super().test_step(batches, at, events)
        late = np.random.rand() if at.step == 3 else 0.0
        self.add_logs(out, {"late": late, "where": at.where, "within": at.within})
        return out


@pytest.mark.parametrize(
    "words",
    [
        ["PHASES.epochs=3", "MODEL.ema={decay: 0.9}"],
        ["PHASES.epochs=null", "PHASES.stages=[{epochs: 1}, {epochs: 3}]"],
        [
            "HOOKS.early_stopping={monitor: -test/loss, patience: 1, min_delta: 100}",
            "PHASES.test_every.epochs=2",
        ],
    ],
)
def test_draws_of_a_test_are_those_of_the_run(tmp_path: Path, words: list[str]) -> None:
    monitor = "CHECKPOINT.best.monitor=-test/accuracy"
    words = ["TASK.name=noisy_tests", "PHASES.limit.test=4", monitor, *words]
    train(tmp_path, *words)
    measured: dict[int, dict[str, float]] = {}
    for record in records(tmp_path):
        if record["kind"] == "phase" and record["split"] != "train":
            values = {f"{record['split']}/{name}": v for name, v in record["metrics"].items()}
            measured.setdefault(record["updates"], {}).update(values)
    for which in ("latest", "best"):
        found = test(tmp_path, *words, f"RUN.checkpoint={which}")
        assert found.last == measured[found.updates]
    assert len(measured) > 1
    assert len({values["test/noise"] for values in measured.values()}) == 1


def test_metrics_are_written_next_to_the_run(trained: tuple[Path, RunResult]) -> None:
    folder, _ = trained
    found = test(folder)
    assert json.loads((folder / "test-p0006-s00000000.json").read_text()) == {
        "checkpoint": f"{folder}/checkpoints/p0006-s00000000",
        "updates": 15,
        "metrics": found.last,
    }


@pytest.mark.feature("test.nonfinite")
def test_samples_that_are_not_finite_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blank_of_a_test.py").write_text(
        "from phasetrain.data.datasets import load_digits\n"
        "class Blank:\n"
        "    samples = load_digits('test')\n"
        "    def __len__(self):\n        return 20\n"
        "    def __getitem__(self, index):\n"
        "        image, label = self.samples[index]\n"
        "        return (image / 0 if index == 7 else image), label\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["DATA.TRAIN.dataset=digits", "DATA.TEST.dataset=blank_of_a_test.Blank"]
    words = [*SMALL, "PHASES.epochs=1", f"RUN.dir={tmp_path}/run", *words]
    for engine in ("train", "test"):
        stream = io.StringIO()
        run([*words, f"RUN.engine={engine}"], terminal=Terminal(stream, live=False))
        printed = " ".join(stream.getvalue().split())
        assert printed.count("DATA.TEST: samples with NaN or infinite values: 1 (7), ") == 1


def test_an_earlier_checkpoint_by_its_path(trained: tuple[Path, RunResult]) -> None:
    folder, before = trained
    path = f"{folder}/checkpoints/p0003-s00000000"
    found = test(folder, f"RUN.checkpoint={path}")
    assert (found.updates, found.reason) == (10, path)
    assert found.last != before.last
    assert (folder / "test-p0003-s00000000.json").exists()


@pytest.mark.feature("24", "any number of test splits", "`DATA.ANY_NAME`")
def test_several_test_splits_and_all_batches(trained: tuple[Path, RunResult]) -> None:
    found = test(
        trained[0],
        "DATA.OTHER={dataset: digits, split: train, batch_size: 500}",
        "PHASES.limit.test=null",
    )
    assert found.last is not None
    assert list(found.last) == ["test/accuracy", "test/loss", "other/accuracy", "other/loss"]


@pytest.mark.parametrize(
    "words",
    [
        ["DATA.TRAIN.dataset=null"],
        ["DATA.TRAIN={dataset: idx, images: missing, labels: missing}", "DATA.TRAIN=null"],
        ["DATA.TEST={dataset: phasetrain.data.datasets.digits.load_digits, split: test}"],
    ],
)
def test_training_data_is_not_needed(trained: tuple[Path, RunResult], words: list[str]) -> None:
    folder, before = trained
    found = test(folder, *words)
    assert before.last is not None
    assert found.last == {
        name: value for name, value in before.last.items() if name.startswith("test/")
    }


NO_TRAINING = ("DATA.TRAIN=null", "PHASES.epochs=0", "PHASES.limit.train=null")


@pytest.mark.feature(
    "test_only", "tests without training data or a run", "`RUN.checkpoint=none`, `PHASES.epochs=0`"
)
@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["RUN.engine=test", "RUN.checkpoint=none"], "tested"),
        (["RUN.engine=test", "RUN.checkpoint=none", "DATA.TRAIN=null"], "tested"),
        ([*NO_TRAINING], "finished"),
        ([*NO_TRAINING, "PHASES.test_first=true"], "finished"),
        (["DATA.TRAIN=null", "PHASES.updates=0", "PHASES.epochs=null"], "finished"),
    ],
)
def test_pretrained_weights_are_tested_without_training_data(
    words: list[str], state: str, trained: tuple[Path, RunResult], tmp_path: Path
) -> None:
    folder, before = trained
    found = train(tmp_path, f"MODEL.weights={folder}", *words)
    assert before.last is not None
    assert (found.state, found.updates, found.digest) == (state, 0, before.digest)
    assert found.last == {
        name: value for name, value in before.last.items() if name.startswith("test/")
    }


@pytest.mark.parametrize(
    "words",
    [
        [*NO_TRAINING, "DATA.TEST=null"],  # nothing to do
        ["DATA.TRAIN=null"],
        ["DATA.TRAIN=null", "PHASES.stages=[{epochs: 1}]", "PHASES.epochs=null"],
        # A file with a length of 0, and another length on the command line.
        ["tests_only.yaml", "PHASES.epochs=null", "PHASES.updates=1"],
    ],
)
def test_run_that_trains_needs_training_data(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests_only.yaml").write_text("DATA: {TRAIN: null}\nPHASES: {samples: 0}\n")
    with raises(ConfigError, code="config.missing_dataset", key="DATA.TRAIN"):
        train(tmp_path, *words)


def test_without_a_checkpoint_averages_are_not_tested(tmp_path: Path) -> None:
    found = test(tmp_path, "RUN.checkpoint=none", "MODEL.ema={decay: 0.9}")
    assert found.last is not None
    assert list(found.last) == ["test/accuracy", "test/loss"]
    assert json.loads((tmp_path / "test-none.json").read_text()) == {
        "checkpoint": "none",
        "updates": 0,
        "metrics": found.last,
    }


def test_folder_of_a_run_is_tested_with_its_initial_weights(
    trained: tuple[Path, RunResult],
) -> None:
    folder, before = trained
    fresh = train(folder / "fresh", *NO_TRAINING)
    stored, words = use_folder(str(folder), "test", checkpoint="none", trust=True)
    found = run_engine(words, stored=stored, terminal=Terminal(io.StringIO(), live=False))
    assert (found.state, found.digest) == ("tested", fresh.digest)
    assert found.digest != before.digest


def test_killed_run_of_tests_only_resumes_exactly(tmp_path: Path) -> None:
    words = [*NO_TRAINING, "DATA.OTHER={dataset: digits, split: train, batch_size: 50}"]
    whole = train(tmp_path / "whole", *words)
    hooks = {"save": SaveEachStep(), "kill": KillAfter(2)}
    run_until_killed(tmp_path / "killed", *words, hooks=hooks)
    assert train(tmp_path / "killed", *words).last == whole.last
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []


def test_line_of_a_run_without_epochs_counts_none(tmp_path: Path) -> None:
    train(tmp_path, *NO_TRAINING, "HOOKS.console={}")
    assert "epoch 0/0  test " in (tmp_path / "log.txt").read_text()


def test_nothing_of_the_run_is_touched_and_no_lock_is_needed(
    trained: tuple[Path, RunResult],
) -> None:
    folder, _ = trained
    test(folder)
    owner = RunFolder(str(folder))
    owner.open()
    try:
        before = {
            p: p.stat().st_mtime_ns
            for p in folder.rglob("*")
            if p.is_file() and not p.name.startswith("test-")
        }
        test(folder)
        after = {
            p: p.stat().st_mtime_ns
            for p in folder.rglob("*")
            if p.is_file() and not p.name.startswith("test-")
        }
        assert after == before
    finally:
        owner.close()


class TestErrors:
    def test_folder_without_checkpoint_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=f"RUN.checkpoint = 'latest' .*'{tmp_path}'"):
            test(tmp_path)

    def test_path_that_is_not_a_checkpoint(self, trained: tuple[Path, RunResult]) -> None:
        with raises(ConfigError, code="checkpoint.unusable", key="RUN.checkpoint"):
            test(trained[0], f"RUN.checkpoint={trained[0]}")

    def test_damaged_checkpoints_are_rejected(self, tmp_path: Path) -> None:
        train(tmp_path, "PHASES.epochs=1")
        for file in tmp_path.glob("checkpoints/*/tensors.safetensors"):
            file.write_bytes(b"")
        with pytest.raises(NoValidCheckpointError):
            test(tmp_path)

    def test_missing_test_split_is_rejected(self, trained: tuple[Path, RunResult]) -> None:
        with raises(ConfigError, key="RUN.engine", given="'test'"):
            test(trained[0], "DATA.TEST=null")

    def test_checkpoint_of_another_model_is_rejected(self, trained: tuple[Path, RunResult]) -> None:
        with raises(ChangedError, code="checkpoint.other_model"):
            test(trained[0], "MODEL.width=8")


def test_newest_valid_checkpoint_is_tested_if_the_last_is_damaged(tmp_path: Path) -> None:
    train(tmp_path, "PHASES.epochs=2")
    (tmp_path / "checkpoints/p0004-s00000000/state.json").unlink()
    assert newest(tmp_path).path.endswith("p0003-s00000000")
    assert test(tmp_path).reason.endswith("p0003-s00000000")


class TestBest:
    @pytest.mark.by_default("-")
    @pytest.mark.parametrize("sign", ["", "-"])
    def test_the_best_by_the_monitor_is_tested(self, tmp_path: Path, sign: str) -> None:
        monitor = f"CHECKPOINT.best.monitor={sign}test/accuracy"
        train(tmp_path, monitor, "CHECKPOINT.keep_last=9", "OPTIMIZER.lr=0.5")
        listed = Checkpointer(f"{tmp_path}/checkpoints", Storage()).list_checkpoints()
        values = {saved.name: saved.manifest.facts.metrics.get("test/accuracy") for saved in listed}
        measured = {name: value for name, value in values.items() if value is not None}
        wanted = (min if sign else max)(measured.values())
        found = test(tmp_path, "RUN.checkpoint=best", monitor)
        assert found.last is not None
        assert found.last["test/accuracy"] == wanted
        assert (
            found.reason.rpartition("/")[2]
            == [name for name in measured if measured[name] == wanted][-1]
        )

    def test_missing_monitor_is_rejected(self, trained: tuple[Path, RunResult]) -> None:
        with pytest.raises(ConfigError) as caught:
            test(trained[0], "RUN.checkpoint=best")
        assert (caught.value.code, caught.value.key) == ("config.no_monitor", "RUN.checkpoint")

    def test_unmeasured_monitor_is_rejected(self, trained: tuple[Path, RunResult]) -> None:
        with pytest.raises(ConfigError, match="other/accuracy"):
            test(trained[0], "RUN.checkpoint=best", "CHECKPOINT.best.monitor=other/accuracy")
