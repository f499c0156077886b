"""Values that change and that no checkpoint contains end a run at the first save after the change."""

import importlib
import json
import linecache
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, newest, run_until_killed, train
from raising import raises
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from phasetrain.addons.observe.state_watch import describe_held
from phasetrain.addons.observe.uses import Uses
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook, Run
from phasetrain.proof.held import Held, is_changed
from phasetrain.runs.records import format_deviations

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
HERE = __name__
LINEAR = ("~MODEL.width", "~MODEL.dropout", "~MODEL.batch_norm")
LATE = ("PHASES.epochs=2", "CHECKPOINT.every_updates=2", "RUN.rehearse=false")
HOOK = f"+HOOKS.late.name={HERE}.Late"


class Late(Hook):
    """Begins to count at the fifth update, and changes the weights at the ninth."""

    def __init__(self) -> None:
        self.count = 0

    def on_update(self, run: Run, phase: Any) -> None:
        if run.state.updates >= 4:
            self.count += 1
        if self.count == 5:
            with torch.no_grad():
                next(run.task.model.parameters()).mul_(0.5)


class SavedLate(Late):
    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class RecomputedLate(Late):
    recomputed = ("count",)


class ObservingLate(Late):
    observe_only = True


class Counted:
    """An object that a hook holds."""


class Unfinished(Hook):
    """Freezes a weight and leaves the model in eval mode in the middle of a phase."""

    def on_update(self, run: Run, phase: Any) -> None:
        if run.state.updates == 1:
            next(run.task.model.parameters()).requires_grad_(False)
            run.task.model.eval()


@pytest.mark.feature(
    "resume.hidden_state",
    "state that no checkpoint contains ends a run at the first save after it has changed",
    "`RUN.exact`",
)
def test_late_change_ends_the_run_at_its_first_save_and_loses_nothing(tmp_path: Path) -> None:
    with raises(ConfigError, key="HOOKS.late", code="resume.not_exact") as caught:
        train(tmp_path, *LATE, HOOK)
    for text in ("`count` of", f"{HERE}.Late", '`"count": self.count`', "update 5"):
        assert text in str(caught.value)
    saved = newest(tmp_path)
    assert saved.manifest.state["updates"] == 5
    [entry] = saved.promised["departures"]
    assert entry["updates"] == 5
    assert "`count` of" in entry["what"][0]
    assert json.loads((tmp_path / "environment.json").read_text())["departures"] == [entry]
    assert "`count` of" in (tmp_path / "RUN.md").read_text()


@pytest.mark.feature("resume.hidden_state")
def test_late_change_is_accepted_and_recorded_for_good(tmp_path: Path) -> None:
    words = (*LATE, HOOK, "RUN.exact=false")
    run_until_killed(tmp_path, *words, hooks={"kill": KillAfter(7)})
    assert train(tmp_path, *words).updates == 10
    departures = json.loads((tmp_path / "environment.json").read_text())["departures"]
    found = [entry for entry in departures if "`count` of" in entry["what"][0]]
    assert [entry["updates"] for entry in found] == [5]


@pytest.mark.parametrize("name", ["SavedLate", "RecomputedLate", "ObservingLate"])
def test_saved_declared_and_observing_values_are_accepted(name: str, tmp_path: Path) -> None:
    assert train(tmp_path, *LATE, f"+HOOKS.late.name={HERE}.{name}").updates == 10


@pytest.mark.feature("resume.hidden_state")
def test_modes_and_frozen_weights_are_restored(tmp_path: Path) -> None:
    words = (*LATE, f"+HOOKS.flags.name={HERE}.Unfinished")
    train(tmp_path / "whole", *words)
    hooks: dict[str, Hook] = {"save": SaveEachStep(), "kill": KillAfter(3)}
    run_until_killed(tmp_path / "killed", *words, hooks=hooks)
    assert newest(tmp_path / "killed").state["task"]["flags"].keys() == {
        "training",
        "requires_grad",
    }
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []


class Pruning(Hook):
    """Prunes the head after an update; 0: before the first one."""

    def __init__(self, after: int) -> None:
        self.after = after

    def change(self, head: nn.Module) -> None:
        prune.random_unstructured(head, "weight", amount=0.5)

    def act(self, run: Run) -> None:
        if run.state.updates == self.after:
            self.change(run.task.parts.model.get_submodule("head"))

    def on_start(self, run: Run) -> None:
        self.act(run)

    def on_step(self, run: Run, phase: Any, out: Any) -> None:
        self.act(run)


class Normalizing(Pruning):
    def change(self, head: nn.Module) -> None:
        weight_norm(head)


