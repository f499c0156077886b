"""Strategies against each other and against one process, over real processes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, differences_of_runs, leftovers, newest, records, status
from processes import Launcher

from phasetrain.config.engines import list_engines
from phasetrain.hooks.numerics import read_dump
from phasetrain.runtime.storage import Storage
from phasetrain.testing import differences

ONE = "MACHINE.threads=1"
PARTS = "RUN.imports=[strategy_parts, process_parts]"
EACH = "DISTRIBUTED.bucket_cap_mb=0.00001"
"""A bucket for each parameter: sums over three processes are in the order then in which fairscale
adds them, too."""

ADAMW = ("OPTIMIZER={name: adamw, lr: 0.003, accumulate: 2, clip_norm: 0.5}",)
MOMENTUM = ("OPTIMIZER={name: sgd, lr: 0.05, momentum: 0.9, accumulate: 2, clip_norm: 0.5}",)
FIFTY = (*SMALL, ONE, PARTS, "PHASES.epochs=5", "PHASES.limit.train=10")
# No batch norm and no dropout: what a sample contributes does not depend on the process that it
# falls to.
PLAIN = (*SMALL[:5], *SMALL[-2:], ONE, PARTS, "MODEL.name=crossed", "METERS.loss=null")
STRATEGIES = ("ddp", "zero", "sharded_ddp")


def using(strategy: str) -> tuple[str, ...]:
    return (
        f"DISTRIBUTED.strategy={strategy}",
        *([] if strategy in ("sharded_ddp", "bucketed") else [EACH]),
    )


def finished(launcher: Launcher, folder: Path, size: int, *words: str) -> Path:
    done = launcher.run(folder, size, *words)
    assert (done.codes, done.alive) == ([0] * size, []), done.outputs
    assert "Warning" not in "".join(done.outputs), done.outputs  # of torch or fairscale
    return folder


def trained_state(folder: Path) -> dict[str, Any]:
    task = newest(folder).state["task"]
    return {name: task[name] for name in ("model", "loss", "updater")}


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder) if record["kind"] == "step"]


@pytest.fixture(scope="module")
def fifty(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of 50 updates with AdamW under ddp, on three processes."""
    folder = tmp_path_factory.mktemp("fifty") / "run"
    return finished(launcher, folder, 3, *FIFTY, *ADAMW, *using("ddp"))


class TestFiftyUpdates:
    """Batch norm, dropout, augmentation, accumulation without sync, clipping of the whole gradient,
    tests between."""

    @pytest.mark.feature(
        "58",
        "sharded gradients, optimizer state and weights",
        "`DISTRIBUTED.strategy: zero, sharded_ddp, fsdp`",
    )
    @pytest.mark.slow  # in the quick tests those that change the strategy on the way show it
    @pytest.mark.parametrize("strategy", ["zero", "sharded_ddp"])
    def test_strategy_has_the_bits_of_ddp(
        self, launcher: Launcher, fifty: Path, tmp_path: Path, strategy: str
    ) -> None:
        finished(launcher, tmp_path / "run", 3, *FIFTY, *ADAMW, *using(strategy))
        assert newest(fifty).manifest.state["updates"] == 50
        assert differences_of_runs(fifty, tmp_path / "run") == []

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("size", "words"), [(3, MOMENTUM), (2, ADAMW), (2, MOMENTUM), (4, ADAMW)]
    )
    def test_momentum_and_other_world_sizes_agree_too(
        self, launcher: Launcher, tmp_path: Path, size: int, words: tuple[str, ...]
    ) -> None:
        for strategy in STRATEGIES:
            finished(launcher, tmp_path / strategy, size, *FIFTY, *words, *using(strategy))
        assert differences_of_runs(tmp_path / "ddp", tmp_path / "zero") == []
        assert differences_of_runs(tmp_path / "ddp", tmp_path / "sharded_ddp") == []

    @pytest.mark.feature("58")
    @pytest.mark.slow
    def test_fairscale_buckets_are_silently_wrong(
        self, launcher: Launcher, fifty: Path, tmp_path: Path
    ) -> None:
        finished(launcher, tmp_path / "run", 3, *FIFTY, *ADAMW, *using("bucketed"))
        assert losses(tmp_path / "run")[:1] == losses(fifty)[:1]
        assert losses(tmp_path / "run")[3:] != losses(fifty)[3:]
        right, wrong = trained_state(fifty)["model"], trained_state(tmp_path / "run")["model"]
        assert (
            max(
                float((wrong[name] - tensor).abs().max())
                for name, tensor in right.items()
                if "weight" in name
            )
            > 0.01
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "strategies",
        [
            ("zero", "sharded_ddp", "ddp"),
            pytest.param(("sharded_ddp", "zero", "zero"), marks=pytest.mark.slow),
            pytest.param(("ddp", "zero", "sharded_ddp"), marks=pytest.mark.slow),
        ],
    )
    def test_strategy_may_change_between_attempts(
        self, launcher: Launcher, fifty: Path, tmp_path: Path, strategies: tuple[str, str, str]
    ) -> None:
        folder = tmp_path / "run"
        words = (*FIFTY, *ADAMW, "CHECKPOINT.every_updates=4")
        for strategy, rank, update in zip(strategies, (1, 2), (11, 33), strict=False):
            strike = f"HOOKS.strike={{rank: {rank}, update: {update}}}"
            assert launcher.run(folder, 3, *words, *using(strategy), strike).codes[rank] == -9
        finished(launcher, folder, 3, *words, *using(strategies[2]))
        assert differences_of_runs(fifty, folder) == []
        assert leftovers(folder) == []


