"""Errors in the user's code point at the user's files; log.txt and -v have the whole traceback."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from harness import SMALL, status
from raising import raises

from phasetrain.app.api import run
from phasetrain.cli import main
from phasetrain.errors import ExitCallError

PARTS = """
import sys

import torch
from torch import nn
from phasetrain.hooks import Hook
from phasetrain.tasks import Supervised


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 32)
        self.b = nn.Linear(33, 10)

    def forward(self, x):
        return self.b(self.a(x.flatten(1)))  # wrong


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index < 60:
            return torch.zeros(1, 8, 8), index % 10
        return {}["image"]  # wrong


class LeavingSamples(Samples):
    def __getitem__(self, index):
        return super().__getitem__(index) if index < 60 else sys.exit(0)


class InterruptingSamples(Samples):
    def __getitem__(self, index):
        if index < 60:
            return super().__getitem__(index)
        raise KeyboardInterrupt


class LeavingModel(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        return super().forward(x.flatten(1)) if self.training else exit()


def leaving_loss(output, target):
    sys.exit("no loss")


class LeavingHook(Hook):
    def on_step(self, run, phase, out):
        sys.exit(3)


class Detached(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        return super().forward(x.flatten(1)).detach()


class TrainsACopy(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        weight = self.weight.detach().clone().requires_grad_(torch.is_grad_enabled())
        return nn.functional.linear(x.flatten(1), weight)


def make_nothing():
    pass


def fails():
    return [][1]  # wrong


def detached_loss(output, target):
    return nn.functional.cross_entropy(output.detach(), target)


def make_text():
    return lambda where: "hello"


def late_nan(where):
    return 0.1 if where < 0.5 else float("nan")


def make_number():
    return 1.0


def fall(where, power=1.0):
    return (1 - where) ** power


class NoHook:
    pass


class WrongArguments(Hook):
    def on_step(self, run):
        pass


class LossAlone(Supervised):
    def forward(self, batch):
        return super().forward(batch).loss


class StatefulAlone(Supervised):
    def stateful(self):
        return {"memory": nn.Linear(1, 1)}


class Typo(Hook):
    def on_step(self, run, phase, out):
        undefined(out)  # wrong
"""


@pytest.fixture(autouse=True)
def _parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_parts", raising=False)
    Path("broken_parts.py").write_text(PARTS)


def line_of(text: str) -> int:
    lines = PARTS.splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


@pytest.mark.feature(
    "errors.user_code",
    "errors in user code show its lines and the layer; `-v` prints tracebacks",
    "`-v`, [debugging.md](debugging.md)",
)
@pytest.mark.parametrize(
    ("words", "code", "frame"),
    [
        (["MODEL=null", "MODEL.name=broken_parts.Narrow"], 2, "Narrow.forward: return self.b"),
        (
            [
                *("DATA.TRAIN.dataset=broken_parts.Samples", "DATA.TEST=null", "MODEL.classes=10"),
                *("DATA.TRAIN.workers=1", "MODEL.channels=1"),
            ],
            1,
            'Samples.__getitem__: return {}["image"]',
        ),
        (["+HOOKS.typo.name=broken_parts.Typo"], 1, "Typo.on_step: undefined(out)"),
    ],
    ids=["model", "worker", "hook"],
)
def test_error_in_user_code_shows_its_line_and_the_log_has_the_traceback(
    words: list[str], code: int, frame: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, *words, "RUN.dir=run"]
    assert main([*words, "--json"]) == code
    out, err = capfd.readouterr()
    (error,) = json.loads(out)["errors"]
    place = f"broken_parts.py:{line_of(frame.partition(': ')[2])} in {frame}"
    assert error["frames"][-1].startswith(place)
    assert f"\n    {place}" in err
    assert "Traceback" not in err
    log = Path("run/log.txt").read_text()
    assert "Traceback (most recent call last)" in log
    assert frame.partition(": ")[2] in log


LEAVING = [
    *("DATA.TRAIN.dataset=broken_parts.LeavingSamples", "DATA.TEST=null", "MODEL.classes=10"),
    "MODEL.channels=1",
]


@pytest.mark.feature(
    "errors.exit",
    "`sys.exit` in user code is a failure with exit code 1 that names its line",
    "[debugging.md](debugging.md)",
)
@pytest.mark.parametrize(
    ("words", "call"),
    [
        (LEAVING, "else sys.exit(0)"),
        ([*LEAVING, "DATA.TRAIN.workers=1"], "else sys.exit(0)"),
        (
            [*LEAVING, "DATA.TRAIN.dataset=broken_parts.InterruptingSamples"],
            "raise KeyboardInterrupt",
        ),
        (["LOSS=null", "LOSS.name=broken_parts.leaving_loss", "RUN.rehearse=true"], '"no loss"'),
        (["+HOOKS.leaving.name=broken_parts.LeavingHook"], "sys.exit(3)"),
    ],
    ids=["sample", "worker", "interrupt", "rehearsal", "hook"],
)
def test_exit_in_user_code_is_a_failure_that_names_its_line(
    words: list[str], call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words, "RUN.dir=run", "--json"]) == 1
    (error,) = json.loads(capfd.readouterr().out)["errors"]
    location = f"broken_parts.py:{line_of(call)}"
    assert error["code"] == "run.exit_called"
    raised = "KeyboardInterrupt()" if "Interrupt" in call else "sys.exit("
    assert error["message"].startswith(f"{location}: {raised}")
    assert error["frames"][-1].startswith(f"{location} in ")
    ended = status(Path("run"))
    assert (ended["state"], ended["exit_code"]) == ("failed", 1)


def test_exit_in_a_custom_loop_is_a_failure() -> None:
    with raises(ExitCallError, code="run.exit_called"):
        run([*SMALL, "RUN.dir=run"], loop=lambda engine: [sys.exit(0) for _ in engine.steps()])
    assert status(Path("run"))["exit_code"] == 1


@pytest.mark.feature("errors.exit")
@pytest.mark.addon("deploy")
def test_exit_is_a_failure_of_any_engine_and_command(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["MODEL=null", "MODEL.name=broken_parts.LeavingModel", "DATA.TEST=null"]
    assert main([*SMALL, *words, "PHASES.epochs=1", "RUN.dir=run"]) == 0
    torch.save(torch.zeros(1, 8, 8), "sample.pt")
    assert main(["predict", "run", "sample.pt", "--trust"]) == 1
    assert "sys.exit(None) before" in capfd.readouterr().err
    extract = ["RUN.dir=run", "RUN.engine=extract", "EXTRACT.splits=[train]"]
    with raises(ExitCallError, code="run.exit_called"):  # it has no loop of phases
        run([*SMALL, *words, *extract])


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["HOOKS.typo.name=broken_parts.Typo", "RUN.dir=run"], "run/log.txt"),
        (["DATA.TRAIN.dataset=broken_parts.fails"], "-v"),
    ],
    ids=["run", "no folder yet"],
)
def test_error_says_where_the_whole_traceback_is(
    words: list[str], place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words]) in (1, 2)
    last = capfd.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"    \(.* (?:\S*/)?{place}\)", last), last
    if place != "-v":
        assert "Traceback" in Path(place).read_text()


def test_verbose_terminal_prints_the_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "MODEL=null", "MODEL.name=broken_parts.Narrow", "RUN.dir=run"]
    assert main([*words, "-v"]) == 2
    out, err = capfd.readouterr()
    assert "Traceback (most recent call last)" in out
    assert "in b: Linear(in_features=33, out_features=10, bias=True) on " in err


SCHEDULE = "OPTIMIZER.SCHEDULES.lr"


@pytest.mark.feature(
    "errors.wrong_parts",
    "parts of the wrong form (schedule, hook, transform, loss without a gradient, task that "
    "drops state) are config errors",
    "[debugging.md](debugging.md)",
)
@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (["DATA.TRAIN.collate=make_nothing"], "config.wrong_part", "DATA.TRAIN.collate"),
        (["DATA.TRAIN.transforms=[make_nothing]"], "config.wrong_part", "DATA.TRAIN.transforms[0]"),
        (
            ["LOSS={name: CrossEntropyLoss, weight: [1.0, 2.0]}"],
            "loss.class_weights",
            "LOSS.weight",
        ),
        (["LOSS=null", "LOSS.name=detached_loss"], "task.no_gradient", "LOSS"),
        (["MODEL=null", "MODEL.name=Detached"], "task.no_gradient", "MODEL"),
        (["MODEL=null", "MODEL.name=TrainsACopy"], "task.no_gradient", "MODEL"),
        (["TASK.name=LossAlone"], "config.wrong_part", "TASK.name"),
        (["TASK.name=StatefulAlone"], "task.missing_state", "TASK.name"),
        ([f"{SCHEDULE}=null", f"{SCHEDULE}.name=make_text"], "schedule.invalid", SCHEDULE),
        ([f"{SCHEDULE}=null", f"{SCHEDULE}.name=late_nan"], "schedule.invalid", SCHEDULE),
        ([f"{SCHEDULE}=null", f"{SCHEDULE}.name=make_number"], "schedule.invalid", SCHEDULE),
        (["+HOOKS.x.name=NoHook"], "config.wrong_part", "HOOKS.x"),
        (["+HOOKS.x.name=WrongArguments"], "hook.signature", "HOOKS.x"),
    ],
)
def test_part_of_the_wrong_form_is_rejected_before_the_first_step(
    words: list[str], code: str, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    names = ("make_nothing", "detached_loss", "Detached", "make_text", "late_nan", "make_number")
    more = ("NoHook", "WrongArguments", "LossAlone", "StatefulAlone", "TrainsACopy")
    for name in (*names, *more):
        words = [re.sub(rf"(=|\[){name}\b", rf"\1broken_parts.{name}", word) for word in words]
    assert main([*SMALL, *words, "RUN.dir=run", "--json"]) == 2
    (error,) = json.loads(capfd.readouterr().out)["errors"]
    assert (error["code"], error["key"]) == (code, key)
    assert not Path("run/metrics.jsonl").exists()


def test_function_of_where_is_a_schedule(capfd: pytest.CaptureFixture[str]) -> None:
    words = [f"{SCHEDULE}={{name: broken_parts.fall, power: 2}}", "PHASES.epochs=1"]
    assert main([*SMALL, *words, "RUN.dir=run"]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if line["kind"] == "step"]
    assert rates == pytest.approx([0.1 * (1 - update / 5) ** 2 for update in range(5)])