@pytest.mark.feature("resume.hidden_state")
@pytest.mark.parametrize("exact", ["true", "false"])
@pytest.mark.parametrize(
    ("name", "after", "new"),
    [
        ("Pruning", 0, "head.weight_mask, head.weight_orig"),
        ("Pruning", 3, "head.weight_mask, head.weight_orig"),
        (
            "Normalizing",
            3,
            "head.parametrizations.weight.original0, head.parametrizations.weight.original1",
        ),
    ],
)
def test_renamed_weights_end_the_run_before_they_are_saved(
    name: str, after: int, new: str, exact: str, tmp_path: Path
) -> None:
    hook = (f"+HOOKS.late.name={HERE}.{name}", f"+HOOKS.late.after={after}")
    with raises(ConfigError, key="MODEL", code="checkpoint.names_changed") as caught:
        train(tmp_path, *LATE, *hook, f"RUN.exact={exact}")
    assert f"(gone: head.weight; new: {new})" in str(caught.value)
    if after:
        assert newest(tmp_path).manifest.state["updates"] == 2


@pytest.mark.parametrize(
    ("part", "owner", "name", "words", "wrong"),
    [
        ("model", nn.Dropout(), "", "`on_phase_start`", "recomputed"),
        ("model", nn.Linear(1, 1), "n", "no weight depends on it", "observe_only"),
        ("hooks.log", Counted(), "n", "`observe_only = True`", "stateful"),
        (
            "env",
            Counted(),
            "rng",
            '`state_dict` and `load_state_dict` of the object "env"',
            "add `",
        ),
        ("data.train", Counted(), "slots", "in `on_phase_start` of each phase", "observe_only"),
        ("task", Counted(), "rng", 'add `"rng": ...` to what `stateful()`', '"env"'),
    ],
)
def test_remedy_fits_the_owner(part: str, owner: object, name: str, words: str, wrong: str) -> None:
    message = describe_held(Held(part, owner, name, 1))
    assert words in message
    assert wrong not in message


LATE_SOURCE = """
from phasetrain.hooks import Hook


class Late(Hook):
DECLARED    def __init__(self):
        self.count = 0

    def on_update(self, run, phase):
        self.count += run.state.updates >= 4
        if self.count == 5:
            next(run.task.model.parameters()).data.mul_(1.0)

    SAVED
"""
SAVED = """def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
"""


@pytest.mark.feature("resume.hidden_state")
@pytest.mark.parametrize(
    ("declared", "saved", "spans", "reason"),
    [
        ("    observe_only = True\n\n", "", [], "declared to have no effect"),
        ('    recomputed = ("count",)\n\n', "", [], "computed again, as its class declares"),
        ("", SAVED, ["from update 5 on", "from update 5 until update 5"], None),
        ("    other = 1\n", "", ["from update 5 on", "from update 5 on"], None),
    ],
    ids=["observe_only", "recomputed", "saved", "neither"],
)
@pytest.mark.parametrize("from_python", [False, True])
def test_repair_ends_the_mark_of_a_value(
    declared: str,
    saved: str,
    spans: list[str],
    reason: str | None,
    from_python: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)

    def attempt(declaration: str, methods: str, *words: str) -> list[dict[str, Any]]:
        text = LATE_SOURCE.replace("DECLARED", declaration).replace("SAVED", methods)
        (tmp_path / "late_part.py").write_text(text)
        monkeypatch.delitem(sys.modules, "late_part", raising=False)
        importlib.invalidate_caches()
        linecache.checkcache()
        if from_python:
            hooks = {"late": importlib.import_module("late_part").Late()}
        else:
            hooks, words = {}, (*words, "+HOOKS.late.name=late_part.Late")
        try:
            train(tmp_path / "run", *LATE, *words, hooks=hooks)
        except ConfigError as error:
            assert error.code == "resume.not_exact"  # noqa: PT017 - both outcomes are compared
        content = json.loads((tmp_path / "run/environment.json").read_text())
        return list(content["departures"])

    lost = ["hooks.late", "late_part", "Late", "count"]
    assert [entry.get("value") for entry in attempt("", "")][-1] == lost
    words = ["RUN.exact=false"] if "other" in declared else []
    repaired = attempt(declared, saved, *words)
    if from_python:  # a hook that acts; its file is not compared
        is_observing = "observe_only" in declared
        spans = [] if is_observing else ["from the start", *spans[1:]]
    assert sorted(line.partition(":")[0] for line in format_deviations(repaired)) == spans
    log = (tmp_path / "run/log.txt").read_text()
    reasons = re.findall("late_part.Late.count: (.*), so it does not make the run inexact", log)
    assert reasons == [reason] * (reason is not None)
    assert log.count("this run is not exact from update 5") == ("count" in str(repaired))
    assert newest(tmp_path / "run").promised["departures"] == repaired
    assert bool(spans) == ("not the result of its command" in (tmp_path / "run/RUN.md").read_text())


@pytest.fixture(scope="module")
def try_part() -> Iterator[Callable[..., Any]]:
    sys.path.append(str(BENCHMARKS))
    from hidden_state import try_part

    yield try_part
    sys.path.remove(str(BENCHMARKS))


