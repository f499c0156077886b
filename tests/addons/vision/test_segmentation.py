"""Runs that segment: killed and resumed, with workers and ranks, in training and in a test."""

from pathlib import Path

import pytest
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    train,
)
from processes import Launcher
from segment_parts import WORDS

RUN = (
    *WORDS,
    "MACHINE.threads=1",
    "PHASES.epochs=1",
    "PHASES.limit.train=6",
    "PHASES.limit.test=null",
    "PHASES.train_meters=false",
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=20",
)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segmentation") / "run"
    assert train(folder, *RUN).state == "finished"
    return folder


# Steps 1 to 6 train, 7 to 10 are the test.
@pytest.mark.feature(
    "segmentation",
    "segmentation: folders of images and masks, a U-Net, exact on resume with workers, ranks "
    "and in a test",
    "`DATA.*.dataset=image_mask_folder`, `MODEL.name=unet`",
)
@pytest.mark.by_default(1)
@pytest.mark.parametrize(("update", "workers"), [(3, 0), (8, 0), (3, 2), (8, 2)])
def test_killed_run_resumes_with_equal_bits(
    update: int, workers: int, unbroken: Path, tmp_path: Path
) -> None:
    words = [*RUN, f"DATA.TRAIN.workers={workers}", f"DATA.TEST.workers={workers}"]
    run_until_killed(tmp_path, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(update)})
    assert train(tmp_path, *words).state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []


@pytest.mark.feature("segmentation")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_test_cut_in_half_ends_on_several_ranks_with_equal_metrics(
    ranks: int, unbroken: Path, launcher: Launcher, tmp_path: Path
) -> None:
    run_until_killed(tmp_path, *RUN, hooks={"save": SaveEachStep(), "kill": KillAfter(8)})
    position = newest(tmp_path).manifest.state
    assert (position["phase"], position["step"]) == (1, 2)
    words = ["DATA.TEST.batch_size=20", *SMALL, *RUN]

    ended = launcher.run(tmp_path, ranks, *words)

    assert ended.codes == [0] * ranks, ended.outputs
    expected = records(unbroken)[-1]["metrics"]
    found = records(tmp_path)[-1]["metrics"]
    # Counts of pixels are integers, so these metrics are equal bit for bit.
    names = [name for name in expected if name.startswith(("mean_iou", "dice", "pixel"))]
    assert len(names) == 11
    assert {name: found[name] for name in names} == {name: expected[name] for name in names}
