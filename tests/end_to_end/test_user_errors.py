"""Errors in the user's code point at the user's files; log.txt and -v have the whole traceback."""

import json
import sys
from pathlib import Path

import pytest
from harness import SMALL

from phasetrain.commands.cli import main

PARTS = """
import torch
from torch import nn
from phasetrain.hooks import Hook


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


def test_verbose_terminal_prints_the_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "MODEL=null", "MODEL.name=broken_parts.Narrow", "RUN.dir=run"]
    assert main([*words, "-v"]) == 2
    out, err = capfd.readouterr()
    assert "Traceback (most recent call last)" in out
    assert "in b: Linear(in_features=33, out_features=10, bias=True) on " in err
