"""RUN.engine=replay runs any past update again with equal bits, and says what differs where one
does not."""

import io
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SMALL, newest, train
from raising import raises

from phasetrain.app.api import run
from phasetrain.app.train import resume
from phasetrain.cli import main
from phasetrain.data.datasets.base import TensorSamples
from phasetrain.errors import ChangedError, ConfigError, NumericsError
from phasetrain.hooks import Hook
from phasetrain.runs.folder import RunFolder
from phasetrain.runs.ledger import FILE, encode_ledger, parse_ledger
from phasetrain.runtime.machine import reseed
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Position, Task

MANY = ("CHECKPOINT.every_updates=4", "CHECKPOINT.keep_last=10")


def replayed(
    folder: Path, step: int, *words: str, hooks: Mapping[str, Hook] | None = None
) -> tuple[int, str]:
    """Replay an update and return the exit code and what was printed."""
    screen = io.StringIO()
    overrides = [*SMALL, f"RUN.dir={folder}", "RUN.engine=replay", f"RUN.step={step}", *words]
    result = run(overrides, hooks=hooks, terminal=Terminal(screen, live=False))
    assert (result.state, result.updates) == ("replayed", step)
    return result.exit_code, screen.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    train(folder, *MANY)
    return folder


@pytest.mark.feature("B6")
@pytest.mark.parametrize(("step", "since"), [(1, 0), (4, 0), (5, 4), (6, 5), (12, 10), (15, 12)])
def test_an_update_from_the_checkpoint_before_it(trained: Path, step: int, since: int) -> None:
    code, shown = replayed(trained, step)
    assert code == 0
    assert f"(update {since})" in shown
    equal = f"updates {since + 1} to {step} equal" if step > since + 1 else f"update {step} equals"
    assert f"{equal} the ledger, bit for bit" in shown
    rows = [
        line.split()[-1]
        for line in shown.splitlines()
        if line.startswith(("samples", "loss", "weights"))
    ]
    assert rows == ["equal"] * 3


@pytest.mark.by_default(1)
@pytest.mark.parametrize(
    "words",
    [
        [
            "OPTIMIZER.accumulate=2",
            "OPTIMIZER.clip_norm=0.5",
            "OPTIMIZER.name=adamw",
            "OPTIMIZER.lr=0.01",
        ],
        [
            "MACHINE.precision=fp16",
            "OPTIMIZER.scaler={name: grad, init_scale: 1e6, growth_interval: 2}",
        ],
        ["HOOKS.ledger.content=full", "HOOKS.ledger.flush_every=1"],
        ["HOOKS.ledger.content=none", "HOOKS.ledger.deferred=true"],
    ],
    ids=["accumulated", "fp16", "full", "none"],
)
def test_update_is_replayed_with_other_settings(tmp_path: Path, words: list[str]) -> None:
    train(tmp_path, *MANY, *words)
    code, shown = replayed(tmp_path, 7, *words, "DATA.TRAIN.workers=1")
    assert code == 0, shown


@pytest.mark.feature(
    "B6", "replay of any update; analysis of non-finite steps", "`phasetrain replay`, `RUN.step`"
)
@pytest.mark.slow
def test_100_random_updates(tmp_path: Path) -> None:
    words = (
        "PHASES.epochs=30",
        "CHECKPOINT.every_updates=11",
        "CHECKPOINT.keep_last=20",
        "METERS=null",
    )
    train(tmp_path, *words)
    steps = random.Random(0).sample(range(1, 151), 100)
    codes = [replayed(tmp_path, step, *words)[0] for step in steps]
    print(f"replay: {codes.count(0)} of {len(codes)} random updates have equal bits")  # noqa: T201
    assert codes == [0] * 100


