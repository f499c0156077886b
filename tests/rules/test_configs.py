"""Every config under configs/ composes and builds: each experiment, and each option of a group over
the default one."""

import io
import json
import struct
from pathlib import Path

import pytest
import torch
from own_files import written
from PIL import Image
from raising import raises

from phasetrain.app.api import run
from phasetrain.config.addons import explain_missing
from phasetrain.config.compose.folders import RECIPES
from phasetrain.config.compose.sources import ConfigFiles
from phasetrain.errors import ConfigError
from phasetrain.models import SmallCNN
from phasetrain.runtime.terminal import Terminal

ROOT = Path(__file__).parents[2]
FILES = ConfigFiles()
SMALL_BATCH = ("DATA.TRAIN.batch_size=2", "DATA.TRAIN.workers=0", "DATA.TEST.workers=0")
WITHOUT_PATHS = {
    "cifar10": SMALL_BATCH,
    "digits_transfer": (*SMALL_BATCH, "MODEL.weights=null"),
    "imagenet": (*SMALL_BATCH, "MODEL.depth=18"),
}
"""Experiments that leave the paths of folders of images open, and what fits to two images."""

OPTIONS = [(group, option) for group in sorted(FILES.groups()) for option in FILES.options(group)]


def plan(overrides: list[str], folder: Path) -> str:
    """Plan a run, which builds every part of it, and return what was printed."""
    printed = io.StringIO()
    words = [*overrides, "RUN.engine=plan", f"RUN.dir={folder}"]
    run(words, terminal=Terminal(printed))
    return printed.getvalue()


def fashion_files(folder: Path, option: str) -> list[str]:
    """Write 600 pictures as a stand-in for Fashion-MNIST, and return the words that name them."""
    folder.mkdir(parents=True)
    pixels = bytes(600 * 28 * 28)
    (folder / "images").write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 600, 28, 28) + pixels)
    labels = bytes(number % 10 for number in range(600))
    (folder / "labels").write_bytes(bytes([0, 0, 8, 1]) + struct.pack(">I", 600) + labels)
    words = [
        f"DATA.{split}.{kind}={folder / kind}"
        for split in ("TRAIN", "TEST")
        for kind in ("images", "labels")
    ]
    if option == "fashion_probe":
        return [*words, "MODEL.weights=null"]
    if option == "fashion_swav":
        return [*words, "LOSS.frozen_updates=2"]
    if option == "gan":
        torch.save(SmallCNN(10, width=16).state_dict(), folder / "judge.pt")
        return [*words, f"TASK.judge.weights.path={folder / 'judge.pt'}"]
    return words


def files_for(option: str, folder: Path) -> list[str]:
    """Return what the command line has to give to an option that leaves the paths of files open."""
    if option == "g2p":
        words = written(folder, ["DATA.TRAIN.file=FILES/cmudict/words.dict"])
        return [*words, words[0].replace("TRAIN", "TEST"), "DATA.TRAIN.batch_size=16"]
    if option == "timeseries":
        words = written(folder, ["DATA.TRAIN.folder=FILES/ucr/", "DATA.TEST.folder=FILES/ucr/"])
        return [*words, "DATA.TRAIN.series=Waves"]
    if option == "lm":
        words = written(folder, ["DATA.TRAIN.path=FILES/tokens/written"])
        return [*words, words[0].replace("TRAIN", "TEST"), "DATA.TRAIN.batch_size=4"]
    if option in ("transfer", "transfer_lora"):
        return ["MODEL.weights=null"]
    if option.startswith(("fashion", "gan")):
        return fashion_files(folder, option)
    if option == "segment":
        return written(
            folder,
            [
                f"DATA.{split}.{name}=FILES/stamps/{name}"
                for split in ("TRAIN", "TEST")
                for name in ("stamps", "backgrounds")
            ],
        )
    if option not in WITHOUT_PATHS:
        return []
    for name in ("even", "odd"):
        (folder / name).mkdir(parents=True)
        Image.new("L", (32, 32)).save(folder / name / "0.png")
    paths = [f"{key}={folder}" for key in ("DATA.TRAIN.path", "DATA.TEST.path")]
    return [*paths, *WITHOUT_PATHS[option]]


def test_every_file_is_an_option() -> None:
    files = {
        path.relative_to(ROOT / "configs").with_suffix("")
        for path in (ROOT / "configs").rglob("*.yaml")
        if path.parent.name != RECIPES
    }
    assert {Path(group, option) for group, option in OPTIONS} == files


@pytest.mark.feature("segmentation.recipe")
@pytest.mark.feature(
    "language_model.recipe",
    "a language model on real text, with a trained BPE",
    "`experiment=lm`, [recipe](recipes/lm.md)",
)
@pytest.mark.feature(
    "1",
    "config composed from groups, experiments, files and a custom folder",
    "`phasetrain FILE.yaml`, `experiment=NAME`, `SECTION=GROUP`, `--config-dir DIR`",
)
@pytest.mark.parametrize(
    "rehearse", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["built", "rehearsed"]
)
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_option_composes_and_builds(
    group: str, option: str, rehearse: bool, tmp_path: Path
) -> None:
    words = [f"{group}={option}", *files_for(option, tmp_path / "files")]
    try:
        printed = plan([*words, f"RUN.rehearse={rehearse}"], tmp_path)
    except ConfigError as error:
        # Parts of an add-on that was deleted.
        if explain_missing() and explain_missing() in str(error):
            return
        raise
    written = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert written["phases"]
    assert "parameters" in printed


def test_option_that_does_not_build_is_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, code="config.wrong_type", key="MODEL.width"):
        plan(["MODEL=small_cnn", "MODEL.width=big"], tmp_path)
