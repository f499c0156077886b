"""A golden run is identical after changes without an effect; others are named with the first
difference."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forks import launch_fork
from mutations import MODULE, NEUTRAL, OTHERS, SOURCE, WORDS, Mutation

from phasetrain.addons.experiments.golden.components import (
    FirstDifference,
    find_first_difference,
    summarize_traces,
)
from phasetrain.addons.experiments.golden.golden import (
    NO_RECORD,
    check_golden,
    list_changes,
    record_golden,
)
from phasetrain.addons.experiments.golden.golden_file import GoldenRecord, read_golden, write_golden
from phasetrain.addons.experiments.options import RecordOptions
from phasetrain.cli import main
from phasetrain.cli.output import Outcome
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.proof.positions import PhaseLabel
from phasetrain.proof.trace import Trace

# A fork keeps the kernels of this process.
RUN = (*WORDS, "MACHINE.cpu_capability=null")
DIFFERENT = 7
HOOK = """

from phasetrain.hooks import Hook


class Mine(Hook):
    observe_only = True

    def __init__(self, token: str) -> None:
        pass
"""


@pytest.fixture(autouse=True)
def _in_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Bytecode of a source that was changed within a second would be taken for its own.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_source(SOURCE)


def write_source(text: str) -> None:
    Path(f"{MODULE}.py").write_text(text)
    forget_source()


def forget_source() -> None:
    sys.modules.pop(MODULE, None)
    importlib.invalidate_caches()


def record(*words: str, updates: int | None = 2, out: str = "golden.json") -> Outcome:
    options = RecordOptions(out=out, updates=updates, launch=launch_fork)
    return record_golden([*RUN, *words], options)


def check(*words: str, path: str = "golden.json") -> Outcome:
    return check_golden(path, words, launch=launch_fork)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with the record of the project."""
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr(sys, "dont_write_bytecode", True)
        write_source(SOURCE)
        assert record().exit_code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["golden.json", f"{MODULE}.py"]
    return folder / "golden.json"


def name_of(mutation: Mutation) -> str:
    return mutation.name


@pytest.mark.feature(
    "golden",
    "a short run is recorded in a file to commit; a check trains it again, and names the first "
    "update and component that differ, and the changed keys and source files",
    "`phasetrain golden record`, `golden check`",
)
@pytest.mark.by_default(2)
@pytest.mark.parametrize("mutation", NEUTRAL, ids=name_of)
def test_change_without_an_effect_is_identical(mutation: Mutation, recorded: Path) -> None:
    mutation.apply(Path())
    forget_source()
    outcome = check(*mutation.words, path=str(recorded))
    assert (outcome.exit_code, outcome.content["verdict"]) == (0, "identical"), outcome.text
    assert outcome.content["changed"]["sources"] == ([MODULE] if mutation.before else [])
    assert (outcome.content["changed"]["config"], outcome.content["changed"]["defaults"]) == (
        {},
        False,
    )


@pytest.mark.feature("golden")
@pytest.mark.by_default(2)
@pytest.mark.parametrize("mutation", OTHERS, ids=name_of)
def test_first_difference_of_another_change_is_named(mutation: Mutation, recorded: Path) -> None:
    mutation.apply(Path())
    forget_source()
    outcome = check(*mutation.words, path=str(recorded))
    content = outcome.content
    assert (outcome.exit_code, content["verdict"]) == (DIFFERENT, "different"), outcome.text
    assert (content["update"], content["component"]) == (mutation.update, mutation.component)
    changed = content["changed"]
    assert changed["sources"] == ([MODULE] if mutation.before else [])
    assert list(changed["config"]) == [word.partition("=")[0] for word in mutation.words]


@pytest.mark.feature("golden")
def test_each_platform_has_its_record(recorded: Path) -> None:
    [(name, own)] = read_golden(str(recorded)).items()
    other = replace(own, config={**own.config, "OPTIMIZER.lr": 1.0})
    write_golden("golden.json", {"elsewhere": other})
    missing = check()
    assert (missing.exit_code, missing.content["code"]) == (NO_RECORD, "golden.no_record")
    assert missing.content["platforms"] == ["elsewhere"]
    added = record()
    assert (added.content["platform"], added.content["stale"]) == (name, ["elsewhere"])
    assert read_golden("golden.json") == {"elsewhere": other, name: own}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "updates", "labels"),
    [
        ((), None, ["train step 3", "end of train", "train step 1"]),
        (("DATA.TEST.dataset=digits",), 3, ["train step 2", "end of train", "test step 1"]),
    ],
)
def test_run_has_the_requested_length_and_its_file_no_secret(
    words: tuple[str, ...], updates: int | None, labels: list[str]
) -> None:
    write_source(SOURCE + HOOK)
    hook = f"HOOKS.mine={{name: {MODULE}.Mine, token: hunter2}}"
    outcome = record(*words, hook, updates=updates)
    assert "hunter2" not in Path("golden.json").read_text()
    assert outcome.content["updates"] == (updates or 6)
    [entry] = read_golden("golden.json").values()
    names = [step["at"] for step in entry.steps]
    assert names[names.index(labels[0]) :][:3] == labels
    assert check().exit_code == 0


