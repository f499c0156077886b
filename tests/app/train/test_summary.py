"""What a run says of itself: the time line of its phases, and how it ended."""

import io
from pathlib import Path

import pytest
import torch
from harness import SMALL, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from phasetrain.app.api import run
from phasetrain.app.build_hooks import build_checkpointer
from phasetrain.app.train.summary import final_lines, format_timeline
from phasetrain.engine.interleave import interleave
from phasetrain.engine.plan import PhaseSettings, Plan, Split, Stage
from phasetrain.engine.position import RunState
from phasetrain.losses import LOSSES
from phasetrain.models import MODELS
from phasetrain.runs.folder import RunFolder
from phasetrain.runtime.terminal import IN_SWEEP, Terminal
from phasetrain.tasks import Supervised
from phasetrain.testing.build import resolve_overrides

TRAIN = Split("train", 220, 10, drop_last=True)
TEST = Split("test", 20, 10, drop_last=False)
VALID = Split("valid", 30, 10, drop_last=False)


@pytest.mark.parametrize(
    ("splits", "settings", "text"),
    [
        ([TRAIN, TEST], PhaseSettings(epochs=12), "12 x (train 22, test 2)"),
        ([TRAIN], PhaseSettings(epochs=1), "train 22"),
        ([TRAIN], PhaseSettings(epochs=3), "3 x train 22"),
        ([TRAIN, TEST, VALID], PhaseSettings(epochs=1), "train 22, test 2, valid 3"),
        (
            [TRAIN, TEST],
            PhaseSettings(epochs=7, test_every_epochs=3, test_first=True),
            "test 2, 2 x (3 x train 22, test 2), train 22, test 2",
        ),
        ([TRAIN, TEST], PhaseSettings(epochs=0), "nothing"),
    ],
)
def test_time_lines(splits: list[Split], settings: PhaseSettings, text: str) -> None:
    assert (
        format_timeline(interleave([Stage({split.name: split for split in splits}, settings)]))
        == text
    )


def test_a_long_one_is_cut() -> None:
    plan = interleave(
        [
            Stage(
                {"train": TRAIN, "test": TEST},
                PhaseSettings(epochs=7, test_every_epochs=None, test_every_updates=9),
            )
        ]
    )
    assert isinstance(plan, Plan)
    text = format_timeline(plan)
    assert text.startswith("2 x (train 9, test 2), ")
    assert text.endswith(" more")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            (),
            {
                "end": "everything is in",
                "resume": " PHASES.epochs=2 RUN.allow=PHASES",
                "load": "phasetrain.load(",
            },
        ),
        (
            ("CHECKPOINT.every_epochs=null", "CHECKPOINT.at_end=false"),
            {"end": "no checkpoint was kept, everything "},
        ),
    ],
)
def test_only_what_was_kept_is_said_to_be_loaded(
    tmp_path: Path, words: tuple[str, ...], told: dict[str, str]
) -> None:
    words = ("PHASES.epochs=1", "PHASES.limit.train=2", "DATA.TEST=null", *words)
    train(tmp_path, *words)
    setup = resolve_overrides([*SMALL, f"RUN.dir={tmp_path}", *words])
    state = RunState(finished="completed", updates=2)
    rows = dict(
        final_lines(setup, state, "ab", "", build_checkpointer(setup, RunFolder(str(tmp_path))))
    )
    assert rows.pop("weights") == "sha256 ab"
    assert list(rows) == list(told)
    assert all(text in rows[word] for word, text in told.items())


def test_run_of_a_sweep_gives_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_SWEEP, "1")
    train(tmp_path, "PHASES.epochs=1", "PHASES.limit.train=1", "DATA.TEST=null")
    checkpointer = build_checkpointer(resolve_overrides(SMALL), RunFolder(str(tmp_path)))
    state = RunState(finished="completed", updates=1)
    rows = final_lines(resolve_overrides(SMALL), state, "ab", "", checkpointer)
    assert [word for word, _ in rows] == ["end", "weights"]


