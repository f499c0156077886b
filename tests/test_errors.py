import pickle
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from phasetrain.config.problems import collect_problems, combine_problems
from phasetrain.errors import (
    ChangedError,
    ConfigError,
    FolderInUseError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    PhasetrainError,
    Problem,
    did_you_mean,
    is_user_file,
    list_problems,
    list_user_frames,
    nearest,
    needs_traceback,
    plain,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PhasetrainError, 1),
        (ConfigError, 2),
        (ChangedError, 3),
        (FolderInUseError, 4),
        (NoValidCheckpointError, 5),
        (InvalidCheckpointError, 1),
    ],
)
def test_each_error_has_the_exit_code_that_scripts_see(
    error: type[PhasetrainError], code: int
) -> None:
    assert error("told").exit_code == code
    assert issubclass(error, PhasetrainError)


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="told"):
        raise ConfigError("told")


@pytest.mark.parametrize(
    ("given", "known", "near"),
    [
        ("lrr", ["lr", "momentum"], "lr"),
        ("LR", ["lr"], "lr"),
        ("batchsize", ["batch_size"], "batch_size"),
        ("batch-size", ["batch_size"], "batch_size"),
        ("Adam_W", ["adamw", "adam"], "adamw"),
        ("zzz", ["lr"], None),
        ("lr", [], None),
        ("a_b", ["ab", "AB"], "ab"),
    ],
)
def test_nearest(given: str, known: list[str], near: str | None) -> None:
    assert nearest(given, known) == near


def test_nearest_as_like_as_asked() -> None:
    assert nearest("epochs", ["eps"]) == "eps"
    assert nearest("epochs", ["eps"], likeness=0.8) is None


def test_did_you_mean() -> None:
    assert did_you_mean("focl", ["focal"]) == "; did you mean 'focal'?"
    assert did_you_mean("zzz", ["focal"]) == ""


def test_plain() -> None:
    assert plain("Batch_Size-2") == "batchsize2"


HERE = "test_errors.py:"


class Part:
    """A part of the user that fails two calls deep."""

    def call(self) -> Any:
        return self.look_up({})

    def look_up(self, values: dict[str, Any]) -> Any:
        return values["missing"]


def call_part(call: Any) -> Exception:
    """Return the ConfigError that is made of a KeyError of a part."""
    with pytest.raises(ConfigError) as caught:
        wrap(call)
    return caught.value


def wrap(call: Any) -> None:
    try:
        call()
    except KeyError as error:
        raise ConfigError("LOSS: it fails") from error


class TestUserFrames:
    def test_files_of_the_user_are_those_outside_of_libraries(self, tmp_path: Path) -> None:
        assert is_user_file(__file__)
        assert is_user_file(str(tmp_path / "net.py"))
        assert not is_user_file(torch.__file__)
        assert not is_user_file(f"{sysconfig.get_path('stdlib')}/json/__init__.py")
        assert not is_user_file(collect_problems.__code__.co_filename)
        assert not is_user_file("<string>")

    def test_innermost_calls_are_listed_with_their_lines(self) -> None:
        with pytest.raises(KeyError) as caught:
            Part().call()
        *_, outer, inner = list_user_frames(caught.value)
        assert HERE in outer
        assert outer.endswith("in Part.call: return self.look_up({})")
        assert inner.endswith('in Part.look_up: return values["missing"]')

    def test_at_most_three_calls_are_listed(self) -> None:
        def recurse(depth: int) -> float:
            return recurse(depth - 1) if depth else 1 / 0

        with pytest.raises(ZeroDivisionError) as caught:
            recurse(9)
        assert len(list_user_frames(caught.value)) == 3

    def test_callers_of_phasetrain_are_left_out(self) -> None:
        with pytest.raises(TypeError) as caught:
            combine_problems(None)  # type: ignore[arg-type]
        assert list_user_frames(caught.value) == ()
        assert needs_traceback(caught.value)

    def test_error_keeps_the_lines_of_its_cause_across_processes_and_collections(self) -> None:
        frames = call_part(Part().call).problems[0].frames
        assert frames[-1].endswith('in Part.look_up: return values["missing"]')
        problems = collect_problems(lambda: wrap(Part().call))
        other = combine_problems([*problems, "MODEL.width = 0: expected at least 1"])
        sent = pickle.loads(pickle.dumps(other))
        assert [one.frames[-1:] for one in list_problems(sent)] == [frames[-1:], ()]

    def test_sentence_without_a_cause_needs_no_traceback(self) -> None:
        assert not needs_traceback(ConfigError("MODEL.width = 0: expected at least 1"))
        assert needs_traceback(call_part(Part().call))


def test_notebook_shows_the_message_and_the_lines_of_the_user() -> None:
    error = ConfigError("MODEL.name = 3: expected a name")
    error.add_note("while building")
    assert error._render_traceback_() == [
        "ConfigError: MODEL.name = 3: expected a name",
        "while building",
    ]
    problem = Problem("config.misfit", "it fails", frames=("net.py:3 in Net.forward: return x",))
    error = ConfigError("MODEL: it fails", problems=[problem])
    assert error._render_traceback_()[-1] == "    net.py:3 in Net.forward: return x"
