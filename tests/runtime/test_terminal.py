"""Plain text without a terminal, a live line with one."""

import io
import logging
import re

import pytest

from phasetrain.runtime.live_view import Bar, View
from phasetrain.runtime.terminal import Terminal, Verbosity, plain_table


def logged(text: str, *values: object, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("phasetrain.x", level, "", 0, text, values, None)


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
        terminal.print_table(
            "results", ("metric", "value"), [("test/loss", "0.1000"), ("test/accuracy", "-12.5")]
        )
        assert stream.getvalue() == (
            "results\nmetric          value\n-------------  ------\ntest/loss      0.1000\ntest/accuracy   -12.5\n"
        )

    def test_nothing_moves(self) -> None:
        terminal, stream = plain()
        terminal.start_live(lambda: View((Bar("run", 5, 10),)))
        terminal.stop_live()
        assert stream.getvalue() == ""

    def test_lines_with_a_word_before_each(self) -> None:
        terminal, stream = plain()
        terminal.print_pairs([("run", "digits"), ("weights", "sha256 0")])
        assert re.fullmatch(
            r"\d\d:\d\d:\d\d run     digits\n\d\d:\d\d:\d\d weights sha256 0\n", stream.getvalue()
        )

    @pytest.mark.parametrize(
        ("level", "text"),
        [(logging.INFO, ""), (logging.WARNING, "warning: "), (logging.ERROR, "error: ")],
    )
    def test_logged_lines_have_the_time_and_the_level(self, level: int, text: str) -> None:
        terminal, stream = plain()
        record = logging.LogRecord("phasetrain.x", level, "", 0, "%d updates", (3,), None)
        terminal.make_handler().handle(record)
        assert re.fullmatch(rf"\d\d:\d\d:\d\d {text}3 updates\n", stream.getvalue())

    @pytest.mark.parametrize(
        ("verbosity", "shown"),
        [
            ("quiet", ["warning: w"]),
            ("normal", ["i", "warning: w"]),
            ("verbose", ["d", "i", "warning: w"]),
        ],
    )
    def test_how_much_is_printed(self, verbosity: Verbosity, shown: list[str]) -> None:
        terminal, stream = plain()
        terminal.verbosity = verbosity
        handler = terminal.make_handler()
        for level, text in ((logging.DEBUG, "d"), (logging.INFO, "i"), (logging.WARNING, "w")):
            handler.handle(logged(text, level=level))
        assert [line[9:] for line in stream.getvalue().splitlines()] == shown

    def test_what_is_for_the_log_alone_is_not_shown(self) -> None:
        terminal, stream = plain()
        terminal.make_handler().handle(
            logging.LogRecord("phasetrain.shown", logging.INFO, "", 0, "in a table", (), None)
        )
        assert stream.getvalue() == ""

    def test_a_quiet_terminal_prints_the_end(self) -> None:
        terminal, stream = plain()
        terminal.verbosity = "quiet"
        terminal.print_pairs([("run", "digits")])
        terminal.print_pairs([("end", "completed")], always=True)
        assert [line[9:] for line in stream.getvalue().splitlines()] == ["end     completed"]

    def test_a_stream_that_is_no_terminal(self) -> None:
        assert not Terminal(io.StringIO()).live


class TestWarnings:
    def test_each_is_shown_once_and_counted(self) -> None:
        terminal, stream = plain()
        handler = terminal.make_handler()
        for text in ("one", "one", "other", "one"):
            handler.handle(logged(text))
        assert [line[9:] for line in stream.getvalue().splitlines()] == [
            "warning: one",
            "warning: other",
        ]
        assert terminal.warnings.repeated_rows() == [("warned", "3 x one")]

    def test_of_one_kind_a_few_are_shown(self) -> None:
        terminal, stream = plain()
        handler = terminal.make_handler()
        for sample in range(9):
            handler.handle(logged("sample %d cannot be read", sample))
        lines = [line[9:] for line in stream.getvalue().splitlines()]
        assert lines[:4] == [f"warning: sample {sample} cannot be read" for sample in range(4)]
        assert lines[4:] == [
            "warning: sample 4 cannot be read (further ones of this kind are only counted, and are in log.txt)"
        ]
        assert terminal.warnings.repeated_rows() == [("warned", "9 like sample 0 cannot be read")]

    def test_different_texts_that_were_all_shown_are_not_repeated_at_the_end(self) -> None:
        terminal, _ = plain()
        handler = terminal.make_handler()
        for sample in (3, 7):
            handler.handle(logged("sample %d cannot be read", sample))
        assert terminal.warnings.repeated_rows() == []

    def test_errors_are_always_shown(self) -> None:
        terminal, stream = plain()
        for _ in range(2):
            terminal.make_handler().handle(logged("broken", level=logging.ERROR))
        assert stream.getvalue().count("error: broken") == 2

    def test_many_kinds(self) -> None:
        terminal, _ = plain()
        for kind in range(7):
            for _ in range(2):
                terminal.make_handler().handle(logged(f"kind {kind}"))
        rows = terminal.warnings.repeated_rows()
        assert rows[0] == ("warned", "2 x kind 0")
        assert rows[-1] == ("", "4 x others, 2 kinds; all are in log.txt")
        assert len(rows) == 6


class Gone(io.StringIO):
    """A stream whose reader has gone, such as a closed connection."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def write(self, text: str) -> int:
        self.asked += 1
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("live", [False, True])
def test_a_reader_that_has_gone_ends_nothing(live: bool) -> None:
    stream = Gone()
    terminal = Terminal(stream, live=live)
    terminal.start_live(lambda: View((Bar("run", 5, 10),)))
    terminal.say("one")
    asked = stream.asked
    terminal.say("two")
    terminal.print_table("results", ("a",), [("b",)])
    terminal.stop_live()
    assert stream.asked == asked == 1


class TestLive:
    def test_a_run(self) -> None:
        stream = io.StringIO()
        terminal = Terminal(stream, live=True)
        terminal.start_live(lambda: View((Bar("run", 5, 10),), ("loss 0.5",)))
        terminal.say("epoch 1 [not markup]")
        terminal.stop_live()
        terminal.stop_live()
        terminal.print_table("results", ("metric", "value"), [("loss", "0.1")])
        assert "epoch 1 [not markup]" in stream.getvalue()
        assert "0.1" in stream.getvalue()

    def test_logged_lines_have_no_time(self) -> None:
        stream = io.StringIO()
        Terminal(stream, live=True).make_handler().handle(
            logging.LogRecord("x", logging.INFO, "", 0, "hello", (), None)
        )
        assert stream.getvalue() == "hello\n"

    def test_a_quiet_terminal_does_not_move(self) -> None:
        stream = io.StringIO()
        terminal = Terminal(stream, live=True, verbosity="quiet")
        terminal.start_live(lambda: View((Bar("run", 5, 10),)))
        terminal.stop_live()
        assert stream.getvalue() == ""


def test_tables_of_nothing() -> None:
    assert plain_table("none", ("a", "b"), []) == "none\na  b\n-  -"


def test_numbers_stand_at_the_right_and_gaps_do_not_matter() -> None:
    assert plain_table("t", ("a", "long"), [("x", "1"), ("y", ""), ("...", "...")]) == (
        "t\na    long\n---  ----\nx       1\ny\n...   ..."
    )


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_first_line_after_ctrl_c_is_not_behind_its_echo() -> None:
    screen = Screen()
    terminal = Terminal(screen, live=False)
    terminal.leave_echo()
    terminal.say("end")
    assert screen.getvalue() == "\nend\n"
    file = io.StringIO()
    terminal = Terminal(file, live=False)
    terminal.leave_echo()
    terminal.say("end")
    assert file.getvalue() == "end\n", "nothing is echoed into a file"
