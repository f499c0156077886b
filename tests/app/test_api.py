"""From Python: `phasetrain.run` and `phasetrain.load`."""

import io
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from harness import SMALL
from raising import raises

import phasetrain
from phasetrain.app.api import RunResult, load, overrides_of
from phasetrain.app.setup import resolve_config
from phasetrain.app.stored.stored_config import StoredConfig
from phasetrain.config.changes import compare_configs
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.runs.history import History
from phasetrain.runtime.machine import reseed_all
from phasetrain.runtime.terminal import Terminal
from phasetrain.testing import differences

ROOT = Path(__file__).parents[2]
WORDS = (
    "CHECKPOINT.best.monitor=test/accuracy",
    "MODEL.ema={decay: 0.5}",
    "PHASES.limit.test=null",
    "PHASES.epochs=2",
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    folder = tmp_path_factory.mktemp("api") / "run"
    words = [*SMALL, f"RUN.dir={folder}", *WORDS]
    found = phasetrain.run(words, terminal=Terminal(io.StringIO(), live=False))
    assert isinstance(found, RunResult)
    return found


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    data = resolve_config(["RUN.dir=unused"]).builder().data()["test"].reader.dataset
    samples = [data[index] for index in range(len(data))]
    return torch.stack([torch.as_tensor(one) for one, _ in samples]), torch.tensor(
        [int(two) for _, two in samples]
    )


class TestRun:
    @pytest.mark.feature(
        "112",
        "error policy of hooks; results and models in Python",
        "`HOOKS.*.on_exception`, `phasetrain.run`, `phasetrain.load`",
    )
    def test_says_what_came_of_it(self, result: RunResult) -> None:
        assert (result.state, result.reason, result.updates, result.exit_code) == (
            "finished",
            "completed",
            10,
            0,
        )
        assert result.last["test/accuracy"] == result.history.last["test/accuracy"]
        assert result.best is not None
        assert result.best.metric == "test/accuracy"
        assert result.best.value == max(
            value for _, value in result.history.scalar("test/accuracy")
        )
        assert Path(result.best.checkpoint, "manifest.json").is_file()
        assert [row["updates"] for row in result.history if row["kind"] == "step"] == list(
            range(1, 11)
        )

    @pytest.mark.addon("observe")
    def test_notebook_shows_metrics_folder_and_curve(self, result: RunResult) -> None:
        page = result._repr_html_()
        assert result.folder in page
        assert page.count("<tr>") == 1 + len(result.last)
        assert "<polyline" in page
        assert "<polyline" not in RunResult("planned")._repr_html_()

    def test_of_a_run_that_has_finished(self, result: RunResult) -> None:
        words = [*SMALL, f"RUN.dir={result.folder}", *WORDS]
        again = phasetrain.run(words, terminal=Terminal(io.StringIO(), live=False))
        assert (again.state, again.last, again.best) == ("finished", result.last, result.best)

    def test_of_a_run_that_measures_nothing(self, tmp_path: Path) -> None:
        words = [
            *SMALL,
            "METERS.accuracy=null",
            "METERS.loss=null",
            "PHASES.epochs=1",
            f"RUN.dir={tmp_path}",
        ]
        found = phasetrain.run(words, terminal=Terminal(io.StringIO(), live=False))
        assert (found.best, found.last) == (None, {})

    @pytest.mark.parametrize(
        "config",
        [
            "RUN.dir='a b' PHASES.epochs=2",
            ["RUN.dir=a b", "PHASES.epochs=2"],
            {"RUN": {"dir": "a b"}, "PHASES.epochs": 2},
        ],
    )
    def test_takes_a_text_words_or_a_mapping(self, config: Any) -> None:
        setup = resolve_config(overrides_of(config))
        assert (setup.config.RUN.dir, setup.config.PHASES.epochs) == ("a b", 2)

    def test_a_mistake_is_told_as_on_the_command_line(self) -> None:
        with raises(
            ConfigError,
            code="config.unknown_parameter",
            key="OPTIMIZER.lrr",
            suggestion="OPTIMIZER.lr",
        ):
            phasetrain.run({"OPTIMIZER": {"lrr": 1}}, terminal=Terminal(io.StringIO(), live=False))


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param("digits_byol", marks=pytest.mark.addon("vision")),
        "digits_progressive",
        pytest.param("digits_swav", marks=pytest.mark.addon("vision")),
    ],
)
def test_the_config_of_a_checkpoint_comes_back_without_the_files_that_it_was_made_from(
    experiment: str,
) -> None:
    schema, asked = (
        default_schema(),
        resolve_config([f"experiment={experiment}", "RUN.dir=x", "HOOKS.metrics=null"]).asked,
    )
    stored = StoredConfig("x", asked, "x")
    assert compare_configs(asked, resolve_config(["RUN.dir=x"], stored=stored).asked, schema) == []


