"""A run folder is enough: it is resumed, tested, extracted, replayed and exported with the config
that it has recorded."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    status,
    train,
)
from raising import raises

from phasetrain import load
from phasetrain.app.setup import resolve_config
from phasetrain.app.stored.stored_config import (
    StoredConfig,
    list_derived,
    read_checkpoint_config,
    read_newest_command,
    use_folder,
)
from phasetrain.app.stored.trust import select_code_folders
from phasetrain.cli import main
from phasetrain.errors import ConfigError

MONITOR = "CHECKPOINT.best.monitor=test/accuracy"
MODULE = """
from torch import nn
from phasetrain.models import MODELS

@MODELS.register("{name}")
class Net(nn.Sequential):
    def __init__(self, width: int = 3) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
"""


def run_json(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    """Run a command line with `--json`, and return its object."""
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed") / "run"
    run_until_killed(folder, MONITOR, hooks={"save": SaveEachStep(), "kill": KillAfter(9)})
    return folder


@pytest.fixture(scope="module")
def finished(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the killed run after `phasetrain resume`."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(killed, folder)
    assert main(["resume", str(folder)]) == 0
    return folder


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "run")
    return tmp_path / "run"


class TestResume:
    @pytest.mark.feature(
        "resume.folder",
        "a run folder is enough: resume, plan, test, extract, replay, rerun, export",
        "`phasetrain resume RUN_FOLDER`",
    )
    def test_killed_run_ends_with_the_bits_of_an_unbroken_one(
        self, finished: Path, tmp_path: Path
    ) -> None:
        train(tmp_path, MONITOR)
        assert status(finished)["attempt"] == 2
        assert differences_of_runs(finished, tmp_path) == []

    def test_it_leaves_the_records_of_the_command(self, finished: Path) -> None:
        words = yaml.safe_load((finished / "overrides.yaml").read_text())
        assert words == [*SMALL, MONITOR, f"RUN.dir={finished}"]
        # A derived value is null again, so that the first command resumes the run as well.
        assert newest(finished).promised["config"]["OPTIMIZER"]["accumulate"] is None
        assert run_json_of_first_command(finished) == "finished"

    def test_change_needs_consent_and_is_repeated_without_words(
        self, copy: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = run_json(capsys, "resume", str(copy), "PHASES.epochs=2", code=3)
        assert [one["key"] for one in found["errors"]] == ["PHASES.epochs"]
        words = ("PHASES.epochs=2", "RUN.allow=[PHASES.epochs]")
        found = run_json(capsys, "resume", str(copy), *words)
        assert (found["state"], found["updates"]) == ("finished", 10)
        assert read_newest_command(str(copy)).allowed == ("PHASES.epochs",)
        assert run_json(capsys, "resume", str(copy))["updates"] == 10

    def test_consents_are_not_taken_over_by_another_change(self, copy: Path) -> None:
        config = yaml.safe_load((copy / "config.yaml").read_text())
        config["RUN"]["allow"] = ["OPTIMIZER.lr"]
        (copy / "config.yaml").write_text(yaml.safe_dump(config))
        assert "RUN.allow=['OPTIMIZER.lr']" in use_folder(str(copy), "train", trust=False)[1]
        words = use_folder(str(copy), "train", ["OPTIMIZER.lr=9"], trust=False)[1]
        assert [word for word in words if word.startswith("RUN.allow")] == []

    def test_run_without_a_checkpoint_starts_from_its_beginning(
        self, copy: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shutil.rmtree(copy / "checkpoints")
        found = run_json(capsys, "resume", str(copy), "PHASES.epochs=1")
        assert (found["state"], found["updates"]) == ("finished", 5)

    def test_configs_and_modules_are_found_from_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "there" / "mine" / "experiment").mkdir(parents=True)
        (tmp_path / "there" / "mine" / "experiment" / "short.yaml").write_text(
            "defaults: [digits, _self_]\nMODEL: {name: net_of_elsewhere}\n"
            "RUN: {imports: [module_of_elsewhere]}\nPHASES: {updates: 2}\nHOOKS: {report: null}\n"
        )
        module = MODULE.format(name="net_of_elsewhere")
        (tmp_path / "there" / "module_of_elsewhere.py").write_text(module)
        monkeypatch.chdir(tmp_path / "there")
        assert main(["--config-dir", "mine", "experiment=short", "RUN.dir=run"]) == 0
        shutil.rmtree("mine")
        monkeypatch.chdir(tmp_path)
        assert main(["resume", "there/run", "PHASES.updates=3", "RUN.allow=[PHASES.updates]"]) == 0
        assert status(tmp_path / "there" / "run")["updates"] == 3
        assert load("there/run").predict(torch.zeros(2, 1, 8, 8)).shape == (2, 10)

    @pytest.mark.feature(
        "4",
        "registries for every kind of part; duplicate names are rejected",
        "`phasetrain.losses.LOSSES`, `RUN.imports`, entry points",
    )
    def test_modules_next_to_a_yaml_file_are_found_from_anywhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("there", "elsewhere"):
            (tmp_path / name).mkdir()
        (tmp_path / "there" / "own.yaml").write_text(
            "defaults: [digits, _self_]\nMODEL: {name: net_beside_yaml.Net}\n"
            "PHASES: {updates: 2}\nHOOKS: {report: null}\n"
        )
        (tmp_path / "there" / "net_beside_yaml.py").write_text(
            "from torch import nn\n"
            "class Net(nn.Sequential):\n"
            "    def __init__(self):\n"
            "        super().__init__(nn.Flatten(), nn.Linear(64, 10))\n"
        )

        def forget_module() -> None:
            sys.modules.pop("net_beside_yaml", None)
            monkeypatch.setattr(sys, "path", [one for one in sys.path if str(tmp_path) not in one])

        monkeypatch.chdir(tmp_path)
        assert main(["there/own.yaml", "RUN.dir=run"]) == 0
        forget_module()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert main(["resume", "../run", "PHASES.updates=3", "RUN.allow=PHASES"]) == 0
        assert status(tmp_path / "run")["updates"] == 3
        forget_module()
        assert load("../run").predict(torch.zeros(2, 1, 8, 8)).shape == (2, 10)

    def test_folders_without_a_named_module_are_not_searched(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
        (tmp_path / "a" / "named.py").touch()
        (tmp_path / "b" / "wandb.py").touch()
        folders = [str(tmp_path / "a"), str(tmp_path / "b")]
        config = {"RUN": {"imports": []}, "MODEL": {"name": "named.Net"}}
        assert select_code_folders(config, folders) == folders[:1]

    @pytest.mark.feature("resume.folder")
    @pytest.mark.slow
    @pytest.mark.parametrize("step", range(1, 21), ids=str)
    def test_killed_at_every_step_and_resumed_from_the_folder(
        self, finished: Path, tmp_path: Path, step: int
    ) -> None:
        hooks = {"save": SaveEachStep(), "kill": KillAfter(step)}
        run_until_killed(tmp_path / "run", MONITOR, hooks=hooks)
        assert main(["resume", str(tmp_path / "run")]) == 0
        assert differences_of_runs(finished, tmp_path / "run") == []


def run_json_of_first_command(folder: Path) -> str:
    return train(folder, MONITOR).state


class TestOtherCommands:
    def test_best_checkpoint_is_tested(
        self, finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = run_json(capsys, "test", str(finished), "--checkpoint", "best")
        assert (found["state"], found["folder"]) == ("tested", str(finished))
        tests = [one["metrics"] for one in records(finished) if one.get("split") == "test"]
        best = max(metrics["accuracy"] for metrics in tests)
        assert found["last"]["test/accuracy"] == best

    def test_one_checkpoint_is_tested_by_its_path(
        self, finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = newest(finished).path
        found = run_json(capsys, "test", path, "DATA.TEST.batch_size=8", "PHASES.limit.test=null")
        assert found["reason"] == path
        assert found["folder"] == str(finished)

    @pytest.mark.addon("deploy")
    def test_features_are_extracted(
        self, finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = run_json(capsys, "extract", str(finished), "EXTRACT.splits=[test]")
        assert found["state"] == "extracted"
        assert Path(found["folder"], "test").is_dir()

    @pytest.mark.addon("experiments")
    def test_update_is_replayed(self, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = run_json(capsys, "replay", str(finished), "RUN.step=7")
        assert (found["state"], found["updates"]) == ("replayed", 7)

    @pytest.mark.addon("deploy")
    def test_model_is_exported_with_its_computation(self, finished: Path, tmp_path: Path) -> None:
        from phasetrain.addons.deploy.export import export

        export(str(finished), str(tmp_path / "m.pt2"), "torch_export")
        exported = torch.export.load(str(tmp_path / "m.pt2")).module()
        images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        expected = load(finished).predict(images)
        torch.testing.assert_close(exported(images), expected)

    def test_config_is_printed(self, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
        found = run_json(capsys, "resume", str(finished), "--cfg", "OPTIMIZER.lr=0.5")
        assert (found["config"]["MODEL"]["width"], found["config"]["OPTIMIZER"]["lr"]) == (4, 0.5)

    @pytest.mark.addon("deploy")
    def test_config_of_predict_is_printed(
        self, finished: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = run_json(capsys, "predict", str(finished), "x.png", "--cfg", "MACHINE.threads=1")
        assert (found["config"]["MODEL"]["width"], found["config"]["MACHINE"]["threads"]) == (4, 1)


class TestStoredConfig:
    def test_folder_and_checkpoint_have_the_same_config(self, finished: Path) -> None:
        one = read_newest_command(str(finished))
        other = read_checkpoint_config(str(finished))
        ignored = {"name": None}
        assert dict(one.values) | {"RUN": one.values["RUN"] | ignored} == dict(other.values) | {
            "RUN": other.values["RUN"] | ignored
        }
        assert read_checkpoint_config(newest(finished).path).folder == str(finished)

    def test_default_parts_that_the_run_had_removed_stay_away(self, finished: Path) -> None:
        setup = resolve_config([], stored=read_newest_command(str(finished)))
        assert "console" not in setup.config.HOOKS
        assert setup.config.MODEL.plain() == resolve_config(SMALL).config.MODEL.plain()

    def test_derived_values_are_listed(self) -> None:
        given = {"RUN": {"name": None}, "OPTIMIZER": {"accumulate": None, "lr": None, "decay": 1}}
        found = {"RUN": {"name": "x"}, "OPTIMIZER": {"accumulate": 1, "lr": None, "decay": 1}}
        assert list_derived(given, found) == ["OPTIMIZER.accumulate"]

    def test_changes_replace_the_words_that_they_set_again(self) -> None:
        stored = StoredConfig("a", {}, "a", ("LOSS.name=focal", "PHASES.epochs=2", "LOSS.gamma=3"))
        changes = ["RUN.dir=a", "RUN.engine=train", "LOSS=soft", "PHASES.epochs=4"]
        assert stored.record_overrides(changes) == ("LOSS=soft", "PHASES.epochs=4", "RUN.dir=a")

    def test_value_that_followed_a_changed_key_is_recorded(self, tmp_path: Path) -> None:
        file = tmp_path / "linked.yaml"
        file.write_text('defaults: [digits]\nMODEL: {width: "${PHASES.updates}"}\n')
        words = [str(file), "PHASES.updates=4", f"RUN.dir={tmp_path / 'run'}"]
        assert main([*words, "RUN.pause_at=1", "METERS=null", "DATA.TEST=null"]) == 0
        longer = ["PHASES.updates=6", "RUN.allow=PHASES"]
        assert main(["resume", str(tmp_path / "run"), *longer, "RUN.pause_at=2"]) == 0
        recorded = read_newest_command(str(tmp_path / "run")).overrides
        assert [word for word in recorded if word.startswith("MODEL")] == ["MODEL.width=4"]
        assert main([word for word in recorded if word != "RUN.pause_at=2"]) == 0
        # Without the recorded word, the model follows the length of the training.
        assert main([*words, "METERS=null", "DATA.TEST=null", *longer]) == 3

    @pytest.mark.parametrize(
        ("text", "added"),
        [
            ("OPTIMIZER: {auto_lr_scaling: {base_batch_size: 32}}", []),
            ("MACHINE: {compile: false, precision: apex}", []),
            ("MACHINE: {compile: true}", []),
            pytest.param(
                "DATA: {TRAIN: {dataset: mixed, datasets: {a: {dataset: digits, batch_size: 8}}}}",
                [],
                marks=pytest.mark.addon("sampling"),
            ),
            ("OPTIMIZER: {lr: 0.7}", ["OPTIMIZER.lr=0.2"]),
            (
                "OPTIMIZER: {lr: 0.7, auto_lr_scaling: {base_batch_size: 32}}",
                ["OPTIMIZER.auto_lr_scaling=null", "OPTIMIZER.lr=0.4"],
            ),
        ],
    )
    def test_only_values_of_changed_files_are_recorded(
        self, tmp_path: Path, text: str, added: list[str]
    ) -> None:
        file = tmp_path / "own.yaml"
        file.write_text(f"defaults: [digits, _self_]\n{text.replace('0.7', '0.2')}\n")
        asked = resolve_config([str(file)]).asked
        file.write_text(f"defaults: [digits, _self_]\n{text}\n")
        stored = StoredConfig("x", asked, "x", overrides=(str(file),), is_trusted=True)
        found = resolve_config([], stored=stored).composed.overrides
        assert sorted(found) == sorted([str(file), *added])

    @pytest.mark.addon("deploy")
    def test_interpolations_of_a_folder_are_taken_literally(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET_OF_MINE", "abc")
        text = "${oc.env:SECRET_OF_MINE}"
        stored = read_newest_command(str(copy))
        values = {**stored.values, "EXTRACT": {**stored.values["EXTRACT"], "dir": text}}
        setup = resolve_config([], stored=StoredConfig("x", values, "x"))
        assert setup.config.EXTRACT.dir == text

    def test_folder_of_release_0_1_is_read(self, tmp_path: Path) -> None:
        release = Path(__file__).parents[2] / "data" / "releases" / "0.1" / "stopped"
        shutil.copytree(release, tmp_path / "old")
        stored = read_newest_command(str(tmp_path / "old"))
        assert stored.values["OPTIMIZER"]["accumulate"] is None
        assert main(["resume", str(tmp_path / "old"), "PHASES.epochs=2"]) == 3
        assert main(["test", str(tmp_path / "old")]) == 0


class TestErrors:
    def test_missing_folder(self, tmp_path: Path) -> None:
        for read in (read_newest_command, read_checkpoint_config):
            with raises(ConfigError, code="run.not_found"):
                read(str(tmp_path / "nothing"))

    def test_folder_without_a_checkpoint(self, copy: Path) -> None:
        with raises(ConfigError, code="checkpoint.not_found"):
            read_checkpoint_config(str(copy), "p9")
        shutil.rmtree(copy / "checkpoints")
        with raises(ConfigError, code="checkpoint.not_found"):
            read_checkpoint_config(str(copy))

    def test_damaged_promise_is_replaced_by_an_older_one(self, copy: Path) -> None:
        names = sorted(path.parent for path in copy.glob("checkpoints/*/promised.json"))
        (names[-1] / "promised.json").write_text("{}")
        assert read_checkpoint_config(str(copy)).values["MODEL"]["width"] == 4
        for name in names:
            (name / "promised.json").unlink()
        with raises(ConfigError, code="checkpoint.none_valid"):
            read_checkpoint_config(str(copy))

    def test_best_without_a_monitor(self, tmp_path: Path) -> None:
        hooks = {"save": SaveEachStep(), "kill": KillAfter(2)}
        run_until_killed(tmp_path, "CHECKPOINT.best.monitor=null", hooks=hooks)
        with raises(ConfigError, code="config.no_monitor"):
            read_checkpoint_config(str(tmp_path), "best")

    def test_best_before_a_test_has_measured_the_monitor(self, tmp_path: Path) -> None:
        hooks = {"save": SaveEachStep(), "kill": KillAfter(2)}
        run_until_killed(tmp_path, "CHECKPOINT.best.monitor=test/accuracy", hooks=hooks)
        with raises(ConfigError, code="checkpoint.not_found") as caught:
            read_checkpoint_config(str(tmp_path), "best")
        assert "test/accuracy" in str(caught.value)
        assert "best" not in str(caught.value).rpartition("expected")[2]

    def test_another_folder_or_experiment(self, copy: Path) -> None:
        with raises(ConfigError, code="cli.conflict"):
            use_folder(str(copy), "train", ["RUN.dir=elsewhere"], trust=False)
        with raises(ConfigError, code="config.conflict", key="experiment"):
            resolve_config(["experiment=digits"], stored=read_newest_command(str(copy)))
