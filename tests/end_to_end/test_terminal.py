"""Whole runs on real pseudo-terminals and pipes: what stays, at any width, in any locale, of any
size."""

import re
import signal
import time
from pathlib import Path

import pytest
from harness import SMALL, newest, status
from processes import Launcher
from screens import Screen, on_terminal

from phasetrain.app.api import run
from phasetrain.cli import main
from phasetrain.runtime import live_view
from phasetrain.runtime.live_view import Bar, View
from phasetrain.runtime.terminal import Terminal

WORDS = (
    *[word for word in SMALL if word not in ("HOOKS.console=null", "PHASES.epochs=3")],
    "PHASES.epochs=2",
    "MACHINE.threads=1",
)
DEFAULT = ("MACHINE.threads=1", "RUN.dir=runs/digits-12345678")
COLOUR = re.compile(rb"\x1b\[[0-9;]*\b(3[0-7]|38|4[0-7]|48|9[0-7])[0-9;]*m")


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Screen:
    """Return the default run on a terminal of 80 columns."""
    folder = tmp_path_factory.mktemp("default")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        return on_terminal(*DEFAULT)


@pytest.mark.feature(
    "terminal",
    "terminal: live view, at most 25 permanent lines",
    "`HOOKS.console`, `RUN.verbosity`",
)
def test_a_default_run_leaves_at_most_25_lines(default: Screen) -> None:
    # After 10 s of training, which this run takes on a busy machine only, it says what is left.
    lines = [line for line in default.lines if not line.endswith(" to go")]
    assert default.code == 0, default.text
    assert len([line for line in lines if line]) <= 25, default.text
    assert max(map(len, lines)) <= 80
    first = [line.split()[0] for line in lines]
    assert first[:6] == [
        "run",
        "device",
        "data",
        "model",
        "plan",
        "epoch",
    ]  # the header: 5 of at most 10
    assert (
        lines[0] == "run     digits in runs/digits-12345678, attempt 1; the same command resumes it"
    )
    assert lines[1] == "device  cpu, fp32, 1 thread, 1 process, deterministic, seed 0"
    samples = "digits (train 1,442, test 355 samples), 64 per update, 34 left out/epoch"
    assert lines[2] == f"data    {samples}"
    assert lines[3] == "model   small_cnn, 56,554 parameters"
    assert lines[4] == "plan    12 epochs, 264 updates: 12 x (train 22, test 2)"
    assert lines[5] == "epoch  train/accuracy  train/loss  test/accuracy  test/loss      time"
    assert [line.split()[0] for line in lines[6:18]] == [f"{epoch}/12" for epoch in range(1, 13)]


def test_closing_lines_give_results_and_next_commands(default: Screen) -> None:
    text = default.text[default.text.index("12/12") :]
    assert re.search(
        r"^best    test/accuracy 0\.99\d\d \(update \d+\), test/loss 0\.\d{4} \(update \d+\)$",
        text,
        re.M,
    )
    assert re.search(r"^time    \d+\.\d s, \d+ % in steps; .*\bstartup \d+ %", text, re.M)
    assert "end     completed after 264 updates; everything is in runs/digits-12345678" in text
    resume = "phasetrain resume runs/digits-12345678 PHASES.epochs=24 PHASES.extend=stretch"
    assert f"resume  {resume}" in re.sub(r"\n +", " ", text)
    assert "load    phasetrain.load('runs/digits-12345678') in Python" in text
    assert re.search(r"^weights sha256 [0-9a-f]{64}$", text, re.M)


@pytest.mark.feature("terminal")
def test_live_lines_are_erased_at_the_end(default: Screen) -> None:
    assert b"samples/s" in default.raw
    assert b"MiB" in default.raw
    assert "samples/s" not in default.text
    assert "MiB" not in default.text
    assert default.raw.rfind(b"\x1b[?25l") < default.raw.rfind(
        b"\x1b[?25h"
    )  # the cursor is there again


@pytest.mark.by_default(1)
@pytest.mark.parametrize("columns", [40, 60, 200])
def test_lines_fit_the_width_of_the_terminal(tmp_path: Path, columns: int) -> None:
    found = on_terminal(*WORDS, f"RUN.dir={tmp_path}/run", columns=columns)
    assert found.code == 0
    assert "sha256" in found.text
    assert "samples/s" not in found.text  # nothing of what moved is left
    assert all(len(line) <= columns for line in found.lines)
    rows = [line for line in found.lines if re.match(r"(epoch )?\s*[12]/2", line)]
    assert len(rows) == (2 if columns == 200 else 4)


