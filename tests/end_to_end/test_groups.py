"""Parameter groups resume exactly and are the same under every strategy."""

from pathlib import Path

import pytest
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
from test_processes import ONE

from phasetrain.testing import differences

RULES = (
    "OPTIMIZER.groups=[{max_ndim: 1, weight_decay: 0.0, momentum: 0.5}, {match: 'head.*', lr_scale: 3.0}]",
    "OPTIMIZER.weight_decay=0.01",
    "OPTIMIZER.SCHEDULES={lr: {name: cosine}}",
    "OPTIMIZER.layer_decay=0.9",
)


@pytest.mark.feature("53")
@pytest.mark.slow
def test_run_with_parameter_groups_resumes_exactly(tmp_path: Path) -> None:
    train(tmp_path / "whole", *RULES)
    run_until_killed(tmp_path / "run", *RULES, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    train(tmp_path / "run", *RULES)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []
    train(tmp_path / "plain")
    assert differences_of_runs(tmp_path / "whole", tmp_path / "plain") != []


@pytest.mark.addon("sharding")
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero", "sharded_ddp", "fsdp"])
def test_groups_are_the_same_under_every_strategy(
    launcher: Launcher, tmp_path: Path, strategy: str
) -> None:
    words = (*SMALL, ONE, *RULES, "DISTRIBUTED.bucket_cap_mb=0.00001")
    assert launcher.run(tmp_path / "ddp", 3, *words).codes == [0, 0, 0]
    words = (*words[:-1], *(words[-1:] if strategy == "zero" else ()))
    ended = launcher.run(tmp_path / "run", 3, *words, f"DISTRIBUTED.strategy={strategy}")
    assert ended.codes == [0, 0, 0], ended.outputs
    one, other = (newest(tmp_path / name).state["task"]["model"] for name in ("ddp", "run"))
    if strategy == "fsdp":
        assert all((one[name].double() - other[name].double()).abs().max() < 1e-5 for name in one)
    else:
        assert differences(one, other, "model") == []
