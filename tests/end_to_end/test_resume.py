"""A run that is killed at any step and started again ends with the bits of one that was not."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from harness import (
    STEPS,
    KillAfter,
    Killed,
    SaveEachStep,
    differences_of_runs,
    leftovers,
    newest,
    records,
    run_until_killed,
    train,
)

from phasetrain.data import PhaseSampler
from phasetrain.engine.plan import Phase
from phasetrain.hooks import Hook, Run
from phasetrain.runtime.machine import reseed
from phasetrain.tasks import Task
from phasetrain.tasks.generator_use import GeneratorUse


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    result = train(folder)
    assert (result.state, result.updates, result.exit_code) == ("finished", 15, 0)
    return folder


@pytest.mark.feature("20", "results are written during the run", "`metrics.jsonl`")
def test_the_unbroken_run_logs_each_step_and_phase_once(unbroken: Path) -> None:
    found = records(unbroken)
    assert [r["updates"] for r in found if r["kind"] == "step"] == list(range(1, 16))
    assert [(r["split"], r["epoch"]) for r in found if r["kind"] == "phase"] == [
        (split, epoch) for epoch in range(3) for split in ("train", "test")
    ]
    assert found[0].keys() == {
        "kind",
        "updates",
        "phase",
        "split",
        "epoch",
        "step",
        "samples",
        "loss",
        "lr",
    }
    assert leftovers(unbroken) == []


def test_two_unbroken_runs_are_equal_and_another_seed_is_not(
    unbroken: Path, tmp_path: Path
) -> None:
    train(tmp_path / "same")
    assert differences_of_runs(unbroken, tmp_path / "same") == []
    train(tmp_path / "other", "RUN.seed=1")
    assert "metrics.jsonl.0.loss" in differences_of_runs(unbroken, tmp_path / "other")


def die_after_each(folder: Path, steps: Sequence[int], *overrides: str) -> None:
    """Run in attempts that are killed after the given numbers of steps of the whole run."""
    for before, after in pairwise((0, *steps)):
        hooks = {"save": SaveEachStep(), "kill": KillAfter(after - before)}
        run_until_killed(folder, *overrides, hooks=hooks)


@pytest.mark.feature("B1", "bit-identical after a kill at every step; 1,000 SIGKILLs", "")
def test_run_killed_at_the_ends_of_phases_resumes_exactly(unbroken: Path, tmp_path: Path) -> None:
    # the first and last steps of phases and of the run, and two between
    die_after_each(tmp_path, (0, 1, 4, 5, 6, 7, 12, 20))
    assert train(tmp_path).state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []
    assert leftovers(tmp_path) == []


@pytest.mark.feature("B1")
@pytest.mark.slow
@pytest.mark.parametrize("step", range(STEPS))
def test_killed_at_every_step_and_resumed_from_that_step(
    unbroken: Path, tmp_path: Path, step: int
) -> None:
    run_until_killed(tmp_path, hooks={"save": SaveEachStep(), "kill": KillAfter(step)})
    result = train(tmp_path, hooks={"save": SaveEachStep()})
    assert result.state == "finished"
    assert differences_of_runs(unbroken, tmp_path) == []
    assert leftovers(tmp_path) == []


class DecayByRate(Hook):
    """Shrinks the weights before a phase by the learning rate of the last update."""

    def on_phase_start(self, run: Run, phase: Phase) -> None:
        with torch.no_grad():
            for weight in run.task.model.parameters():
                weight.mul_(1 - run.task.updater.lr)


def test_hook_sees_the_last_learning_rate_after_a_resume(tmp_path: Path) -> None:
    words = ("OPTIMIZER.SCHEDULES={lr: {name: cosine}}",)
    train(tmp_path / "whole", *words, hooks={"decay": DecayByRate()})
    end_of_epoch = {"save": SaveEachStep(), "kill": KillAfter(5), "decay": DecayByRate()}
    run_until_killed(tmp_path / "killed", *words, hooks=end_of_epoch)
    train(tmp_path / "killed", *words, hooks={"decay": DecayByRate()})
    assert differences_of_runs(tmp_path / "whole", tmp_path / "killed") == []


@pytest.mark.by_default("4")
@pytest.mark.parametrize("every", [1, 2, 4])
def test_run_killed_between_checkpoints_repeats_steps_exactly(
    unbroken: Path, tmp_path: Path, every: int
) -> None:
    overrides = (f"CHECKPOINT.every_updates={every}", "CHECKPOINT.every_epochs=null")
    attempts = 0
    for _ in range(40):
        attempts += 1
        try:
            train(tmp_path, *overrides, hooks={"kill": KillAfter(7)})
            break
        except Killed:
            continue
    assert attempts > 2
    assert differences_of_runs(unbroken, tmp_path) == []


@pytest.mark.by_default(1)
@pytest.mark.parametrize("workers", [(2, 1), (2, 0), (0, 1), (0, 2)])
@pytest.mark.parametrize("step", [6, 3, 5, 12])
def test_the_number_of_workers_may_change(
    unbroken: Path, tmp_path: Path, workers: tuple[int, int], step: int
) -> None:
    before, after = (f"DATA.TRAIN.workers={n}" for n in workers)
    run_until_killed(
        tmp_path,
        before,
        "DATA.TEST.workers=1",
        hooks={"save": SaveEachStep(), "kill": KillAfter(step)},
    )
    train(tmp_path, after)
    assert differences_of_runs(unbroken, tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_way_workers_start_may_change(unbroken: Path, tmp_path: Path, method: str) -> None:
    run_until_killed(tmp_path, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
    train(
        tmp_path,
        "DATA.TRAIN.workers=2",
        f"DATA.TRAIN.start_method={method}",
        "DATA.TRAIN.prefetch=4",
    )
    assert differences_of_runs(unbroken, tmp_path) == []


@pytest.mark.feature(
    "46-47",
    "clipping by norm and value, once per update",
    "`OPTIMIZER.clip_norm`, `OPTIMIZER.clip_value`",
)
@pytest.mark.by_default(1)
@pytest.mark.parametrize("steps", [(1, 9), range(0, 17, 3)], ids=["two", "every third"])
def test_accumulation_clipping_and_adam_resume_exactly(
    tmp_path: Path, steps: Sequence[int]
) -> None:
    overrides = (
        "OPTIMIZER.name=adamw",
        "OPTIMIZER.lr=0.01",
        "OPTIMIZER.accumulate=3",
        "OPTIMIZER.clip_norm=0.5",
        "PHASES.epochs=2",
        "PHASES.test_every.updates=3",
        "DATA.TRAIN.drop_last=false",
        "PHASES.limit.train=null",
        "DATA.TRAIN.batch_size=300",
    )
    train(tmp_path / "unbroken", *overrides)
    die_after_each(tmp_path / "killed", steps, *overrides)
    train(tmp_path / "killed", *overrides)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []


@pytest.mark.feature(
    "59",
    "tf32, bf16, fp16; separate test precision; scaler saved",
    "`MACHINE.precision`, `MACHINE.test_precision`, `OPTIMIZER.scaler`",
)
@pytest.mark.by_default("fp16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_and_its_scaler_resume_exactly(tmp_path: Path, precision: str) -> None:
    words = (f"MACHINE.precision={precision}", "PHASES.epochs=1", "PHASES.limit.train=4")
    if (
        precision == "fp16"
    ):  # a scale that overflows at first: skipped updates and the scale itself are state too
        words = (*words, "OPTIMIZER.scaler={name: grad, init_scale: 1e9, growth_interval: 2}")
    train(tmp_path / "unbroken", *words)
    run_until_killed(
        tmp_path / "killed", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(2)}
    )
    train(tmp_path / "killed", *words)
    assert differences_of_runs(tmp_path / "unbroken", tmp_path / "killed") == []
    scaler = newest(tmp_path / "killed").state["task"]["updater"].get("scaler")
    assert scaler is None if precision == "bf16" else scaler["scale"] < 1e9


@pytest.mark.feature("98-100", "complete state, with half-finished meters", "")
def test_meters_of_a_phase_cut_in_half_count_every_sample_once(
    unbroken: Path, tmp_path: Path
) -> None:
    run_until_killed(
        tmp_path, hooks={"save": SaveEachStep(), "kill": KillAfter(6)}
    )  # one of two test steps is done
    assert newest(tmp_path).manifest.state == {
        "phase": 1,
        "step": 1,
        "updates": 5,
        "samples": 120,
        "finished": "",
    }
    train(tmp_path)
    assert [r for r in records(tmp_path) if r["kind"] == "phase"][1] == [
        r for r in records(unbroken) if r["kind"] == "phase"
    ][1]


PARTS = """
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from phasetrain.data import DATASETS
from phasetrain.hooks import HOOKS, Hook
from phasetrain.models import MODELS


