"""Strategies that shard, against `ddp` and against one process, over real processes."""

from pathlib import Path

import pytest
from harness import SMALL, differences_of_runs, leftovers, newest
from processes import Launcher
from strategy_runs import (
    ONE,
    PARTS,
    PLAIN,
    SHARPENED,
    finished,
    losses,
    trained_state,
    using,
)

from phasetrain.testing import differences

SHARDED_PARTS = "RUN.imports=[strategy_parts, process_parts, sharded_parts]"
ADAMW = ("OPTIMIZER={name: adamw, lr: 0.003, accumulate: 2, clip_norm: 0.5}",)
MOMENTUM = ("OPTIMIZER={name: sgd, lr: 0.05, momentum: 0.9, accumulate: 2, clip_norm: 0.5}",)
FIFTY = (*SMALL, ONE, PARTS, "PHASES.epochs=5", "PHASES.limit.train=10")
STRATEGIES = ("ddp", "zero", "sharded_ddp")


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
        finished(launcher, tmp_path / "run", 3, *FIFTY, *ADAMW, SHARDED_PARTS, *using("bucketed"))
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


@pytest.fixture(scope="module")
def sharpened(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run under ddp with a loss that trains."""
    return finished(
        launcher, tmp_path_factory.mktemp("sharpened") / "run", 3, *SHARPENED, *using("ddp")
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded_ddp", "zero"])
def test_loss_that_trains_has_the_bits_of_ddp(
    launcher: Launcher, sharpened: Path, tmp_path: Path, strategy: str
) -> None:
    finished(launcher, tmp_path / "run", 3, *SHARPENED, *using(strategy))
    assert differences_of_runs(sharpened, tmp_path / "run") == []


@pytest.mark.slow
def test_ranks_without_consensus_diverge(launcher: Launcher, tmp_path: Path) -> None:
    taint = "HOOKS.taint={rank: 2, updates: [3], gradient: true}"
    words = (
        *PLAIN,
        "OPTIMIZER.on_nonfinite=skip",
        SHARDED_PARTS,
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
