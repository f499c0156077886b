"""`phasetrain runs diff` names the first update and the component at which two runs differ, for
every planted fault."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, run_until_killed, train
from raising import raises

from phasetrain.addons.experiments.compare.diff import diff
from phasetrain.cli import main
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.hooks import checkpoint as checkpoint_hook
from phasetrain.runs.ledger import FILE, HEADER_BYTES
from phasetrain.runtime.machine import reseed
from phasetrain.tasks import Position, Task

RECORD_BYTES = 92
"""Size of a record in the version that new runs write."""

ROOT = Path(__file__).parents[4]
SHORT = ("PHASES.epochs=2",)  # ten updates, tests after the fifth and the tenth
KILLED_AFTER = 3  # updates


class RecordIds(Hook):
    """Keeps the sample ids of every update."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}

    def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
        if phase.is_train:
            self.ids[run.state.updates + 1] = batch.ids.tolist()


class Observing(Hook):
    """Only observes; a module that `runs diff` has not imported has it."""

    observe_only = True

    def __init__(self, level: int = 0) -> None:
        self.level = level


class Acting(Observing):
    observe_only = False


@pytest.fixture(scope="module")
def recorded() -> RecordIds:
    """Return the hook that has recorded the sample ids of `unbroken`."""
    return RecordIds()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, recorded: RecordIds) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder, *SHORT, hooks={"record": recorded})
    return folder


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run, killed after its third update with a checkpoint."""
    folder = tmp_path_factory.mktemp("killed")
    run_until_killed(
        folder, *SHORT, hooks={"save": SaveEachStep(), "kill": KillAfter(KILLED_AFTER)}
    )
    return folder


@pytest.fixture
def to_resume(killed_once: Path, tmp_path: Path) -> Path:
    """Return a copy of the killed run."""
    return Path(shutil.copytree(killed_once, tmp_path / "run", symlinks=True))


@pytest.fixture
def copy(unbroken: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run."""
    return Path(shutil.copytree(unbroken, tmp_path / "copy", symlinks=True))


CONFIGS = [
    ("another order", ["DATA.TRAIN.sampler=sequential"], (1, "samples")),
    ("another seed", ["RUN.seed=1"], (1, "samples")),
    ("another batch size", ["DATA.TRAIN.batch_size=23"], (1, "samples")),
    (
        "another augmentation",
        ["DATA.TRAIN.transforms=[{name: random_shift, pixels: 2}, {name: noise, std: 0.1}]"],
        (1, "batch content"),
    ),
    (
        "another learning rate",
        ["OPTIMIZER.lr=0.2"],
        (2, "lr"),
    ),  # the first update is at 0, where warm-up begins
    ("another schedule", ["OPTIMIZER.SCHEDULES.lr.warmup=0.5"], (2, "lr")),
    ("another loss", ["LOSS.label_smoothing=0.1"], (1, "loss")),
    ("another dropout", ["MODEL.dropout=0.2"], (1, "loss")),
    ("clipping", ["OPTIMIZER.clip_norm=0.5"], (1, "gradient norm")),
    ("clipping values", ["OPTIMIZER.clip_value=0.001"], (2, "weights")),
    ("weight decay", ["OPTIMIZER.weight_decay=0.1"], (2, "weights")),
    ("no momentum", ["OPTIMIZER.momentum=0", "OPTIMIZER.nesterov=false"], (2, "weights")),
]


@pytest.mark.feature(
    "B9", "the first update and component at which two runs diverge", "`phasetrain runs diff A B`"
)
@pytest.mark.by_default("another order", "another learning rate")
@pytest.mark.parametrize(
    ("words", "expected"), [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS]
)
def test_effect_of_a_different_config_is_located(
    unbroken: Path, tmp_path: Path, words: list[str], expected: tuple[int, str]
) -> None:
    train(tmp_path, *SHORT, *words)
    found = diff(str(unbroken), str(tmp_path))
    assert (found.updates, found.components[0]) == expected
    assert any(change.path.startswith(words[0].partition("=")[0]) for change in found.config)
    assert found.environment == {}


