"""Progress in a notebook."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness import train

from phasetrain.addons.observe.notebook import NotebookProgress
from phasetrain.runtime.terminal import in_notebook


def test_progress_bar_moves(tmp_path: Path) -> None:
    shown: list[str] = []
    train(tmp_path, "PHASES.epochs=1", hooks={"notebook": NotebookProgress(shown.append)})
    assert 'value="0" max="5"' in shown[0]
    assert any(re.search(r"1/5 updates epoch 1/1, loss \d+\.\d{4}, .* left", one) for one in shown)
    assert "5/5 updates completed after" in shown[-1]


@pytest.mark.parametrize(
    ("config", "expected"), [({"IPKernelApp": {}}, True), ({}, False), (None, False)]
)
def test_is_known_by_its_kernel(
    monkeypatch: pytest.MonkeyPatch, config: Any, expected: bool
) -> None:
    kernel = ModuleType("IPython")
    shell = None if config is None else ModuleType("shell")
    if shell is not None:
        shell.__dict__["config"] = config
    kernel.__dict__["get_ipython"] = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert in_notebook() is expected


def test_plain_interpreter_is_no_notebook() -> None:
    assert "IPython" in sys.modules or not in_notebook()
