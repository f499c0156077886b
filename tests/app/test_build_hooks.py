"""Hooks of section HOOKS and of Python."""

import pytest
from raising import raises

from phasetrain.app.build_hooks import flatten_config, label_hooks, redact_secrets
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, on


class WatchLoss(Hook):
    """A hook whose class gives its label."""


@on("step", every=2)
def record(run: object, phase: object, out: object) -> None:
    """A function as a hook."""


@pytest.mark.feature("hooks.list", "hooks as a list, with entries None", "`hooks=[...]`")
def test_hooks_of_a_list_are_named_after_their_classes() -> None:
    hooks = [WatchLoss(), None, record, WatchLoss(), WatchLoss()]
    labelled = label_hooks(hooks)
    assert list(labelled) == ["watch_loss", "record", "watch_loss_2", "watch_loss_3"]
    assert list(labelled.values()) == [hook for hook in hooks if hook]
    assert label_hooks({"a": None, "b": record}) == {"b": record}
    assert label_hooks(None) == label_hooks([None]) == {}


def test_entry_that_is_no_hook_is_rejected() -> None:
    with raises(ConfigError, code="config.wrong_part", key="HOOKS.builtin_function_or_method"):
        label_hooks([print])  # type: ignore[list-item]


def test_what_leaves_the_run_folder_has_no_secrets() -> None:
    config = {
        "HOOKS": {"mine": {"api_key": "abc", "every": 10}},
        "RUN": {"dir": "https://me:word@host/x", "seed": 1},
    }
    found = redact_secrets(flatten_config(config), {"MY_TOKEN": "0123456789"})
    assert found["RUN.seed"] == 1
    assert found["HOOKS.mine.every"] == 10
    assert "abc" not in str(found)
    assert "word" not in str(found)
    assert "0123456789" not in str(
        redact_secrets({"LOSS.name": "x0123456789y"}, {"MY_TOKEN": "0123456789"})
    )
