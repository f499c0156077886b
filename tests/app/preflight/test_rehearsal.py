"""A rehearsal finds what would fail later, and the run is bit for bit what it is without one."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import SMALL, differences_of_runs, leftovers, train
from raising import raises

from phasetrain.app.preflight.rehearsal import LONG_SECONDS
from phasetrain.app.preflight.step_kinds import estimate_seconds, list_step_kinds, sum_seconds
from phasetrain.errors import ConfigError, NumericsError, PhasetrainError
from phasetrain.hooks import Hook
from phasetrain.testing.build import build_run, resolve_overrides
from phasetrain.testing.kills import run_quietly

REHEARSED, WITHOUT = "RUN.rehearse=true", "RUN.rehearse=false"
MUCH = (  # stages, averages, own batches, skipped updates, several optimizers' worth of state
    "PHASES.epochs=null",
    "PHASES.stages=[{epochs: 1}, {epochs: 1, DATA: {TRAIN: {batch_size: 16}}, OPTIMIZER: {lr: 0.05}}]",
    "MODEL.ema={decay: 0.9}",
    "MODEL.swa={start: 0.5}",
    "OPTIMIZER={name: adamw, lr: 0.01}",
    "OPTIMIZER.clip_norm=1.0",
    "DATA.TRAIN.batch_transforms=[mixing_parts.Blended]",
)
PARTS = """
import torch
from torch import nn

from phasetrain.losses import LOSSES
from phasetrain.meters import METERS, Meter
from phasetrain.models import MODELS

@LOSSES.register("spoilt_at_once")
class Spoilt(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return super().forward(output, target) * float("nan")

@LOSSES.register("any_label")
class AnyLabel(nn.Module):
    def forward(self, output, target):
        return output.square().mean()

@MODELS.register("counting")
class Counting(nn.Module):
    made = 0

    def __init__(self, classes, input_shape, breaks_in_tests=False, counts=False, forgets=False, norm=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(torch.Size(input_shape).numel()) if norm else nn.Identity()
        self.layer = nn.Linear(torch.Size(input_shape).numel(), classes)
        self.breaks, self.counts, self.forgets = breaks_in_tests, counts, forgets
        self.register_buffer("seen", torch.zeros(()))
        if counts:
            Counting.made += 1
            nn.init.constant_(self.layer.bias, Counting.made)

    def forward(self, x):
        self.seen += 1
        if self.breaks and not self.training:
            raise RuntimeError("this layer has no test mode")
        return self.layer(self.norm(x.flatten(1)))

    def load_state_dict(self, state, strict=True):
        return super().load_state_dict({**state, "seen": self.seen} if self.forgets else state, strict)

@METERS.register("late")
class Late(Meter):
    def __init__(self):
        super().__init__()
        self.add_sum("total")

    def update(self, out):
        if len(out.ids) == 3:
            raise ValueError("a batch of three")

    def compute(self):
        return {"found": 1.0} if self.total < 1 else {}
"""
TASK = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from phasetrain.tasks import Supervised

class Drawing(Supervised):
    def __init__(self, parts):
        super().__init__(parts)
        weight_norm(self.model.head)
        self.drawn = nn.Linear(2, 2)

    def stateful(self):
        return super().stateful() | {"drawn": self.drawn}
"""
STEP = """
from dataclasses import replace

from phasetrain.tasks import Supervised

class TestsOnly(Supervised):
    def train_step(self, batches, at, events):
        self.begin_update(at)
        done = self.gradient_pass(batches, at, events, forward=super().forward)
        return self.update(done, at, events)

    def forward(self, batch):
        if self.model.training:
            batch = replace(batch, input={"images": batch.input})
        return super().forward(batch)
"""
COUNTING = ("RUN.imports=[parts_of_a_rehearsal]", "MODEL=null", "MODEL.name=counting")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts_of_a_rehearsal.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)


def plan_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "plan.json").read_text())
    assert isinstance(found, dict)
    return found


