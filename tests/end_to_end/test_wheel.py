"""The wheel holds all that the default experiment needs, and runs it in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("phasetrain", "configs", "pyproject.toml", "README.md", "LICENSE")
ONE_EPOCH = ("PHASES.epochs=1", "RUN.dir=run")


def command(*words: str, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a program to its end and return what it printed.

    Raises:
        AssertionError: it did not exit with 0.
    """
    done = subprocess.run(
        words,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def accuracy(folder: Path) -> float:
    """Return the test accuracy that a run has written last."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["metrics"]["accuracy"] for line in lines if '"split": "test"' in line][
        -1
    ]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel that was built from a copy of the sources, so that no `build` folder is left
    among them."""
    folder = tmp_path_factory.mktemp("wheel")
    (source := folder / "source").mkdir()
    for name in SHIPPED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    # The hook that pip calls, without the seconds that pip itself takes.
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command(sys.executable, "-c", build, str(folder), cwd=source)
    (built,) = folder.glob("phasetrain-*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    """Return a folder with the content of the wheel."""
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_wheel_holds_configs_data_and_license(unpacked: Path) -> None:
    for name in (
        "py.typed",
        "configs/experiment/digits.yaml",
        "configs/MODEL/small_cnn.yaml",
        "configs/recipes/digits.yaml",
        "data/datasets/digits-images.idx.gz",
        "data/datasets/digits-labels.idx.gz",
        "data/datasets/digits.LICENSE.txt",
    ):
        assert (unpacked / "phasetrain" / name).is_file(), name
    (metadata,) = unpacked.glob("*.dist-info")
    assert (
        (metadata / "licenses" / "LICENSE").read_text("utf-8").lstrip().startswith("Apache License")
    )
    assert "phasetrain = phasetrain.__main__:console" in (metadata / "entry_points.txt").read_text(
        "utf-8"
    )


def test_wheel_holds_every_module_and_config_and_no_test(unpacked: Path) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.py", "*.yaml")
        for path in (ROOT / "phasetrain").rglob(pattern)
    }
    expected |= {
        f"phasetrain/{path.relative_to(ROOT).as_posix()}"
        for path in (ROOT / "configs").rglob("*.yaml")
    }
    held = {
        path.relative_to(unpacked).as_posix()
        for path in unpacked.rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    assert held == expected | {"phasetrain/configs/__init__.py"}


# Importing torch takes seconds, so one interpreter runs all commands, each as `python -m phasetrain`.
COMMANDS = """
import contextlib, io, json, runpy, sys

results = []
for words in json.loads(sys.argv[1]):
    sys.argv, code, printed = ["phasetrain", *words], 0, io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_module("phasetrain", run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
    results.append((code, printed.getvalue()))
print(json.dumps(results))
"""


@pytest.mark.slow  # `.ci/run` runs it
def test_commands_print_json_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    commands = [
        ["runs", "list", "--json"],
        ["plan", "PHASES.epochs=1", "RUN.rehearse=false", "RUN.dir=plan", "--json"],
        ["plan", "--help"],
        ["OPTIMIZER.lrr=1", "--json"],
    ]
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    printed = command(sys.executable, "-c", COMMANDS, json.dumps(commands), cwd=tmp_path, env=env)
    runs, plan, usage, misspelt = json.loads(printed)
    assert [code for code, _ in (runs, plan, usage, misspelt)] == [0, 0, 0, 2]
    content = json.loads(runs[1])
    assert (content["schema"], content["runs"], content["errors"]) == (1, [], [])
    content = json.loads(plan[1])
    assert (content["state"], content["details"]["updates"]) == ("planned", 22)
    assert usage[1].startswith("usage: phasetrain plan")
    (error,) = json.loads(misspelt[1])["errors"]
    assert (error["key"], error["suggestion"]) == ("OPTIMIZER.lrr", "OPTIMIZER.lr")


@pytest.mark.slow
def test_the_default_experiment_runs_in_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    where = "import phasetrain, phasetrain.configs; print(phasetrain.__file__, *phasetrain.configs.__path__)"
    for path in command(sys.executable, "-c", where, cwd=tmp_path, env=env).split():
        assert Path(path).is_relative_to(unpacked)
    command(sys.executable, "-m", "phasetrain", *ONE_EPOCH, cwd=tmp_path, env=env)
    assert accuracy(tmp_path / "run") > 0.4


@pytest.mark.slow
def test_installed_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
    command(sys.executable, "-m", "venv", "environment", cwd=tmp_path)
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    env["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    scripts = tmp_path / "environment" / "bin"
    command(str(scripts / "pip"), "install", "--quiet", str(wheel), cwd=tmp_path, env=env)
    for start in ((str(scripts / "phasetrain"),), (str(scripts / "python"), "-m", "phasetrain")):
        (folder := tmp_path / str(len(start))).mkdir()
        printed = command(*start, "RUN.dir=run", cwd=folder, env=env)
        assert "test/accuracy" in printed
        assert accuracy(folder / "run") >= 0.97