def damage(content: dict[str, Any], how: str) -> str:
    text = json.dumps(content)
    if how == "truncated":
        return text[:-40]
    if how == "format":
        return json.dumps(content | {"format": 99})
    if how == "no record":
        return json.dumps(content | {"platforms": {}})
    if how == "list":
        return "[]"
    [entry] = content["platforms"].values()
    entry["steps"] = how
    return json.dumps(content)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("truncated", "golden.unreadable"),
        ("list", "golden.unreadable"),
        ("steps of another type", "golden.unreadable"),
        ("no record", "golden.unreadable"),
        ("format", "golden.format"),
    ],
)
def test_damaged_file_is_rejected_and_not_overwritten(how: str, code: str, recorded: Path) -> None:
    text = damage(json.loads(recorded.read_text()), how)
    Path("golden.json").write_text(text)
    for call in (check, record) if how != "no record" else (check,):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.code == code
    assert Path("golden.json").read_text() == text


def test_missing_file_and_mistakes_of_the_config_have_their_codes(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as missing:
        check(path="other.json")
    assert missing.value.code == "golden.missing"
    assert main(["golden", "check", "other.json"]) == 2
    with pytest.raises(ConfigError) as length:
        record(updates=0)
    assert length.value.code == "golden.out_of_range"
    write_source(SOURCE.replace("class Network", "class Renamed"))
    with pytest.raises(ConfigError) as unknown:
        check(path=str(recorded))
    assert unknown.value.key == "MODEL.name"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as ranks:
        check(path=str(recorded))
    assert ranks.value.code == "config.world_size"


def test_run_that_fails_has_no_verdict(recorded: Path) -> None:
    write_source(
        SOURCE.replace("return loss *", "raise RuntimeError('no loss')\n        return loss *")
    )
    with pytest.raises(PhasetrainError) as caught:
        check(path=str(recorded))
    assert caught.value.code == "golden.run_failed"
    assert "no loss" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, ({}, False, [])),
        ({"config_sha256": "other"}, ({}, True, [])),
        (
            {"config_sha256": "other", "config": {"OPTIMIZER.lr": 1.0}},
            ({"OPTIMIZER.lr": [None, 1.0]}, False, []),
        ),
        ({"sources": {"new": "digest"}}, ({}, False, ["old", "new"])),
    ],
)
def test_changes_since_the_record_are_listed(change: dict[str, Any], expected: Any) -> None:
    before = GoldenRecord([], None, None, {}, "digest", {"old": "digest"}, {}, "", "", [])
    changes = list_changes(before, replace(before, **change))
    assert (changes["config"], changes["defaults"], changes["sources"]) == expected


def make_trace(updates: int, changed: tuple[int, str] = (0, "")) -> Trace:
    trace = Trace()
    trace.begin([PhaseLabel("train", 0, updates, True)])
    for step in range(1, updates + 1):
        names = ("batch.0.ids", "loss", "state.model.weight")
        trace.steps[0, step] = {name: f"{name} {step} {(step, name) == changed}" for name in names}
    trace.steps[1, 0] = {"state.model.weight": "end"}
    return trace


@pytest.mark.parametrize(
    ("updates", "changed", "expected"),
    [
        (3, (0, ""), None),
        (3, (2, "loss"), (2, "train step 2", "loss")),
        (3, (2, "state.model.weight"), (2, "train step 2", "weights")),
        (40, (3, "state.model.weight"), None),
        (40, (4, "state.model.weight"), (4, "train step 4", "weights")),
        (40, (3, "batch.0.ids"), (3, "train step 3", "samples")),
    ],
)
def test_states_of_long_runs_are_recorded_at_some_updates(
    updates: int, changed: tuple[int, str], expected: tuple[int, str, str] | None
) -> None:
    before = summarize_traces([make_trace(updates)])
    now = summarize_traces([make_trace(updates, changed)])
    difference = find_first_difference(before, now)
    assert difference == (FirstDifference(*expected) if expected else None)


def test_run_of_another_length_differs_where_one_ends() -> None:
    before, now = (summarize_traces([make_trace(updates)]) for updates in (2, 3))
    for pair in ((before, now), (now, before)):
        difference = find_first_difference(*pair)
        assert difference is not None
        assert difference.component == "length"


@pytest.mark.slow
def test_command_trains_in_new_processes_with_portable_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for word in WORDS if "transforms" not in word]
    assert main(["golden", "record", *words, "--updates", "1", "--out", "mine.json"]) == 0
    [entry] = read_golden("mine.json").values()
    assert entry.config["MACHINE.threads"] == 1
    capsys.readouterr()
    assert main(["golden", "check", "mine.json", "RUN.seed=1", "--json"]) == DIFFERENT
    printed = json.loads(capsys.readouterr().out)
    assert (printed["component"], printed["changed"]["config"]) == (
        "initial weights",
        {"RUN.seed": [None, 1]},
    )
