import pytest
from raising import raises

from phasetrain.addons.experiments.sweep.prune.trial_plan import drop_pause, plan_trial
from phasetrain.errors import ConfigError

SMALL = ["DATA.TRAIN.batch_size=100", "PHASES.limit.train=4", "RUN.dir=x"]


def test_a_plan_has_the_tests_and_the_ends_of_epochs() -> None:
    words = [*SMALL, "PHASES.updates=10", "PHASES.test_every={epochs: null, updates: 3}"]
    plan = plan_trial(words, "test/accuracy", config_dir=None)
    assert (plan.updates, plan.tests, plan.epoch_ends) == (10, (3, 6, 9, 10), (4, 8, 10))
    assert "\n  pause_at" not in plan.config
    assert "lr: " in plan.config


def test_a_train_metric_is_measured_at_the_end_of_train_phases() -> None:
    plan = plan_trial([*SMALL, "PHASES.epochs=2"], "train/accuracy", config_dir=None)
    assert plan.tests == (4, 8)


def test_a_test_before_the_first_update_is_no_rung() -> None:
    words = [*SMALL, "PHASES.epochs=1", "PHASES.test_first=true"]
    assert plan_trial(words, "test/accuracy", config_dir=None).tests == (4,)


@pytest.mark.parametrize(
    ("word", "monitor", "code"),
    [
        ("RUN.pause_at=3", "test/accuracy", "sweep.prune_run"),
        ("RUN.engine=test", "test/accuracy", "sweep.prune_run"),
        ("LAUNCH.cluster=slurm", "test/accuracy", "sweep.prune_run"),
        ("RUN.seed=1", "test/acuracy", "monitor.not_measured"),
        ("RUN.seed=1", "valid/accuracy", "monitor.not_measured"),
    ],
)
def test_what_cannot_be_pruned_is_rejected(word: str, monitor: str, code: str) -> None:
    with raises(ConfigError, code=code):
        plan_trial([*SMALL, word], monitor, config_dir=None)


def test_a_pause_is_no_part_of_the_config() -> None:
    paused = "RUN:\n  seed: 0\n  pause_at: 30\n  dir: x\n"
    assert drop_pause(paused) == drop_pause(paused.replace("30", "null"))
    assert drop_pause(paused) != drop_pause(paused.replace("seed: 0", "seed: 1"))
