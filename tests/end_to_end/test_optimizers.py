"""Several optimizers, sparse rows, SAM, schedulers and scalers of other libraries resume exactly,
also on several processes."""

import json
import math
from pathlib import Path
from typing import Any

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
from processes import Launcher
from raising import raises
from test_processes import ONE

from phasetrain.errors import ConfigError

PARTS = "RUN.imports=[optimizer_parts, process_parts]"
SEVERAL = (
    "OPTIMIZER={name: sgd, lr: 0.05, momentum: 0.9, clip_norm: 1.0}",
    "OPTIMIZER.others.head={name: adamw, lr: 0.01, match: 'head*', groups: [{max_ndim: 1, weight_decay: 0.0}]}",
    "OPTIMIZER.others.head.SCHEDULES.lr={name: torch.CosineAnnealingWarmRestarts, T_0: 4}",
    "OPTIMIZER.others.norms={name: RMSprop, lr: 0.01, types: BatchNorm2d}",
    "OPTIMIZER.SCHEDULES={lr: {name: cosine, warmup: 0.0}, momentum: {name: linear, end: 0.5}}",
)
ROWS = (
    "MODEL={name: bag, width: 4}",
    "OPTIMIZER={name: sgd, lr: 0.05, momentum: 0.9, accumulate: 2}",
    "OPTIMIZER.others.rows={name: SparseAdam, lr: 0.05, match: 'rows.*'}",
)
OPTIMIZERS = pytest.mark.addon("optimizers")
SAM = ("OPTIMIZER={name: sgd, lr: 0.05, momentum: 0.9, accumulate: 2}", "OPTIMIZER.sam={rho: 0.1}")
RIVALS = (
    "MODEL={name: rivals}",
    "TASK.name=adversarial",
    "METERS.accuracy=null",
    "OPTIMIZER={name: adam, lr: 0.002}",
    "OPTIMIZER.others.critic={name: sgd, lr: 0.05, momentum: 0.5, match: 'critic.*'}",
)
TIMM = (
    "OPTIMIZER={name: timm.lion, lr: 0.003, weight_decay: 0.01}",
    "OPTIMIZER.SCHEDULES.lr={name: timm.cosine, warmup_t: 3}",
)
SPOILT = ("LOSS={name: spoilt, update: 6}", "OPTIMIZER.on_nonfinite=skip")
# What a sample contributes does not depend on the process that it falls to.
PLAIN = (*SMALL[:5], *SMALL[-2:], PARTS, "METERS.loss=null")

SHARDED = ("strategy=zero", "strategy=sharded_ddp", "strategy=fsdp")