@pytest.mark.slow
def test_run_on_a_terminal_that_is_made_narrower(tmp_path: Path) -> None:
    found = on_terminal(
        *WORDS,
        "PHASES.epochs=40",
        "HOOKS.ledger=null",
        f"RUN.dir={tmp_path}/run",
        columns=120,
        resize=40,
    )
    assert found.code == 0
    assert status(tmp_path / "run")["state"] == "finished"
    tail = found.raw[found.raw.rindex(b"best") :].decode()
    assert widest(tail) <= 40


def drawn() -> int:
    """Draw for a moment, then print a table, as a run does."""
    live_view.REFRESHES = 8  # of this fork
    terminal = Terminal()
    terminal.start_live(
        lambda: View(
            (Bar("epoch 1/2 train", 3, 10, "2.0 s"), Bar("run", 3, 20, "5.0 s")), ("loss 0.5",)
        )
    )
    time.sleep(0.3)
    terminal.say("a line that stays")
    time.sleep(0.25)
    terminal.stop_live()
    terminal.print_pairs(
        [("best", "test/accuracy 0.9972 (update 220), test/loss 0.0319 (update 264)")]
    )
    terminal.print_table(
        "results", ("metric", "value"), [("test/accuracy", "0.9972"), ("test/" + 30 * "x", "0.1")]
    )
    return 0


@pytest.fixture(scope="module")
def simple() -> Screen:
    """Return what `drawn` draws on a terminal of 80 columns."""
    return on_terminal(call=drawn)


def widest(text: str) -> int:
    """Return the columns of the widest line, as it was printed."""
    return max(
        len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) for line in re.split(r"[\r\n]+", text)
    )


def test_live_view_fits_a_terminal_that_is_made_narrower() -> None:
    found = on_terminal(call=drawn, columns=120, resize=40)
    assert found.code == 0
    before, after = found.raw.decode().split("a line that stays")
    assert widest(before) > 100
    assert widest(after) <= 40


def test_no_color_turns_colours_off(simple: Screen) -> None:
    assert COLOUR.search(simple.raw) is not None
    assert COLOUR.search(on_terminal(call=drawn, environment={"NO_COLOR": "1"}).raw) is None


def test_bars_are_ascii_on_an_ascii_terminal(simple: Screen) -> None:
    assert "━".encode() in simple.raw
    assert all(byte < 128 for byte in on_terminal(call=drawn, encoding="ascii").raw)


def test_dumb_terminal_gets_plain_lines() -> None:
    found = on_terminal(call=drawn, environment={"TERM": "dumb"})
    assert b"\x1b" not in found.raw
    assert found.lines[0] == "a line that stays"
    assert re.fullmatch(r"\d\d:\d\d:\d\d best    test/accuracy 0.9972 .*", found.lines[1])


def test_run_in_an_ascii_locale_escapes_other_letters(tmp_path: Path) -> None:
    words = (*WORDS, f"RUN.dir='{tmp_path}/Läufe-✓'", "RUN.name='größe'")
    found = on_terminal(*words, encoding="ascii", columns=200)
    assert found.code == 0
    assert all(byte < 128 for byte in found.raw)
    assert r"run     gr\xf6\xdfe in" in found.text
    assert (tmp_path / "Läufe-✓" / "status.json").exists()


@pytest.mark.slow
def test_run_without_metrics_shows_no_best_value(tmp_path: Path) -> None:
    found = on_terminal(
        *WORDS,
        "METERS=null",
        "DATA.TEST=null",
        "CHECKPOINT.best.monitor=null",
        f"RUN.dir={tmp_path}/run",
    )
    assert found.code == 0, found.text
    assert [line for line in found.lines if re.match(r"\s*[12]/2 +\d", line)]
    assert "best " not in found.text


def test_quiet_prints_the_end_and_verbose_a_line_per_phase(tmp_path: Path) -> None:
    quiet = on_terminal(*WORDS, "RUN.verbosity=quiet", f"RUN.dir={tmp_path}/quiet", columns=200)
    assert [line.split()[0] for line in quiet.lines] == [
        "best",
        "time",
        "end",
        "resume",
        "load",
        "weights",
    ]
    assert b"samples/s" not in quiet.raw
    verbose = on_terminal(
        *WORDS, "RUN.verbosity=verbose", f"RUN.dir={tmp_path}/verbose", columns=200
    )
    assert (
        len(
            [
                line
                for line in verbose.lines
                if re.match(r"epoch [12]/2  (train|test )  accuracy", line)
            ]
        )
        == 4
    )
    assert "where the time went" in verbose.text
    for name in ("quiet", "verbose"):  # the log has all of it
        log = (tmp_path / name / "log.txt").read_text()
        assert len(re.findall(r"INFO epoch [12]/2  (?:train|test )  accuracy", log)) == 4
        assert "DEBUG where the time went" in log


