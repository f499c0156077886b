"""What a person sees of a small run."""

import io
import re
from pathlib import Path

import pytest
from harness import SMALL, KillAfter, die

from phasetrain.hooks import ConsoleView
from phasetrain.run import run
from phasetrain.terminal import Terminal

WORDS = (*[word for word in SMALL if word != "HOOKS.console=null"], "PHASES.epochs=2")


def printed(folder: Path, *words: str, live: bool = False) -> str:
    stream = io.StringIO()
    run([*WORDS, f"RUN.dir={folder}", *words], terminal=Terminal(stream, live=live))
    return stream.getvalue()


def masked(text: str) -> list[str]:
    """Return the lines with times and measured values masked."""
    text = re.sub(r"\d\d:\d\d:\d\d ", "", text)
    text = re.sub(r"\d+\.\d s", "T", text)
    return [re.sub(r"\d+\.\d{4}", "N", line) for line in text.splitlines()]


def test_plain_lines(tmp_path: Path) -> None:
    lines = masked(printed(tmp_path))
    first = lines.index("epoch 1/2  train  accuracy N  loss N  (T)")
    assert lines[first:] == [
        "epoch 1/2  train  accuracy N  loss N  (T)",
        "epoch 1/2  test   accuracy N  loss N  (T)",
        "epoch 2/2  train  accuracy N  loss N  (T)",
        "epoch 2/2  test   accuracy N  loss N  (T)",
        "results after T of this attempt",
        "metric           value  at update",
        "--------------  ------  ---------",
        "test/accuracy   N         10",
        "test/loss       N         10",
        "train/accuracy  N         10",
        "train/loss      N         10",
        "where the time went",
        *lines[first + 12 : first + 15],
        lines[first + 15],
        f"completed after 10 updates; everything is in {tmp_path}",
        lines[-1],
    ]
    head, _, row = (line.split() for line in lines[first + 12 : first + 15])
    assert head == ["start", "train", "test", "data", "save", "redone", "end", "total", "in", "steps"]
    assert row[:3] == ["this", "attempt", "T"]
    assert lines[first + 15].startswith("a checkpoint holds the training up for ")
    assert re.fullmatch(r"weights sha256 [0-9a-f]{64}", lines[-1])


def test_progress_without_a_terminal_comes_every_so_many_seconds(tmp_path: Path) -> None:
    text = printed(tmp_path / "a", "HOOKS.console.every_seconds=0", "HOOKS.console.every_updates=4")
    found = [line for line in masked(text) if line.startswith("update")]
    assert len(found) == 2
    assert re.fullmatch(r"update 4/10  epoch 1/2  loss N  lr [N\d.e-]+  [\d,]+ samples/s  .* left", found[0])
    assert "update 4/10" not in printed(tmp_path / "b", "HOOKS.console.every_updates=4")


def test_the_closing_table_is_whole_after_a_resume(tmp_path: Path) -> None:
    whole = printed(tmp_path / "whole")
    die(tmp_path / "killed", "PHASES.epochs=2", "HOOKS.console={}", hooks={"kill": KillAfter(13)})
    again = printed(tmp_path / "killed")
    assert "going on from" in again

    def table(text: str) -> list[str]:
        return text[text.index("metric ") : text.index("train/loss")].splitlines()

    assert table(again) == table(whole)


def test_a_terminal(tmp_path: Path) -> None:
    text = printed(tmp_path, live=True)
    assert "epoch 2/2" in text
    assert "test/accuracy" in text


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every_updates = 0: expected at least 1"):
        ConsoleView(Terminal(io.StringIO()), every_updates=0)
