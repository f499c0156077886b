"""Frozen weights in whole runs: they stay equal to the last bit, and the others learn as if they
were alone."""

import json
from itertools import pairwise
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
    run_until_killed,
    train,
)
from processes import Launcher
from raising import raises
from test_processes import ONE, STRIKE

from phasetrain import load
from phasetrain.engine.batch import StepOutput
from phasetrain.engine.plan import Phase
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.testing import assert_exact_resume

STEADY = "OPTIMIZER.SCHEDULES.lr={name: constant, warmup: 0.0}"
DECAY = ("OPTIMIZER.momentum=0.9", "OPTIMIZER.weight_decay=0.1", STEADY)
CUT = [word for word in SMALL if not word.startswith(("PHASES", "HOOKS"))]


class Watch(Hook):
    """Keeps the model's state before the first update and after each, the norm, and what has
    momentum."""

    observe_only = True

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []
        self.norms: list[float] = []
        self.momenta: list[int] = []
        self.training: list[bool] = []

    def on_start(self, run: Run) -> None:
        self._keep(run)

    def on_step(self, run: Run, phase: Phase, out: StepOutput) -> None:
        if phase.is_train:
            updater: Any = run.task.updater
            self._keep(run)
            self.momenta.append(len(updater.optimizer.state))
            if updater.gradients.norm is not None:
                self.norms.append(float(updater.gradients.norm))

    def on_forward(self, run: Run, phase: Phase, out: StepOutput) -> None:
        model: Any = run.task.parts.model
        if phase.is_train:
            self.training.append(model.features[1].training)

    def _keep(self, run: Run) -> None:
        self.states.append(
            {name: one.clone() for name, one in run.task.parts.model.state_dict().items()}
        )

    def moved(self, name: str) -> list[bool]:
        """Tell for each update whether a tensor changed."""
        values = [state[name] for state in self.states]
        return [not torch.equal(one, other) for one, other in pairwise(values)]


def watched(folder: Path, *words: str) -> Watch:
    watch = Watch()
    train(folder, "PHASES.epochs=1", *DECAY, *words, hooks={"watch": watch})
    return watch