def _list_parts(kind: str) -> list[Any]:
    sys.path.append(str(BENCHMARKS))
    import hidden_state_parts

    sys.path.remove(str(BENCHMARKS))
    return list(vars(hidden_state_parts)[kind])


QUICK = (
    "hook: a module with a buffer",
    "hook: an object with a counter",
    "hook: an option of the default loss changed at the end of a phase",
    "hook: a list with a local name",
    "hook: an attribute that is set at the start of one phase",
    "task: a module whose buffer is assigned",
    "task: a target network of a custom class",
    "task: a target network synced every 30 updates",
)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, id=part.name, marks=() if part.name in QUICK else pytest.mark.slow)
        for part in _list_parts("HIDDEN")
    ],
)
def test_hidden_state_is_found(
    part: Any, tmp_path: Path, try_part: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    tried = try_part(part, tmp_path, 0)
    finishes = part.is_missed or part.is_restored
    assert tried.code == ("" if finishes else "resume.not_exact"), tried.message


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, id=part.name, marks=() if number == 0 else pytest.mark.slow)
        for number, part in enumerate(_list_parts("CLEAN"))
    ],
)
def test_clean_part_trains(
    part: Any, tmp_path: Path, try_part: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    tried = try_part(part, tmp_path, 0)
    assert (tried.code, tried.updates) == ("", 40), tried.message


@pytest.mark.parametrize(
    ("body", "matters"),
    [
        ("self.x += 1", False),  # nothing reads it
        ("self.x += 1; return self.x", True),
        ("self.x.append(1)", False),
        ("self.x.append(1); return len(self.x)", True),
        ("self.x = batch; return self.x", False),  # rewritten before it is read
        ("y = self.x; self.x = batch; return y", True),
        ("if batch: self.x = batch\n    return self.x", True),
        ("if self.x is None: self.x = make()\n    return self.x", False),
        ("if batch:\n      if batch == 1: self.x = 1\n      return self.x", True),
        ("if batch:\n      self.x = 0\n      self.x += 1\n      return self.x", False),
        ("if self.x is None or self.x > batch: self.x = batch\n    return self.x", True),
        ("self.x['key'] = batch; return self.x", False),
        ("self.x[batch] = 1; return self.x", True),
        ("self.x = self.x + 1; return 0", True),
    ],
)
def test_source_says_which_values_may_matter(
    body: str, matters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "used_part.py"
    module.write_text(f"class Part:\n  def step(self, batch):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "used_part", raising=False)
    import used_part  # type: ignore[import-not-found]

    assert Uses([used_part], ["Part"]).may_matter(".x", in_place=False) is matters
    assert not Uses([used_part], ["Other"]).may_matter(".x", in_place=False)


@pytest.mark.parametrize(
    ("assigns", "matters"),
    [
        ("def on_update(self, run):\n    run.loss.x = 1", True),
        ("def on_step(self, run):\n    loss = run.loss\n    loss.x = 1", True),
        ("def on_step_start(self, run):\n    run.loss.x = 1", False),
        (  # a resume calls it again
            "def on_update(self, run):\n    run.loss.x = 1\n"
            "  def on_start(self, run):\n    run.loss.x = 1",
            False,
        ),
        ("def on_update(self, run):\n    self.x = 1", False),  # of the hook itself
    ],
)
def test_attribute_that_a_hook_sets_after_a_step_is_read_in_the_next_one(
    assigns: str, matters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "late_uses.py"
    part = "class Loss:\n  def forward(self, output):\n    return output * self.x\n"
    module.write_text(f"{part}class Setter:\n  {assigns}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_uses", raising=False)
    linecache.clearcache()
    import late_uses  # type: ignore[import-not-found]

    uses = Uses([late_uses], ["Loss", "Setter"])
    assert uses.may_matter(".x", in_place=False) is matters


def test_function_that_is_a_hook_counts_as_its_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "from phasetrain.hooks import on\n"
        "class Loss:\n  def forward(self, output):\n    return output * self.x\n"
        "@on('update')\ndef late(run, phase):\n  run.loss.x = 1\n"
        "@on('step_start')\ndef early(run, phase):\n  run.loss.x = 1\n"
    )
    (tmp_path / "function_uses.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import function_uses  # type: ignore[import-not-found]

    for names, matters in ((["Loss", "late"], True), (["Loss", "late", "early"], False)):
        assert Uses([function_uses], names).may_matter(".x", in_place=False) is matters


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (1, 2, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),  # a cache that grows
        ({"a": 1}, {"a": 2}, True),
        ([2, None, 1], [2, 5, 1], False),
        ([2, 5, 1], [2, 6, 1], True),
        ([1, 5], [2, 5, 6], True),
    ],
)
def test_growing_caches_have_not_changed(before: Any, after: Any, changed: bool) -> None:
    assert is_changed(before, after) is changed
