"""Plain text without a terminal, a live line with one."""

import io
import logging
import re

import pytest

from phasetrain.terminal import Terminal, plain_table, seconds


def plain() -> tuple[Terminal, io.StringIO]:
    stream = io.StringIO()
    return Terminal(stream, live=False), stream


class TestPlain:
    def test_lines(self) -> None:
        terminal, stream = plain()
        terminal.say("one [bold]\ntwo")
        assert stream.getvalue() == "one [bold]\ntwo\n"

    def test_a_table(self) -> None:
        terminal, stream = plain()
        terminal.table("results", ("metric", "value"), [("test/loss", "0.1000"), ("test/accuracy", "-12.5")])
        assert stream.getvalue() == (
            "results\nmetric          value\n-------------  ------\ntest/loss      0.1000\ntest/accuracy   -12.5\n"
        )

    def test_no_bar(self) -> None:
        terminal, stream = plain()
        terminal.progress(10, 0)
        terminal.advance(5, "half")
        terminal.end_progress()
        assert stream.getvalue() == ""

    @pytest.mark.parametrize(
        ("level", "text"), [(logging.INFO, ""), (logging.WARNING, "warning: "), (logging.ERROR, "error: ")]
    )
    def test_logged_lines_have_the_time_and_the_level(self, level: int, text: str) -> None:
        terminal, stream = plain()
        record = logging.LogRecord("phasetrain.x", level, "", 0, "%d updates", (3,), None)
        terminal.handler().handle(record)
        assert re.fullmatch(rf"\d\d:\d\d:\d\d {text}3 updates\n", stream.getvalue())

    def test_debug_lines_are_not_shown(self) -> None:
        assert plain()[0].handler().level == logging.INFO

    def test_a_stream_that_is_no_terminal(self) -> None:
        assert not Terminal(io.StringIO()).live


class TestLive:
    def test_a_run(self) -> None:
        stream = io.StringIO()
        terminal = Terminal(stream, live=True)
        terminal.progress(10, 0)
        terminal.advance(5, "loss 0.5")
        terminal.advance(6)
        terminal.say("epoch 1 [not markup]")
        terminal.end_progress()
        terminal.end_progress()
        terminal.table("results", ("metric", "value"), [("loss", "0.1")])
        assert "epoch 1 [not markup]" in stream.getvalue()
        assert "0.1" in stream.getvalue()

    def test_logged_lines_have_no_time(self) -> None:
        stream = io.StringIO()
        Terminal(stream, live=True).handler().handle(logging.LogRecord("x", logging.INFO, "", 0, "hello", (), None))
        assert stream.getvalue() == "hello\n"


def test_tables_of_nothing() -> None:
    assert plain_table("none", ("a", "b"), []) == "none\na  b\n-  -"


def test_numbers_stand_at_the_right_and_gaps_do_not_matter() -> None:
    assert plain_table("t", ("a", "long"), [("x", "1"), ("y", ""), ("...", "...")]) == (
        "t\na    long\n---  ----\nx       1\ny\n...   ..."
    )


@pytest.mark.parametrize(
    ("duration", "text"),
    [(0, "0.0 s"), (1.24, "1.2 s"), (59.94, "59.9 s"), (60, "1 min 00 s"), (185.4, "3 min 05 s"),
     (3600, "1 h 00 min"), (7805, "2 h 10 min"), (90_000, "25 h 00 min")],
)  # fmt: skip
def test_seconds(duration: float, text: str) -> None:
    assert seconds(duration) == text
