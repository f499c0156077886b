"""Whole runs of self-supervised learning: exact resume, several processes, and features that are
worth something."""

import io
from pathlib import Path

import pytest
import torch
from harness import differences_of_runs, newest, records, status
from processes import Launcher
from self_supervised_parts import ROWS

from phasetrain.app.api import run
from phasetrain.data.datasets.digits import load_digits
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run

SMALL = ("DATA.TRAIN.batch_size=24", "DATA.TEST.batch_size=32", "MACHINE.threads=1")
PARTS = "RUN.imports=[self_supervised_parts]"
STATE = {
    "simclr": ("DATA.TRAIN.batch_transforms=[{name: each_view, transforms: [mixup, cutmix]}]",),
    "npid": (
        *("LOSS.name=npid", "LOSS.negatives=16", "DATA.TEST=null"),
        "DATA.TRAIN.subset.samples=100",
    ),
    "deepcluster": ("LOSS.clusters=[5,6]", "DATA.TRAIN.subset.samples=100"),
    "moco": ("LOSS.queue=60",),
    "swav": ("LOSS.queue=40", "LOSS.queue_updates=1", "LOSS.frozen_updates=2"),
}
SHORT = (
    "PHASES.epochs=2",
    "PHASES.limit.train=4",
    "PHASES.limit.test=2",
    "PHASES.test_every.epochs=1",
)
EXPERIMENTS = ("simclr", "moco", "byol", "barlow", "swav", "dino", "deepcluster")


def words(name: str) -> tuple[str, ...]:
    experiment = "simclr" if name == "npid" else name
    return (f"experiment=digits_{experiment}", *SMALL, *STATE.get(name, ()))


@pytest.mark.feature("loss.memory")
@pytest.mark.feature("self_supervised")
@pytest.mark.by_default("dino")
@pytest.mark.parametrize("name", [*EXPERIMENTS, "npid"])
def test_run_resumes_exactly(name: str) -> None:
    assert_exact_resume(words(name), steps=[2, 4], workers=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPERIMENTS, "npid"])
def test_run_resumes_exactly_with_and_without_workers(name: str) -> None:
    assert_exact_resume(words(name))


def write_teacher(folder: Path) -> tuple[str, ...]:
    """Return the overrides of a student of a trained teacher with a wider trunk."""
    trunk = "trunk: {name: small_cnn, width: 8, cut: head}"
    head = "head: {name: prototypes, hidden: [16], bottleneck: 8, dimensions: 64}"
    section = f"{{name: trunk_head, {trunk}, {head}}}"
    model = build_run([*words("dino"), f"MODEL={section}"]).task.parts.model
    torch.save(model.state_dict(), folder / "teacher.pt")
    teacher = f"{section[:-1]}, weights: {folder / 'teacher.pt'}}}"
    task = (f"TASK.teacher={teacher}", "TASK.momentum=null")
    return (*words("dino"), *task, "LOSS={name: view_distillation}")


@pytest.mark.feature("loss.view_distillation")
def test_trained_teacher_is_not_saved_and_does_not_change(tmp_path: Path) -> None:
    given = (*write_teacher(tmp_path), *SHORT, "PHASES.epochs=1", f"RUN.dir={tmp_path / 'run'}")
    run(given, terminal=Terminal(io.StringIO(), live=False))
    state = newest(tmp_path / "run").state["task"]
    assert list(state["teacher"]) == ["digest"]
    assert state["model"]["head.prototypes"].shape == (64, 32)


