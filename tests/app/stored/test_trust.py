"""A folder from elsewhere runs no code: every command lists what it would run, and runs it only if
it is trusted."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from damaged import resign
from harness import SMALL, newest, status
from raising import raises

from phasetrain import load
from phasetrain.app.api import run
from phasetrain.app.setup import resolve_config
from phasetrain.app.stored.stored_config import read_newest_command
from phasetrain.app.stored.trust import is_signed, list_code, sign_code
from phasetrain.cli import main
from phasetrain.config.trust import trust_only
from phasetrain.errors import ConfigError
from phasetrain.models import MODELS

CANARY = Path("PWNED")
EVIL = f"open({str(CANARY)!r}, 'w').close()\n"
PARTS = """
from torch import nn
from phasetrain.models import MODELS

@MODELS.register("{name}")
class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    run([*SMALL, "PHASES.epochs=1", "CHECKPOINT.every_updates=3", f"RUN.dir={folder}"])
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of a run in the current folder."""
    shutil.copytree(finished, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return Path("run")


def plant(folder: Path, change: Callable[[dict[str, Any]], object], *words: str) -> None:
    """Change the config in every record of a run, with fitting digests, as an attacker would."""
    for path in folder.glob("checkpoints/*/promised.json"):
        promised = json.loads(path.read_text())
        change(promised["config"])
        path.write_text(json.dumps(promised))
        resign(path.parent)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    change(config)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    overrides = yaml.safe_load((folder / "overrides.yaml").read_text())
    (folder / "overrides.yaml").write_text(yaml.safe_dump([*overrides, *words]))


def plant_command(folder: Path) -> None:
    """Let the model be a shell command."""
    command = f"touch {CANARY}"

    def change(config: dict[str, Any]) -> None:
        config["MODEL"] = {"name": "subprocess.getoutput", "cmd": command}

    plant(folder, change, "MODEL.name=subprocess.getoutput", f"MODEL.cmd='{command}'")


def plant_import(folder: Path) -> None:
    """Let the run import a module of the current folder."""
    Path("evil_of_a_folder.py").write_text(EVIL)

    def change(config: dict[str, Any]) -> None:
        config["RUN"]["imports"] = ["evil_of_a_folder"]

    plant(folder, change, "RUN.imports=[evil_of_a_folder]")


COMMANDS = {
    "resume": lambda folder: main(["resume", folder]),
    "resume with changes": lambda folder: main(["resume", folder, "PHASES.epochs=2"]),
    "plan": lambda folder: main(["plan", folder]),
    "test": lambda folder: main(["test", folder]),
    "test of a checkpoint": lambda folder: main(["test", newest(Path(folder)).path]),
    "extract": lambda folder: main(["extract", folder]),
    "replay": lambda folder: main(["replay", folder, "RUN.step=2"]),
    "predict": lambda folder: main(["predict", folder, folder]),
    "rerun": lambda folder: main(["rerun", folder]),
    "--from": lambda folder: main(["--from", folder]),
    "export": lambda folder: main(["export", folder, "out.pt2", "--format", "torch_export"]),
}
"""Commands that build parts from the config of a folder."""

ADDON_OF_COMMAND = {
    **dict.fromkeys(("extract", "predict", "export"), "deploy"),
    **dict.fromkeys(("replay", "rerun", "--from"), "experiments"),
}


class TestAttack:
    @pytest.mark.feature(
        "trust",
        "a folder from elsewhere runs no custom code without `--trust`",
        "`--trust`, `trust=True`",
    )
    @pytest.mark.parametrize("attack", [plant_command, plant_import])
    @pytest.mark.parametrize(
        "command",
        [
            pytest.param(
                name,
                marks=pytest.mark.addon(ADDON_OF_COMMAND[name]) if name in ADDON_OF_COMMAND else (),
            )
            for name in COMMANDS
        ],
    )
    def test_command_names_the_code_and_runs_nothing(
        self,
        folder: Path,
        attack: Callable[[Path], None],
        command: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        attack(folder)
        assert COMMANDS[command](str(folder)) == 2
        name = "subprocess.getoutput" if attack is plant_command else "evil_of_a_folder"
        assert name in capsys.readouterr().err
        assert not CANARY.exists()
        assert not Path("run-again").exists()

    @pytest.mark.parametrize("attack", [plant_command, plant_import])
    def test_python_api_names_the_code_and_runs_nothing(
        self, folder: Path, attack: Callable[[Path], None]
    ) -> None:
        attack(folder)
        key = "MODEL.name" if attack is plant_command else "RUN.imports"
        for path in (str(folder), newest(folder).path):
            with raises(ConfigError, code="trust.needed", key=key):
                load(path)
        assert not CANARY.exists()

    @pytest.mark.addon("deploy")
    @pytest.mark.parametrize("attack", [plant_command, plant_import])
    def test_export_names_the_code_and_runs_nothing(
        self, folder: Path, attack: Callable[[Path], None]
    ) -> None:
        from phasetrain.addons.deploy.export import export

        attack(folder)
        key = "MODEL.name" if attack is plant_command else "RUN.imports"
        with raises(ConfigError, code="trust.needed", key=key):
            export(str(folder), "out.onnx", "onnx")
        assert not CANARY.exists()

    @pytest.mark.addon("deploy", "report")
    @pytest.mark.parametrize("attack", [plant_command, plant_import])
    def test_data_is_copied_without_code(
        self, folder: Path, attack: Callable[[Path], None]
    ) -> None:
        attack(folder)
        assert main(["consolidate", newest(folder).path, "one.safetensors"]) == 0
        assert main(["export", str(folder), "two.safetensors"]) == 0
        assert main(["report", str(folder)]) == 0
        assert main(["runs", "compare", str(folder), str(folder)]) == 0
        assert not CANARY.exists()

    def test_code_of_another_place_than_a_part_is_not_run(self, folder: Path) -> None:
        def change(config: dict[str, Any]) -> None:
            transform = {"name": "os.system", "command": f"touch {CANARY}"}
            config["DATA"]["TEST"]["transforms"] = [transform]

        plant(folder, change)
        with raises(ConfigError, code="trust.needed", key="DATA.TEST.transforms[0].name"):
            load(folder)
        assert main(["test", str(folder)]) == 2
        assert not CANARY.exists()

    def test_files_of_its_config_folder_are_no_word_of_the_user(self, folder: Path) -> None:
        Path("theirs", "LOSS").mkdir(parents=True)
        Path("theirs", "LOSS", "handy.yaml").write_text("name: os.system\ncommand: touch PWNED\n")
        environment = json.loads((folder / "environment.json").read_text())
        changed = json.dumps({**environment, "config_dir": str(Path("theirs").absolute())})
        (folder / "environment.json").write_text(changed)
        stored = read_newest_command(str(folder))
        with raises(ConfigError, code="trust.needed", key="LOSS.name"):
            resolve_config(["LOSS=handy"], stored=stored)
        with raises(ConfigError, code="config.unknown_parameter"):  # named by the user: looked up
            resolve_config(["LOSS=handy", "LOSS.x=1"], stored=stored, config_dir="theirs")

    def test_job_is_not_submitted(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        plant(folder, lambda config: config["LAUNCH"].update(cluster="local"))
        assert main(["resume", str(folder), "--json"]) == 2
        (error,) = json.loads(capsys.readouterr().out)["errors"]
        assert (error["code"], error["key"]) == ("trust.needed", "LAUNCH.cluster")

    @pytest.mark.feature("trust")
    def test_trusted_folder_runs_its_code_and_names_its_files(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plant_import(folder)
        file = Path("evil_of_a_folder.py").resolve()
        assert main(["test", str(folder)]) == 2
        assert not CANARY.exists()
        assert main(["test", str(folder), "--trust"]) == 0
        printed = capsys.readouterr()
        for output in (printed.out, printed.err):  # the list of --trust, and that of the refusal
            assert f"RUN.imports: evil_of_a_folder ({file})" in output
        assert CANARY.exists()
        del sys.modules["evil_of_a_folder"]
        CANARY.unlink()
        load(folder, trust=True)
        assert CANARY.exists()


class TestOwnRuns:
    @pytest.fixture(autouse=True)
    def _registry(self) -> Iterator[None]:
        # All are imported first: what registers in the meantime would be forgotten with the rest.
        before = dict(MODELS.items())
        yield
        MODELS._own.clear()
        MODELS._own.update(before)
        sys.modules.pop("parts_of_mine", None)

    @pytest.fixture
    def own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Return a run with custom code that a command of this user made, forgotten by Python."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        Path("parts_of_mine.py").write_text(PARTS.format(name="net_of_mine"))
        words = ["RUN.imports=[parts_of_mine]", "MODEL.name=net_of_mine", "PHASES.updates=2"]
        assert main([*words, "HOOKS.report=null", "RUN.dir=own"]) == 0
        self.forget()
        return Path("own")

    @staticmethod
    def forget() -> None:
        del sys.modules["parts_of_mine"]
        del MODELS._own["net_of_mine"]

    @pytest.mark.feature("trust")
    def test_need_no_flag(self, own: Path) -> None:
        assert (Path("state", "phasetrain", "key").stat().st_mode & 0o777) == 0o600
        assert type(load(own).model).__name__ == "Net"
        self.forget()
        assert main(["test", str(own)]) == 0

    def test_need_trust_for_another_user(
        self, own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
        with raises(ConfigError, code="trust.needed", key="RUN.imports", given="'parts_of_mine'"):
            load(own)
        # Naming the module in the command is trust in it.
        assert main(["test", str(own), "RUN.imports=[parts_of_mine]"]) == 0

    def test_need_trust_where_the_module_is_another_file(
        self, own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "parts_of_mine.py").write_text(EVIL)
        monkeypatch.syspath_prepend(str(tmp_path / "other"))
        with raises(ConfigError, code="trust.needed"):
            load(own)
        assert not CANARY.exists()

    def test_signature_covers_names_and_files(self, own: Path) -> None:
        stored = read_newest_command(str(own))
        assert is_signed(stored, ["parts_of_mine"])
        assert not is_signed(stored, ["parts_of_mine", "subprocess.getoutput"])
        environment = json.loads((own / "environment.json").read_text())
        environment["code"]["files"]["subprocess.getoutput"] = ""
        (own / "environment.json").write_text(json.dumps(environment))
        assert not is_signed(read_newest_command(str(own)), ["parts_of_mine"])

    def test_home_that_cannot_be_written_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
        assert sign_code(["parts_of_mine"]) is None
        assert sign_code([]) is None


class TestLibraries:
    @pytest.mark.parametrize(
        ("section", "value", "fits"),
        [
            ("MODEL", {"name": "torch.nn.Identity"}, True),
            ("MODEL", {"name": "torch.hub.load", "repo_or_dir": "x", "model": "y"}, False),
            ("MODEL", {"name": "torch.compile", "model": None}, False),
            ("MODEL", {"name": "torch.optim.SGD", "params": {}, "lr": 1}, False),
            ("LOSS", {"name": "torch.nn.CrossEntropyLoss"}, True),
        ],
    )
    def test_only_classes_of_the_expected_kind_need_no_trust(
        self, folder: Path, section: str, value: dict[str, Any], fits: bool
    ) -> None:
        stored = read_newest_command(str(folder))
        config = {**stored.values, section: value}
        assert list_code(config) == []
        changed = type(stored)("x", config, "x")
        if fits:
            assert resolve_config([], stored=changed).config[section].plain()["name"]
        else:
            with raises(ConfigError, code="trust.needed", key=f"{section}.name"):
                resolve_config([], stored=changed)
        assert not CANARY.exists()

    def test_part_named_inside_of_a_part_is_restricted(self) -> None:
        with trust_only(frozenset()), raises(ConfigError, code="trust.needed"):
            MODELS.build("subprocess.getoutput", {"cmd": f"touch {CANARY}"})
        assert not CANARY.exists()

    def test_command_line_is_trusted(self, folder: Path) -> None:
        setup = resolve_config(
            ["MODEL.name=collections.OrderedDict"], stored=read_newest_command(str(folder))
        )
        assert setup.config.MODEL.name == "collections.OrderedDict"
        assert status(folder)["state"] == "finished"
