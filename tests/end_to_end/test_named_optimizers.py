"""Muon, Adafactor and others resume exactly, on one and two ranks and with sharded state."""

from pathlib import Path

import pytest
from harness import SMALL, KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train
from processes import Launcher

ONE = "MACHINE.threads=1"
PARTS = "RUN.imports=[strategy_parts, process_parts]"
MODEL = ("~MODEL.width", "MODEL={name: mlp, hidden: [24, 16], dropout: 0.2, batch_norm: true}")
MUON = (*MODEL, "OPTIMIZER={name: muon, lr: 0.01, adamw_lr_scale: 0.5, accumulate: 2}")
ADAFACTOR = (*MODEL, "OPTIMIZER={name: Adafactor, lr: 0.01, accumulate: 2}")
EACH = [pytest.param(MUON, id="muon"), pytest.param(ADAFACTOR, id="adafactor")]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", EACH)
def test_killed_run_resumes_exactly(tmp_path: Path, words: tuple[str, ...], precision: str) -> None:
    words = (*words, "OPTIMIZER.SCHEDULES={lr: cosine}", f"MACHINE.precision={precision}")
    train(tmp_path / "whole", *words)
    run_until_killed(tmp_path / "run", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    train(tmp_path / "run", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize("words", EACH)
class TestTwoRanks:
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
