"""Audits of small scripts that are really killed and started again."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import phasetrain
from phasetrain.addons.audit.auditor import (
    Audit,
    Options,
    _Auditor,
    _check_shared,
    _explain_failure,
    _explain_new_start,
    audit,
)
from phasetrain.addons.audit.cost import describe_cost
from phasetrain.addons.audit.page import write_page
from phasetrain.addons.audit.probe import FOLDER
from phasetrain.addons.audit.runs import CannotAuditError, Finished, Runner
from phasetrain.addons.audit.text import format_audit
from phasetrain.addons.audit.trace import Trace, Update
from phasetrain.addons.audit.verdict import Check, Finding
from phasetrain.cli.main import main

SCRIPT = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
inputs = torch.randn(32, 4)
loader = DataLoader(TensorDataset(inputs), 4, generator=torch.Generator())
model = nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
update = 0
if os.path.exists("last.pt"):
    state = torch.load("last.pt")
    model.load_state_dict(state["model"])
    update = state["update"]
while update < 12:
    for (batch,) in loader:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        update += 1
        if update % 5 == 0:
            state = {"model": model.state_dict(), "update": update}
            torch.save(state, "last.tmp")
            os.replace("last.tmp", "last.pt")
        if update == 12:
            break
"""
"""Restores neither its optimizer nor the place in its epoch: update 6 has the samples of update 1."""


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    folder = tmp_path_factory.mktemp("script")
    folder.joinpath("train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))
        before = describe_process()
        found = phasetrain.audit([sys.executable, "train.py"], kill_at=7)
        # Nothing is left, neither where the script is nor elsewhere.
        assert describe_process() == before
        assert list_started() == []
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    return found


def describe_process() -> list[Any]:
    """Return what an audit could leave in the process that asks for it."""
    return [
        dict(os.environ),
        Path.cwd(),
        signal.getsignal(signal.SIGTERM),
        list(Path(tempfile.gettempdir()).iterdir()),
    ]


def list_started() -> list[str]:
    """Return the processes that an audit with this folder for temporary files has left."""
    mark = os.fsencode(f"{FOLDER}={tempfile.gettempdir()}/")
    left = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = path.read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if any(variable.startswith(mark) for variable in variables):
            left.append(path.parent.name)
    return left


@pytest.mark.feature("audit", "Audit: what any training script does not restore after a kill")
def test_each_part_that_is_not_restored_is_named_once(verdict: Audit) -> None:
    assert verdict.exit_code == 1
    (check,) = verdict.checks
    named = [(finding.code, finding.part, finding.update) for finding in check.findings]
    assert named == [
        ("samples", "samples", 6),
        ("optimizer", "optimizer.AdamW.step", 6),
        ("optimizer", "optimizer.AdamW.exp_avg", 6),
        ("optimizer", "optimizer.AdamW.exp_avg_sq", 6),
    ]
    # Updates 6 to 8 would have ended the epoch with samples 20 to 31; they had 0 to 11.
    assert check.findings[0].sentence.startswith("12 of 32 samples of the epoch were trained twice")
    assert "in updates 1 to 8" in check.findings[0].sentence
    assert [finding.place.rpartition("/")[2] for finding in check.findings] == [
        "train.py:18",
        *["train.py:14"] * 3,
    ]
    assert set(check.effects) == {"loss", "weights", "checkpoint.model"}
    cost = check.cost
    assert cost is not None
    assert (cost.kill_at, cost.resumed_after, cost.updates, cost.samples) == (7, 5, 2, 8)
    assert cost.restart is not None
    assert 0 < cost.seconds < cost.restart  # which has the import of torch
    assert verdict.to_json()["checks"][0]["cost"]["samples"] == 8
    assert verdict.to_json()["checks"][0]["samples"][0]["never"] == 12
    assert describe_cost(cost) in format_audit(verdict)


def test_the_page_has_both_curves(verdict: Audit, tmp_path: Path) -> None:
    write_page(verdict, ["python", "train.py"], tmp_path / "audit.html")
    page = tmp_path.joinpath("audit.html").read_text()
    lines = [line.split("'")[1].split() for line in page.split("<polyline ")[1:]]
    assert [len(points) for points in lines] == [12, 12]
    assert lines[0][:5] == lines[1][:5]  # up to the checkpoint that the run was resumed from
    assert lines[0][5] != lines[1][5]
    cost = verdict.checks[0].cost
    assert cost is not None
    assert describe_cost(cost) in page


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("print(1)", "no process of the command imported torch"),
        ("import sys; sys.exit('no data')", "no data"),
        ("input('start? ')", "EOFError"),
        ("while True: pass", "did not end within 3 seconds"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "exit code -15"),
        ("open('/dev/tty')", "/dev/tty"),
        ("import getpass; getpass.getpass()", "EOFError"),
        ("import sys; sys.exit(sys.stdin.read() or 'empty')", "empty"),
        (
            "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', "
            "'import time; time.sleep(600)'], start_new_session=True)\nsys.exit('left one')",
            "left one",
        ),
    ],
)
def test_a_command_that_cannot_be_audited_is_explained(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "scratch"):
        tmp_path.joinpath(name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    before = describe_process()
    found = audit([sys.executable, "-c", script], timeout=3)
    assert found.exit_code == 2
    assert words in found.sentence
    assert describe_process() == before
    assert list_started() == []
    assert list(Path.cwd().iterdir()) == []


def test_temporary_files_of_the_script_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "import sys, tempfile; sys.exit(tempfile.mkdtemp())"
    found = audit([sys.executable, "-c", script])
    folder = Path(found.sentence.splitlines()[-1])
    assert folder.is_absolute()
    assert not folder.exists()


FORKED = (
    "import os\nimport torch\n"
    "if os.fork():\n    os.wait()\n    os._exit(0)\n"
    "if not os.fork():\n"
    "    os.setsid()\n    open({pid!r}, 'w').write(str(os.getpid()))\n"
    "    import time\n    time.sleep(600)\n"
    "while not os.path.exists({pid!r}): pass\n"
)
"""The training is in a forked process, which leaves a daemon."""

SAVE = "        if update % 5 == 0:\n"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({SAVE: "        if False:\n"}, "writes no checkpoint before the end of its 12"),
        pytest.param(
            {SAVE: "        if update == 7:\n            os.kill(os.getpid(), 9)\n" + SAVE},
            "exit code -9",
            marks=pytest.mark.slow,
        ),
        ({"import os\nimport torch\n": FORKED}, "forked process is not recorded"),
    ],
)
def test_a_training_that_cannot_be_audited_is_explained(
    changes: dict[str, str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, daemon = SCRIPT, tmp_path / "pid"
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new.replace("{pid!r}", repr(str(daemon))))
    folder = tmp_path / "here"
    folder.mkdir()
    folder.joinpath("train.py").write_text(script)
    monkeypatch.chdir(folder)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    before = describe_process()
    found = audit([sys.executable, "train.py"])
    assert (found.exit_code, words in found.sentence) == (2, True), found.sentence
    assert describe_process() == before
    assert list_started() == []
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    if daemon.exists():
        end = time.monotonic() + 30
        while is_alive(int(daemon.read_text())) and time.monotonic() < end:
            time.sleep(0.05)  # it was killed, and takes its time to end on a busy machine
        assert not is_alive(int(daemon.read_text()))


@pytest.mark.parametrize(
    ("kill_at", "words"),
    [
        (12, "--kill-at 12: expected 1 to 11"),
        (0, "--kill-at 0: expected 1 to 11"),
        (4, "no checkpoint is written before update 4"),
        (5, ""),
    ],
)
def test_a_kill_without_a_checkpoint_before_it_is_explained(
    kill_at: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    update = Update(1, (), (), (), (), {}, None, None, {}, "", "")
    trace = Trace([replace(update, number=number) for number in range(1, 13)], files=[(5, "a.pt")])
    auditor = _Auditor(
        Runner(["train"], tmp_path / "scratch", 1.0), Options(kill_at=kill_at), print
    )
    with pytest.raises(CannotAuditError, match=words) if words else nullcontext():
        assert auditor._choose_kill(Finished(0, [trace], "", tmp_path)) == kill_at


def is_alive(pid: int) -> bool:
    """Return whether a process exists that is no zombie, which remains if nobody waits for it."""
    try:
        return Path("/proc", str(pid), "stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_the_newest_checkpoint_and_its_folder_are_those_of_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = Runner(["train"], tmp_path / "scratch", 1.0)
    options = Options(resume=["train", "--from={ckpt_dir}", "{ckpt}"])
    auditor = _Auditor(runner, options, print)
    killed, copy = tmp_path / "killed", tmp_path / "copy"
    files = [(5, f"{killed}/out/5/model.pt"), (10, f"{killed}/out/10/model.pt")]
    finished = Finished(-9, [Trace(files=files)], "", killed)
    with pytest.raises(CannotAuditError, match="left no checkpoint"):
        auditor._resume_command(copy, finished)
    for number in (5, 10):
        copy.joinpath(f"out/{number}").mkdir(parents=True)
        copy.joinpath(f"out/{number}/model.pt").touch()
    words = ["train", f"--from={copy}/out/10", f"{copy}/out/10/model.pt"]
    assert auditor._resume_command(copy, finished) == words


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("Traceback:\n  load()\n_pickle.UnpicklingError: Weights\nSee the docs.\n", "Weights"),
        ("\x1b[1mValueError: bold\x1b[0m \n", "ValueError: bold"),
        ("no such file\n\n", "no such file"),
        ("", "it printed nothing"),
    ],
)
def test_a_resume_that_fails_is_explained_by_its_exception(output: str, words: str) -> None:
    check = _explain_failure("resume", Finished(1, [], output, Path()))
    assert check.sentence.endswith(words)


def test_words_behind_two_dashes_belong_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = "import sys; sys.exit(' '.join(sys.argv[1:]))"
    words = ["--", sys.executable, "-c", script, "--version", "--help", "-h", "--json"]
    assert main(["audit", *words]) == 2
    assert "--version --help -h --json" in capsys.readouterr().out
    assert main(["audit", "--json", *words]) == 2
    assert json.loads(capsys.readouterr().out)["checks"] == []


def test_it_runs_where_only_torch_is_installed(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(['hydra', 'omegaconf', 'fvcore', 'iopath', 'torch']))\n"
        f"sys.argv = ['audit', '--', {sys.executable!r}, '-c', '1']\n"
        "runpy.run_module('phasetrain.addons.audit', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout[:12]) == (2, "Not audited:")


LIBRARY = (
    "import signal\n"
    "from phasetrain.addons.audit.auditor import audit\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "audit([{python!r}, '-c', {script!r}])\n"
)
"""Asks for an audit from Python, as a test does."""


@pytest.mark.parametrize(
    ("caller", "number", "exit_code"),
    [
        ("command", signal.SIGTERM, 2),
        # The process ends as it would have without an audit.
        ("library", signal.SIGTERM, -signal.SIGTERM),
        ("library", signal.SIGHUP, -signal.SIGHUP),
        ("library", signal.SIGINT, -signal.SIGINT),
    ],
)
def test_an_audit_that_is_ended_leaves_neither_folders_nor_processes(
    caller: str, number: int, exit_code: int, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    script = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    words = ["-m", "phasetrain", "audit", "--", sys.executable, "-c", script]
    if caller == "library":
        words = ["-c", LIBRARY.format(python=sys.executable, script=script)]
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        while process.poll() is None and not (pid.exists() and pid.read_text()):
            time.sleep(0.05)
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == exit_code
    assert output.startswith("Not audited:") == (caller == "command")
    assert list(scratch.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.parametrize(
    ("names", "is_shared"),
    [
        (("elsewhere/last.pt", "elsewhere/last.pt"), True),
        (("elsewhere/a.pt", "elsewhere/b.pt"), False),  # a new temporary file in each run
        (("elsewhere/gone.pt", "elsewhere/gone.pt"), False),
        (("first/last.pt", "again/last.pt"), False),
    ],
)
def test_runs_that_write_the_same_file_are_not_compared(
    names: tuple[str, str], is_shared: bool, tmp_path: Path
) -> None:
    for folder in ("first", "again", "elsewhere"):
        tmp_path.joinpath(folder).mkdir()
    runs = []
    for folder, name in zip(("first", "again"), names, strict=True):
        path = tmp_path / name
        if path.stem != "gone":
            path.touch()
        runs.append(Finished(0, [Trace(files=[(5, str(path))])], "", tmp_path / folder))
    with pytest.raises(CannotAuditError) if is_shared else nullcontext() as caught:
        _check_shared(*runs)
    assert not is_shared or "elsewhere/last.pt" in str(caught.value)


@pytest.mark.parametrize(
    ("loads", "is_same", "words"),
    [
        (
            (),
            True,
            'did not read gan.pth; if another command resumes, name it: --resume "COMMAND".',
        ),
        ((), False, "updates are lost."),
        (({"path": "/run/gan.pth", "place": "gan.py:9"},), True, "It read gan.pth, and did not"),
    ],
)
def test_a_new_start_says_what_was_read(loads: tuple[Any, ...], is_same: bool, words: str) -> None:
    update = Update(1, (), (), (), (), {}, None, None, {}, "gan.py:3", "gan.py:7")
    trace = Trace([update], loads=loads)
    written = ["/run/gan.pth"] if is_same else []
    check = _explain_new_start("resume", Trace([update]), 1, trace, written)
    assert words in check.sentence
    assert check.findings[0].code == "start"


def test_a_generator_that_differs_may_be_a_cause_as_well(tmp_path: Path) -> None:
    finding = Finding("samples", "The order differs.")
    check = Check("resume", 1, "Not exact.", [finding], ["generator.torch", "loss", "weights"])
    lines = [
        "As a consequence: loss, weights.",
        "A consequence, or a cause as well: generator.torch.",
    ]
    found = Audit(1, "Not exact.", [check])
    assert format_audit(found).splitlines()[-2:] == [f"  {line}" for line in lines]
    write_page(found, ["train"], tmp_path / "audit.html")
    page = tmp_path.joinpath("audit.html").read_text().splitlines()
    assert page[-3:-1] == [f"<p>{line}</p>" for line in lines]
