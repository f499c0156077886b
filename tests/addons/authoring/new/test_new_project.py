"""`phasetrain new` writes a project that trains and passes its own test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf
from raising import raises

import phasetrain
from phasetrain.addons.authoring.new.new_project import create_project
from phasetrain.cli import main
from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES
from phasetrain.meters import METERS

FILES = [
    "my-first.yaml",
    "my_first_parts.py",
    "test_my_first_parts.py",
    ".gitignore",
    "phasetrain.json",
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new project, whose parts are forgotten after the test."""
    # All are imported first: what registers in the meantime would be forgotten with the rest.
    monkeypatch.setattr(LOSSES, "_own", dict(LOSSES.items()))
    monkeypatch.setattr(METERS, "_own", dict(METERS.items()))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_first_parts", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my-first"
    assert main(["new", "my-first"]) == 0
    return folder


@pytest.mark.feature("new", "new projects: experiment, parts, test, schema", "`phasetrain new`")
def test_project_trains_and_its_experiment_is_valid(project: Path) -> None:
    assert {path.name for path in project.iterdir()} - {"__pycache__"} == set(FILES)
    text = (project / "my-first.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=phasetrain.json\n")
    validator = Draft7Validator(json.loads((project / "phasetrain.json").read_text()))
    experiment = OmegaConf.to_container(OmegaConf.create(text))
    assert list(validator.iter_errors(experiment)) == []
    experiment["LOSS"]["gama"] = 1
    assert len(list(validator.iter_errors(experiment))) == 1
    words = ["PHASES.limit.train=2", "PHASES.epochs=1", f"RUN.dir={project / 'run'}"]
    result = phasetrain.run([str(project / "my-first.yaml"), *words])
    assert result.updates == 2
    assert 0.1 < result.last["test/confidence"] < 1


def test_existing_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "x.yaml").write_text("mine")
    with raises(ConfigError, code="file.exists") as caught:
        create_project(str(tmp_path / "x"))
    assert "x.yaml" in str(caught.value)
    assert [one.name for one in (tmp_path / "x").iterdir()] == ["x.yaml"]
    assert (tmp_path / "x" / "x.yaml").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with raises(ConfigError, code="file.not_writable"):
        create_project(str(tmp_path / "file"))


@pytest.mark.parametrize("name", ["mypart.py", "mine.yaml", "mine.yml"])
def test_path_of_a_file_is_rejected(tmp_path: Path, name: str) -> None:
    with raises(ConfigError, code="file.not_a_folder") as caught:
        create_project(str(tmp_path / name))
    assert name in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.feature("new")
@pytest.mark.slow
def test_tests_of_the_project_pass(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(project)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
