"""The guide for users of the Hugging Face Trainer: its tables are complete, and its two programs have
the same losses."""

import ast
import dataclasses
import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from guide_tables import (
    ROOT,
    check_counterparts,
    code_spans,
    compare_names,
    read_table,
    write_files,
)

from phasetrain.data.samplers.phase_sampler import SAMPLERS
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.kills import run_quietly

transformers = pytest.importorskip("transformers", reason="the extra `transformers` is missing")

pytestmark = pytest.mark.addon()  # the page is about the whole package

PAGE = ROOT / "docs" / "guides" / "huggingface.md"


def fields() -> list[str]:
    """Return the fields of TrainingArguments."""
    return [field.name for field in dataclasses.fields(transformers.TrainingArguments)]


def schedules() -> list[str]:
    """Return the types of schedules, below the head of their column."""
    return [kind.value for kind in transformers.SchedulerType]


@cache
def trainer_methods() -> dict[str, ast.FunctionDef]:
    """Return the methods of Trainer from its source: an import of it takes ten seconds."""
    spec = importlib.util.find_spec("transformers.trainer")
    assert spec
    assert spec.origin
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    (found,) = [
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Trainer"
    ]
    return {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}


def arguments() -> list[str]:
    """Return the arguments of Trainer."""
    return [one.arg for one in trainer_methods()["__init__"].args.args[1:]]


def events() -> list[str]:
    """Return the events of TrainerCallback."""
    return [name for name in vars(transformers.TrainerCallback) if name.startswith("on_")]


@pytest.mark.slow  # importing the trainer of transformers takes seconds; `.ci/run` runs it
@pytest.mark.feature("guide.huggingface")
@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("TrainingArguments", fields),
        ("Schedules", schedules),
        ("Arguments", arguments),
        ("Callback events", events),
    ],
)
def test_table_has_every_name_of_the_installed_version(
    heading: str, names: Callable[[], Sequence[str]]
) -> None:
    assert compare_names(read_table(PAGE, heading), names()) == []


def test_methods_exist() -> None:
    names = [name for row in read_table(PAGE, "Methods") for name in code_spans(row[0])]
    assert [name for name in names if name not in trainer_methods()] == []
    overridden = {"compute_loss", "training_step", "prediction_step", "predict", "push_to_hub"}
    assert overridden <= set(names)


@pytest.mark.parametrize(
    "heading",
    [
        *("Defaults that differ", "TrainingArguments", "Schedules"),
        *("Arguments", "Methods", "Callback events"),
    ],
)
def test_counterparts_exist(heading: str) -> None:
    assert check_counterparts(read_table(PAGE, heading)) == []


def train_losses(*overrides: str) -> list[float]:
    """Return the losses of a run of the page's experiment, which tests nothing."""
    result = run_quietly(["speech.yaml", "DATA.TEST=null", "METERS=null", *overrides])
    return [row["loss"] for row in result.history.steps()]


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Let torch use one thread: on a busy machine several wait for each other in every operator."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, single_thread: None) -> Path:
    """Return the current folder, with the files of the page and the data."""
    pytest.importorskip("datasets", reason="the extra `datasets` is missing")
    write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # Put back afterwards as they were: not there.
    for name in ("trainer_order", "masking"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    # All are imported first: what registers in the meantime would be forgotten with the rest.
    monkeypatch.setattr(SAMPLERS, "_own", dict(SAMPLERS.items()))
    runpy.run_path("speech.py")
    return tmp_path


@pytest.mark.feature(
    "guide.huggingface",
    "guide from Hugging Face Trainer, with equal losses and every field of `TrainingArguments`",
    "`docs/guides/huggingface.md`",
)
@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_trainer_and_phasetrain_have_equal_losses(
    record_property: Callable[[str, object], None],
) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it")
    history = runpy.run_path("with_trainer.py")["trainer"].state.log_history
    expected = [row["loss"] for row in history if "loss" in row]
    assert len(expected) == 40

    losses = train_losses()
    assert losses[:2] == expected[:2]
    assert losses == pytest.approx(expected, rel=0, abs=1e-6)
    equal = sum(one == other for one, other in zip(losses, expected, strict=True))
    record_property("summary", f"losses of Trainer: {equal} of 40 equal in every bit")

    # Each setting of the table of defaults is needed.
    for number, override in enumerate(
        (
            "OPTIMIZER.clip_norm=null",
            "OPTIMIZER.groups=[]",
            "OPTIMIZER.SCHEDULES.lr.warmup=0",
            "DATA.TRAIN.sampler=shuffled",
            "DATA.TRAIN.drop_last=true",
        )
    ):
        other = train_losses(override, f"RUN.dir=other-{number}")
        assert other != pytest.approx(expected[: len(other)], rel=0, abs=1e-5), override


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_random_masks_of_a_collator_resume_exactly() -> None:
    config = ["masked.yaml", "MODEL.weights=null", "OPTIMIZER.SCHEDULES=null"]
    assert_exact_resume(config, steps=[2])
