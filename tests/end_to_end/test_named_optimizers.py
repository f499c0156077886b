"""Muon, Adafactor and optimizers of other libraries resume exactly, on one and two ranks and with
sharded state."""

from pathlib import Path

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    run_until_killed,
    train,
)
from processes import Launcher
from raising import raises

from phasetrain.errors import ConfigError

ONE = "MACHINE.threads=1"
PARTS = "RUN.imports=[strategy_parts, process_parts]"
MODEL = ("~MODEL.width", "MODEL={name: mlp, hidden: [24, 16], dropout: 0.2, batch_norm: true}")
PLAIN = ("~OPTIMIZER.momentum", "~OPTIMIZER.nesterov")
MUON = (*MODEL, "OPTIMIZER={name: muon, lr: 0.01, adamw_lr_scale: 0.5, accumulate: 2}")
ADAFACTOR = (*MODEL, "OPTIMIZER={name: Adafactor, lr: 0.01, accumulate: 2}")
SOAP = (
    *MODEL,
    "OPTIMIZER={name: pytorch_optimizer.SOAP, lr: 0.003, precondition_frequency: 2, accumulate: 2}",
    *PLAIN,
)
SHAMPOO = (*MODEL, "OPTIMIZER={name: pytorch_optimizer.Shampoo, lr: 0.01}", *PLAIN)
EIGHT_BIT = (
    *MODEL,
    "OPTIMIZER={name: bitsandbytes.optim.AdamW8bit, lr: 0.003, min_8bit_size: 64, accumulate: 2}",
    *PLAIN,
)
SCHEDULE_FREE = (
    *MODEL,
    "OPTIMIZER={name: schedulefree.AdamWScheduleFree, lr: 0.01, warmup_steps: 4, accumulate: 2}",
    *PLAIN,
    "MODEL.schedule_free={batches: 2}",
)
LIBRARIES = {
    "SOAP": "pytorch_optimizer",
    "Shampoo": "pytorch_optimizer",
    "8 bit": "bitsandbytes",
    "schedule free": "schedulefree",
}
WHOLE_STATE = [
    pytest.param(MUON, id="muon", marks=pytest.mark.addon("optimizers")),
    pytest.param(ADAFACTOR, id="adafactor"),
]
LIBRARY = pytest.mark.addon("libraries")
EACH = [
    *WHOLE_STATE,
    pytest.param(SOAP, id="SOAP", marks=LIBRARY),
    pytest.param(SHAMPOO, id="Shampoo", marks=LIBRARY),
    pytest.param(EIGHT_BIT, id="8 bit", marks=LIBRARY),
    pytest.param(SCHEDULE_FREE, id="schedule free", marks=LIBRARY),
]


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    """Skip a test whose library is not installed."""
    for name, library in LIBRARIES.items():
        if name in request.node.name:
            pytest.importorskip(library)


@pytest.mark.feature(
    "optimizer.schedule_free",
    "schedule-free optimizers; SOAP, Shampoo and 8-bit optimizers of other libraries",
    "`MODEL.schedule_free`, `OPTIMIZER.name=schedulefree.AdamWScheduleFree`",
)
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", EACH)
def test_killed_run_resumes_exactly(tmp_path: Path, words: tuple[str, ...], precision: str) -> None:
    words = (*words, "OPTIMIZER.SCHEDULES={lr: cosine}", f"MACHINE.precision={precision}")
    train(tmp_path / "whole", *words)
    # The 7th step is in a test, where a schedule-free optimizer would have other weights.
    for step in (7, 9):
        folder = tmp_path / str(step)
        run_until_killed(folder, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(step)})
        train(folder, *words)
        assert differences_of_runs(tmp_path / "whole", folder) == []


