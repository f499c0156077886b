"""Entries of OPTIMIZER.others with their own limits of the gradient."""

import pytest
from optimizer_parts import AdversarialUpdaters
from raising import raises

from phasetrain.errors import ConfigError
from phasetrain.testing.build import build_run

RIVALS = (
    "experiment=digits",
    "MODEL={name: rivals}",
    "METERS=null",
    "OPTIMIZER={name: adam, clip_norm: 2.0, clip_value: 0.5}",
)
CRITIC = "OPTIMIZER.others.critic={name: adam, match: 'critic.*', clip_norm: 1.0, scaler: grad}"


@pytest.mark.feature("several_models")
def test_entry_has_its_own_limits() -> None:
    assert AdversarialUpdaters.separate_updaters
    task = build_run([*RIVALS, CRITIC, "TASK.name=adversarial_updaters"]).task
    limits = {
        name: (one.gradients.settings.clip_norm, one.gradients.settings.clip_value)
        for name, one in task.updaters.items()
    }
    assert limits == {"main": (2.0, 0.5), "critic": (1.0, 0.5)}
    assert {name: one.scaler is None for name, one in task.updaters.items()} == {
        "main": True,
        "critic": False,
    }


@pytest.mark.parametrize("key", ["clip_norm", "clip_value", "scaler"])
def test_limit_of_an_optimizer_that_steps_with_others_is_rejected(key: str) -> None:
    value = "grad" if key == "scaler" else "1.0"
    entry = f"OPTIMIZER.others.critic={{name: adam, match: 'critic.*', {key}: {value}}}"
    with raises(ConfigError, code="config.conflict", key=f"OPTIMIZER.others.critic.{key}"):
        build_run([*RIVALS, entry, "TASK.name=adversarial"])


def test_label_of_the_main_updater_is_rejected() -> None:
    with raises(ConfigError, code="config.conflict", key="OPTIMIZER.others.main"):
        build_run([*RIVALS, CRITIC.replace("critic=", "main="), "TASK.name=adversarial_updaters"])