@MODELS.register("last_channels")
class LastChannels(nn.Module):
    def __init__(self, classes: int, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(),
            nn.Linear(128, classes)
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, batch):
        return self.body(batch)


@DATASETS.register("random_split")
class RandomSplit(Dataset):
    def __init__(self, split: str):
        order = np.random.permutation(200)
        self.indices = order[:160] if split == "train" else order[160:]

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        value = torch.randn(1, 64, 64) + float(self.indices[index]) + np.random.rand()
        return (value - value.mean()) / value.std(), int(self.indices[index]) % 10

    def facts(self):
        return {"classes": 10, "channels": 1}

    def fingerprint(self):
        return str(sorted(self.indices.tolist()))


@HOOKS.register("noisy_batches")
class NoisyBatches(Hook):
    def on_batch(self, run, phase, batch):
        batch.input = batch.input + 0.1 * torch.randn_like(batch.input)
        return batch
"""


class TestPartsOfUsers:
    """What users' parts do that ours do not, each found wrong once."""

    @pytest.fixture(autouse=True)
    def _parts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "odd_parts.py").write_text(PARTS)
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        "words",
        [
            ["MODEL.name=last_channels"],
            ["MODEL.name=last_channels", "OPTIMIZER.name=adamw", "OPTIMIZER.lr=0.01"],
            ["HOOKS.noisy_batches={}"],
            [
                "DATA.TRAIN.dataset=random_split",
                "DATA.TEST.dataset=random_split",
                "MACHINE.threads=2",
            ],
        ],
        ids=lambda words: words[-1],
    )
    def test_custom_parts_resume_exactly_with_another_number_of_workers(
        self, tmp_path: Path, words: list[str]
    ) -> None:
        own = [w for w in words if not w.startswith("MODEL.name")]
        model = [w for w in words if w.startswith("MODEL.name")]
        words = [
            *(model or ["MODEL.name=small_cnn", "MODEL.width=4"]),
            *own,
            "RUN.imports=[odd_parts]",
            "PHASES.epochs=1",
        ]
        drop = ["~MODEL.width", "~MODEL.dropout"] if model else []
        unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
        train(unbroken, *words, *drop)
        run_until_killed(
            killed, *words, *drop, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        train(killed, *words, *drop, "DATA.TRAIN.workers=1")
        assert differences_of_runs(unbroken, killed) == []


class TestNegativeControls:
    """The comparison sees each of the ways in which a resume goes wrong elsewhere."""

    def test_sampler_that_forgets_its_start_is_detected(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps = PhaseSampler.steps
        run_until_killed(tmp_path, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})

        def forgetful(self: PhaseSampler, phase, start=0):  # type: ignore[no-untyped-def]
            shown = list(steps(self, phase, 0))
            return iter(shown[: phase.steps - start])

        monkeypatch.setattr(PhaseSampler, "steps", forgetful)
        train(tmp_path)
        assert "metrics.jsonl.3.loss" in differences_of_runs(unbroken, tmp_path)

    @pytest.mark.slow
    def test_dropout_seeded_once_per_attempt_is_detected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(GeneratorUse, "seed", lambda self, seed: None)
        reseed(0)
        train(tmp_path / "unbroken")
        reseed(0)
        run_until_killed(tmp_path / "killed", hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
        reseed(0)
        train(tmp_path / "killed")
        assert any(
            path.startswith("task.model")
            for path in differences_of_runs(tmp_path / "unbroken", tmp_path / "killed")
        )

    @pytest.mark.slow
    def test_unsaved_momentum_is_detected(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_until_killed(tmp_path, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
        load = torch.optim.Optimizer.load_state_dict
        monkeypatch.setattr(
            torch.optim.Optimizer,
            "load_state_dict",
            lambda self, state: load(self, {**state, "state": {}}),
        )
        train(tmp_path)
        assert any(
            path.startswith("task.model") for path in differences_of_runs(unbroken, tmp_path)
        )

    @pytest.mark.slow
    def test_reset_meters_are_detected(
        self, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run_until_killed(tmp_path, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
        begin = Task.begin
        monkeypatch.setattr(
            Task, "begin", lambda self, phase, *, fresh: begin(self, phase, fresh=True)
        )
        train(tmp_path)
        assert any("metrics.accuracy" in path for path in differences_of_runs(unbroken, tmp_path))
