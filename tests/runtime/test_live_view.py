"""What moves on a terminal, and the streams around it."""

import io
import sys

import pytest

from phasetrain.runtime.live_view import (
    Bar,
    LastingStream,
    LineRedirect,
    LiveLines,
    View,
    fit_facts,
)

FACTS = ("loss 0.5", "lr 0.1", "1,000 samples/s")


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (80, "loss 0.5  lr 0.1  1,000 samples/s"),
        (33, "loss 0.5  lr 0.1  1,000 samples/s"),
        (32, "loss 0.5  lr 0.1"),
        (8, "loss 0.5"),
        (7, ""),
    ],
)
def test_facts_that_fit(width: int, line: str) -> None:
    assert fit_facts(FACTS, width) == line


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (
            80,
            [
                "   1/12  waiting",
                "epoch 1/12 train ━━━━━━━━━━━━━━━━━━━━                      11/22      1.0 s left",
                "run              ━━━                                      22/264 1 min 04 s left",
                "loss 0.5  lr 0.1  1,000 samples/s",
            ],
        ),
        (
            40,
            [
                "   1/12  waiting",
                "epoch 1/12 train  11/22      1.0 s",
                "run              22/264 1 min 04 s",
                "loss 0.5  lr 0.1  1,000 samples/s",
            ],
        ),
    ],
)
def test_lines(width: int, lines: list[str]) -> None:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=width)
    bars = (Bar("epoch 1/12 train", 11, 22, "1.0 s"), Bar("run", 22, 264, "1 min 04 s"))
    console.print(LiveLines(console, lambda: View(bars, FACTS, "   1/12  waiting"))._render())
    assert [line.rstrip() for line in stream.getvalue().splitlines()] == lines
    assert max(map(len, stream.getvalue().splitlines())) <= width


def test_empty_view_prints_no_text() -> None:
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=40)
    console.print(LiveLines(console, View)._render())
    assert stream.getvalue().strip() == ""


class TestAbove:
    def test_whole_lines_go_above(self) -> None:
        said: list[str] = []
        above = LineRedirect(said.append, io.StringIO())
        above.write("one\ntw")
        assert said == ["one"]
        above.write("o\n")
        above.flush()
        assert said == ["one", "two"]
        above.write("rest")
        assert said == ["one", "two"]
        assert above.close_line() is above.stream
        assert said == ["one", "two", "rest"]

    def test_a_fork_prints_past_it(self) -> None:
        said: list[str] = []
        stream = io.StringIO()
        above = LineRedirect(said.append, stream)
        above._process += 1
        above.write("from a worker\n")
        assert (said, stream.getvalue()) == ([], "from a worker\n")


class Ascii(io.StringIO):
    """A stream that takes ASCII alone."""

    encoding = "ascii"

    def write(self, text: str) -> int:
        text.encode("ascii")
        return super().write(text)


def test_what_an_encoding_lacks_is_written_in_ascii() -> None:
    stream = Ascii()
    lasting = LastingStream(stream)
    lasting.write("größe ✓\n")
    assert stream.getvalue() == "gr\\xf6\\xdfe \\u2713\n"
    assert lasting.encoding == "ascii"


def test_python_ends_well_when_the_reader_of_standard_output_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    stream = Gone()
    monkeypatch.setattr(sys, "stdout", stream)
    lasting = LastingStream(stream)
    lasting.write("x")
    lasting.flush()
    assert sys.stdout is not stream
    sys.stdout.flush()


def test_output_after_ctrl_c_begins_on_a_new_line() -> None:
    stream = io.StringIO()
    lasting = LastingStream(stream)
    lasting.is_echoed_to = True
    lasting.write("end\n")
    lasting.write("of the run\n")
    assert stream.getvalue() == "\nend\nof the run\n"