class TestFaultsInCode:
    """What no config shows."""

    def test_changed_sample_is_located(
        self,
        unbroken: Path,
        recorded: RecordIds,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        before = {one for updates in (1, 2, 3) for one in recorded.ids[updates]}
        index = next(one for one in recorded.ids[4] if one not in before)
        make = TensorSamples.__init__

        def altered(
            self: TensorSamples, inputs: torch.Tensor, targets: torch.Tensor, **facts: Any
        ) -> None:
            if len(inputs) == 1442:  # the digits for training
                inputs[index] += 0.01
            make(self, inputs, targets, **facts)

        monkeypatch.setattr(TensorSamples, "__init__", altered)
        train(tmp_path / "changed", *SHORT)
        found = diff(str(unbroken), str(tmp_path / "changed"))
        assert (found.updates, found.components[0]) == (4, "batch content")
        assert found.data.keys() == {"train"}

    @pytest.mark.slow
    def test_wrong_dropout_seed_is_located(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = Task.reseed

        def wrong(self: Task, at: Position, micro: int = 0, stream: int = 0) -> None:
            right(self, at, micro, stream)
            if at.updates >= 5:
                reseed(at.updates)

        monkeypatch.setattr(Task, "reseed", wrong)
        train(tmp_path, *SHORT)
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components) == (6, ("loss", "weights"))
        assert found.config == ()

    @pytest.mark.feature("B9")
    def test_lost_momentum_is_located(
        self, unbroken: Path, to_resume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = torch.optim.Optimizer.load_state_dict

        def forget(self: Any, state: dict[str, Any]) -> None:
            load(self, {**state, "state": {}})

        monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", forget)
        train(to_resume, *SHORT)
        found = diff(str(unbroken), str(to_resume))
        assert (found.updates, found.components) == (KILLED_AFTER + 1, ("weights",))

    @pytest.mark.slow
    def test_lost_buffers_are_located(
        self, unbroken: Path, to_resume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = checkpoint_hook.restore

        def wrong(run: Any, loaded: Any) -> None:
            right(run, loaded)
            for module in run.task.model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.reset_running_stats()

        monkeypatch.setattr(checkpoint_hook, "restore", wrong)
        train(to_resume, *SHORT)
        found = diff(str(unbroken), str(to_resume))
        assert (found.updates, found.components) == (5, ("metrics",))
        assert "test of epoch 0" in found.verdict

    def test_meter_that_forgets_is_located(
        self, unbroken: Path, to_resume: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin = Task.begin
        monkeypatch.setattr(
            Task, "begin", lambda self, phase, *, fresh: begin(self, phase, fresh=True)
        )
        train(to_resume, *SHORT)
        found = diff(str(unbroken), str(to_resume))
        assert (found.updates, found.components) == (5, ("metrics",))
        assert "train of epoch 0" in found.verdict

    @pytest.mark.slow
    def test_missing_sample_is_located(self, unbroken: Path, tmp_path: Path) -> None:
        class DropFirstSample(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
                if phase.is_train and run.state.updates == 6:
                    batch.input = batch.input[1:]
                    batch.target = batch.target[1:]
                    batch.ids = batch.ids[1:]
                    batch.size -= 1

        train(tmp_path, *SHORT, hooks={"drop": DropFirstSample()})
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components[0]) == (7, "samples")

    def test_shorter_run_differs_in_length(self, unbroken: Path, killed_once: Path) -> None:
        found = diff(str(unbroken), str(killed_once))
        assert (found.updates, found.components) == (KILLED_AFTER + 1, ("length",))


class TestEqualUpdates:
    def test_equal_runs_do_not_differ(self, unbroken: Path, tmp_path: Path) -> None:
        train(tmp_path, *SHORT, "DATA.TRAIN.prefetch=3")
        found = diff(str(unbroken), str(tmp_path))
        assert (found.equal, found.updates, found.components) == (True, 0, ())
        assert [change.path for change in found.config] == ["DATA.TRAIN.prefetch"]

    @pytest.mark.slow
    def test_additional_tests_differ_in_metrics_only(self, unbroken: Path, tmp_path: Path) -> None:
        train(tmp_path, *SHORT, "PHASES.test_every.updates=2", "PHASES.test_every.epochs=null")
        found = diff(str(unbroken), str(tmp_path))
        assert found.components == ("metrics",)
        assert any("update 3" in note for note in found.notes)

    @pytest.mark.slow
    def test_hashes_of_another_kind_are_not_compared(self, unbroken: Path, tmp_path: Path) -> None:
        train(tmp_path, *SHORT, "HOOKS.ledger.content=full")
        found = diff(str(unbroken), str(tmp_path))
        assert found.equal
        assert any("HOOKS.ledger.content" in note for note in found.notes)

    def test_metrics_are_compared_without_a_ledger(self, unbroken: Path, copy: Path) -> None:
        (copy / FILE).unlink()
        lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
        changed = next(line for line in lines if line["kind"] == "step" and line["updates"] == 2)
        changed["loss"] += 1e-6
        (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found = diff(str(unbroken), str(copy))
        assert (found.updates, found.components) == (2, ("metrics",))
        assert any(FILE in note for note in found.notes)

    def test_damaged_records_are_reported(self, unbroken: Path, copy: Path) -> None:
        data = bytearray((copy / FILE).read_bytes())
        data[HEADER_BYTES + 2 * RECORD_BYTES + 40] ^= 1
        (copy / FILE).write_bytes(data)
        found = diff(str(unbroken), str(copy))
        assert found.equal
        assert [note.partition(" ")[0] for note in found.notes] == ["1", "1"]
        assert all("ledger of B" in note for note in found.notes)


def test_changed_source_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    words = ("PHASES.epochs=1", "PHASES.limit.train=1", "RUN.imports=[edited_part, same_part]")
    (tmp_path / "same_part.py").write_text("VALUE = 1\n")
    for folder in ("one", "other"):
        (tmp_path / "edited_part.py").write_text(f"VALUE = {folder!r}\n")
        train(tmp_path / folder, *words)
    found = diff(str(tmp_path / "one"), str(tmp_path / "other"))
    assert list(found.code) == ["edited_part"]
    assert re.search(r"edited_part +[0-9a-f]{64} +[0-9a-f]{64}", found.report())
    assert "equal: config, environment, data" in found.report()


class TestInvalidFiles:
    def test_deeply_nested_line_is_skipped_and_config_rejected(
        self, unbroken: Path, copy: Path
    ) -> None:
        with (copy / "metrics.jsonl").open("a") as file:
            file.write(3_000 * "[" + "\n")
        assert diff(str(unbroken), str(copy)).equal
        (copy / "config.yaml").write_text(1_000 * "[")
        with raises(ConfigError, code="runs.unreadable") as caught:
            diff(str(unbroken), str(copy))
        assert "copy/config.yaml" in str(caught.value)

    def test_file_that_is_no_ledger_is_rejected(self, tmp_path: Path) -> None:
        (tmp_path / FILE).write_bytes(b"something else")
        with raises(ConfigError, code="runs.unreadable") as caught:
            diff(str(tmp_path), str(tmp_path))
        assert FILE in str(caught.value)

    def test_folder_without_run_is_rejected(self, unbroken: Path, tmp_path: Path) -> None:
        for nothing in (tmp_path, tmp_path / "missing"):
            with raises(ConfigError, code="runs.no_run"):
                diff(str(unbroken), str(nothing))


class TestCommandLine:
    def test_first_difference_is_printed(
        self, unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        train(tmp_path, *SHORT, "LOSS.label_smoothing=0.1")
        environment = json.loads((tmp_path / "environment.json").read_text())
        environment["threads"] = 64
        (tmp_path / "environment.json").write_text(json.dumps(environment))
        assert main(["runs", "diff", str(unbroken), str(tmp_path)]) == 1
        shown = capsys.readouterr().out
        assert "update 1: same samples, same batch content, same lr, different loss" in shown
        assert re.search(r"LOSS\.label_smoothing +default \(0\.0\) +0\.1 +forbidden", shown)
        assert re.search(r"threads +1 +64", shown)

    def test_exit_code_is_0_for_equal_ledgers_and_2_for_errors(
        self, unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ledger = str(unbroken / FILE)
        assert main(["runs", "diff", ledger, ledger]) == 0
        assert "10 updates" in capsys.readouterr().out
        assert main(["runs", "diff", ledger, str(tmp_path)]) == 2
        assert str(tmp_path) in capsys.readouterr().err
        assert main(["runs", "diff", ledger]) == 2
        assert "usage: phasetrain runs diff" in capsys.readouterr().err

    def test_script_does_the_same(self, unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = str(ROOT / "tools" / "runs.py")
        monkeypatch.setattr(sys, "argv", [script, "diff", str(unbroken), str(unbroken)])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(script, run_name="__main__")
        assert caught.value.code == 0


@pytest.mark.parametrize(("name", "resume"), [("Observing", "free"), ("Acting", "adjustable")])
def test_key_of_a_custom_hook_that_observes_is_free(
    name: str, resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level in (0, 1):
        words = [f"+HOOKS.own={{name: {__name__}.{name}, level: {level}}}", "PHASES.epochs=1"]
        train(tmp_path / str(level), *words)
    monkeypatch.delitem(sys.modules, __name__)  # as in another process
    found = diff(str(tmp_path / "0"), str(tmp_path / "1"))
    assert [(change.path, change.resume) for change in found.config] == [
        ("HOOKS.own.level", resume)
    ]