def model_weights(folder: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = newest(folder).state["task"]["model"]
    return model


def largest_difference(one: Path, other: Path) -> float:
    first, second = model_weights(one), model_weights(other)
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with three optimizers."""
    folder = tmp_path_factory.mktemp("several") / "run"
    train(folder, *SEVERAL)
    return folder


@pytest.mark.feature("55")
@pytest.mark.addon("libraries")
def test_run_with_several_optimizers_resumes_exactly(several: Path, tmp_path: Path) -> None:
    run_until_killed(
        tmp_path / "run", *SEVERAL, hooks={"save": SaveEachStep(), "kill": KillAfter(9)}
    )
    train(tmp_path / "run", *SEVERAL)
    assert differences_of_runs(several, tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "plain"),
    [
        (SEVERAL, SEVERAL[:1]),
        (ROWS, ("MODEL={name: bag, sparse: false}", ROWS[1])),
        pytest.param((*SAM, *SPOILT), (SAM[0], *SPOILT), marks=OPTIMIZERS),
        (RIVALS, RIVALS[:-1]),
        ((*RIVALS, "TASK.in_turn=true"), RIVALS),
        (
            (RIVALS[0], "TASK.name=adversarial_updaters", *RIVALS[2:], "OPTIMIZER.accumulate=2"),
            RIVALS,
        ),
    ],
    ids=["several", "rows", "sam", "rivals", "rivals in turn", "separate updaters"],
)
def test_killed_run_resumes_exactly_and_differs_from_plain(
    tmp_path: Path, words: tuple[str, ...], plain: tuple[str, ...]
) -> None:
    words = (PARTS, *words)
    train(tmp_path / "whole", *words)
    run_until_killed(tmp_path / "run", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    train(tmp_path / "run", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []
    train(tmp_path / "plain", PARTS, *plain)
    assert largest_difference(tmp_path / "whole", tmp_path / "plain") > 1e-4


@pytest.mark.addon("libraries")
@pytest.mark.slow
def test_optimizer_and_schedule_of_timm_resume_exactly(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    train(tmp_path / "whole", *TIMM)
    rates = [one["lr"] for one in records(tmp_path / "whole") if one["kind"] == "step"]
    assert rates[:4] == pytest.approx(
        [0.0, 0.001, 0.002, 0.003 * (1 + math.cos(math.pi * 3 / 15)) / 2]
    )
    run_until_killed(tmp_path / "run", *TIMM, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    train(tmp_path / "run", *TIMM)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []


@pytest.mark.addon("libraries")
def test_logged_lr_is_that_of_the_main_optimizer(several: Path) -> None:
    assert next(one["lr"] for one in records(several) if one["kind"] == "step") == 0.05


@pytest.mark.addon("libraries")
def test_plan_lists_the_groups_of_each_optimizer(several: Path) -> None:
    rows = json.loads((several / "plan.json").read_text())["groups"]
    assert [row[0] for row in rows] == [
        "OPTIMIZER (sgd): defaults",
        "head (adamw): defaults, lr with its own schedule",
        "head (adamw): weight_decay 0, lr with its own schedule",
        "norms (RMSprop): defaults",
    ]


@pytest.mark.addon("libraries")
def test_null_removes_an_optimizer(tmp_path: Path) -> None:
    words = (*SEVERAL, "RUN.engine=plan", "RUN.rehearse=false")
    train(tmp_path / "run", *words, "OPTIMIZER.others.norms=null")
    rows: list[Any] = json.loads((tmp_path / "run" / "plan.json").read_text())["groups"]
    assert [row[0].partition(" ")[0] for row in rows] == ["OPTIMIZER", "head", "head"]


@OPTIMIZERS
@pytest.mark.slow
def test_logged_loss_of_sam_is_that_of_the_first_pass(tmp_path: Path) -> None:
    for name, words in (("sam", SAM), ("plain", SAM[:1])):
        train(tmp_path / name, "PHASES.epochs=1", *words)
    one, other = (
        [r["loss"] for r in records(tmp_path / name) if r["kind"] == "step"]
        for name in ("sam", "plain")
    )
    assert one[0] == other[0]
    assert one[1:] != other[1:]


@pytest.mark.feature(
    "61",
    "custom scalers; sharpness-aware minimization",
    "`OPTIMIZER.scaler`, `SCALERS`, `OPTIMIZER.sam`",
)
def test_custom_scaler_resumes_with_its_scale(tmp_path: Path) -> None:
    words = (PARTS, "PHASES.epochs=2", "OPTIMIZER.scaler={name: halving, start: 256.0}")
    train(tmp_path / "whole", *words)
    assert newest(tmp_path / "whole").state["task"]["updater"]["scaler"]["scale"] == 256.0 / 2**10
    run_until_killed(tmp_path / "run", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    train(tmp_path / "run", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []


class TestThreeProcesses:
    @pytest.mark.feature("56")
    @pytest.mark.parametrize(
        "words",
        [
            pytest.param(ROWS, id="rows"),
            pytest.param(
                (*SAM, "MODEL.sparse=false"), marks=[OPTIMIZERS, pytest.mark.slow], id="sam"
            ),
        ],
    )
    def test_three_ranks_train_as_one(
        self, launcher: Launcher, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        words = (*PLAIN, "PHASES.epochs=1", ONE, "MODEL.name=bag", *words)
        for size in (1, 3):
            ended = launcher.run(tmp_path / str(size), size, *words)
            assert ended.codes == [0] * size, ended.outputs
            assert "Warning" not in "".join(ended.outputs), ended.outputs
        assert largest_difference(tmp_path / "1", tmp_path / "3") < 1e-5

    @pytest.mark.by_default(1)
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "words",
        [SEVERAL, ROWS, pytest.param(SAM, marks=OPTIMIZERS)],
        ids=["several", "rows", "sam"],
    )
    def test_killed_run_resumes_exactly(
        self, launcher: Launcher, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        words = (*SMALL, ONE, PARTS, *words)
        assert launcher.run(tmp_path / "unbroken", 3, *words).codes == [0, 0, 0]
        words = (*words, "HOOKS.strike={rank: 1, update: 8}", "CHECKPOINT.every_updates=2")
        assert launcher.run(tmp_path / "run", 3, *words).codes[1] == -9
        assert launcher.run(tmp_path / "run", 3, *words).codes == [0, 0, 0]
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []

    @pytest.mark.addon("sharding")
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("words", "what", "ways"),
        [
            (SEVERAL[:2], "OPTIMIZER.others = head", SHARDED),
            pytest.param(SAM, "OPTIMIZER.sam = {'rho': 0.1}", SHARDED, marks=OPTIMIZERS),
            (
                (*ROWS[:1], "OPTIMIZER={name: sgd}"),
                "an embedding with sparse=True",
                (*SHARDED, "reduction=ordered"),
            ),
        ],
        ids=["several", "sam", "rows"],
    )
    def test_settings_that_need_whole_weights_are_rejected(
        self,
        launcher: Launcher,
        tmp_path: Path,
        words: tuple[str, ...],
        what: str,
        ways: tuple[str, ...],
    ) -> None:
        for way in ways:
            key, _, value = way.partition("=")
            ended = launcher.run(tmp_path / value, 2, *SMALL, PARTS, *words, f"DISTRIBUTED.{way}")
            assert ended.codes == [2, 2], ended.outputs
            assert f"{what} and DISTRIBUTED.{key} = {value!r}" in ended.outputs[0]


@OPTIMIZERS
@pytest.mark.slow
def test_weights_equal_those_of_one_process_with_ordered_reduction(
    launcher: Launcher, tmp_path: Path
) -> None:
    words = (*SMALL[:3], "DATA.TRAIN.batch_size=32", *SMALL[4:], ONE, PARTS, *SAM[1:], *SEVERAL[:2])
    for size in (1, 4):
        ended = launcher.run(tmp_path / str(size), size, *words, "DISTRIBUTED.reduction=ordered")
        assert ended.codes == [0] * size, ended.outputs
    assert largest_difference(tmp_path / "1", tmp_path / "4") == 0.0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("OPTIMIZER.name=LBFGS",), {"key": "OPTIMIZER.name", "given": "'LBFGS'"}),
        (
            (
                *SEVERAL,
                "OPTIMIZER.others.norms={name: RMSprop, match: 'head.*'}",
                "OPTIMIZER.others.norms.types=null",
            ),
            {"code": "config.wrong_type", "key": "OPTIMIZER.others.norms.types", "given": "null"},
        ),
        (
            (SEVERAL[0], "OPTIMIZER.others.head={name: adamx, match: 'head.*'}"),
            {
                "code": "config.unknown_part",
                "key": "OPTIMIZER.others.head.name",
                "suggestion": "Adamax",
            },
        ),
        (
            (SEVERAL[0], "OPTIMIZER.others.head={match: 'head.*'}"),
            {"code": "config.missing_part", "key": "OPTIMIZER.others.head"},
        ),
        (
            (SEVERAL[0], "OPTIMIZER.others.head={name: adam, mach: 'head.*'}"),
            {
                "code": "config.unknown_parameter",
                "key": "OPTIMIZER.others.head.mach",
                "suggestion": "OPTIMIZER.others.head.match",
            },
        ),
        (
            (
                SEVERAL[0],
                "OPTIMIZER.others.head={name: adam, match: 'head.*', SCHEDULES: {momentum: cosine}}",
            ),
            {"key": "OPTIMIZER.others.head.SCHEDULES.momentum"},
        ),
        (
            (PARTS, "MODEL={name: bag}", "OPTIMIZER={name: adamw}"),
            {"code": "config.conflict", "key": "OPTIMIZER.name"},
        ),
        pytest.param(
            (PARTS, *ROWS, "OPTIMIZER.sam={rho: 0.1}"),
            {"code": "config.conflict"},
            marks=OPTIMIZERS,
        ),
        pytest.param(
            ("OPTIMIZER.SCHEDULES.lr={name: torch.OneCycleLR, max_lr: 0.1, total_steps: 9}",),
            {"code": "config.rejected_by_part", "key": "OPTIMIZER.SCHEDULES.lr"},
            marks=pytest.mark.addon("libraries"),
        ),
        pytest.param(
            ("OPTIMIZER.SCHEDULES.lr={name: torch.CosineAnnealingWarmRestart, T_0: 9}",),
            {
                "code": "config.unknown_part",
                "key": "OPTIMIZER.SCHEDULES.lr.name",
                "suggestion": "CosineAnnealingWarmRestarts",
            },
            marks=pytest.mark.addon("libraries"),
        ),
    ],
    ids=[
        "LBFGS",
        "null",
        "unknown name",
        "no name",
        "unknown parameter",
        "unknown schedule",
        "dense optimizer of sparse rows",
        "sam of sparse rows",
        "schedule that rejects its length",
        "unknown schedule of torch",
    ],
)
def test_wrong_setting_is_rejected_before_training(
    tmp_path: Path, words: tuple[str, ...], problem: dict[str, str]
) -> None:
    with raises(ConfigError, **problem):
        train(tmp_path / "run", *words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
