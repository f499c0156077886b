"""The hook `activations`: the figures are right, no bit of a run changes, and only what is due is
watched."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    records,
    run_until_killed,
    train,
)
from raising import raises
from torch import Tensor, nn

from phasetrain.addons.observe.profiling.activations import (
    Activations,
    TensorMoments,
    compute_moments,
    iterate_floating,
    select_modules,
)
from phasetrain.app.api import run
from phasetrain.app.train.train import Loop
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks.parts import StepEvents
from phasetrain.testing import assert_exact_resume, differences

ALL = "HOOKS.activations={every_updates: 4, gradients: true, histogram: true}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train(folder)
    return folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    train(folder, ALL)
    return folder


def activation_lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in records(folder) if line["kind"] == "activations"]


def differences_of_tasks(one: Path, other: Path) -> list[str]:
    """Return in what parts of two finished runs differ that learn or count."""
    found = differences(newest(one).state["task"], newest(other).state["task"], "task")
    return found + differences(
        (one / "steps.ledger").read_bytes(), (other / "steps.ledger").read_bytes(), "ledger"
    )


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        )
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])


def forgets(engine: PhaseEngine) -> None:
    """A loop that tells of its batches and of nothing else."""
    for batches in engine.steps():
        engine.events().on_batch(batches[0])
        engine.finish(engine.task.train_step(batches, engine.position(), StepEvents()))


def silent(engine: PhaseEngine) -> None:
    for batches in engine.steps():
        engine.finish(engine.task.train_step(batches, engine.position(), StepEvents()))


class TestCustomLoop:
    def looped(self, folder: Path, loop: Loop) -> str:
        terminal = Terminal(io.StringIO(), live=False)
        run([*SMALL, f"RUN.dir={folder}", ALL], loop=loop, terminal=terminal)
        return (folder / "log.txt").read_text()

    def test_without_forward_events_it_has_the_same_lines(
        self, watched: Path, tmp_path: Path
    ) -> None:
        assert "HOOKS.activations" not in self.looped(tmp_path, forgets)
        assert activation_lines(tmp_path) == activation_lines(watched)

    def test_without_any_event_there_is_one_warning(self, tmp_path: Path) -> None:
        assert self.looped(tmp_path, silent).count("HOOKS.activations: ") == 1
        assert activation_lines(tmp_path) == []


class TestChosen:
    @pytest.mark.parametrize(
        ("rules", "names"),
        [
            (["*"], ["trunk.0", "trunk.1", "trunk.2.0", "trunk.2.1", "heads.0", "heads.1"]),
            (["trunk"], ["trunk"]),
            (["trunk.*"], ["trunk.0", "trunk.1", "trunk.2.0", "trunk.2.1"]),
            (["Linear"], ["trunk.0", "trunk.2.0", "heads.0", "heads.1"]),
            (["ReLU", "trunk.2"], ["trunk.1", "trunk.2", "trunk.2.1"]),
            (["Seq*"], ["trunk", "trunk.2"]),
            (["trunk.[02]"], ["trunk.0"]),
            (["heads.?", "heads.0"], ["heads.0", "heads.1"]),
        ],
    )
    def test_modules_are_selected_by_name_and_class(
        self, rules: list[str], names: list[str]
    ) -> None:
        assert list(select_modules(Model(), rules)) == names

    def test_single_module_is_called_model(self) -> None:
        assert list(select_modules(nn.Linear(2, 2), ["*"])) == ["model"]

    @pytest.mark.parametrize(
        ("rule", "near"),
        [
            ("trnk", "'trunk'"),
            ("Liner", "'Linear'"),
            ("heads", r"trunk, trunk\.0"),
        ],
    )
    def test_a_rule_that_fits_nothing(self, rule: str, near: str) -> None:
        with pytest.raises(
            ConfigError, match=rf"HOOKS\.activations\.modules = \[{rule}\]: .*{near}"
        ):
            select_modules(Model(), ["*", rule])


class TestMeasured:
    def test_moments_and_histogram_of_six_numbers(self) -> None:
        row = compute_moments(torch.tensor([[0.0, 1.0, 2.0], [0.0, -3.0, 6.0]]), bins=3).tolist()
        assert row == [6.0, 1.0, 44.0, -3.0, 6.0, 2.0, 1.0, 4.0, 1.0]
        shown = TensorMoments(6, *row[:6]).as_json()
        assert shown == {
            "mean": 1.0, "std": math.sqrt(44 / 6), "min": -3.0, "max": 6.0, "norm": math.sqrt(50), "zeros": 1 / 3,
            "nonfinite": 0.0,
        }  # fmt: skip

    @pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
    def test_moments_equal_those_of_torch(self, kind: torch.dtype) -> None:
        values = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0)).to(kind)
        row = compute_moments(values, bins=20).tolist()
        shown = TensorMoments(values.numel(), *row[:6]).as_json()
        exact = values.double()
        assert shown["mean"] == pytest.approx(float(exact.mean()), rel=1e-5)
        assert shown["std"] == pytest.approx(float(exact.std(correction=0)), rel=1e-5)
        assert shown["norm"] == pytest.approx(float(exact.norm()), rel=1e-5)
        assert (shown["min"], shown["max"]) == (float(exact.min()), float(exact.max()))
        if kind in (torch.float32, torch.float64):
            assert row[6:] == torch.histc(exact, 20).tolist()
        assert sum(row[6:]) == values.numel()

    def test_numbers_that_are_not_finite_are_counted_and_left_out(self) -> None:
        row = compute_moments(
            torch.tensor([1.0, math.inf, math.nan, 3.0, -math.inf]), bins=2
        ).tolist()
        assert row == [2.0, 2.0, 2.0, 1.0, 3.0, 0.0, 1.0, 1.0]
        assert TensorMoments(5, *row[:6]).as_json()["nonfinite"] == 0.6
        none = TensorMoments(
            2, *compute_moments(torch.tensor([math.inf, math.nan])).tolist()
        ).as_json()
        assert (none["mean"], none["max"], none["nonfinite"]) == ("nan", "nan", 1.0)
        assert json.loads(json.dumps(none), parse_constant=pytest.fail) == none

    def test_equal_numbers_and_large_ones(self) -> None:
        assert compute_moments(torch.full((9,), 0.25), bins=4).tolist() == [
            9.0,
            0.25,
            0.0,
            0.25,
            0.25,
            0.0,
            0.0,
            0.0,
            0.0,
            9.0,
        ]
        spread = TensorMoments(100, *compute_moments(1e4 + torch.arange(100.0) / 64).tolist())
        assert spread.as_json()["std"] == pytest.approx(0.45103, rel=1e-4)

    def test_sums_that_are_no_number_any_more(self) -> None:
        shown = TensorMoments(2, *compute_moments(torch.tensor([3e38, -3e38])).tolist()).as_json()
        assert (shown["mean"], shown["std"], shown["max"], shown["nonfinite"]) == (
            0.0,
            "inf",
            pytest.approx(3e38),
            0.0,
        )

    def test_moments_of_two_tensors_add_up(self) -> None:
        first, second = torch.arange(5.0), torch.tensor([7.0, math.nan, 0.0])
        whole = TensorMoments(8, *compute_moments(torch.cat([first, second])).tolist())
        parts = [TensorMoments(len(one), *compute_moments(one).tolist()) for one in (first, second)]
        for found in (parts[0] + parts[1], parts[1] + parts[0]):
            assert found.as_json() == pytest.approx(whole.as_json())
        nothing = TensorMoments(1, *compute_moments(torch.tensor([math.nan])).tolist())
        assert (parts[0] + nothing).as_json() == (nothing + parts[0]).as_json()
        assert (parts[0] + nothing).as_json()["nonfinite"] == 1 / 6

    def test_no_random_number_is_drawn_and_the_tensor_stays(self) -> None:
        values = torch.randn(10, requires_grad=True)
        before, content = torch.get_rng_state(), values.detach().clone()
        assert not compute_moments(values, bins=20).requires_grad
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.equal(values, content)
        assert values._version == 0

    def test_only_nonempty_floating_tensors_are_measured(self) -> None:
        one, two = torch.ones(2), torch.ones(3)
        output = {
            "a": [one, torch.ones(2, dtype=torch.int64)],
            "b": (two, None, torch.ones(0)),
            "c": 4.0,
        }
        assert [
            tensor is expected
            for tensor, expected in zip(iterate_floating(output), (one, two), strict=True)
        ] == [
            True,
            True,
        ]


class TestARun:
    def test_hook_changes_no_bit(self, plain: Path, watched: Path) -> None:
        assert differences_of_tasks(plain, watched) == []
        assert [line for line in records(watched) if line["kind"] != "activations"] == records(
            plain
        )

    def test_lines_hold_moments_and_histograms(self, watched: Path) -> None:
        found = activation_lines(watched)
        places = [
            (line["updates"], line["phase"], line["split"], line["epoch"], line["step"])
            for line in found
        ]
        assert places == [(4, 0, "train", 0, 4), (8, 2, "train", 1, 3), (12, 4, "train", 2, 2)]
        kinds = ("outputs", "outputs_histograms", "gradients", "gradients_histograms")
        assert all(set(kinds) <= line.keys() for line in found)
        names = dict.fromkeys(name.rpartition("/")[0] for name in found[0]["outputs"])
        assert list(names) == list(found[0]["outputs_histograms"])
        assert {name.rpartition("/")[2] for name in found[0]["gradients"]} == {
            "mean", "std", "min", "max", "norm", "zeros", "nonfinite",
        }  # fmt: skip
        histogram = found[0]["outputs_histograms"]["features.0"]
        assert len(histogram["counts"]) == 20
        assert sum(histogram["counts"]) == 24 * 4 * 8 * 8
        assert histogram["max"] == found[0]["outputs"]["features.0/max"]

    def test_the_figures_are_those_of_the_weights_before_the_update(
        self, watched: Path, tmp_path: Path
    ) -> None:
        """Watched by a hook of the test, which keeps whole tensors."""

        class Keeps(Hook):
            observe_only = True

            def __init__(self) -> None:
                self.kept: dict[str, list[Tensor]] = {"outputs": [], "gradients": []}

            def on_start(self, run: Any) -> None:
                self.first = run.task.parts.model.get_submodule("features.0")
                self.first.register_forward_hook(self.keep)

            def keep(self, module: Any, args: Any, output: Tensor) -> None:
                self.kept["outputs"].append(output.detach().clone())
                if output.requires_grad:
                    output.register_hook(
                        lambda gradient: self.kept["gradients"].append(gradient.clone())
                    )

        keeps = Keeps()
        train(tmp_path, hooks={"keeps": keeps})
        for kind, found in keeps.kept.items():
            fourth, told = found[3].double(), activation_lines(watched)[0][kind]
            assert told["features.0/mean"] == pytest.approx(
                float(fourth.mean()), rel=1e-4, abs=1e-9
            )
            assert told["features.0/norm"] == pytest.approx(float(fourth.norm()), rel=1e-6)
            assert told["features.0/max"] == float(fourth.max())
            assert told["features.0/min"] != float(found[2].min())

    def test_a_run_that_was_killed_has_the_same_lines(self, watched: Path, tmp_path: Path) -> None:
        # After update 4, of which there is a line.
        run_until_killed(tmp_path, ALL, hooks={"save": SaveEachStep(), "kill": KillAfter(4)})
        train(tmp_path, ALL)
        assert differences_of_runs(watched, tmp_path) == []
        assert len(activation_lines(tmp_path)) == 3

    @pytest.mark.slow
    def test_checkpoint_does_not_contain_the_hook(self) -> None:
        assert_exact_resume(
            ["HOOKS.activations={every_updates: 2, gradients: true}"], steps=[1], workers=(0,)
        )

    @pytest.mark.by_default(1)
    @pytest.mark.parametrize(
        "words",
        [
            ("OPTIMIZER.accumulate=3", "MACHINE.precision=bf16"),
            pytest.param(
                ("OPTIMIZER={name: sgd, lr: 0.05, accumulate: 2}", "OPTIMIZER.sam={rho: 0.1}"),
                marks=pytest.mark.addon("optimizers"),
            ),
            ("MACHINE.activation_checkpointing=[features]", "OPTIMIZER.accumulate=2"),
        ],
    )
    def test_other_ways_to_make_an_update(self, tmp_path: Path, words: tuple[str, ...]) -> None:
        words = (*words, "PHASES.epochs=1")
        train(tmp_path / "plain", *words)
        train(tmp_path / "watched", *words, "HOOKS.activations={every_updates: 2, gradients: true}")
        assert differences_of_tasks(tmp_path / "plain", tmp_path / "watched") == []
        found = activation_lines(tmp_path / "watched")
        assert [line["updates"] for line in found] == [2, 4]
        assert found[0]["outputs"].keys() == found[0]["gradients"].keys()

    def test_only_the_first_micro_batch_of_an_update_that_is_due_is_watched(
        self, tmp_path: Path
    ) -> None:
        class Counts(Hook):
            """Counts the hooks of modules after each micro-batch's batch is there; the last one to
            hear of it."""

            seen: list[int] = []

            def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
                self.seen.append(
                    sum(len(module._forward_hooks) for module in run.task.parts.model.modules())
                )

        counts = Counts()
        words = (
            "PHASES.epochs=1",
            "OPTIMIZER.accumulate=2",
            "HOOKS.activations={every_updates: 2, modules: [Conv2d]}",
        )
        train(tmp_path, *words, hooks={"counts": counts})
        assert counts.seen == [0, 0, 3, 0, 0, 0, 3, 0, 0, 0, 0, 0]

    def test_a_step_whose_update_was_not_made_has_its_line(self, tmp_path: Path) -> None:
        class Spoils(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Any) -> None:
                if phase.is_train and run.state.updates == 2:
                    batch.input[0, 0, 0, 0] = math.nan

        words = (
            "PHASES.epochs=1",
            "OPTIMIZER.on_nonfinite=skip",
            "HOOKS.activations={every_updates: 3}",
        )
        train(tmp_path, *words, hooks={"spoils": Spoils()})
        [line] = activation_lines(tmp_path)
        assert 0 < line["outputs"]["features.0/nonfinite"] < 0.1
        assert isinstance(line["outputs"]["features.0/mean"], float)


class TestRejected:
    @pytest.mark.slow
    def test_compiled_model_is_rejected(self, tmp_path: Path) -> None:
        with raises(ConfigError, code="config.conflict"):
            train(tmp_path, "HOOKS.activations={}", "MACHINE.compile=eager")

    def test_run_without_metrics_is_rejected(self, tmp_path: Path) -> None:
        with raises(ConfigError, code="config.conflict"):
            train(tmp_path, "HOOKS.activations={}", "HOOKS.metrics=null")

    @pytest.mark.parametrize(
        ("words", "given"),
        [
            ("{every_updates: 0}", r"HOOKS\.activations .*every_updates = 0"),
            ("{modules: []}", r"modules = \[\]"),
            (
                "{modules: [featurs.0]}",
                r"HOOKS\.activations\.modules = \[featurs\.0\]: .*'features\.0'",
            ),
        ],
    )
    def test_invalid_settings_are_rejected(self, tmp_path: Path, words: str, given: str) -> None:
        with pytest.raises(ConfigError, match=given):
            train(tmp_path, f"HOOKS.activations={words}")
        assert HOOKS["activations"] is Activations
