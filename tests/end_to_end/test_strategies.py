"""Runs over several real processes under `ddp`, against each other and against one process."""

import json
import re
from pathlib import Path

import pytest
import torch
from harness import SMALL, differences_of_runs, newest, status
from processes import Launcher
from strategy_runs import PARTS, PLAIN, SHARPENED, finished, losses, trained_state, using

from phasetrain.config.engines import list_engines
from phasetrain.hooks.numerics import read_dump
from phasetrain.runtime.storage import Storage
from phasetrain.testing import differences

SHARDING = pytest.mark.addon("sharding")

REORDERED = (
    *PLAIN,
    "PHASES.epochs=2",
    "DISTRIBUTED.bucket_cap_mb=0.01",
    "CHECKPOINT.every_updates=2",
)


@pytest.fixture(scope="module")
def reordered(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a few buckets that met no fault."""
    return finished(launcher, tmp_path_factory.mktemp("reordered") / "run", 3, *REORDERED)


class TestWarmUp:
    """DDP orders its buckets anew after its first backward pass, and a sum of three in another
    order is another one."""

    @pytest.mark.slow
    @pytest.mark.parametrize(("strategy", "same"), [("ddp", True), ("cold", False)])
    def test_a_resume_has_the_bits_of_the_unbroken_run_with_it_alone(
        self, launcher: Launcher, reordered: Path, tmp_path: Path, strategy: str, same: bool
    ) -> None:
        strike = "HOOKS.strike={rank: 1, update: 7}"
        assert launcher.run(tmp_path / "run", 3, *REORDERED, strike).codes[1] == -9
        finished(launcher, tmp_path / "run", 3, *REORDERED, f"DISTRIBUTED.strategy={strategy}")
        assert (differences_of_runs(reordered, tmp_path / "run") == []) is same


@pytest.fixture(scope="module")
def sharpened(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run under ddp with a loss that trains."""
    return finished(
        launcher, tmp_path_factory.mktemp("sharpened") / "run", 3, *SHARPENED, *using("ddp")
    )


class TestLossThatTrains:
    def test_result_is_that_of_one_rank(
        self, launcher: Launcher, sharpened: Path, tmp_path: Path
    ) -> None:
        finished(launcher, tmp_path / "run", 1, *SHARPENED)
        assert losses(sharpened) == pytest.approx(losses(tmp_path / "run"), rel=1e-5)
        many, one = trained_state(sharpened)["loss"], trained_state(tmp_path / "run")["loss"]
        assert float(many["sharpness"]) == pytest.approx(float(one["sharpness"]), rel=1e-5)
        assert float(one["sharpness"]) != 1.0
        assert float(many["calls"]) == float(one["calls"]) == 10.0


@pytest.mark.parametrize(
    ("strategy", "gradient"),
    [
        pytest.param("sharded_ddp", True, marks=SHARDING),
        ("ddp", False),
        ("ddp", True),
        pytest.param("zero", True, marks=SHARDING),
        pytest.param("zero", False, marks=SHARDING),
        pytest.param("sharded_ddp", False, marks=SHARDING),
    ],
)
class TestNonfiniteValueOnOneRank:
    @pytest.mark.feature("67")
    @pytest.mark.by_default(1)
    def test_nonfinite_value_stops_all_ranks_before_the_update(
        self, launcher: Launcher, tmp_path: Path, strategy: str, gradient: bool
    ) -> None:
        folder = tmp_path / "run"
        taint = f"HOOKS.taint={{rank: 1, updates: [6], gradient: {str(gradient).lower()}}}"
        words = (
            *PLAIN,
            "OPTIMIZER.accumulate=2",
            f"DISTRIBUTED.strategy={strategy}",
            "CHECKPOINT.every_updates=1",
        )
        done = launcher.run(folder, 3, *words, taint)
        assert (done.codes, status(folder)["state"]) == ([1, 1, 1], "failed"), done.outputs
        sentence = status(folder)["reason"]
        assert "update 6 " in sentence
        assert ("loss nan" in sentence) is not gradient
        bad = (
            "gradients of last.bias; samples"
            if gradient
            else "gradients of last.weight, last.bias, first.weight"
        )
        assert bad in sentence
        saved = newest(folder)
        assert saved.manifest.state["updates"] == 5
        assert all(bool(t.isfinite().all()) for t in saved.state["task"]["model"].values())

        kept = read_dump(Storage(), f"{folder}/numerics/u00000006")
        assert kept.shares == (2, 2, 2)
        assert kept.found.ids == tuple(i for batch in kept.batches for i in batch.ids.tolist())
        assert len(set(kept.found.ids)) == 24
        # Update 6 has begun, so its learning rate is the last one.
        changed = differences(kept.task["updater"], saved.state["task"]["updater"])
        assert changed == ["state.used_lr"]
        assert differences(kept.task["model"], saved.state["task"]["model"]) == []

        if "replay" in list_engines():
            looked = launcher.run(folder, 1, *words, "RUN.engine=replay", "RUN.step=6")
            assert looked.codes == [1]  # the fault was a hook's, which takes no part in a replay
            assert "non-finite values" in looked.outputs[0]

    @pytest.mark.by_default("ddp-False")
    def test_update_is_skipped_by_all_ranks(
        self, launcher: Launcher, tmp_path: Path, strategy: str, gradient: bool
    ) -> None:
        words = (
            *PLAIN,
            "OPTIMIZER.accumulate=2",
            f"DISTRIBUTED.strategy={strategy}",
            "OPTIMIZER.on_nonfinite=skip",
        )
        taint = f"HOOKS.taint={{rank: 2, updates: [3, 4, 9], gradient: {str(gradient).lower()}}}"
        done = launcher.run(tmp_path / "run", 3, *words, taint)
        assert done.codes == [0, 0, 0], done.outputs
        updater = newest(tmp_path / "run").state["task"]["updater"]
        assert (updater["skipped"], updater["skipped_in_row"]) == (3, 0)
        assert sorted(path.name for path in (tmp_path / "run" / "numerics").iterdir()) == [
            "u00000003",
            "u00000004",
            "u00000009",
        ]


class TestReplayOfThreeRanks:
    @pytest.mark.addon("experiments")
    @pytest.mark.slow
    def test_replay_on_one_rank_finds_the_sample(self, launcher: Launcher, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        words = (
            *PLAIN,
            "LOSS.name=torn_log",
            "RUN.imports=[strategy_parts, process_parts, torn_log]",
        )
        (tmp_path / "torn_log.py").write_text(TORN)
        done = launcher.run(folder, 3, *words)
        assert done.codes == [1, 1, 1], done.outputs
        number = int(re.findall(r"update (\d+) is not finite", done.outputs[0])[0])
        looked = launcher.run(folder, 1, *words, "RUN.engine=replay", f"RUN.step={number}")
        assert looked.codes == [0], looked.outputs
        assert "equal" in looked.outputs[0]


TORN = '''
import torch
from phasetrain.losses import LOSSES


@LOSSES.register("torn_log")
def torn_log(output, target):
    """Cross-entropy, and the logarithm of a negative number where a batch begins with a three."""
    loss = torch.nn.functional.cross_entropy(output, target)
    return loss * torch.log(-loss.detach()) if int(target[0]) == 3 else loss
'''


class TestDroppedSamples:
    """Six samples a batch in the order of the data set: processes get (0, 1), (2, 3) and (4, 5) of
    the first one."""

    WORDS = (
        *PLAIN,
        "PHASES.epochs=1",
        "PHASES.limit.train=null",
        "DATA.TRAIN.transforms=[]",
        "DATA.TRAIN.sampler=sequential",
        "DATA.TRAIN.batch_size=6",
    )

    def data(self, *bad: int) -> str:
        return f"DATA.TRAIN={{dataset: torn_digits, samples: 24, bad: {list(bad)}, on_bad_sample: drop}}"

    @pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
    def test_result_is_that_of_one_process(
        self, launcher: Launcher, tmp_path: Path, workers: int
    ) -> None:
        words = (*self.WORDS, self.data(2, 3, 7, 18, 19, 20, 21), f"DATA.TRAIN.workers={workers}")
        finished_quietly = [launcher.run(tmp_path / str(size), size, *words) for size in (1, 3)]
        assert [done.codes for done in finished_quietly] == [[0], [0, 0, 0]], finished_quietly
        assert losses(tmp_path / "3") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)
        weights = [trained_state(tmp_path / size)["model"] for size in ("1", "3")]
        for name, tensor in weights[0].items():
            torch.testing.assert_close(weights[1][name], tensor, rtol=1e-4, atol=1e-6)

    @pytest.mark.slow
    def test_run_ends_if_no_rank_has_samples_left(self, launcher: Launcher, tmp_path: Path) -> None:
        done = launcher.run(tmp_path / "run", 3, *self.WORDS, self.data(*range(6, 12)))
        assert done.codes == [1, 1, 1]
        sentence = json.loads((tmp_path / "run" / "status.json").read_text())["reason"]
        assert "DATA.TRAIN.on_bad_sample = 'drop'" in sentence


@pytest.mark.feature(
    "unused_parameters",
    "parameters that the loss does not use are named on several ranks",
    "`DISTRIBUTED.find_unused_parameters`",
)
@pytest.mark.slow
@pytest.mark.parametrize("used", [0, 6])
def test_unused_parameters_are_named_with_the_key(
    launcher: Launcher, tmp_path: Path, used: int
) -> None:
    words = (
        *SMALL[:5],
        *SMALL[-2:],
        PARTS,
        "PHASES.epochs=2",
        f"MODEL={{name: spared, used: {used}}}",
    )
    failed = launcher.run(tmp_path / "run", 2, *words)
    assert failed.codes == [2, 2]
    output = "".join(failed.outputs)
    assert "DISTRIBUTED.find_unused_parameters = false" in output
    assert "spare.weight, spare.bias" in output
    assert "Traceback" not in output
    done = launcher.run(tmp_path / "run", 2, *words, "DISTRIBUTED.find_unused_parameters=true")
    assert done.codes == [0, 0], done.outputs
