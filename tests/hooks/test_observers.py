"""Keys of hooks that only observe are free; keys of all other hooks need consent."""

from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, train
from raising import raises

from phasetrain.app.setup import resolve_config
from phasetrain.config.schema import default_schema
from phasetrain.errors import ChangedError
from phasetrain.hooks import HOOKS, Hook
from phasetrain.hooks.observers import classify_hooks, is_observer

ACTING = {"early_stopping", "plateau", "reload_weights"}
SHORT = "PHASES.epochs=1"
PATIENT = "HOOKS.early_stopping={monitor: -train/loss, patience: 6}"


class Shrink(Hook):
    """Multiplies the weights after each update."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_update(self, run: Any, phase: Any) -> None:
        for weight in run.task.model.parameters():
            weight.data *= self.factor


class Count(Hook):
    observe_only = True


def test_every_registered_hook_but_three_observes() -> None:
    own = {name for name in HOOKS if HOOKS[name].__module__.startswith("phasetrain.")}
    assert {name for name in own if not is_observer(name)} == ACTING & own


def test_module_of_a_checkpoint_is_not_imported(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_observer("stranger.Hook")


def test_hook_observes_if_it_does_so_in_all_configs() -> None:
    one = {"HOOKS": {"a": {"name": f"{__name__}.Count"}, "b": {"name": "ledger"}, "console": {}}}
    other = {"HOOKS": {"a": {"name": f"{__name__}.Shrink"}, "c": {"name": "metrics"}}}
    schema = classify_hooks(default_schema(), one, other)
    assert {label: schema.resume(f"HOOKS.{label}.x") for label in (*"abc", "console")} == {
        "a": "adjustable",
        "b": "free",
        "c": "free",
        "console": "free",
    }


def test_checkpoint_says_that_a_hook_observed_whose_module_is_gone() -> None:
    before = {"HOOKS": {"gone": {"name": "vanished.Hook"}}}
    known = classify_hooks(default_schema(), before, {}, recorded=["gone"])
    assert known.resume("HOOKS.gone") == "free"
    assert classify_hooks(default_schema(), before, {}).resume("HOOKS.gone") == "adjustable"


@pytest.mark.parametrize(
    ("words", "is_another"),
    [
        ([PATIENT], True),
        ([PATIENT.replace("6", "7")], True),
        (["HOOKS.more={name: metrics, every_updates: 3}", "HOOKS.console=null"], False),
    ],
)
def test_acting_hooks_are_part_of_the_default_folder(words: list[str], is_another: bool) -> None:
    plain = resolve_config([SHORT]).config.RUN.dir
    patient = resolve_config([SHORT, PATIENT]).config.RUN.dir
    found = resolve_config([SHORT, *words]).config.RUN.dir
    assert (found != plain) is is_another
    assert (found == patient) is (words == [PATIENT])


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shrunk")
    train(folder, SHORT, f"HOOKS.shrink={{name: {__name__}.Shrink, factor: 0.99}}")
    return folder


@pytest.mark.parametrize(
    ("word", "key"),
    [
        (f"HOOKS.shrink={{name: {__name__}.Shrink, factor: 0.5}}", "HOOKS.shrink.factor"),
        (f"HOOKS.more={{name: {__name__}.Count}}", "HOOKS.shrink"),
    ],
)
def test_finished_run_is_not_mistaken_for_one_with_another_acting_hook(
    shrunk: Path, word: str, key: str
) -> None:
    with raises(ChangedError, key=key, code="resume.adjustable_key"):
        train(shrunk, SHORT, word)


def test_finished_run_with_another_observing_hook_is_the_same(shrunk: Path) -> None:
    word = f"HOOKS.shrink={{name: {__name__}.Shrink, factor: 0.99}}"
    found = train(
        shrunk, SHORT, word, "HOOKS.more={name: metrics}", f"HOOKS.n={{name: {__name__}.Count}}"
    )
    assert found.updates == 5


def test_run_that_a_hook_has_ended_trains_on_with_more_patience(tmp_path: Path) -> None:
    never = "HOOKS.early_stopping={monitor: -train/loss, patience: 1, min_delta: 100}"
    more = never.replace("patience: 1", "patience: 9")
    assert train(tmp_path, never).updates == 10
    again = train(tmp_path, more, "RUN.allow=[HOOKS.early_stopping]")
    assert (again.reason, again.updates) == ("completed", 15)


def test_consent_applies_to_a_hook_that_is_gone(tmp_path: Path) -> None:
    plain, resumed = tmp_path / "plain", tmp_path / "resumed"
    train(plain, SHORT)
    kill = {"save": SaveEachStep(), "kill": KillAfter(2)}
    run_until_killed(resumed, SHORT, PATIENT, hooks=kill)
    train(resumed, SHORT, "RUN.allow=[HOOKS.early_stopping]")
    assert differences_of_runs(plain, resumed) == []
