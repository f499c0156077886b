"""Tables of guides are read, and rows that name what does not exist are found."""

from pathlib import Path

import pytest
from guide_tables import check_counterparts, compare_names, exists, read_table

PAGE = """
# Guide
| not | this one |
|---|---|
| `a` | `b` |

## Arguments
Text.

| there | here |
|---|---|
| `epochs` | `PHASES.epochs` |
| `a \\| b` | none |

| there | here | remark |
|:--|--:|---|
| `stop`, `halt` | `run.stop` | |

## Callbacks
| x | y |
|---|---|
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "guide.md"
    path.write_text(PAGE)
    return path


def test_tables_below_a_heading_are_read(page: Path) -> None:
    assert read_table(page, "Arguments") == [
        ("`epochs`", "`PHASES.epochs`"),
        ("`a \\| b`", "none"),
        ("`stop`, `halt`", "`run.stop`", ""),
    ]
    assert read_table(page, "Callbacks") == []
    with pytest.raises(AssertionError, match="0 headings"):
        read_table(page, "Hooks")


def test_missing_invented_and_repeated_names_are_reported(page: Path) -> None:
    rows = [*read_table(page, "Arguments"), ("`epochs`", "")]
    assert compare_names(rows, ["epochs", "stop", "a \\| b", "seed"]) == [
        "no row for seed",
        "halt does not exist there",
        "epochs has 2 rows",
    ]


@pytest.mark.parametrize(
    "span",
    [
        "PHASES.epochs",
        "PHASES.epochs=3",
        "CHECKPOINT.best",
        "DATA.VALID.batch_size",
        "OPTIMIZER.name=AdamW",
        "OPTIMIZER.momentum",
        "OPTIMIZER.SCHEDULES.lr",
        "OPTIMIZER.SCHEDULES.lr=cosine",
        "LOSS.label_smoothing",
        "LOSS.name=MSELoss",
        "METERS.accuracy.topk",
        "HOOKS.early_stopping",
        "HOOKS.early_stopping.patience",
        "HOOKS.early_stopping={patience: 5}",
        pytest.param("DISTRIBUTED.strategy=fsdp", marks=pytest.mark.addon("sharding")),
        "MODEL.ema={decay: 0.99}",
        "RUN.resume=must",
        pytest.param("mixup", marks=pytest.mark.addon("vision")),
        "on_step",
        "Hook.state_dict",
        "Hook.main_only",
        "Task.forward",
        "task.model",
        "run.stop(why)",
        "run.state.updates",
        "StepOutput",
        "StepOutput.loss",
        "phasetrain.fit",
        "phasetrain.log(name, value)",
        "phasetrain plan",
        pytest.param("phasetrain find-lr", marks=pytest.mark.addon("experiments")),
        "phasetrain PHASES.epochs=3",
        "--restart",
        "metrics.jsonl",
        "torch.nn.Linear",
    ],
)
def test_code_of_phasetrain_exists(span: str) -> None:
    assert exists(span)


@pytest.mark.parametrize(
    "span",
    [
        "PHASES.epoch",
        "PHASES.epochs=three",
        "OPTIMIZER.name=AdamX",
        "OPTIMIZER.SCHEDULES.lr=cosinus",
        "OPTIMIZER.lrr",
        "METERS.accuracy.tops",
        "HOOKS.early_stop",
        "HOOKS.early_stopping.monitors",
        "HOOKS.early_stopping={waits: 5}",
        "DISTRIBUTED.strategy=fsdp3",
        "SECTION.key",
        "mixups",
        "on_epoch",
        "Hook.state",
        "Task.forwards",
        "run.halt",
        "run.state.update",
        "phasetrain.fits",
        "phasetrain planned",
        "--again",
        "metric.jsonl",
        "numpy.array",
    ],
)
def test_code_of_something_else_does_not_exist(span: str) -> None:
    assert not exists(span)


def test_rows_without_a_counterpart_are_reported() -> None:
    rows = [
        ("`a`", "`PHASES.epochs`", "see `PHASES.limits`, `their.thing`"),
        ("`b`", "none"),
        ("`c`", "none", "not needed"),
        ("`d`", "none: every run does it"),
        ("`e`", "nothing to do"),
        ("`f`", "[`PHASES.epoch`](x.md)"),
    ]
    assert check_counterparts(rows) == [
        "`a`: phasetrain has no `PHASES.limits`",
        "`b`: none without a reason",
        "`e`: 'nothing to do' has no code; expected some, or `none` and a reason",
        "`f`: phasetrain has no `PHASES.epoch`",
    ]
