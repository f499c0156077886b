"""Distinct bad samples are counted once, up to a budget, and the count survives a resume."""

import json
import logging
import pickle
import re

import pytest
from raising import raises

from phasetrain.data.bad_samples import BadSamples, SampleError, Unreadable, format_samples


def test_each_bad_sample_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    bad = BadSamples("substitute", 3)
    with caplog.at_level(logging.WARNING, logger="phasetrain"):
        bad.add("train", [(7, "OSError: unreadable"), (7, "OSError: unreadable")])
        bad.add("train", [])
        bad.add("train", [(2, "ValueError: x"), (7, "OSError: again")])
    first, second = caplog.messages
    assert re.search(r"DATA\.TRAIN.*\b7\b.*\(OSError: unreadable\)", first)
    assert re.search(r"DATA\.TRAIN.*\b2\b.*\(ValueError: x\)", second)
    assert len(bad) == 2


def test_warning_names_the_split_the_sample_and_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="phasetrain"):
        BadSamples("drop", 3).add("valid", [(7, "OSError: x")])
    [message] = caplog.messages
    assert re.search(r"DATA\.VALID.*\b7\b.*\(OSError: x\)", message)


def test_error_beyond_the_budget_names_the_last_samples() -> None:
    bad = BadSamples("drop", 2)
    bad.add("train", [(9, "a"), (1, "b"), (9, "a")])
    with pytest.raises(SampleError) as caught:
        bad.add("train", [(5, "c"), (1, "b"), (4, "d")])
    assert caught.value.code == "data.bad_sample_budget"
    assert caught.value.key == "DATA.TRAIN.bad_sample_budget"
    assert "1 (b), 5 (c), 4 (d)" in str(caught.value)
    assert caught.value.exit_code == 1
    assert bad.state_dict() == {"samples": [[1, "b"], [9, "a"]]}  # the batch was not used


def test_budget_of_0_tolerates_no_bad_sample() -> None:
    BadSamples("drop", 0).add("train", [])
    with raises(SampleError, key="DATA.TRAIN.bad_sample_budget"):
        BadSamples("drop", 0).add("train", [(1, "b")])


def test_count_survives_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    before = BadSamples("drop", 2)
    before.add("train", [(9, "a"), (1, "b")])
    state = json.loads(json.dumps(before.state_dict()))
    caplog.clear()
    after = BadSamples("drop", 2)
    after.load_state_dict(state)
    after.add("train", [(1, "b"), (9, "a")])
    assert caplog.messages == []
    with raises(SampleError, key="DATA.TRAIN.bad_sample_budget"):
        after.add("train", [(2, "c")])
    assert after.state_dict() == before.state_dict()


def test_lowered_budget_fails_at_the_next_bad_sample() -> None:
    after = BadSamples("drop", 1)
    after.load_state_dict({"samples": [[1, "b"], [9, "a"]]})
    after.add("train", [])
    with raises(SampleError, key="DATA.TRAIN.bad_sample_budget"):
        after.add("train", [(1, "b")])


def test_state_does_not_depend_on_the_order_of_the_samples() -> None:
    one, other = BadSamples("drop", 5), BadSamples("drop", 5)
    one.add("train", [(9, "a"), (1, "b")])
    other.add("train", [(1, "b")])
    other.add("train", [(9, "a")])
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(2, "No such file", "a.png"), "FileNotFoundError: [Errno 2] No such file: 'a.png'"),
        (
            ValueError("cannot identify <BytesIO at 0x7f3d58A48b80>"),
            "ValueError: cannot identify <BytesIO at 0x...>",
        ),
        (ValueError("one\n  two\n"), "ValueError: one two"),
        (ZeroDivisionError(), "ZeroDivisionError:"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 288),
    ],
)
def test_reason_is_one_line_without_memory_addresses(error: Exception, reason: str) -> None:
    assert Unreadable.from_error(error).reason == reason


def test_samples_are_formatted_with_their_reasons() -> None:
    assert format_samples([(7, "a"), (3, "b")]) == "7 (a), 3 (b)"


def test_error_survives_pickling() -> None:
    assert str(pickle.loads(pickle.dumps(SampleError("DATA.TRAIN: x")))) == "DATA.TRAIN: x"
