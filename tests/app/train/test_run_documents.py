"""The files for people: the same command, the same config, and where it ran."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from harness import REPORT, REPORT_FILES, SMALL, train
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from phasetrain.app.setup import resolve_config
from phasetrain.app.train.run_documents import _format_script, format_command, write_documents
from phasetrain.cli import main
from phasetrain.distributed import World
from phasetrain.runs.folder import RunFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    train(made, *REPORT, "PHASES.epochs=1")
    return made


OF_A_CHANGED_TREE = {"git.diff", "phasetrain.diff"}


def test_what_a_finished_run_leaves(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} - OF_A_CHANGED_TREE == REPORT_FILES | {
        "RUN.md", "checkpoints", "config.yaml", "environment.json", "log.txt", "metrics.jsonl", "overrides.yaml",
        "plan.json", "reproduce.sh", "status.json", "steps.ledger",
    }  # fmt: skip


def test_every_file_is_explained(folder: Path) -> None:
    text = (folder / "RUN.md").read_text()
    assert text.startswith("# Run digits\n\nCommand:\n\n    phasetrain PHASES.epochs=3 ")
    for path in folder.iterdir():
        assert path.name == "RUN.md" or f"| {path.name}" in text
    assert not any(f"| {name} " in text for name in ("profile/", "find/", "git.diff, "))
    # there is no monitor, and so no best checkpoint
    assert f"    phasetrain test {folder}\n" in text


def test_the_config_is_resolved(folder: Path) -> None:
    config = OmegaConf.load(folder / "config.yaml")
    assert (config.PHASES.epochs, config.DATA.TRAIN.micro_batch_size, config.MODEL.name) == (
        1,
        24,
        "small_cnn",
    )
    assert config == OmegaConf.create(
        resolve_config([*SMALL, f"RUN.dir={folder}", *REPORT, "PHASES.epochs=1"]).config.plain()
    )


def test_the_overrides_are_those_that_were_given(folder: Path) -> None:
    given = [*SMALL, f"RUN.dir={folder}", *REPORT, "PHASES.epochs=1"]
    assert OmegaConf.to_container(OmegaConf.load(folder / "overrides.yaml")) == given


def test_the_environment(folder: Path) -> None:
    found = json.loads((folder / "environment.json").read_text())
    assert found.keys() >= {
        "phasetrain",
        "python",
        "torch",
        "numpy",
        "machine",
        "device",
        "threads",
        "packages",
    }
    assert found["packages"]["torch"].startswith(found["torch"].partition("+")[0])
    assert (found["executable"], found["device"]) == (sys.executable, "cpu")
    assert found["command"][:2] == ["phasetrain", "PHASES.epochs=3"]
    assert (found["seeds"], found["switches"]["deterministic"], found["devices"]) == (
        {"RUN.seed": 0},
        True,
        [],
    )
    assert found["host"].keys() >= {"name", "system", "cpu", "cores", "memory_bytes"}
    assert found["installed"]["pytest"]
    tree = found["git"] or found.get("phasetrain_git")
    assert tree is None or (folder / tree["diff"] if tree["diff"] else folder).exists()


def test_no_secret_is_left_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hunter22@host/0123456789abcdef")
    setup = resolve_config([f"RUN.dir={tmp_path}", "RUN.name=0123456789abcdef"])
    departures = [{"updates": 1, "what": ["DATA.TRAIN.path: was 0123456789abcdef"]}]
    write_documents(setup, RunFolder(str(tmp_path)), departures)
    text = (tmp_path / "environment.json").read_text()
    assert '"WANDB_API_KEY": "(redacted)"' in text
    assert "hunter22" not in text
    assert "0123456789abcdef" not in text


def test_in_a_folder_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / os.fsdecode(b"b\xff")
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "run").mkdir()
    write_documents(resolve_config([f"RUN.dir='{here}'"]), RunFolder(str(tmp_path / "run")))
    for document in ("RUN.md", "reproduce.sh"):
        assert os.fsencode(tmp_path) + b"/b\xff" in (tmp_path / "run" / document).read_bytes()
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").RUN.dir == str(here)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["folder"] == str(here)


class TestDepartures:
    """What the newest command does not say of a run."""

    FOUND = (
        {"updates": 0, "what": ["hook 'a' (b.C) is given in Python"]},
        {"updates": 44, "what": ["PHASES.epochs: the checkpoint has 2,\n now 3", "x"]},
    )

    def test_they_are_told_wherever_repetition_is_promised(self, tmp_path: Path) -> None:
        write_documents(
            resolve_config([f"RUN.dir={tmp_path}"]), RunFolder(str(tmp_path)), self.FOUND
        )
        lines = (
            "from the start: hook 'a' (b.C) is given in Python",
            "44 on: PHASES.epochs: the checkpoint has 2, now 3; x",
        )
        page, script = (tmp_path / "RUN.md").read_text(), (tmp_path / "reproduce.sh").read_text()
        head = script.partition("\nfrom=")[0]
        for line in lines:
            assert line in page
            assert line in head
        assert all(line.startswith("#") for line in head.splitlines())
        assert json.loads((tmp_path / "environment.json").read_text())["departures"] == list(
            self.FOUND
        )

    def test_there_are_none(self, folder: Path) -> None:
        assert json.loads((folder / "environment.json").read_text())["departures"] == []
        assert (
            "The weights may be others"
            not in (folder / "RUN.md").read_text() + (folder / "reproduce.sh").read_text()
        )


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
        assert format_command(resolve_config(words)) == text

    def test_a_folder_that_was_not_given_is_added(self) -> None:
        setup = resolve_config(["PHASES.epochs=2"])
        assert format_command(setup) == f"phasetrain PHASES.epochs=2 RUN.dir={setup.config.RUN.dir}"

    def test_a_folder_that_must_be_quoted(self, tmp_path: Path) -> None:
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text(
            '# @package _global_\ndefaults: [digits, _self_]\nRUN: {dir: "it\'s a, b"}\n'
        )
        setup = resolve_config(["experiment=mine"], config_dir=str(tmp_path))
        assert setup.config.RUN.dir == "it's a, b"
        _flag, folder, *words = shlex.split(format_command(setup))[1:]
        assert resolve_config(words, config_dir=folder).config.RUN.dir == "it's a, b"

    def test_a_folder_of_configs(self, tmp_path: Path) -> None:
        assert (
            format_command(resolve_config(["RUN.dir=x"], config_dir=str(tmp_path)))
            == f"phasetrain --config-dir {tmp_path} RUN.dir=x"
        )


@pytest.mark.feature(
    "B12", "scripts that reproduce the weights", "`reproduce.sh`, `phasetrain rerun RUN_FOLDER`"
)
def test_reproducing_gives_the_same_weights(folder: Path, tmp_path: Path) -> None:
    # The script calls a Python that prints its arguments, and the command line of this process
    # runs them: importing torch again would take longer than the run.
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    python.chmod(0o755)
    printed = subprocess.run(
        [folder / "reproduce.sh", tmp_path / "again"],
        env=os.environ | {"PYTHON": str(python)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert printed[:2] == ["-m", "phasetrain"]
    assert main(printed[2:]) == 0
    digests = [
        json.loads((path / "status.json").read_text())["digest"]
        for path in (folder, tmp_path / "again")
    ]
    assert digests[0] == digests[1]


SPACED = "DATA.TRAIN.transforms=[{name: noise, std: 0.1}]"


@pytest.mark.addon("experiments")
class TestReproduceFromAClone:
    """The script, with a Python that only says where and with what it was called."""

    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        top = tmp_path / "tree"
        (top / "sub").mkdir(parents=True)
        (top / "code.py").write_text("A = 1\n")
        (top / "sub" / "more.py").write_text("B = 1\n")
        git(top, "init", "-q")
        git(top, "add", ".")
        git(top, "commit", "-q", "-m", "one")
        git(tmp_path, "clone", "-q", str(top), "clone")
        monkeypatch.chdir(top / "sub")
        (tmp_path / "python").write_text(
            '#!/bin/sh\nfor word in "$PWD" "$@"; do printf "%s\\n" "$word"; done\n'
        )
        (tmp_path / "python").chmod(0o755)
        return top

    def made(self, tmp_path: Path, *words: str) -> Path:
        setup = resolve_config([f"RUN.dir={tmp_path / 'run'}", *words])
        (tmp_path / "run").mkdir()
        write_documents(setup, RunFolder(setup.config.RUN.dir))
        return tmp_path / "run" / "reproduce.sh"

    def call(self, script: Path, where: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        environment = os.environ | {"PYTHON": str(script.parents[1] / "python")}
        return subprocess.run(
            ["sh", script, *words],
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def test_it_runs_in_the_clone_with_the_changes_of_the_run(
        self, tree: Path, tmp_path: Path
    ) -> None:
        (tree / "code.py").write_text("A = 2\n")
        (tree / "new.py").write_text("C = 1\n")
        script = self.made(tmp_path, "PHASES.epochs=2", SPACED)
        clone = tmp_path / "clone"
        for told in (
            f"applying {tmp_path}/run/git.diff to {clone}\n",
            "",
        ):  # the second time they are there
            done = self.call(script, clone)
            assert (done.returncode, done.stderr) == (0, told)
            assert done.stdout.splitlines() == [
                f"{clone}/sub", "-m", "phasetrain", "PHASES.epochs=2", SPACED, "MACHINE.threads=1",
                f"RUN.dir='{clone}/runs/digits-again'",
            ]  # fmt: skip
            assert [(clone / name).read_text() for name in ("code.py", "new.py")] == [
                "A = 2\n",
                "C = 1\n",
            ]

    def test_other_changes_are_left_and_told(self, tree: Path, tmp_path: Path) -> None:
        (tree / "code.py").write_text("A = 2\n")
        script = self.made(tmp_path)
        (tmp_path / "clone" / "code.py").write_text("A = 3\n")
        done = self.call(script, tmp_path / "clone")
        assert (done.returncode, "has other changes than the run" in done.stderr) == (
            0,
            True,
        )
        assert (tmp_path / "clone" / "code.py").read_text() == "A = 3\n"

    def test_elsewhere_it_runs_where_the_run_was_started(self, tree: Path, tmp_path: Path) -> None:
        script = self.made(tmp_path, "MACHINE.threads=2")
        done = self.call(script, tmp_path, "x")
        assert done.stderr.startswith("no clone at commit ")
        expected = [
            f"{tree}/sub",
            "-m",
            "phasetrain",
            "MACHINE.threads=2",
            f"RUN.dir='{tmp_path}/x'",
        ]
        assert done.stdout.splitlines() == expected

    def test_it_says_what_it_needs(self, tree: Path, tmp_path: Path) -> None:
        script, commit = self.made(tmp_path), git(tree, "rev-parse", "HEAD")
        tree.rename(tmp_path / "moved")
        done = self.call(script, tmp_path)
        told = f"call this in a clone of the source, after: git checkout {commit}\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", told)

    @pytest.mark.parametrize(
        "name", ["M\u00fcller, code (1)", "it's a=b", "back\\'\\slash\\", '$HOME `x` "q"']
    )
    def test_a_folder_may_have_any_name(self, tree: Path, tmp_path: Path, name: str) -> None:
        script = self.made(tmp_path)
        (tmp_path / "clone").rename(tmp_path / name)
        done = self.call(script, tmp_path / name, "new one")
        assert (done.returncode, done.stderr) == (0, "")
        given = OverridesParser.create().parse_override(done.stdout.splitlines()[-1])
        assert (given.key_or_group, given.value()) == ("RUN.dir", f"{tmp_path / name}/new one")

    def test_a_run_of_a_subfolder_takes_the_package_and_the_python_of_the_clone(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script, clone = self.made(tmp_path), tmp_path / "clone"
        own = clone / ".venv" / "bin" / "python"
        own.parent.mkdir(parents=True)
        own.write_text('#!/bin/sh\necho "$0"; echo "$PWD"; echo "$PYTHONPATH"\n')
        own.chmod(0o755)
        (clone / "phasetrain").mkdir()
        monkeypatch.setenv("PYTHONPATH", "/before")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHON"}
        call = partial(
            subprocess.run,
            ["sh", script],
            cwd=clone,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        assert call().stdout.splitlines() == [str(own), f"{clone}/sub", f"{clone}:/before"]
        (clone / "phasetrain").rmdir()  # the package comes from elsewhere
        assert call().stdout.splitlines() == [str(own), f"{clone}/sub", "/before"]

    def test_several_processes(self, tree: Path, tmp_path: Path) -> None:
        setup = replace(resolve_config(["RUN.dir=x"]), world=World(size=3))
        text = _format_script(setup, None)
        assert (
            "-m torch.distributed.run --standalone --nproc-per-node=3 -m phasetrain MACHINE.threads=1"
            in text
        )


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()
