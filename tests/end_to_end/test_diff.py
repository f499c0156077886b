"""`tools/runs.py diff` names the first update and the component at which two runs part, for every
planted fault."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, die, train

from phasetrain.commands.cli import main
from phasetrain.commands.runs.diff import diff
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.errors import ConfigError
from phasetrain.hooks import Hook
from phasetrain.hooks import checkpoint as checkpoint_hook
from phasetrain.runs.ledger import FILE, HEADER, RECORD_BYTES
from phasetrain.runtime.machine import reseed
from phasetrain.tasks import Position, Task

ROOT = Path(__file__).parents[2]
SHORT = ("PHASES.epochs=2",)  # ten updates, tests after the fifth and the tenth


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder, *SHORT)
    return folder


def killed_and_resumed(folder: Path, patch: Callable[[], object], steps: int = 3) -> None:
    """Let `steps` steps of a run happen, save, plant a fault, and go on."""
    die(folder, *SHORT, hooks={"save": SaveEachStep(), "kill": KillAfter(steps)})
    patch()
    train(folder, *SHORT)


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


@pytest.mark.by_default(3)
@pytest.mark.parametrize(
    ("words", "expected"), [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS]
)
def test_differing_config_is_named(
    unbroken: Path, tmp_path: Path, words: list[str], expected: tuple[int, str]
) -> None:
    train(tmp_path, *SHORT, *words)
    found = diff(str(unbroken), str(tmp_path))
    assert (found.updates, found.components[0]) == expected
    assert any(change.path.startswith(words[0].partition("=")[0]) for change in found.config)
    assert found.environment == {}


class TestFaultsInCode:
    """What no config shows."""

    def test_changed_data(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[int, list[int]] = {}

        class Look(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
                if phase.is_train:
                    seen[run.state.updates + 1] = batch.ids.tolist()

        train(tmp_path / "look", *SHORT, hooks={"look": Look()})
        assert diff(str(unbroken), str(tmp_path / "look")).equal
        before = {one for updates in (1, 2, 3) for one in seen[updates]}
        index = next(one for one in seen[4] if one not in before)
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
        assert "data" in found.report()

    def test_dropout_seeded_otherwise(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = Task.reseed

        def wrong(self: Task, at: Position, micro: int = 0) -> None:
            right(self, at, micro)
            if at.updates >= 5:
                reseed(at.updates)

        monkeypatch.setattr(Task, "reseed", wrong)
        train(tmp_path, *SHORT)
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components) == (6, ("loss", "weights"))
        assert found.verdict == (
            "They diverge at update 6: same samples, same batch content, same lr, different loss. Everything on record was "
            "equal up to update 5, some of the weights included; the forward pass differs: the loss or its "
            "parameters, the model, its randomness (dropout) or its buffers, the precision, the number of threads; or "
            "weights differ that are not on record."
        )
        assert found.config == ()

    def test_lost_momentum_is_detected(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        load = torch.optim.Optimizer.load_state_dict

        def forget(self: Any, state: dict[str, Any]) -> None:
            load(self, {**state, "state": {}})

        killed_and_resumed(
            tmp_path, lambda: monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", forget)
        )
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components) == (4, ("weights",))

    def test_lost_buffers_are_detected(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = checkpoint_hook.restore

        def wrong(run: Any, loaded: Any) -> None:
            right(run, loaded)
            for module in run.task.model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.reset_running_stats()

        killed_and_resumed(tmp_path, lambda: monkeypatch.setattr(checkpoint_hook, "restore", wrong))
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components) == (5, ("metrics",))
        assert "test of epoch 0" in found.verdict
        assert "their 10 updates are equal" in found.verdict

    def test_meter_that_forgets_is_detected(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begin = Task.begin
        killed_and_resumed(
            tmp_path,
            lambda: monkeypatch.setattr(
                Task, "begin", lambda self, phase, *, fresh: begin(self, phase, fresh=True)
            ),
        )
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components) == (5, ("metrics",))
        assert "train of epoch 0" in found.verdict

    def test_a_sample_left_out(self, unbroken: Path, tmp_path: Path) -> None:
        class LeaveOut(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
                if phase.is_train and run.state.updates == 6:
                    batch.input, batch.target, batch.ids = (
                        batch.input[1:],
                        batch.target[1:],
                        batch.ids[1:],
                    )
                    batch.size -= 1

        train(tmp_path, *SHORT, hooks={"leave_out": LeaveOut()})
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components[0]) == (7, "samples")

    def test_one_ends_earlier(self, unbroken: Path, tmp_path: Path) -> None:
        die(tmp_path, *SHORT, hooks={"kill": KillAfter(3)})
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components) == (4, ("length",))
        assert (
            found.verdict
            == "They are equal up to update 3, where B ends; A continues to update 10."
        )


class TestEqual:
    def test_two_equal_runs(self, unbroken: Path, tmp_path: Path) -> None:
        train(tmp_path, *SHORT, "DATA.TRAIN.workers=1")
        found = diff(str(unbroken), str(tmp_path))
        assert (found.equal, found.updates, found.components) == (True, 0, ())
        assert (
            found.verdict
            == "They do not differ: their 10 updates are equal, and so are all measured values."
        )
        assert [change.path for change in found.config] == ["DATA.TRAIN.workers"]

    def test_more_tests_are_no_parting_of_updates(self, unbroken: Path, tmp_path: Path) -> None:
        train(tmp_path, *SHORT, "PHASES.test_every.updates=2", "PHASES.test_every.epochs=null")
        found = diff(str(unbroken), str(tmp_path))
        assert found.components == ("metrics",)
        assert "their 10 updates are equal" in found.verdict
        assert any(
            note.startswith("From update 3 on the plans divide phases differently")
            for note in found.notes
        )

    def test_another_kind_of_content_is_not_compared(self, unbroken: Path, tmp_path: Path) -> None:
        train(tmp_path, *SHORT, "HOOKS.ledger.content=full")
        found = diff(str(unbroken), str(tmp_path))
        assert found.equal
        told = "The content of batches was not compared: HOOKS.ledger.content or the number of processes differs."
        assert told in found.notes

    def test_without_a_ledger_metrics_are_compared(self, unbroken: Path, tmp_path: Path) -> None:
        train(tmp_path, *SHORT, "HOOKS.ledger=null", "OPTIMIZER.lr=0.2")
        found = diff(str(unbroken), str(tmp_path))
        assert (found.updates, found.components) == (2, ("metrics",))
        assert any("has no steps.ledger" in note for note in found.notes)

    def test_damaged_records_are_reported(self, unbroken: Path, tmp_path: Path) -> None:
        shutil.copytree(unbroken, tmp_path / "copy")
        data = bytearray((tmp_path / "copy" / FILE).read_bytes())
        data[len(HEADER) + 2 * RECORD_BYTES + 40] ^= 1
        (tmp_path / "copy" / FILE).write_bytes(data)
        found = diff(str(unbroken), str(tmp_path / "copy"))
        assert found.equal
        assert found.notes == (
            "1 updates are not in the ledger of B; they were not compared.",
            "1 records in the ledger of B are damaged.",
        )

    def test_files_that_are_nested_too_deeply(self, unbroken: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy"
        shutil.copytree(unbroken, copy)
        with (copy / "metrics.jsonl").open("a") as file:
            file.write(100_000 * "[" + "\n")
        assert diff(str(unbroken), str(copy)).equal
        (copy / "config.yaml").write_text(100_000 * "[")
        with pytest.raises(ConfigError, match=r"copy/config\.yaml cannot be read"):
            diff(str(unbroken), str(copy))


class TestCommandLine:
    @pytest.fixture
    def call(self) -> Callable[..., int]:
        return lambda *words: main(["runs", *map(str, words)])

    def test_first_difference_is_found(
        self, unbroken: Path, tmp_path: Path, call: Any, capsys: Any
    ) -> None:
        train(tmp_path, *SHORT, "LOSS.label_smoothing=0.1")
        environment = json.loads((tmp_path / "environment.json").read_text())
        (tmp_path / "environment.json").write_text(json.dumps(environment | {"threads": 64}))
        assert call("diff", unbroken, tmp_path) == 1
        shown = capsys.readouterr().out
        assert (
            "They diverge at update 1: same samples, same batch content, same lr, different loss."
            in shown
        )
        assert re.search(r"LOSS\.label_smoothing +absent +0\.1 +forbidden", shown)
        assert re.search(r"threads +1 +64", shown)

    def test_equal_ledgers_and_usage(
        self, unbroken: Path, tmp_path: Path, call: Any, capsys: Any
    ) -> None:
        assert call("diff", unbroken / FILE, unbroken / FILE) == 0
        assert "their 10 updates are equal" in capsys.readouterr().out
        for nothing in (tmp_path, tmp_path / "missing"):
            assert call("diff", unbroken, nothing) == 2
            assert "expected the folder of a run" in capsys.readouterr().err
        assert call("diff", unbroken) == 2
        assert "usage: phasetrain runs diff" in capsys.readouterr().err

    def test_as_a_command(self, unbroken: Path) -> None:
        command = [
            sys.executable,
            str(ROOT / "tools" / "runs.py"),
            "diff",
            str(unbroken),
            str(unbroken),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_folder_without_run_is_rejected(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"something else")
    with pytest.raises(ConfigError, match="does not begin as a ledger of version 1 does"):
        diff(str(tmp_path), str(tmp_path))
