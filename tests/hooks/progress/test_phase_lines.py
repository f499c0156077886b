"""A line for each train phase and the tests after it."""

import io

import pytest

from phasetrain.engine.plan import Phase
from phasetrain.hooks.progress.phase_lines import PhaseLines
from phasetrain.runtime.terminal import Terminal


def phase(split: str, epoch: int) -> Phase:
    return Phase(0, split, epoch, 0, 10, 0, 100, 10)


def lines(width: int | None) -> tuple[PhaseLines, io.StringIO, pytest.MonkeyPatch]:
    """Return lines for plain text, or for a terminal of so many columns."""
    stream, patch = io.StringIO(), pytest.MonkeyPatch()
    terminal = Terminal(stream, live=False)
    if width is not None:
        patch.setattr(Terminal, "width", width)
        terminal.live = True
    found = PhaseLines(terminal)
    found.epochs = 12
    return found, stream, patch


def printed(width: int | None) -> list[str]:
    found, stream, patch = lines(width)
    with_patch = patch
    for epoch, split, loss in (
        (0, "train", 2.0),
        (0, "test", 1.0),
        (1, "train", 0.5),
        (1, "test", 0.25),
    ):
        if split == "train":
            found.end()
        found.add(phase(split, epoch), {"accuracy": 0.5, "loss": loss}, 1.0)
    found.end()
    found.end()
    with_patch.undo()
    return stream.getvalue().splitlines()


def test_a_table_where_there_is_room() -> None:
    assert printed(80) == [
        "epoch  train/accuracy  train/loss  test/accuracy  test/loss      time",
        " 1/12          0.5000      2.0000         0.5000     1.0000     2.0 s",
        " 2/12          0.5000      0.5000         0.5000     0.2500     2.0 s",
    ]


@pytest.mark.parametrize(
    ("epochs", "test_every", "lines_of_text"), [(12, 1, 12), (60, 1, 20), (60, 61, 20), (60, 7, 26)]
)
def test_epochs_that_end_too_fast_to_be_read_are_left_out(
    epochs: int, test_every: int, lines_of_text: int
) -> None:
    found, stream, _ = lines(None)
    found.epochs = epochs
    for epoch in range(epochs):
        found.begin(phase("train", epoch))
        found.add(phase("train", epoch), {"loss": 1.0}, 0.0)
        if (epoch + 1) % test_every == 0:
            found.add(phase("test", epoch), {"loss": 1.0}, 0.0)
    found.end()
    rows = stream.getvalue().splitlines()
    assert len(rows) == lines_of_text
    assert f"epoch {epochs}/{epochs}" in rows[-1]


def test_piece_of_an_epoch_without_a_test_has_no_line() -> None:
    found, stream, patch = lines(80)
    for epoch, loss in ((0, 3.0), (0, 2.0), (1, 1.0)):
        found.begin(phase("train", epoch))
        found.add(phase("train", epoch), {"loss": loss}, 1.0)
    found.end()
    patch.undo()
    assert [line.split() for line in stream.getvalue().splitlines()] == [
        ["epoch", "train/loss", "time"],
        ["1/12", "2.0000", "1.0", "s"],
        ["2/12", "1.0000", "1.0", "s"],
    ]


def test_no_table_is_begun_that_the_first_test_makes_too_wide() -> None:
    found, stream, patch = lines(60)
    found.splits = ("train", "test")
    found.add(phase("test", 0), {"accuracy": 0.5, "loss": 2.0}, 0.0)
    found.end()
    patch.undo()
    assert stream.getvalue() == "epoch 1/12  test accuracy 0.5000 loss 2.0000  (0.0 s)\n"


def test_a_line_for_each_phase_where_there_is_less() -> None:
    assert printed(60) == [
        "epoch 1/12  train accuracy 0.5000 loss 2.0000  (1.0 s)",
        "epoch 1/12  test accuracy 0.5000 loss 1.0000  (1.0 s)",
        "epoch 2/12  train accuracy 0.5000 loss 0.5000  (1.0 s)",
        "epoch 2/12  test accuracy 0.5000 loss 0.2500  (1.0 s)",
    ]


def test_lines_are_broken_between_words_where_there_is_little() -> None:
    assert printed(40)[:2] == ["epoch 1/12  train accuracy 0.5000 loss", "    2.0000  (1.0 s)"]


def test_plain_lines_say_all_of_it() -> None:
    assert [line[9:] for line in printed(None)] == [
        "epoch 1/12  train accuracy 0.5000 loss 2.0000  test accuracy 0.5000 loss 1.0000  (2.0 s)",
        "epoch 2/12  train accuracy 0.5000 loss 0.5000  test accuracy 0.5000 loss 0.2500  (2.0 s)",
    ]


def test_a_column_that_comes_later() -> None:
    found, stream, patch = lines(80)
    found.add(phase("train", 0), {"loss": 2.0}, 1.0)
    found.end()
    assert found.pending() == ""
    found.add(phase("train", 1), {"loss": 1.5}, 1.0)
    assert found.pending() == " 2/12      1.5000     1.0 s"
    found.add(phase("test", 1), {"loss": 1.0}, 1.0)
    assert found.pending() == "epoch 2/12  train loss 1.5000  test loss 1.0000  (2.0 s)"
    found.end()
    found.add(phase("train", 2), {"loss": 0.5}, 1.0)
    found.end()
    patch.undo()
    assert stream.getvalue().splitlines() == [
        "epoch  train/loss      time",
        " 1/12      2.0000     1.0 s",
        "epoch  train/loss  test/loss      time",
        " 2/12      1.5000     1.0000     2.0 s",
        " 3/12      0.5000                1.0 s",
    ]


def test_a_long_phase_gets_its_line_at_once_where_nothing_moves() -> None:
    found, stream, _ = lines(None)
    found.add(phase("train", 0), {"loss": 2.0}, 29.0)
    assert stream.getvalue() == ""
    found.add(phase("test", 0), {"loss": 2.0}, 31.0)
    assert len(stream.getvalue().splitlines()) == 1


def test_a_phase_without_metrics() -> None:
    found, stream, patch = lines(80)
    found.add(phase("train", 0), {}, 1.0)
    found.end()
    patch.undo()
    assert stream.getvalue().splitlines() == ["epoch      time", " 1/12     1.0 s"]
