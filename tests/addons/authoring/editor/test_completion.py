"""Words are completed in real shells, on a terminal."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phasetrain.cli import main

PROMPT = "ready> "
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}


class Terminal:
    """A shell that has read the script of `phasetrain completion`."""

    def __init__(self, shell: str, script: Path, folder: Path) -> None:
        self.process, self._screen = pty.fork()
        if self.process == 0:  # in the shell's process
            os.chdir(folder)
            home = {"HOME": str(folder), "TERM": "dumb", "COLUMNS": "200"}
            os.execvpe(START[shell][0], START[shell], {"PATH": os.environ["PATH"], **home})
        if shell == "bash":
            self._type("bind 'set bell-style none'; bind 'set show-all-if-ambiguous on'\n")
            self._type("bind 'set enable-bracketed-paste off'; bind 'set page-completions off'\n")
        else:
            self._type(
                "unsetopt prompt_cr prompt_sp list_ambiguous; unset zle_bracketed_paste; LISTMAX=999\n"
            )
        self._type(f"source {script}\n")
        # The quotes keep the echoed command from being taken for the prompt.
        self._type(f"PS1='{PROMPT[:3]}''{PROMPT[3:]}'\n")
        self._read_until(PROMPT)

    def close(self) -> None:
        os.close(self._screen)
        os.waitpid(self.process, 0)

    def complete(self, line: str) -> str:
        """Return what the terminal shows after a line and the tab key."""
        self._type(f"{line}\t")
        shown = self._read_until(None)
        self._type("\x15")  # clears the line
        return shown

    def _type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def _read_until(self, end: str | None) -> str:
        """Read until a text, or without one until the shell is quiet."""
        found = ""
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            quiet = 5.0 if end is not None or not found.strip() else 0.5
            if not select.select([self._screen], [], [], quiet)[0]:
                break
            found += os.read(self._screen, 65536).decode()
            if end is not None and found.endswith(end):
                break
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x07|\r", "", found)


@pytest.fixture(scope="module", params=["bash", "zsh"])
def terminal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    script = folder / "completion"
    script.write_text(make_script(request.param))
    (folder / "configs" / "experiment").mkdir(parents=True)
    (folder / "configs" / "experiment" / "wide.yaml").write_text("defaults: [digits]\n")
    for run in ("first", "second"):
        (folder / "runs" / run).mkdir(parents=True)
        (folder / "runs" / run / "status.json").write_text("{}")
    (folder / "runs" / "no_run").mkdir()
    made = Terminal(request.param, script, folder)
    yield made
    made.close()


def make_script(shell: str) -> str:
    command = [sys.executable, "-m", "phasetrain", "completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.feature(
    "completion",
    "completion in bash and zsh: keys, values, parts, experiments, run folders",
    "`phasetrain completion`",
)
@pytest.mark.parametrize(
    ("line", "wanted", "unwanted"),
    [
        pytest.param(
            "phasetrain find-b",
            "phasetrain find-batch-size ",
            None,
            marks=pytest.mark.addon("experiments"),
        ),
        ("phasetrain runs fo", "phasetrain runs follow ", None),
        ("phasetrain plan OPTIMIZER.clip_n", "OPTIMIZER.clip_norm=", "clip_norm= "),
        ("phasetrain MODEL.name=sm", "MODEL.name=small_cnn ", None),
        ("phasetrain MODEL.name=", "trunk_head", "cosine"),
        ("phasetrain MACHINE.precision=b", "MACHINE.precision=bf16 ", None),
        ("phasetrain MACHINE.deterministic=f", "MACHINE.deterministic=false ", None),
        ("phasetrain OPTIMIZER.nest", "OPTIMIZER.nesterov=", None),
        ("phasetrain OPTIMIZER.SCHEDULES.lr=wsd", "OPTIMIZER.SCHEDULES.lr=wsd ", None),
        pytest.param(
            "phasetrain METERS.perp", "METERS.perplexity", None, marks=pytest.mark.addon("text")
        ),
        ("phasetrain DATA.TRAIN.transforms=", "flatten", "mixup"),
        ("phasetrain experiment=wi", "experiment=wide ", None),
        ("phasetrain OPTIMIZER=ad", "OPTIMIZER=adamw ", None),
        ("phasetrain resume runs/f", "phasetrain resume runs/first ", None),
        pytest.param(
            "phasetrain report r", "runs/second", "no_run", marks=pytest.mark.addon("report")
        ),
        pytest.param(
            "phasetrain export --for", "--format ", None, marks=pytest.mark.addon("deploy")
        ),
        ("phasetrain completion z", "completion zsh ", None),
        pytest.param(
            "phasetrain sweep RUN.seed=se",
            r"RUN.seed=seeds\(5\) ",
            None,
            marks=pytest.mark.addon("experiments"),
        ),
    ],
)
@pytest.mark.slow
def test_word_is_completed(
    line: str, wanted: str, unwanted: str | None, terminal: Terminal
) -> None:
    shown = terminal.complete(line)
    assert wanted in shown
    if unwanted is not None:
        assert unwanted not in shown


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_script_lists_candidates_quickly(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script, _, _ = capsys.readouterr().out.partition("\n_phasetrain() {")
    (tmp_path / "script").write_text(f"{script}\ntime _phasetrain_list LOSS.name=c plan\n")
    command = [*START[shell][:-1], str(tmp_path / "script")]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.split() == ["LOSS.name=cross_entropy"]
    assert time.perf_counter() - began < 3  # a loaded machine; 0.02 s otherwise


def test_parts_of_a_shell_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "bash" in capsys.readouterr().err
