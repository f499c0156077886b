"""`experiment=digits_transfer`: what a first run has learned helps to learn other classes of
pictures in folders."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, newest, records
from PIL import Image

from phasetrain.data import DATASETS
from phasetrain.hooks import Hook
from phasetrain.testing.kills import Killed, run_quietly

TRANSFER = ("experiment=digits_transfer", "PHASES.epochs=3", "HOOKS.metrics.every_updates=1")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that has learned the ten digits."""
    folder = tmp_path_factory.mktemp("first") / "run"
    run_quietly(["experiment=digits", "PHASES.epochs=4", f"RUN.dir={folder}"])
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of pictures of digits, train and test, each in a folder `even` or `odd`."""
    root = tmp_path_factory.mktemp("pictures")
    for split, most in (("train", 256), ("test", 256)):
        data = DATASETS.build("digits", {"split": split})
        for at in range(most):
            image, digit = data[at]
            folder = root / split / ("odd" if int(digit) % 2 else "even")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image[0] * 255).round().byte().numpy()).save(folder / f"{at:03}.png")
    return root


def transfer(
    folder: Path, pictures: Path, first: Path, *words: str, hooks: Mapping[str, Hook] | None = None
) -> Path:
    """Run the experiment, or until it is killed."""
    paths = (f"DATA.{split.upper()}.path={pictures}/{split}" for split in ("train", "test"))
    try:
        run_quietly(
            [*TRANSFER, *paths, f"MODEL.weights.path={first}", f"RUN.dir={folder}", *words], hooks
        )
    except Killed:
        assert hooks
    return folder


def accuracies(folder: Path) -> list[float]:
    """Return the test accuracy after each epoch."""
    found = [
        line for line in records(folder) if line["kind"] == "phase" and line["split"] == "test"
    ]
    return [line["metrics"]["accuracy"] for line in found]


def test_run_starts_from_weights_of_the_first_with_another_head(
    tmp_path: Path, pictures: Path
) -> None:
    first = tmp_path / "first"
    run_quietly(
        ["experiment=digits", "PHASES.epochs=1", "PHASES.limit.train=2", f"RUN.dir={first}"]
    )
    run = transfer(tmp_path / "run", pictures, first, "OPTIMIZER.lr=0", "PHASES.epochs=1")
    learned, before = (newest(folder).state["task"]["model"] for folder in (run, first))
    assert (before["head.weight"].shape, learned["head.weight"].shape) == ((10, 64), (2, 64))
    assert torch.equal(learned["features.0.weight"], before["features.0.weight"])
    report = json.loads((run / "plan.json").read_text())["weights"]
    assert sorted(report["reinit"]) == ["head.bias", "head.weight"]
    assert len(report["loaded"]) == 18


@pytest.mark.slow
def test_what_was_learned_before_helps_and_the_rate_falls_every_two_epochs(
    tmp_path: Path, first: Path, pictures: Path
) -> None:
    helped = transfer(tmp_path / "helped", pictures, first)
    alone = transfer(tmp_path / "alone", pictures, first, "MODEL.weights=null")
    assert accuracies(helped)[-1] > 0.9
    assert accuracies(helped)[-1] > accuracies(alone)[-1] + 0.1
    rates = [line["lr"] for line in records(helped) if line["kind"] == "step"]
    assert rates == pytest.approx(
        [0.005] * 8 + [0.0005] * 4
    )  # of the features, a tenth of that of the head


@pytest.mark.slow
def test_it_resumes_exactly_when_the_first_run_has_gone(
    tmp_path: Path, first: Path, pictures: Path
) -> None:
    unbroken = transfer(tmp_path / "unbroken", pictures, first)
    killed: dict[str, Hook] = {"save": SaveEachStep(), "kill": KillAfter(6)}
    transfer(tmp_path / "killed", pictures, first, hooks=killed)
    first.rename(first.with_name("gone"))
    try:
        transfer(tmp_path / "killed", pictures, first)
    finally:
        first.with_name("gone").rename(first)
    assert differences_of_runs(unbroken, tmp_path / "killed") == []
    assert (
        differences_of_runs(
            tmp_path / "killed", transfer(tmp_path / "other", pictures, first, "RUN.seed=1")
        )
        != []
    )