class TestLoad:
    @pytest.mark.feature("112")
    def test_gives_the_weights_and_predicts_what_was_measured(
        self, result: RunResult, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level("INFO", "phasetrain"):
            task = phasetrain.load(result.folder)
        assert not caplog.messages  # a part of a run may load another one
        images, labels = held_out()
        scores = task.predict(images, batch_size=100)
        assert scores.shape == (355, 10)
        assert float((scores.argmax(1) == labels).double().mean()) == pytest.approx(
            result.last["test/accuracy"], abs=1e-9
        )
        assert not scores.requires_grad
        assert not task.model.training
        assert torch.equal(task.predict(images.numpy()[:3]), task.predict(images[:3]))

    def test_the_generators_of_the_caller_stay(self, result: RunResult) -> None:
        drawn = []
        for loads in (False, True):
            reseed_all(7)
            if loads:
                load(result.folder)
            drawn.append((float(torch.rand(1)), np.random.rand(), random.random()))
        assert drawn[0] == drawn[1]

    def test_an_average_and_the_best(self, result: RunResult) -> None:
        trained, average = result.load(), result.load(weights="ema")
        assert differences(trained.model.state_dict(), average.model.state_dict(), "weights")
        images, labels = held_out()
        found = float((average.predict(images).argmax(1) == labels).double().mean())
        assert found == pytest.approx(result.last["test@ema/accuracy"], abs=1e-9)
        assert result.best is not None
        best = load(result.folder, "best")
        named = load(result.folder, result.best.checkpoint.rpartition("/")[2])
        assert differences(best.model.state_dict(), named.model.state_dict(), "weights") == []

    def test_needs_no_data(self, result: RunResult, tmp_path: Path) -> None:
        shutil.copytree(result.folder, tmp_path / "run")
        images = torch.zeros(2, 1, 8, 8)
        expected = load(result.folder).predict(images)
        for path in (tmp_path / "run" / "checkpoints").glob("p*/promised.json"):
            assert '"digits"' in path.read_text()
        found = load(tmp_path / "run").predict(images)
        assert torch.equal(found, expected)
        (tmp_path / "run" / "plan.json").unlink()  # the facts come from the data then
        assert torch.equal(load(tmp_path / "run").predict(images), expected)

    def test_missing_run_checkpoint_or_average_is_rejected(
        self, result: RunResult, tmp_path: Path
    ) -> None:
        with raises(ConfigError, code="run.not_found"):
            load(tmp_path / "none")
        with raises(ConfigError, code="checkpoint.not_found"):
            load(result.folder, "bets")
        with raises(ConfigError, code="checkpoint.no_average"):
            load(result.folder, weights="swa")
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "note.txt").touch()
        with raises(ConfigError, code="weights.unusable"):
            load(tmp_path / "x")

    @pytest.mark.addon("deploy")
    def test_unfit_inputs_are_rejected(self, result: RunResult) -> None:
        task = result.load()
        with raises(ConfigError, key="MODEL"):
            task.predict(torch.zeros(2, 3))
        with raises(ConfigError, code="predict.wrong_type"):
            task.predict(3.5)
        with raises(ConfigError, code="predict.unreadable"):
            task.predict("images")


def test_importing_the_package_imports_nothing_slow() -> None:
    code = (
        "import sys; before = set(sys.modules); import phasetrain\n"
        "new = {name for name in set(sys.modules) - before if '.' not in name}\n"
        "assert new <= {'phasetrain', 'typing', '_typing', 'importlib', 'warnings'}, new\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_names_of_the_package() -> None:
    assert isinstance(phasetrain.run, FunctionType)
    assert isinstance(phasetrain.train, FunctionType)
    assert phasetrain.History is History
    assert phasetrain.load is load
    with pytest.raises(AttributeError, match="no attribute 'lood'"):
        phasetrain.__getattr__("lood")


class TestIgnoredException:
    class Fails(Hook):
        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == 4:
                raise OSError("the cable is out")

    @pytest.mark.feature(
        "python.on_exception",
        "a run that fails without ending the script",
        '`phasetrain.run(on_exception="ignore")`',
    )
    def test_result_has_the_error_and_the_next_call_resumes(self, tmp_path: Path) -> None:
        words = [*SMALL, f"RUN.dir={tmp_path / 'run'}", "PHASES.epochs=1"]
        quiet = Terminal(io.StringIO(), live=False)
        hooks = {"fails": self.Fails()}
        result = phasetrain.run(words, hooks=hooks, terminal=quiet, on_exception="ignore")
        assert isinstance(result.error, OSError)
        assert (result.state, result.exit_code, result.updates) == ("failed", 1, 4)
        assert [row["updates"] for row in result.history.steps()] == [1, 2, 3]
        again = phasetrain.run(words, terminal=quiet, on_exception="ignore")
        assert (again.state, again.updates, again.error) == ("finished", 5, None)

    def test_mistake_in_the_config_is_raised(self, tmp_path: Path) -> None:
        with raises(ConfigError, code="config.unknown_section"):
            phasetrain.run(["MODLE.name=mlp", f"RUN.dir={tmp_path}"], on_exception="ignore")


def test_quiet_run_from_python_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["PHASES.epochs=1", "PHASES.limit.train=1", f"RUN.dir={tmp_path}"]
    phasetrain.run([*words, "RUN.verbosity=quiet", "DATA.TRAIN.exact=false"])
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "")
    assert "DATA.TRAIN.exact = false" in (tmp_path / "log.txt").read_text()