def read_header(folder: Path, *words: str) -> dict[str, str]:
    """Return the lines of a run before its first step."""
    stream = io.StringIO()
    run(
        [*SMALL, "PHASES.epochs=1", "PHASES.limit.train=1", *words, f"RUN.dir={folder}"],
        terminal=Terminal(stream, live=False),
    )
    lines = (line.split(maxsplit=2)[1:] for line in stream.getvalue().splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


@MODELS.register("scores_of_sources")
class ScoresOfSources(nn.Linear):
    def __init__(self, width: int, dropout: float) -> None:  # parameters in SMALL
        super().__init__(64, 10)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(torch.cat([*batch.values()]).flatten(1))


@LOSSES.register("loss_of_sources")
def loss_of_sources(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return cross_entropy(output, torch.cat([*target.values()]))


SOURCE = "dataset: synthetic, classes: 10, input_shape: [1, 8, 8], samples"
MIXED = (
    "DATA.TRAIN={{dataset: mixed, datasets: {{a: {{{}SOURCE: 48}}, b: {{{}SOURCE: 50}}}}}}"
).replace("SOURCE", SOURCE)
BY_SOURCE = (
    "DATA.TRAIN.batch_size=16",
    "MODEL={name: scores_of_sources}",
    "LOSS={name: loss_of_sources}",
    "METERS=null",
)
SYNTHETIC = "{dataset: synthetic, samples: 48, classes: 10, input_shape: [1, 8, 8]}"


@pytest.mark.parametrize(
    ("words", "data"),
    [
        ((), "digits (train 1,442, test 355 samples), 24 per update"),
        (
            (f"DATA.TRAIN={SYNTHETIC}",),
            "synthetic (train 48 samples), no test split (DATA.TEST is not set), 24 per update",
        ),
        (
            (f"DATA.TRAIN={SYNTHETIC}", "experiment=digits"),
            "train synthetic (48 samples), test digits (355 samples), 24 per update",
        ),
    ],
)
def test_header_names_the_dataset_of_each_split(
    tmp_path: Path, words: tuple[str, ...], data: str
) -> None:
    assert read_header(tmp_path, *words)["data"] == data


@pytest.mark.addon("sampling")
def test_header_tells_how_many_samples_an_epoch_leaves_out(tmp_path: Path) -> None:
    words = ("PHASES.limit.train=null", "DATA.TEST=null", f"DATA.TRAIN={SYNTHETIC}")
    data = read_header(tmp_path / "a", *words, "DATA.TRAIN.batch_size=20")["data"]
    assert data.endswith(", 20 per update, 8 left out/epoch")
    samplers = [f"DATA: {{TRAIN: {{sampler: {{name: infinite, samples: {n}}}}}}}" for n in (25, 41)]
    stages = ", ".join(f"{{epochs: 1, {sampler}}}" for sampler in samplers)
    staged = ("DATA.TRAIN.batch_size=20", "PHASES.epochs=null", f"PHASES.stages=[{stages}]")
    data = read_header(tmp_path / "c", *words, *staged)["data"]
    assert data.endswith(", 20 per update, at most 5 left out/epoch")
    words += ("DATA.TRAIN.batch_size=20", "DATA.TRAIN.drop_last=false")
    assert "left out" not in read_header(tmp_path / "b", *words)["data"]


@pytest.mark.addon("sampling")
@pytest.mark.parametrize(
    ("words", "data"),
    [
        (
            (MIXED.format("batch_size: 4, ", "batch_size: 12, "), *BY_SOURCE),
            "mixed (train 98 samples), no test split (DATA.TEST is not set), 16 per update, "
            "192 per epoch",
        ),
        (
            (MIXED.format("batch_size: 12, ", "batch_size: 4, "), *BY_SOURCE),
            "mixed (train 98 samples), no test split (DATA.TEST is not set), 16 per update, "
            "192 per epoch, 2 left out/epoch",
        ),
        (
            (
                MIXED.format("", ""),
                "DATA.TRAIN.batch_size=10",
                "DATA.TRAIN.sampler={name: proportional, proportions: {a: 0.9, b: 0.1}}",
            ),
            "mixed (train 98 samples), no test split (DATA.TEST is not set), 10 per update, "
            "41 left out/epoch",
        ),
    ],
)
def test_header_has_the_samples_of_a_mixture_and_the_draws_of_an_epoch(
    tmp_path: Path, words: tuple[str, ...], data: str
) -> None:
    shared = ("PHASES.limit.train=null", "DATA.TEST=null")
    assert read_header(tmp_path, *shared, *words)["data"] == data


def test_header_lists_what_was_not_asked_for(tmp_path: Path) -> None:
    assert "default" not in read_header(tmp_path / "a", "experiment=digits")
    assumed = read_header(tmp_path / "b", f"DATA.TRAIN={SYNTHETIC}")["default"]
    assert assumed == (
        "LOSS.name = cross_entropy, OPTIMIZER.name = sgd, OPTIMIZER.lr = 0.1 "
        "(experiment=digits, since none is given)"
    )


def test_header_has_no_loss_of_a_task_that_uses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervised, "uses_loss", False)
    assumed = read_header(tmp_path, f"DATA.TRAIN={SYNTHETIC}")["default"]
    assert assumed.startswith("OPTIMIZER.name = sgd, ")


@pytest.mark.parametrize(
    ("state", "remaining", "expected"),
    [
        (RunState(finished="completed"), 1.0, "PHASES.epochs=6 RUN.allow=PHASES"),
        (
            RunState(finished="completed"),
            0.024,
            "PHASES.epochs=6 PHASES.extend=stretch RUN.allow=PHASES",
        ),
        (RunState(finished="early_stopping: no improvement"), 1.0, ""),
    ],
)
def test_hint_to_train_longer_is_given_if_it_works(
    tmp_path: Path, state: RunState, remaining: float, expected: str
) -> None:
    train(tmp_path, "PHASES.epochs=1", "PHASES.limit.train=1")
    setup = resolve_overrides(SMALL)
    checkpointer = build_checkpointer(setup, RunFolder(str(tmp_path)))
    rows = dict(final_lines(setup, state, "ab", "", checkpointer, remaining_lr=remaining))
    assert ("resume" in rows) == bool(expected)
    assert rows.get("resume", "").endswith(expected)