@pytest.mark.slow
def test_world_size_and_strategy_may_change_together(launcher: Launcher, tmp_path: Path) -> None:
    words = (*PLAIN, ADAMW[0].replace(", accumulate: 2", ""), "CHECKPOINT.every_updates=2")
    finished(launcher, tmp_path / "one", 1, *words)
    folder = tmp_path / "run"
    for size, strategy, update in ((3, "zero", 5), (2, "sharded_ddp", 9), (4, "ddp", 13)):
        strike = f"HOOKS.strike={{rank: {size - 1}, update: {update}}}"
        assert (
            launcher.run(folder, size, *words, f"DISTRIBUTED.strategy={strategy}", strike).codes[
                size - 1
            ]
            == -9
        )
    finished(launcher, folder, 2, *words, "DISTRIBUTED.strategy=zero")
    assert losses(folder) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero", "sharded_ddp"])
@pytest.mark.parametrize(("rank", "update"), [(0, 7), (1, 8), (2, 3)])
def test_run_is_bit_identical_after_one_rank_is_killed(
    launcher: Launcher, tmp_path: Path, strategy: str, rank: int, update: int
) -> None:
    words = (*SMALL, ONE, PARTS, f"DISTRIBUTED.strategy={strategy}", "CHECKPOINT.every_updates=2")
    finished(launcher, tmp_path / "unbroken", 3, *words)
    strike = f"HOOKS.strike={{rank: {rank}, update: {update}}}"
    assert launcher.run(tmp_path / "run", 3, *words, strike).codes[rank] == -9
    finished(launcher, tmp_path / "run", 3, *words)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []


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


SHARPENED = (*PLAIN, "PHASES.epochs=1", "LOSS.name=sharpened", "OPTIMIZER.accumulate=2")


@pytest.fixture(scope="module")
def sharpened(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run under ddp with a loss that trains."""
    return finished(
        launcher, tmp_path_factory.mktemp("sharpened") / "run", 3, *SHARPENED, *using("ddp")
    )


class TestLossThatTrains:
    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", ["sharded_ddp", "zero"])
    def test_bits_are_the_same_under_each_strategy(
        self, launcher: Launcher, sharpened: Path, tmp_path: Path, strategy: str
    ) -> None:
        finished(launcher, tmp_path / "run", 3, *SHARPENED, *using(strategy))
        assert differences_of_runs(sharpened, tmp_path / "run") == []

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
        ("sharded_ddp", True),
        ("ddp", False),
        ("ddp", True),
        ("zero", True),
        ("zero", False),
        ("sharded_ddp", False),
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
        assert differences(kept.task["updater"], saved.state["task"]["updater"]) == []
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


@pytest.mark.slow
def test_ranks_without_consensus_diverge(launcher: Launcher, tmp_path: Path) -> None:
    taint = "HOOKS.taint={rank: 2, updates: [3], gradient: true}"
    words = (
        *PLAIN,
        "OPTIMIZER.on_nonfinite=skip",
        "DISTRIBUTED.strategy=deaf",
        "DISTRIBUTED.timeout_seconds=4",
        taint,
    )
    assert 0 not in launcher.run(tmp_path / "run", 3, *words).codes


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["{name: adamw, lr: 0.01}", "{name: sgd, lr: 0.1, momentum: 0.9}"]
)
@pytest.mark.parametrize("clip", ["null", "0.5"])
def test_rank_may_own_no_parameter(
    launcher: Launcher, tmp_path: Path, optimizer: str, clip: str
) -> None:
    taint = "HOOKS.taint={rank: 2, updates: [1, 6], gradient: true}"
    model = (
        "MODEL.name=flat",
        f"OPTIMIZER={optimizer}",
        f"OPTIMIZER.clip_norm={clip}",
        "OPTIMIZER.on_nonfinite=skip",
    )
    for strategy in STRATEGIES:
        done = launcher.run(tmp_path / strategy, 3, *PLAIN, *model, taint, *using(strategy))
        assert done.codes == [0, 0, 0], done.outputs
    found = trained_state(tmp_path / "ddp")
    assert found["updater"]["skipped"] == 2
    assert differences(found, trained_state(tmp_path / "zero")) == []
    assert differences(found, trained_state(tmp_path / "sharded_ddp")) == []


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


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.5, "null"])
def test_scaler_skips_on_all_ranks_if_one_overflows(
    launcher: Launcher, tmp_path: Path, clip: object
) -> None:
    scaler = "OPTIMIZER.scaler={name: grad, init_scale: 1024.0, growth_interval: 5}"
    taint = "HOOKS.taint={rank: 1, updates: [3, 7], gradient: true}"
    for strategy in ("ddp", "sharded_ddp"):
        words = (*PLAIN, scaler, taint, f"OPTIMIZER.clip_norm={clip}")
        finished(launcher, tmp_path / strategy, 3, *words, *using(strategy))
    found = trained_state(tmp_path / "ddp")
    assert found["updater"]["skipped"] == 2
    assert found["updater"]["scaler"]["scale"] == 512.0  # halved twice, doubled after update 12
    assert differences(found, trained_state(tmp_path / "sharded_ddp")) == []


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
