"""The guide for Lightning: its tables are complete, what they name exists, and both trainings of
the page have equal losses."""

import inspect
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from guide_tables import (
    ROOT,
    check_counterparts,
    code_spans,
    compare_names,
    read_table,
    write_files,
)
from torch import nn

import phasetrain
from phasetrain.config.suggestions import ELSEWHERE
from phasetrain.errors import plain

pytestmark = pytest.mark.addon()  # the page is about the whole package

PAGE = ROOT / "docs" / "guides" / "lightning.md"
MODULE = ("Steps and optimization", "Logs, checkpoints and surroundings", "Hooks", "Data")


@pytest.fixture(scope="module")
def lightning() -> Any:
    """Return Lightning, which is imported only when a test needs it, because that takes seconds."""
    return pytest.importorskip("lightning")


def own_names(kind: type) -> set[str]:
    """Return the public methods and properties of a class that Lightning defines."""
    return {
        name
        for base in kind.__mro__
        if base.__module__.startswith("lightning.")
        for name in vars(base)
        if not name.startswith("_") and not name.isupper()
    }


def tables(lightning: Any) -> dict[str, tuple[tuple[str, ...], set[str]]]:
    """Return what Lightning has, and the headings of its tables."""
    from lightning.fabric import connector
    from lightning.pytorch import callbacks, loggers, strategies

    module = own_names(lightning.LightningModule) - (set(dir(nn.Module)) - {"forward"})
    data = own_names(lightning.LightningDataModule)
    events = own_names(lightning.Callback)
    trainer = lightning.Trainer
    methods = {name for name in own_names(trainer) if inspect.isfunction(getattr(trainer, name))}
    words = {str(word) for kind in get_args(connector._PRECISION_INPUT) for word in get_args(kind)}
    return {
        "modules": (MODULE, module | data),
        "arguments": (
            ("Arguments",),
            set(inspect.signature(trainer.__init__).parameters) - {"self"},
        ),
        "methods": (("Methods",), methods),
        "callbacks": (("Callbacks",), set(callbacks.__all__)),
        "events": (("Methods that only callbacks have",), events - module - data),
        "loggers": (("Loggers",), set(loggers.__all__)),
        "strategies": (
            ("Strategies",),
            {"auto", *strategies.StrategyRegistry.available_strategies()},
        ),
        "precisions": (("Precisions",), words),
    }


@pytest.mark.feature("guide.lightning")
def test_tables_name_what_lightning_has_and_their_counterparts_exist(lightning: Any) -> None:
    for headings, names in tables(lightning).values():
        rows = [row for heading in headings for row in read_table(PAGE, heading)]
        assert compare_names(rows, names) == []
        assert check_counterparts(rows) == []


def test_suggestions_for_keys_agree_with_the_table() -> None:
    rows = {name: row[1] for row in read_table(PAGE, "Arguments") for name in code_spans(row[0])}
    suggested = {name: key for name in rows if (key := ELSEWHERE.get(plain(name)))}
    assert len(suggested) > 8
    assert [name for name, key in suggested.items() if f"`{key}=" not in rows[name]] == []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the current folder, with the files of the page."""
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "points", None)
    monkeypatch.delitem(sys.modules, "points")
    with mock.patch.dict(os.environ):  # Lightning puts its seed there
        yield tmp_path


def train_losses(result: phasetrain.RunResult) -> list[float]:
    return [row["loss"] for row in result.history.steps() if row["split"] == "train"]


@pytest.mark.feature(
    "guide.lightning",
    "guide from Lightning, with equal losses and every method, argument, callback, strategy "
    "and precision",
    "`docs/guides/lightning.md`",
)
def test_both_trainings_have_equal_losses(folder: Path, lightning: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = runpy.run_path("lit.py")["trainer"]
    losses = train_losses(runpy.run_path("fitted.py")["result"])
    assert len(losses) == 20
    runpy.run_path("compare.py")  # as on the page

    first, *_ = phasetrain.run(["points.yaml", "RUN.dir=runs/points"]).history.phases()
    assert first["split"] == "valid"
    assert first["accuracy"] == pytest.approx(float(trainer.callback_metrics["accuracy"]))

    program = Path("fitted.py").read_text().replace("lr=0.01", "lr=0.0101")
    Path("other.py").write_text(program.replace("runs/fitted", "runs/other"))
    other = train_losses(runpy.run_path("other.py")["result"])
    assert other[0] == losses[0]
    assert other != pytest.approx(losses, rel=0, abs=1e-6)