def test_kernels_are_limited_to_those_of_the_checkpoint(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[str | None] = []
    monkeypatch.setattr(resume, "limit_cpu_capability", limits.append)
    assert replayed(trained, 5)[0] == 0
    assert limits == [torch.backends.cpu.get_cpu_capability()]


class TestInputsOfReplay:
    def test_run_folder_stays_unchanged_and_may_be_in_use(self, trained: Path) -> None:
        owner = RunFolder(str(trained))
        owner.open()
        try:
            before = {
                path: (path.stat().st_mtime_ns, path.stat().st_size) for path in trained.rglob("*")
            }
            assert replayed(trained, 7)[0] == 0
            assert {
                path: (path.stat().st_mtime_ns, path.stat().st_size) for path in trained.rglob("*")
            } == before
        finally:
            owner.close()

    def test_damaged_checkpoint_is_skipped(self, trained: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        shutil.copytree(trained, folder)
        file = folder / "checkpoints" / "p0002-s00000003" / "tensors.safetensors"  # of update 8
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        code, shown = replayed(folder, 9)
        assert code == 0
        assert "p0002-s00000003 was skipped" in shown
        assert "updates 6 to 9 equal the ledger" in shown

    @pytest.mark.slow
    def test_run_without_checkpoints_is_replayed_from_the_start(self, tmp_path: Path) -> None:
        words = ("CHECKPOINT.every_epochs=null", "MACHINE.threads=1")
        train(tmp_path, *words)
        assert newest(tmp_path).manifest.state["updates"] == 15
        code, shown = replayed(tmp_path, 8, *words)
        assert (code, "updates 1 to 8 equal the ledger" in shown) == (0, True)

    @pytest.mark.addon("observe")
    def test_observe_only_hooks_are_left_out(self, tmp_path: Path) -> None:
        shown = ("activations", "breakdown", "csv", "memory", "profiler", "tensorboard")
        train(tmp_path / "run", *MANY, "HOOKS.activations.every_updates=3", "HOOKS.csv={}")
        before = sorted(path.name for path in (tmp_path / "run").iterdir())
        code, told = replayed(tmp_path / "run", 6, *(f"HOOKS.{name}={{}}" for name in shown))
        assert code == 0, told
        assert "trace" not in told
        assert "where the step time went" not in told
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before

    def test_custom_hooks_run_in_the_replay(self, tmp_path: Path) -> None:
        class Noisy(Hook):
            def __init__(self) -> None:
                self.calls = 0

            def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
                self.calls += 1
                batch.input = batch.input + 0.1 * torch.randn_like(batch.input)
                assert run.folder is not None
                Path(run.folder.file("calls.txt")).write_text(str(self.calls))

            def state_dict(self) -> dict[str, Any]:
                return {"calls": self.calls}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.calls = state["calls"]

        train(tmp_path, *MANY, hooks={"noisy": Noisy()})
        before = (tmp_path / "calls.txt").read_text()
        assert replayed(tmp_path, 6, hooks={"noisy": (noisy := Noisy())})[0] == 0
        assert (
            noisy.calls == 5 + 2 + 1
        )  # five train steps and two test steps before the checkpoint, one after it
        assert (tmp_path / "calls.txt").read_text() == before
        code, shown = replayed(tmp_path, 6)
        assert (code, "update 6 is the first that differs: loss, weights" in shown) == (1, True)

    def test_run_without_a_ledger_is_replayed_unchecked(self, tmp_path: Path) -> None:
        train(tmp_path, "HOOKS.ledger=null")
        code, shown = replayed(tmp_path, 3)
        assert code == 0
        assert f"{tmp_path} has no {FILE} (HOOKS.ledger): nothing to check against" in shown


class TestDifferences:
    def test_contradicting_ledger_is_reported(self, trained: Path, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        shutil.copytree(trained, folder)
        ledger = parse_ledger((folder / FILE).read_bytes())
        records = [
            r._replace(loss=r.loss * (1 + 2e-16) if r.updates == 7 else r.loss)
            for r in ledger.values()
        ]
        (folder / FILE).write_bytes(encode_ledger(records))
        code, shown = replayed(folder, 8)
        assert code == 1
        assert "error: update 7 is the first that differs: loss" in shown
        code, shown = replayed(folder, 7)
        assert [line.split()[-1] for line in shown.splitlines() if line.startswith("loss")] == [
            "DIFFERENT"
        ]
        assert replayed(folder, 6)[0] == 0

    def test_other_seeds_are_reported(self, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        right = Task.reseed

        def wrong(self: Task, at: Position, micro: int = 0, stream: int = 0) -> None:
            right(self, at, micro, stream)
            if at.updates >= 6:
                reseed(at.updates)

        monkeypatch.setattr(Task, "reseed", wrong)
        code, shown = replayed(trained, 8)
        assert (code, "update 7 is the first that differs: loss, weights" in shown) == (1, True)


class TestRejected:
    @pytest.mark.parametrize(
        "step",
        ["16", "null"],
    )
    def test_update_outside_the_run_is_rejected(self, trained: Path, step: str) -> None:
        with raises(ConfigError, key="RUN.step", given=step):
            run([*SMALL, f"RUN.dir={trained}", "RUN.engine=replay", f"RUN.step={step}"])

    def test_update_outside_a_run_without_ledger_is_rejected(self, tmp_path: Path) -> None:
        train(tmp_path, "HOOKS.ledger=null")
        with raises(ConfigError, key="RUN.step", given="16"):
            replayed(tmp_path, 16)

    def test_folder_without_run_has_nothing_to_replay(self, tmp_path: Path) -> None:
        with raises(ConfigError, key="RUN.dir"):
            replayed(tmp_path, 1)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.by_default(2)
    @pytest.mark.parametrize("step", [2, 9])
    @pytest.mark.parametrize("word", ["OPTIMIZER.lr=0.2", "MODEL.dropout=0.2"])
    def test_changed_config_is_rejected(self, trained: Path, step: int, word: str) -> None:
        with pytest.raises(ChangedError, match=re.escape(word.partition("=")[0])):
            replayed(trained, step, word)
        assert (
            main([*SMALL, f"RUN.dir={trained}", "RUN.engine=replay", f"RUN.step={step}", word]) == 3
        )

    def test_allowed_change_of_config_is_compared_with_the_ledger(self, trained: Path) -> None:
        code, shown = replayed(trained, 2, "OPTIMIZER.lr=0.2", "RUN.allow=[OPTIMIZER.lr]")
        assert (code, "update 2 is the first that differs: lr, weights" in shown) == (1, True)


PARTS = """
import torch
from torch import nn

from phasetrain.losses import LOSSES
from phasetrain.models import MODELS


@LOSSES.register("steep")
def steep(output, target, bad=0):
    loss = nn.functional.cross_entropy(output, target)
    if int((target * torch.arange(len(target))).sum()) == bad:
        loss = loss + (output - output.detach()).abs().sum().sqrt()
    return loss


class Log(nn.Module):
    def forward(self, batch):
        return batch.log()


@MODELS.register("logs")
class Logs(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.flat, self.linear, self.log, self.head = nn.Flatten(), nn.Linear(64, 8), Log(), nn.Linear(8, classes)

    def forward(self, batch):
        return self.head(self.log(self.linear(self.flat(batch))))
"""
MODEL = ("RUN.imports=[steep_parts]", "MODEL.name=logs", "~MODEL.width", "~MODEL.dropout")


class TestNonfiniteStep:
    """A step that was not made, looked at on its very batch."""

    @pytest.fixture(autouse=True)
    def _parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "steep_parts.py").write_text(PARTS)
        monkeypatch.syspath_prepend(str(tmp_path))

    def test_operation_with_the_first_nonfinite_gradient_is_found(self, tmp_path: Path) -> None:
        keys: dict[int, int] = {}

        class Look(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
                if phase.is_train:
                    keys[run.state.updates + 1] = int((batch.target * torch.arange(24)).sum())

        words = ["RUN.imports=[steep_parts]", "LOSS.name=steep"]
        train(tmp_path / "look", *words, hooks={"look": Look()})
        words = [*words, f"LOSS.bad={keys[6]}"]
        with pytest.raises(NumericsError, match="update 6 "):
            train(tmp_path / "run", *words)
        code, shown = replayed(tmp_path / "run", 6, *words)
        assert code == 0
        assert "first module with such outputs" in shown
        row = {line.split("  ")[0]: line for line in shown.splitlines()}
        assert row["loss"].endswith("equal")
        assert row["first module with such outputs"].split()[-1] == "none"
        assert "steep_parts.py, line 13" in row["first operation in backward"]
        assert "AbsBackward0" in row["first operation in backward"]
        assert "model." in row["first gradient in backward"]
        assert not (tmp_path / "run" / "run.lock").exists()

    def test_module_with_the_first_nonfinite_output_is_found(self, tmp_path: Path) -> None:
        with pytest.raises(NumericsError, match="update 1 "):
            train(tmp_path / "run", *MODEL)
        code, shown = replayed(tmp_path / "run", 1, *MODEL)
        assert code == 0
        row = {line.split("  ")[0]: line for line in shown.splitlines()}
        assert "model.log (Log, its input is finite)" in row["first module with such outputs"]
        assert (
            "model.head (Linear, its input is not finite)"
            in row["modules with such outputs after it"]
        )

    def test_samples_with_nonfinite_inputs_are_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make = TensorSamples.__init__

        def altered(
            self: TensorSamples, inputs: torch.Tensor, targets: torch.Tensor, **facts: Any
        ) -> None:
            inputs[17, 0, 3, 3] = torch.nan
            make(self, inputs, targets, **facts)

        monkeypatch.setattr(TensorSamples, "__init__", altered)
        words = ("DATA.TRAIN.sampler=sequential", "DATA.TEST=null")
        with pytest.raises(NumericsError, match="update 1 "):
            train(tmp_path / "run", *words)
        code, shown = replayed(tmp_path / "run", 1, *words)
        assert code == 0
        assert (
            next(line for line in shown.splitlines() if "samples with such inputs" in line).split()[
                -1
            ]
            == "17"
        )

    def test_a_skipped_update_is_checked_against_the_ledger_as_well(self, tmp_path: Path) -> None:
        words = (*MODEL, "OPTIMIZER.on_nonfinite=skip", "METERS.loss=null")
        with raises(NumericsError, key="OPTIMIZER.skip_budget", given="2"):
            train(tmp_path / "run", *words, "OPTIMIZER.skip_budget=2")
        code, shown = replayed(tmp_path / "run", 2, *words, "OPTIMIZER.skip_budget=2")
        assert code == 0
        assert "model.log (Log, its input is finite)" in shown
        assert "updates 1 to 2 equal the ledger, bit for bit" in shown
        assert (
            next(line for line in shown.splitlines() if line.startswith("weights")).count("skipped")
            == 2
        )

    def test_step_that_is_finite_in_the_replay_is_reported(self, tmp_path: Path) -> None:
        class Break(Hook):
            def on_forward(self, run: Any, phase: Any, out: Any) -> None:
                out.loss = out.loss * float("nan")

        with pytest.raises(NumericsError):
            train(tmp_path / "run", hooks={"break": Break()})
        code, shown = replayed(tmp_path / "run", 1)
        assert (code, "the step is finite now" in shown) == (
            1,
            True,
        )
