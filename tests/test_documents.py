"""The files for people: the same command, the same config, and where it ran."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SMALL, train
from omegaconf import OmegaConf

from phasetrain.documents import command
from phasetrain.setup import settle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    train(made, "PHASES.epochs=1")
    return made


def test_what_a_finished_run_leaves(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "RUN.md", "checkpoints", "config.yaml", "environment.json", "log.txt", "metrics.jsonl", "overrides.yaml",
        "plan.json", "reproduce.sh", "status.json", "steps.ledger",
    ]  # fmt: skip


def test_every_file_is_explained(folder: Path) -> None:
    text = (folder / "RUN.md").read_text()
    assert text.startswith("# Run digits\n\nCommand:\n\n    phasetrain PHASES.epochs=3 ")
    for path in folder.iterdir():
        assert path.name == "RUN.md" or f"| {path.name}" in text


def test_the_config_is_resolved(folder: Path) -> None:
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.PHASES.epochs, config.DATA.TRAIN.micro_batch_size, config.MODEL.name) == (1, 24, "small_cnn")
    assert config == OmegaConf.create(settle([*SMALL, f"RUN.dir={folder}", "PHASES.epochs=1"]).config.plain())


def test_the_overrides_are_those_that_were_given(folder: Path) -> None:
    given = [*SMALL, f"RUN.dir={folder}", "PHASES.epochs=1"]
    assert OmegaConf.to_container(OmegaConf.load(folder / "overrides.yaml")) == given


def test_the_environment(folder: Path) -> None:
    found = json.loads((folder / "environment.json").read_text())
    assert found.keys() >= {"phasetrain", "python", "torch", "numpy", "machine", "device", "threads", "packages"}
    assert found["packages"]["torch"].startswith(found["torch"].partition("+")[0])
    assert (found["executable"], found["device"]) == (sys.executable, "cpu")


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "text"),
        [
            (["RUN.dir=x"], "phasetrain RUN.dir=x"),
            (["+RUN.dir=x"], "phasetrain +RUN.dir=x"),
            (["RUN.dir=a b", "PHASES.epochs=3"], "phasetrain 'RUN.dir=a b' PHASES.epochs=3"),
        ],
    )
    def test_of_a_folder_that_was_given(self, words: list[str], text: str) -> None:
        assert command(settle(words)) == text

    def test_a_folder_that_was_not_given_is_added(self) -> None:
        setup = settle(["PHASES.epochs=2"])
        assert command(setup) == f"phasetrain PHASES.epochs=2 RUN.dir={setup.config.RUN.dir}"

    def test_a_folder_of_configs(self, tmp_path: Path) -> None:
        assert (
            command(settle(["RUN.dir=x"], config_dir=str(tmp_path))) == f"phasetrain --config-dir {tmp_path} RUN.dir=x"
        )


def test_reproducing_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    tool = tmp_path / "phasetrain"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m phasetrain "$@"\n')
    tool.chmod(0o755)
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": root}
    subprocess.run([folder / "reproduce.sh", tmp_path / "again"], env=environment, check=True, capture_output=True)
    digests = [json.loads((path / "status.json").read_text())["digest"] for path in (folder, tmp_path / "again")]
    assert digests[0] == digests[1]