@pytest.mark.addon("sharding")
@pytest.mark.slow
@pytest.mark.parametrize("words", WHOLE_STATE)
class TestTwoRanks:
    @pytest.mark.feature("optimizer.muon")
    def test_killed_run_resumes_exactly_and_has_the_bits_of_sharded_state(
        self, launcher: Launcher, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        words = (*SMALL, ONE, PARTS, *words)
        assert launcher.run(tmp_path / "unbroken", 2, *words).codes == [0, 0]
        for strategy in ("ddp", "zero", "sharded_ddp"):
            folder = tmp_path / strategy
            own = (*words, f"DISTRIBUTED.strategy={strategy}", "CHECKPOINT.every_updates=2")
            strike = "HOOKS.strike={rank: 1, update: 8}"
            assert launcher.run(folder, 2, *own, strike).codes[1] == -9
            ended = launcher.run(folder, 2, *own)
            assert ended.codes == [0, 0], ended.outputs
            assert differences_of_runs(tmp_path / "unbroken", folder) == []

    def test_fsdp_is_rejected_before_the_first_step(
        self, launcher: Launcher, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        words = (*SMALL, ONE, PARTS, *words, "DISTRIBUTED.strategy=fsdp")
        ended = launcher.run(tmp_path / "run", 2, *words)
        assert ended.codes == [2, 2], ended.outputs
        assert "OPTIMIZER.name: " in ended.outputs[0]
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.feature("optimizer.schedule_free")
@pytest.mark.addon("sharding")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero", "sharded_ddp"])
@pytest.mark.parametrize("words", EACH[2:4])
def test_sharded_state_of_libraries_has_the_bits_of_ddp(
    launcher: Launcher, tmp_path: Path, words: tuple[str, ...], strategy: str
) -> None:
    words = (*SMALL, ONE, PARTS, *words)
    unbroken = launcher.run(tmp_path / "unbroken", 2, *words)
    assert unbroken.codes == [0, 0], unbroken.outputs
    words = (*words, "CHECKPOINT.every_updates=2", f"DISTRIBUTED.strategy={strategy}")
    strike = "HOOKS.strike={rank: 1, update: 8}"
    killed = launcher.run(tmp_path / "run", 2, *words, strike)
    assert killed.codes[1] == -9, killed.outputs
    ended = launcher.run(tmp_path / "run", 2, *words)
    assert ended.codes == [0, 0], ended.outputs
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []


@pytest.mark.feature("optimizer.schedule_free")
@LIBRARY
@pytest.mark.addon("sharding")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "strategy"),
    [
        pytest.param(EIGHT_BIT, "zero", id="8 bit, zero"),
        pytest.param(EIGHT_BIT, "sharded_ddp", id="8 bit, sharded_ddp"),
        pytest.param(EIGHT_BIT, "fsdp", id="8 bit, fsdp"),
        pytest.param(SOAP, "fsdp", id="SOAP, fsdp"),
        pytest.param(SHAMPOO, "fsdp", id="Shampoo, fsdp"),
    ],
)
def test_state_that_cannot_be_sharded_is_rejected_before_the_first_step(
    launcher: Launcher, tmp_path: Path, words: tuple[str, ...], strategy: str
) -> None:
    words = (*SMALL, ONE, PARTS, *words, f"DISTRIBUTED.strategy={strategy}")
    ended = launcher.run(tmp_path / "run", 2, *words)
    assert ended.codes == [2, 2], ended.outputs
    assert "OPTIMIZER.name: " in ended.outputs[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", EACH[2:])
def test_two_ranks_resume_exactly(
    launcher: Launcher, tmp_path: Path, words: tuple[str, ...]
) -> None:
    words = (*SMALL, ONE, PARTS, *words)
    assert launcher.run(tmp_path / "unbroken", 2, *words).codes == [0, 0]
    words = (*words, "CHECKPOINT.every_updates=2")
    strike = "HOOKS.strike={rank: 1, update: 8}"
    assert launcher.run(tmp_path / "run", 2, *words, strike).codes[1] == -9
    assert launcher.run(tmp_path / "run", 2, *words).codes == [0, 0]
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []


@LIBRARY
@pytest.mark.addon("sharding")
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "code"), [("zero", 2), ("fsdp", 2)])
def test_schedule_free_is_rejected_with_sharded_state(
    launcher: Launcher, tmp_path: Path, strategy: str, code: int
) -> None:
    pytest.importorskip("schedulefree")
    words = (*SMALL, ONE, PARTS, *SCHEDULE_FREE, f"DISTRIBUTED.strategy={strategy}")
    ended = launcher.run(tmp_path / "run", 2, *words)
    assert ended.codes == [code, code], ended.outputs
    assert "MODEL.schedule_free and DISTRIBUTED.strategy" in ended.outputs[0]


@LIBRARY
@pytest.mark.slow
class TestScheduleFree:
    def test_weights_for_use_are_better_tested_and_exported(self, tmp_path: Path) -> None:
        pytest.importorskip("schedulefree")
        result = train(tmp_path / "run", *SCHEDULE_FREE)
        assert {"test/accuracy", "test@schedule_free/accuracy"} <= result.last.keys()
        task = newest(tmp_path / "run").state["task"]
        trained, used = task["model"], task["schedule_free"]
        state = task["updater"]["optimizer"][0]
        name = "layers.1.weight"
        expected = trained[name].lerp(state["z"], 1 - 1 / 0.9)
        assert torch.equal(used[name], expected)
        assert not torch.equal(used[name], trained[name])

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            ((*SCHEDULE_FREE, "MODEL.schedule_free=null"), {"code": "optimizer.schedule_free"}),
            (("MODEL.schedule_free={}",), {"code": "config.conflict"}),
        ],
        ids=["without the average", "another optimizer"],
    )
    def test_optimizer_and_average_go_together(
        self, tmp_path: Path, words: tuple[str, ...], problem: dict[str, str]
    ) -> None:
        pytest.importorskip("schedulefree")
        with raises(ConfigError, **problem):
            train(tmp_path / "run", *words)