@pytest.mark.feature("loss.view_distillation")
@pytest.mark.slow
def test_run_with_a_trained_teacher_resumes_exactly(tmp_path: Path) -> None:
    assert_exact_resume(write_teacher(tmp_path), steps=[2, 4], workers=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("LOSS.name=forgetful_moco",),
            r"killed after step 1: (gradient|loss|state\.loss).* differs",
        ),
        (
            ("TASK.name=forgetful_self_supervised", "TASK.momentum=0.9"),
            r"killed after .*: (gradient|loss|output|state)[^:]* differs",
        ),
    ],
    ids=["queue", "teacher"],
)
def test_unsaved_queue_or_teacher_is_detected(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_exact_resume([*words("moco"), PARTS, *given], workers=None)


@pytest.mark.feature(
    "self_supervised",
    "self-supervised learning",
    "`TASK.name=self_supervised`, `experiment=digits_simclr`",
)
@pytest.mark.by_default("3")
@pytest.mark.parametrize("size", [2, 3])
def test_losses_over_processes_are_those_of_one(
    launcher: Launcher, tmp_path: Path, size: int
) -> None:
    assert ROWS % size == 0
    ended = launcher.run(
        tmp_path / "run", size, PARTS, "HOOKS.view_losses={}", "PHASES.epochs=0", *SMALL
    )
    assert ended.codes == [0] * size, ended.outputs
    assert "".join(ended.outputs).count("all losses agree") == size


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moco", "swav", "deepcluster"])
def test_three_ranks_are_bit_identical_after_one_is_killed(
    launcher: Launcher, tmp_path: Path, name: str
) -> None:
    given = (*words(name), *SHORT, "CHECKPOINT.every_updates=1")
    done = launcher.run(tmp_path / "whole", 3, *given)
    assert done.codes == [0, 0, 0], done.outputs
    strike = ("RUN.imports=[process_parts]", "HOOKS.strike={rank: 1, update: 6}")
    assert launcher.run(tmp_path / "run", 3, *given, *strike).codes[1] == -9
    assert launcher.run(tmp_path / "run", 3, *given, *strike).codes == [0, 0, 0]
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []
    assert status(tmp_path / "run")["state"] == "finished"


@pytest.mark.slow
def test_three_ranks_learn_as_one(launcher: Launcher, tmp_path: Path) -> None:
    """Without batch norm, whose statistics are those of each process, only last bits differ."""
    views = "[{name: multi_crop, groups: [{views: 2, transforms: [{name: noise, std: 0.1}]}]}]"
    given = (
        *(
            *SMALL,
            *SHORT,
            "METERS.accuracy=null",
            f"DATA.TRAIN.transforms={views}",
            f"DATA.TEST.transforms={views}",
        ),
        *(
            "MODEL.name=trunk_head",
            "MODEL.trunk={name: mlp, hidden: [16]}",
            "MODEL.head={name: projection}",
        ),
        *("TASK.name=self_supervised", "TASK.momentum=0.9", "LOSS.name=moco", "LOSS.queue=60"),
    )
    for size in (1, 3):
        done = launcher.run(tmp_path / str(size), size, *given)
        assert done.codes == [0] * size, done.outputs
    one, three = (newest(tmp_path / str(size)).state["task"] for size in (1, 3))
    for part in ("model", "teacher", "loss"):
        for key, value in one[part].items():
            assert torch.allclose(three[part][key], value, atol=1e-5, rtol=1e-4), f"{part}.{key}"
    tests = [
        [r["metrics"]["loss"] for r in records(tmp_path / str(size)) if r["kind"] == "phase"]
        for size in (1, 3)
    ]
    assert tests[0] == pytest.approx(tests[1], rel=1e-4)


def test_a_checkpoint_is_tested_with_its_own_teacher(tmp_path: Path) -> None:
    given = (*words("dino"), *SHORT, "PHASES.epochs=1", f"RUN.dir={tmp_path / 'run'}")
    quiet = Terminal(io.StringIO(), live=False)
    trained = run(given, terminal=quiet)
    tested = run([*given, "RUN.engine=test"], terminal=quiet)
    assert tested.last["test/loss"] == pytest.approx(trained.last["test/loss"], abs=1e-6)


@pytest.mark.addon("experiments")
@pytest.mark.slow
def test_an_update_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    given = (*words("moco"), *SHORT, f"RUN.dir={tmp_path / 'run'}", "CHECKPOINT.every_updates=3")
    quiet = Terminal(io.StringIO(), live=False)
    run(given, terminal=quiet)
    assert run([*given, "RUN.engine=replay", "RUN.step=8"], terminal=quiet).exit_code == 0


@pytest.mark.slow
def test_half_precision_resumes_exactly() -> None:
    assert_exact_resume([*words("swav"), "MACHINE.precision=bf16"], steps=[2], workers=None)


def nearest_accuracy(trunk: torch.nn.Module) -> float:
    """Return the share of test digits whose five nearest training digits, by the angle of features,
    vote rightly."""
    train, test = load_digits("train"), load_digits("test")
    with torch.no_grad():
        known, asked = (
            torch.nn.functional.normalize(trunk.eval()(one.inputs), dim=1) for one in (train, test)
        )
    votes = torch.nn.functional.one_hot(train.targets)[
        (asked @ known.T).topk(5, dim=1).indices
    ].sum(dim=1)
    return float((votes.argmax(dim=1) == test.targets).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_features_are_better_than_those_of_random_weights(name: str, tmp_path: Path) -> None:
    given = [f"experiment=digits_{name}", f"RUN.dir={tmp_path / 'run'}"]
    model = build_run(given).task.parts.model
    random = nearest_accuracy(model.trunk)
    run(given, terminal=Terminal(io.StringIO(), live=False))
    model.load_state_dict(newest(tmp_path / "run").state["task"]["model"])
    learned = nearest_accuracy(model.trunk)
    losses = [
        record["metrics"]["loss"]
        for record in records(tmp_path / "run")
        if record.get("split") == "train" and record["kind"] == "phase"
    ]
    assert losses[-1] < 0.95 * max(
        losses
    )  # that of DINO rises first, until its centre has spread the teacher's choices
    assert learned > random + 0.05, (learned, random)