CLIP = "OPTIMIZER.clip_norm=0.1"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Return what a run without frozen weights did."""
    return watched(tmp_path_factory.mktemp("plain") / "run", CLIP)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """Return what a run with MODEL.freeze=[features] did."""
    return watched(tmp_path_factory.mktemp("frozen") / "run", CLIP, "MODEL.freeze=[features]")


class TestFreeze:
    @pytest.mark.feature(
        "64",
        "freezing for the run, a stage, or the first n updates",
        "`MODEL.freeze`, `MODEL.freeze_updates`",
    )
    def test_frozen_weights_and_buffers_stay_and_the_rest_learns(
        self, plain: Watch, frozen: Watch
    ) -> None:
        # Running statistics and counters are among them.
        names = [name for name in frozen.states[0] if name.startswith("features")]
        assert len(names) == 18
        assert not any(any(frozen.moved(name)) for name in names)
        assert all(frozen.moved("head.weight"))
        assert not any(frozen.training)
        assert frozen.momenta[-1] == 2
        assert any(plain.moved("features.0.weight"))

    def test_plan_lists_frozen_weights(self, tmp_path: Path) -> None:
        words = ("RUN.engine=plan", "RUN.rehearse=false")
        train(tmp_path / "run", *words, "MODEL.freeze=['*.0.weight', features.4]")

        plan = json.loads((tmp_path / "run" / "plan.json").read_text())
        assert plan["groups"] == [
            ["frozen", "3", "52", "features.0.weight, features.4.weight, features.4.bias"]
        ]
        assert plan["model"]["parameters"] - plan["model"]["trained"] == 52

    def test_freezing_a_single_parameter_leaves_batch_norm_in_training_mode(
        self, tmp_path: Path
    ) -> None:
        watch = watched(tmp_path / "run", "MODEL.freeze=[features.1.weight]")
        assert not any(watch.moved("features.1.weight"))
        assert all(watch.moved("features.1.running_mean"))
        weights = load(tmp_path / "run").model.named_parameters()
        assert {name for name, weight in weights if not weight.requires_grad} == {
            "features.1.weight"
        }

    def test_frozen_buffers_stay_under_activation_checkpointing(
        self, frozen: Watch, tmp_path: Path
    ) -> None:
        checkpointing = "MACHINE.activation_checkpointing=[BatchNorm2d]"
        watch = watched(tmp_path / "run", CLIP, "MODEL.freeze=[features]", checkpointing)
        assert not any(watch.moved("features.1.running_mean"))
        assert torch.equal(frozen.states[-1]["head.weight"], watch.states[-1]["head.weight"])


class TestFreezeUpdates:
    @pytest.mark.feature("64")
    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        "optimizer",
        [
            "OPTIMIZER={name: sgd, lr: 0.1, momentum: 0.9, weight_decay: 0.1}",
            "OPTIMIZER={name: adamw, lr: 0.01, weight_decay: 0.1}",
            "OPTIMIZER={name: RMSprop, lr: 0.01, weight_decay: 0.1}",
            pytest.param(
                "OPTIMIZER={name: lars, lr: 0.1, momentum: 0.9, weight_decay: 0.1}",
                marks=pytest.mark.addon("optimizers"),
            ),
        ],
    )
    def test_frozen_part_stays_and_then_learns(self, tmp_path: Path, optimizer: str) -> None:
        watch = Watch()
        rule = "MODEL.freeze_updates=[{match: features, for: 3}]"
        train(tmp_path / "run", "PHASES.epochs=1", optimizer, STEADY, rule, hooks={"watch": watch})
        assert watch.moved("features.0.weight") == [False, False, False, True, True]
        assert watch.moved("features.1.running_mean") == [False, False, False, True, True]
        assert watch.training == [False, False, False, True, True]
        assert all(watch.moved("head.weight"))
        assert watch.momenta == [2, 2, 2, 11, 11]

    def test_durations_are_updates_or_epochs(self, tmp_path: Path) -> None:
        watch = Watch()
        rules = "MODEL.freeze_updates=[{match: head, for: 1 epochs}, {match: [features.0, features.1], for: 2}]"
        train(tmp_path / "run", "PHASES.epochs=2", STEADY, rules, hooks={"watch": watch})
        assert watch.moved("head.weight") == [False] * 5 + [True] * 5
        assert watch.moved("features.0.weight") == [False] * 2 + [True] * 8

    def test_epoch_has_the_update_of_a_short_last_batch(self, tmp_path: Path) -> None:
        watch = Watch()
        data = ("DATA.TRAIN.subset.samples=60", "DATA.TRAIN.drop_last=false")
        rule = "MODEL.freeze_updates=[{match: head, for: 2 epochs}]"
        train(tmp_path, *data, "PHASES.epochs=3", STEADY, rule, hooks={"watch": watch})
        assert watch.moved("head.weight") == [False] * 6 + [True] * 3

    def test_momentum_begins_with_the_first_update_after_the_freeze(self, tmp_path: Path) -> None:
        """The momentum is then the gradient, as if the weights had been added to the optimizer."""
        watch = watched(
            tmp_path / "run",
            "MODEL.freeze_updates=[{match: head.bias, for: 4}]",
            "OPTIMIZER={lr: 0.1, nesterov: false}",
        )
        task = newest(tmp_path / "run").state["task"]
        before, after = (state["head.bias"] for state in watch.states[-2:])
        momentum = next(
            kept["momentum_buffer"]
            for kept in task["updater"]["optimizer"].values()
            if kept["momentum_buffer"].shape == (10,)
        )
        torch.testing.assert_close(before - 0.1 * momentum, after)

    def test_clipped_norm_excludes_frozen_weights(
        self, plain: Watch, frozen: Watch, tmp_path: Path
    ) -> None:
        rule = "MODEL.freeze_updates=[{match: features, for: 5}]"
        held = watched(tmp_path / "held", CLIP, rule)
        assert held.norms == frozen.norms
        assert held.norms[0] < plain.norms[0]
        assert torch.equal(held.states[-1]["head.weight"], frozen.states[-1]["head.weight"])

    @pytest.mark.slow
    def test_weights_with_zero_gradients_would_decay(self, tmp_path: Path) -> None:
        class Zero(Hook):
            def on_backward(self, run: Any, phase: Phase, out: StepOutput) -> None:
                run.task.parts.model.features[0].weight.grad.zero_()

        watch = Watch()
        train(tmp_path / "run", "PHASES.epochs=1", *DECAY, hooks={"zero": Zero(), "watch": watch})
        assert all(watch.moved("features.0.weight"))


class TestStages:
    def test_weights_are_frozen_for_one_stage(self, tmp_path: Path) -> None:
        watch = Watch()
        stages = "PHASES.stages=[{updates: 3, MODEL: {freeze: [features]}}, {updates: 3}]"
        train(tmp_path / "run", "PHASES.epochs=null", *DECAY, stages, hooks={"watch": watch})
        assert watch.moved("features.0.weight") == [False] * 3 + [True] * 3
        assert watch.training == [False] * 3 + [True] * 3
        assert all(watch.moved("head.weight"))

    @pytest.mark.by_default("4")
    @pytest.mark.parametrize("at", [2, 4])
    def test_run_killed_in_a_stage_resumes_exactly(self, tmp_path: Path, at: int) -> None:
        stages = "PHASES.stages=[{updates: 3, MODEL: {freeze: [features]}}, {updates: 3, MODEL: {freeze: [head]}}]"
        words = (
            "PHASES.epochs=null",
            *DECAY,
            stages,
            "MODEL.freeze_updates=[{match: head.bias, for: 1}]",
        )
        train(tmp_path / "unbroken", *words)
        run_until_killed(
            tmp_path / "run", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(at)}
        )
        train(tmp_path / "run", *words)
        assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []


@pytest.mark.slow
def test_run_resumes_exactly_before_and_after_the_thaw() -> None:
    rules = "MODEL.freeze_updates=[{match: features.0, for: 2}, {match: [features.1, features.3.*], for: 4}]"
    assert_exact_resume(
        [*CUT, *DECAY, "MODEL.freeze=[features.4]", rules], steps=[1, 2, 3, 6], workers=None
    )


class TestRejected:
    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            (
                ["MODEL.freeze=[feature]"],
                {"code": "config.no_match", "key": "MODEL.freeze", "suggestion": "features"},
            ),
            (["MODEL.freeze=['*']"], {"code": "config.conflict", "key": "MODEL.freeze"}),
            (["MODEL.freeze_updates=[{match: '*', for: 2}]"], {"code": "config.conflict"}),
            (
                ["MODEL.freeze_updates=[{match: haed, for: 2}]"],
                {"key": "MODEL.freeze_updates[0].match", "suggestion": "head"},
            ),
            (
                ["MODEL.freeze=[features]", "MODEL.freeze_updates=[{match: features.0, for: 2}]"],
                {"code": "config.conflict", "key": "MODEL.freeze_updates[0].match"},
            ),
            (
                ["MODEL.freeze_updates=[{match: features.0, for: 2 moons}]"],
                {"key": "MODEL.freeze_updates[0].for", "given": "'2 moons'"},
            ),
            (
                ["MODEL.freeze_updates=[{match: features.0, for: 0.5}]"],
                {"key": "MODEL.freeze_updates[0].for", "given": "0.5"},
            ),
            (
                ["MODEL.freeze_updates=[{match: features.0}]"],
                {"key": "MODEL.freeze_updates[0]"},
            ),
        ],
    )
    def test_invalid_rule_is_rejected_before_training(
        self, tmp_path: Path, words: list[str], problem: dict[str, str]
    ) -> None:
        with raises(ConfigError, **problem):
            train(tmp_path / "run", *words)
        assert not (tmp_path / "run" / "checkpoints").exists()

    def test_entirely_frozen_model_can_be_tested(self, tmp_path: Path) -> None:
        train(tmp_path / "run", "PHASES.epochs=1", "PHASES.limit.train=1")
        assert train(tmp_path / "run", "RUN.engine=test", "MODEL.freeze=['*']").state == "tested"


@pytest.mark.slow
def test_frozen_weights_stay_on_three_ranks(launcher: Launcher, tmp_path: Path) -> None:
    words = (*SMALL, ONE, *DECAY, "PHASES.epochs=2", "MODEL.freeze=[features.0, features.1]")
    words = (*words, "MODEL.freeze_updates=[{match: features.3, for: 6}]")
    assert launcher.run(tmp_path / "unbroken", 3, *words).codes == [0, 0, 0]
    strike = (STRIKE, "HOOKS.strike={rank: 2, update: 5}", "CHECKPOINT.every_updates=1")
    assert launcher.run(tmp_path / "run", 3, *words, *strike).codes[2] == -9
    assert launcher.run(tmp_path / "run", 3, *words, *strike).codes == [0, 0, 0]
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "run") == []
    train(tmp_path / "start", "PHASES.epochs=1", "PHASES.limit.train=1", "OPTIMIZER.lr=0")
    one, other = (newest(tmp_path / name).state["task"]["model"] for name in ("start", "unbroken"))
    assert torch.equal(one["features.0.weight"], other["features.0.weight"])
    assert not torch.equal(one["features.3.weight"], other["features.3.weight"])