def differences_with_and_without(tmp_path: Path, *words: str) -> list[str]:
    """Run with and without a rehearsal, and return in what the runs differ."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, word in ((one, REHEARSED), (other, WITHOUT)):
        assert train(folder, *words, word).state == "finished"
        assert leftovers(folder) == []
    assert plan_of(one)["rehearsal"]["kinds"]
    assert plan_of(other)["rehearsal"] is None
    return differences_of_runs(one, other)


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "words", [("PHASES.epochs=2",), MUCH, ("PHASES.epochs=1", "DATA.TRAIN.workers=2")]
)
def test_the_bits_are_those_of_a_run_without_one(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert differences_with_and_without(tmp_path, *words) == []


def test_task_whose_constructor_draws_and_changes_the_model_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task_of_a_rehearsal.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("TASK.name=task_of_a_rehearsal.Drawing", "PHASES.epochs=1")
    assert differences_with_and_without(tmp_path, *words) == []
    assert train(tmp_path / "other", *words, "PHASES.epochs=2", "RUN.allow=PHASES").updates == 10


def test_step_that_does_not_call_forward_need_not_have_one_for_train_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step_of_a_rehearsal.py").write_text(STEP)
    monkeypatch.syspath_prepend(tmp_path)
    words = ("TASK.name=step_of_a_rehearsal.TestsOnly", REHEARSED)
    with pytest.raises(Reached):
        train(tmp_path / "run", *words, hooks={"first": AtFirst()})


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("OPTIMIZER.sam={rho: 0.05}",), marks=pytest.mark.addon("optimizers")),
        ("MACHINE.precision=bf16", "OPTIMIZER.accumulate=2"),
        ("MODEL.freeze_updates=[{match: head, for: 3}]", "PHASES.test_first=true"),
        ("OPTIMIZER.others={head: {name: adamw, lr: 0.001, match: 'head*'}}",),
        ("MACHINE.compile=aot_eager", "DATA.TEST.drop_last=true"),
        ("HOOKS.early_stopping={monitor: test/accuracy}",),
        pytest.param(
            ("HOOKS.plateau={monitor: test/accuracy, patience: 1}",),
            marks=pytest.mark.addon("optimizers"),
        ),
    ],
)
def test_the_bits_of_many_kinds_of_runs(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert differences_with_and_without(tmp_path, *words) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["digits_moco", "digits_swav", "digits_byol", "digits_dino", "text_tiny"]
)
def test_the_bits_of_experiments(tmp_path: Path, name: str) -> None:
    words = (f"experiment={name}", "PHASES.epochs=1", "PHASES.limit.train=3", "PHASES.limit.test=1")
    folders = tmp_path / "one", tmp_path / "other"
    for folder, word in zip(folders, (REHEARSED, WITHOUT), strict=True):
        run_quietly([*words, f"RUN.dir={folder}", word])
    assert differences_of_runs(*folders) == []


@pytest.mark.usefixtures("parts")
@pytest.mark.slow
def test_model_that_counts_its_instances_makes_the_comparison_fail(tmp_path: Path) -> None:
    found = differences_with_and_without(
        tmp_path, *COUNTING, "MODEL.counts=true", "PHASES.epochs=1"
    )
    assert "task.model.layer.bias" in found


def test_every_kind_of_step_is_rehearsed() -> None:
    words = (
        *SMALL,
        "PHASES.limit.test=null",
        "MODEL.ema={}",
        "RUN.dir=x",
        "DATA.TRAIN.drop_last=false",
    )
    made = build_run([*words, "PHASES.limit.train=null"])
    found = [
        (kind.name, kind.phase.index, kind.step, kind.steps)
        for kind in list_step_kinds(made.plan, made.task)
    ]
    assert found == [
        ("train", 0, 0, 2),
        ("train, last batch of 2", 0, 60, 1),
        ("test", 1, 0, 2),
        ("test, last batch of 3", 1, 11, 1),
        ("test@ema", 2, 0, 2),
        ("test@ema, last batch of 3", 2, 11, 1),
    ]
    assert sum_seconds(made.plan, {"train": 1.0, "test": 0.5}) == pytest.approx(3 * (61 + 12 * 0.5))


class Reached(Exception):  # noqa: N818
    """The first step has begun."""


class AtFirst(Hook):
    def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
        raise Reached


@pytest.mark.feature(
    "12", "rehearsed tests; overfitting a few batches", "`RUN.rehearse`, `PHASES.overfit`"
)
@pytest.mark.by_default(3)
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            (*COUNTING, "MODEL.breaks_in_tests=true"),
            ["no test mode", "in the rehearsal of test, before"],
        ),
        (
            ("RUN.imports=[parts_of_a_rehearsal]", "METERS.late={}", "PHASES.limit.test=null"),
            ["METERS.late: a batch of three", "rehearsal of test, last batch of 3"],
        ),
        (
            (
                "RUN.imports=[parts_of_a_rehearsal]",
                "METERS.late={}",
                "CHECKPOINT.best.monitor=test/late_fond",
            ),
            ["test/late_fond", "did you mean 'test/late_found'"],
        ),
        (
            (*COUNTING, "MODEL.classes=5", "LOSS=null", "LOSS.name=any_label"),
            ["METERS.accuracy: ", "are outside the classes", "rehearsal of train, before"],
        ),
        (
            ("RUN.imports=[parts_of_a_rehearsal]", "LOSS=null", "LOSS.name=spoilt_at_once"),
            [
                "update 1 is not finite (loss nan; ",
                "OPTIMIZER.on_nonfinite=skip\n",
                "rehearsal of train, before",
            ],
        ),
        (
            (
                *COUNTING,
                "MODEL.norm=true",
                "DATA.TRAIN.batch_size=1441",
                "DATA.TRAIN.drop_last=false",
            ),
            ["Expected more than 1 value per channel", "rehearsal of train, last batch of 1"],
        ),
    ],
)
def test_what_would_fail_later_fails_before_the_first_step(
    tmp_path: Path, words: tuple[str, ...], told: list[str]
) -> None:
    with pytest.raises(PhasetrainError) as caught:
        train(tmp_path / "run", *words, REHEARSED, hooks={"first": AtFirst()})
    text = "\n".join((str(caught.value), *vars(caught.value).get("__notes__", ())))
    assert all(one in text for one in told), text
    assert ("RUN.rehearse=false" in text) == isinstance(caught.value, NumericsError)
    assert leftovers(tmp_path / "run") == []
    if "fond" not in text:  # the name is seen to without a rehearsal
        with pytest.raises(Reached):
            train(tmp_path / "without", *words, WITHOUT, hooks={"first": AtFirst()})


@pytest.mark.usefixtures("parts")
def test_nan_in_the_rehearsal_is_no_attempt_and_one_in_a_step_is(tmp_path: Path) -> None:
    words = ("RUN.imports=[parts_of_a_rehearsal]", "LOSS=null", "LOSS.name=spoilt_at_once")
    with raises(NumericsError, code="numerics.nonfinite"):
        train(tmp_path / "run", *words, REHEARSED)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["log.txt"]
    with raises(NumericsError, code="numerics.nonfinite"):
        train(tmp_path / "run", *words, WITHOUT)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["attempt"]) == ("failed", 1)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("forgets", [True, False])
def test_part_that_is_not_restored_is_rejected(tmp_path: Path, forgets: bool) -> None:
    hooks = {"first": AtFirst()}
    words = (*COUNTING, f"MODEL.forgets={forgets}", REHEARSED)
    if forgets:
        with raises(ConfigError, key="MODEL", code="resume.not_exact"):
            train(tmp_path, *words, hooks=hooks)
    else:
        with pytest.raises(Reached):
            train(tmp_path, *words, hooks=hooks)
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert any("WARNING" in line and "'model'" in line for line in logged) == forgets


def test_frozen_weights_are_restored_without_a_warning(tmp_path: Path) -> None:
    rule = "MODEL.freeze_updates=[{match: features, for: 1 epochs}]"
    with pytest.raises(Reached):
        train(tmp_path, rule, REHEARSED, hooks={"first": AtFirst()})
    assert "'flags'" not in (tmp_path / "log.txt").read_text()


def test_batch_that_does_not_fit_into_memory_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_of_a_test.py").write_text(
        "from torch import nn\nimport torch\nclass Large(nn.Linear):\n"
        "    def forward(self, x):\n        return super().forward(x) + torch.empty(1 << 60, device=x.device).sum()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = (
        "MODEL=null",
        "MODEL.name=large_of_a_test.Large",
        "MODEL.in_features=8",
        "MODEL.out_features=10",
    )
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", *words, REHEARSED)
    assert caught.value.code == "machine.out_of_memory"
    assert caught.value.key == "DATA.TRAIN.micro_batch_size"


@pytest.mark.parametrize(
    ("label", "build_seconds", "quick_seconds"),
    [(10, 0.0, 1e-3), (10, 0.6, 1.0), (3, 0.0, 1e-3)],
    ids=["time is up after the train batch", "parts take long to build", "no mistake"],
)
def test_batch_of_the_test_split_is_always_rehearsed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    label: int,
    build_seconds: float,
    quick_seconds: float,
) -> None:
    (tmp_path / "slow_of_a_test.py").write_text(
        "import time\nfrom phasetrain.models import SmallCNN\n"
        "from phasetrain.data.datasets import load_digits\n"
        "class Slow(SmallCNN):\n"
        "    def __init__(self, classes, channels, seconds):\n"
        "        time.sleep(seconds)\n        super().__init__(classes, channels, width=2)\n"
        "class Labels:\n"
        "    def __init__(self, label):\n        self.samples, self.label = load_digits('test'), label\n"
        "    def __len__(self):\n        return 20\n"
        "    def __getitem__(self, index):\n        return self.samples[index][0], self.label\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("phasetrain.app.preflight.rehearsal.QUICK_SECONDS", quick_seconds)
    words = (
        "MODEL=null",
        f"MODEL={{name: slow_of_a_test.Slow, seconds: {build_seconds}}}",
        "DATA.TRAIN.dataset=digits",
        f"DATA.TEST={{dataset: slow_of_a_test.Labels, label: {label}}}",
        "PHASES.epochs=1",
        "RUN.rehearse=auto",
    )
    if label == 3:
        assert train(tmp_path / "run", *words).state == "finished"
        return
    with raises(ConfigError, key="DATA.TEST") as caught:
        train(tmp_path / "run", *words)
    assert "in the rehearsal of test, before the first step" in "".join(caught.value.__notes__)


class TestWhetherThereIsOne:
    def guess(self, *words: str) -> float:
        made, setup = build_run([*SMALL, *words]), resolve_overrides([*SMALL, *words])
        return estimate_seconds(setup.builder().data(), made.plan, made.task.parts)

    def test_a_short_run_has_none(self, tmp_path: Path) -> None:
        train(tmp_path, "RUN.rehearse=auto", "PHASES.epochs=1")
        assert plan_of(tmp_path)["rehearsal"] is None
        assert "nothing was rehearsed" not in (tmp_path / "log.txt").read_text()

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            (("PHASES.epochs=1", "+HOOKS.early_stopping.monitor=-test/loss"), ""),
            (("PHASES.epochs=0", "PHASES.test_first=false"), "its plan has no steps"),
        ],
    )
    def test_reason_for_no_rehearsal_is_the_true_one(
        self, words: tuple[str, ...], why: str, tmp_path: Path
    ) -> None:
        train(tmp_path, "RUN.rehearse=auto", *words)
        log = (tmp_path / "log.txt").read_text()
        assert log.count("nothing was rehearsed") == bool(why)
        assert log.count(f"because the run is short, and {why}:") == bool(why)

    @pytest.mark.parametrize(("word", "count"), [("auto", 1), ("false", 0)])
    def test_a_fresh_run_says_that_it_has_none(self, tmp_path: Path, word: str, count: int) -> None:
        class Act(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Any) -> Any:
                return batch

        words = (f"RUN.rehearse={word}", "PHASES.epochs=1")
        train(tmp_path, *words, hooks={"act": Act()})
        train(tmp_path, *words, "PHASES.epochs=2", "RUN.allow=PHASES", hooks={"act": Act()})
        log = (tmp_path / "log.txt").read_text()
        assert log.count("nothing was rehearsed") == count
        assert log.count("because the run is short, and HOOKS.act may change the steps") == count

    def test_a_long_one_has_one_where_it_begins_and_none_where_it_goes_on(
        self, tmp_path: Path
    ) -> None:
        class Stop(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                run.stop("enough", interrupted=True)

        words = (
            "RUN.rehearse=auto",
            "PHASES.epochs=2000",
            "PHASES.limit.train=null",
            "PHASES.test_every.epochs=null",
        )
        train(tmp_path, *words, hooks={"stop": Stop()})
        first = plan_of(tmp_path)["rehearsal"]
        train(tmp_path, *words, hooks={"stop": Stop()})
        assert first is not None
        assert plan_of(tmp_path)["rehearsal"] == first
        assert (tmp_path / "log.txt").read_text().count("rehearsal: one batch") == 1

    def test_guessed_duration_grows_with_the_epochs(self) -> None:
        short = self.guess("PHASES.epochs=1")
        assert 0.001 < short < LONG_SECONDS < self.guess("PHASES.epochs=20000")
        assert self.guess("PHASES.epochs=2") == pytest.approx(2 * short)