def test_prints_stay_whole_and_warnings_appear_once(tmp_path: Path) -> None:
    found = on_terminal(
        *WORDS,
        "RUN.imports=[terminal_parts]",
        "HOOKS.noisy={}",
        f"RUN.dir={tmp_path}/run",
        columns=160,
    )
    assert found.code == 0, found.text
    assert [f"printed at {update}" for update in range(1, 11)] == [
        x for x in found.lines if x.startswith("printed")
    ]
    shown = [line for line in found.lines if "a library complains" in line]
    assert len(shown) == 2
    assert shown[0].startswith("warning: UserWarning: a library complains (")
    assert shown[1].startswith("warned  10 x UserWarning: a library complains (")


def bytes_after(screen: Screen, prompt: bytes, answer: bytes) -> bytes:
    """Return what was written to the terminal between a prompt and the echo of the answer."""
    return screen.raw.partition(prompt)[2].partition(answer)[0]


def test_question_of_a_hook_is_readable_and_the_live_view_comes_back(tmp_path: Path) -> None:
    found = on_terminal(
        *WORDS,
        *("RUN.imports=[terminal_parts]", "HOOKS.asking={}", f"RUN.dir={tmp_path}/run"),
        columns=160,
        answers={b"continue? ": b"yes\n"},
    )
    assert found.code == 0, found.text
    assert bytes_after(found, b"continue? ", b"yes") == b""
    assert "answer YES" in found.lines
    assert b"\x1b[1A" in found.raw.partition(b"YES")[2]  # live lines are drawn and erased again


@pytest.mark.feature(
    "terminal.breakpoint",
    "`breakpoint()` and `input()` suspend the live view",
    "[debugging.md](debugging.md)",
)
def test_debugger_has_the_terminal_for_itself(tmp_path: Path) -> None:
    found = on_terminal(
        *WORDS,
        *("RUN.imports=[terminal_parts]", "HOOKS.asking={debug: true}", f"RUN.dir={tmp_path}/run"),
        columns=160,
        answers={b"(Pdb) ": b"phase.split * 2\n", b"traintrain": b"continue\n"},
    )
    assert found.code == 0, found.text
    assert bytes_after(found, b"(Pdb) ", b"phase") == b""
    assert any(line.startswith("(Pdb) phase.split * 2") for line in found.lines)
    assert "(Pdb) continue" in found.lines
    assert any(line.startswith("  2/2") for line in found.lines)


@pytest.mark.feature("signals.sighup", "SIGHUP saves and stops; ignored under nohup", "")
@pytest.mark.parametrize(
    ("nohup", "code", "state"), [(False, 129, "preempted"), (True, 0, "finished")]
)
def test_a_closed_terminal_saves_and_stops_the_run_unless_it_began_under_nohup(
    tmp_path: Path, nohup: bool, code: int, state: str
) -> None:
    def call() -> int:
        # Under nohup the run goes on to its end, which takes a second per 20 epochs.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        return main(
            [*WORDS, "PHASES.epochs=20", "CHECKPOINT.every_epochs=null", f"RUN.dir={tmp_path}"]
        )

    assert on_terminal(close=b"1/20", call=call).code == code
    told = status(tmp_path)
    assert (told["state"], told["exit_code"], told["updates"] == 100) == (state, code, nohup)
    assert told["reason"] == ("completed" if nohup else "SIGHUP")
    assert newest(tmp_path).manifest.state["updates"] == told["updates"]


@pytest.mark.slow
def test_only_rank_0_prints(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher.run(tmp_path / "run", 3, *WORDS)
    assert done.codes == [0, 0, 0]
    assert done.outputs[1:] == ["", ""]
    assert "3 processes (ddp)" in done.outputs[0]
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in done.outputs[0].splitlines())


def test_lines_in_a_pipe_start_with_the_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run([*WORDS, f"RUN.dir={tmp_path}/run"])
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d (\w+ +)\S", line) for line in lines)
    assert len(lines) == 6 + 2 + 6
