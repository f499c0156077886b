"""A recheck changes no bit of a run, finds a planted bit flip, and takes the trust from later
checkpoints."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, run_until_killed, status, train
from raising import raises
from torch import Tensor

import phasetrain
from phasetrain.addons.observe.recheck.recheck import Recheck
from phasetrain.app.result import RunResult
from phasetrain.data import PhaseLoader
from phasetrain.engine.loop import PhaseEngine
from phasetrain.errors import ConfigError, CorruptionError
from phasetrain.hooks import HOOKS, Hook, on

EACH = "HOOKS.recheck={every_minutes: 1e-9}"
"""A recheck of every update but the first."""

SHORT = ("PHASES.epochs=1", "PHASES.limit.train=6", "DATA.TEST=null")


def flip(tensor: Tensor, entry: int = 0, bit: int = 20) -> None:
    """Flip one bit of a float32 tensor."""
    tensor.detach().view(torch.int32).view(-1)[entry] ^= 1 << bit


def weight_of(run: Any) -> Tensor:
    found: Tensor = next(run.task.parts.model.parameters())
    return found


def momentum_of(run: Any) -> Tensor:
    found: Tensor = run.task.updater.optimizer.state[weight_of(run)]["momentum_buffer"]
    return found


class Plant(Hook):
    """Flips a bit in an event of an update, as a faulty memory would."""

    observe_only = True

    def __init__(self, event: str, where: Callable[[Any], Tensor], update: int = 4) -> None:
        self.update = update
        self.where = where
        self.event = event

    def flip_in(self, event: str, run: Any) -> None:
        if event == self.event and run.state.updates == self.update - 1:
            flip(self.where(run))

    def on_step_start(self, run: Any, phase: Any) -> None:
        self.flip_in("step_start", run)

    def on_backward(self, run: Any, phase: Any, out: Any) -> None:
        self.flip_in("backward", run)

    def on_update(self, run: Any, phase: Any) -> None:
        self.flip_in("update", run)


def record(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "checkpoints/rechecked.json").read_text())
    assert isinstance(found, dict)
    return found


def fail(folder: Path, *words: str, hooks: dict[str, Hook] | None = None) -> dict[str, Any]:
    """Train until a recheck fails, and return the facts about the mismatch."""
    with raises(CorruptionError, key="HOOKS.recheck", code="recheck.mismatch"):
        train(folder, *SHORT, EACH, *words, hooks=hooks)
    facts: dict[str, Any] = record(folder)["mismatches"][-1]
    return facts


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run without rechecks."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    train(folder, *SHORT)
    return folder


class TestNoEffect:
    @pytest.mark.feature("recheck")
    def test_run_with_rechecks_of_all_updates_has_the_same_bits(
        self, plain: Path, tmp_path: Path
    ) -> None:
        train(tmp_path, *SHORT, EACH)
        assert differences_of_runs(plain, tmp_path) == []
        assert status(tmp_path)["rechecked"] == {"updates": 5, "last": 6}

    @pytest.mark.parametrize(
        "words",
        [
            (
                "OPTIMIZER={name: adamw, lr: 0.01, accumulate: 2, clip_norm: 0.5}",
                "MODEL.ema={decay: 0.9}",
            ),
            pytest.param(
                ("OPTIMIZER.sam={rho: 0.05}", "DATA.TRAIN.batch_transforms=[mixing_parts.Blended]"),
                marks=[pytest.mark.addon("optimizers"), pytest.mark.slow],
            ),
            pytest.param(("DATA.TRAIN.workers=2",), marks=pytest.mark.slow),
            pytest.param(
                ("MACHINE.precision=bf16", "OPTIMIZER.scaler=grad"), marks=pytest.mark.slow
            ),
        ],
        ids=["accumulation-adamw-average", "sam-batch-transform", "workers", "scaler"],
    )
    def test_bits_are_equal_with_other_parts_of_a_step(
        self, tmp_path: Path, words: tuple[str, ...]
    ) -> None:
        train(tmp_path / "plain", *SHORT, *words)
        train(tmp_path / "checked", *SHORT, *words, EACH)
        assert differences_of_runs(tmp_path / "plain", tmp_path / "checked") == []
        assert status(tmp_path / "checked")["rechecked"]["updates"] == 5

    @pytest.mark.slow
    def test_update_without_samples_is_not_checked(self, tmp_path: Path) -> None:
        found: list[int] = []

        @on("batch")
        def note_ids(run: Any, phase: Any, batch: Any) -> None:
            if run.state.updates == 3:
                found.extend(batch.ids.tolist())

        train(tmp_path / "all", *SHORT, hooks={"note": note_ids})
        words = (*SHORT, f"DATA.TRAIN.exclude={found}")
        train(tmp_path / "plain", *words)
        train(tmp_path / "checked", *words, EACH)
        assert differences_of_runs(tmp_path / "plain", tmp_path / "checked") == []
        assert status(tmp_path / "checked")["rechecked"]["updates"] == 4

    def test_killed_run_resumes_with_the_same_bits(self, plain: Path, tmp_path: Path) -> None:
        hooks = {"save": SaveEachStep(), "kill": KillAfter(3)}
        run_until_killed(tmp_path, *SHORT, EACH, hooks=hooks)
        assert record(tmp_path)["good"] in (2, 3)
        train(tmp_path, *SHORT, EACH)
        assert differences_of_runs(plain, tmp_path) == []


class TestFlips:
    @pytest.mark.feature(
        "recheck",
        "silent corruption: random updates are computed twice; a flipped bit ends the run, names "
        "update, component and device, and later checkpoints are not used",
        "`HOOKS.recheck`",
    )
    @pytest.mark.parametrize(
        ("event", "where", "component"),
        [
            ("step_start", weight_of, "loss"),
            ("step_start", momentum_of, "weights"),
            ("backward", lambda run: weight_of(run).grad, "weights"),
            ("update", weight_of, "weights"),
            ("update", momentum_of, "optimizer state"),
        ],
        ids=["weight-at-rest", "momentum-at-rest", "gradient", "new-weight", "new-momentum"],
    )
    def test_flipped_bit_is_found_and_its_component_named(
        self, tmp_path: Path, event: str, where: Callable[[Any], Tensor], component: str
    ) -> None:
        facts = fail(tmp_path, hooks={"plant": Plant(event, where)})
        assert (facts["update"], facts["good"], facts["components"][0]) == (4, 3, component)
        assert (facts["ranks"], facts["devices"][0].split()[0]) == ([0], "cpu")
        assert facts["verdict"].startswith("A third computation agrees with the second")

    def test_flip_while_the_gradient_is_computed_names_the_gradient(self, tmp_path: Path) -> None:
        class Disturb(Plant):
            """Disturbs the gradient of the last layer, as a faulty unit in a backward pass does."""

            def on_step_start(self, run: Any, phase: Any) -> None:
                if run.state.updates == self.update - 1:
                    bias = list(run.task.parts.model.parameters())[-1]
                    self.handle = bias.register_hook(lambda gradient: gradient * 2)

            def on_update(self, run: Any, phase: Any) -> None:
                if run.state.updates == self.update - 1:
                    self.handle.remove()

        facts = fail(tmp_path, hooks={"plant": Disturb("", weight_of)})
        assert facts["components"][0] == "gradient"

    def test_sample_that_is_read_with_other_bits_is_found(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = PhaseLoader.read

        def disturbed(self: PhaseLoader, draw: Any) -> Any:
            batch = read(self, draw)
            flip(batch.input, entry=7)
            return batch

        monkeypatch.setattr(PhaseLoader, "read", disturbed)
        facts = fail(tmp_path)
        assert (facts["update"], facts["components"]) == (2, ["batch content"])

    def test_repetition_that_is_disturbed_ends_the_run_as_well(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repeat = Recheck._repeat
        calls = []

        def disturbed(self: Recheck, run: Any, step: Any) -> Any:
            trace = repeat(self, run, step)
            if not calls:
                flip(weight_of(run))
            calls.append(step)
            return trace

        monkeypatch.setattr(Recheck, "_repeat", disturbed)
        facts = fail(tmp_path)
        assert facts["components"] == ["weights"]
        assert facts["verdict"].startswith("A third computation agrees with the run")


class TestTrust:
    @pytest.mark.feature("recheck")
    def test_checkpoints_since_the_last_good_recheck_are_not_used(
        self, plain: Path, tmp_path: Path
    ) -> None:
        # The update 3 is wrong and not checked, update 5 is found: all after update 2 is suspect.
        hooks: dict[str, Hook] = {
            "save": SaveEachStep(),
            "early": Plant("update", weight_of, update=3),
            "late": Plant("update", weight_of, update=5),
            "recheck": Chosen(2, 5),
        }
        with raises(CorruptionError, code="recheck.mismatch"):
            train(tmp_path, *SHORT, hooks=hooks)
        assert status(tmp_path)["exit_code"] == 8
        assert (record(tmp_path)["good"], record(tmp_path)["is_open"]) == (2, True)
        resumed = train(tmp_path, *SHORT)
        assert resumed.updates == 6
        assert "p0000-s00000002 at update 2 of 6" in (tmp_path / "log.txt").read_text()
        assert differences_of_runs(plain, tmp_path) == []
        after = record(tmp_path)
        assert after["suspects"] == ["p0000-s00000003", "p0000-s00000004"]
        assert not after["is_open"]

    def test_run_starts_over_if_nothing_was_rechecked(self, plain: Path, tmp_path: Path) -> None:
        hooks: dict[str, Hook] = {
            "save": SaveEachStep(),
            "plant": Plant("update", weight_of),
            "recheck": Chosen(4),
        }
        with raises(CorruptionError, code="recheck.mismatch"):
            train(tmp_path, *SHORT, hooks=hooks)
        train(tmp_path, *SHORT)
        assert differences_of_runs(plain, tmp_path) == []
        assert len(record(tmp_path)["suspects"]) == 3

    def test_newest_trusted_checkpoint_is_not_deleted(self, tmp_path: Path) -> None:
        hooks: dict[str, Hook] = {"save": SaveEachStep(), "recheck": Chosen(2)}
        train(tmp_path, *SHORT, "CHECKPOINT.keep_last=2", hooks=hooks)
        names = {path.name for path in (tmp_path / "checkpoints").glob("p*")}
        assert "p0000-s00000002" in names
        assert not names & {"p0000-s00000001", "p0000-s00000003", "p0000-s00000004"}


class Chosen(Recheck):
    """Checks given updates."""

    def __init__(self, *updates: int) -> None:
        super().__init__(1e9)
        self.updates = updates

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        super().on_step(run, phase, out)
        self._is_armed = run.state.updates + 1 in self.updates


class TestRefusals:
    def test_runs_whose_updates_cannot_be_repeated_are_refused(self, tmp_path: Path) -> None:
        for code, words in {
            "recheck.not_deterministic": "MACHINE.deterministic=false",
            "recheck.not_exact": "RUN.exact=false",
        }.items():
            with raises(ConfigError, key="HOOKS.recheck", code=code):
                train(tmp_path, *SHORT, EACH, words)
        assert not (tmp_path / "checkpoints").exists()

    def test_hook_that_may_change_an_update_is_refused(self, tmp_path: Path) -> None:
        class Change(Hook):
            def on_forward(self, run: Any, phase: Any, out: Any) -> None:
                out.loss = out.loss * 2

        with raises(ConfigError, key="HOOKS.mine", code="recheck.hook"):
            train(tmp_path, *SHORT, EACH, hooks={"mine": Change()})

    def test_loop_that_computes_its_updates_itself_is_refused(self, tmp_path: Path) -> None:
        def loop(engine: PhaseEngine) -> None:
            for batches in engine.steps():
                engine.finish(engine.task.train_step(batches, engine.position(), engine.events()))

        with raises(ConfigError, key="HOOKS.recheck", code="recheck.custom_loop"):
            run_with(loop, tmp_path)

    def test_interval_has_to_be_positive(self) -> None:
        with pytest.raises(ValueError, match="every_minutes = 0"):
            Recheck(0)
        assert HOOKS["recheck"] is Recheck


def run_with(loop: Callable[[PhaseEngine], Iterator[Any] | None], folder: Path) -> RunResult:
    words = ["PHASES.epochs=1", "PHASES.limit.train=6", "DATA.TEST=null", EACH]
    return phasetrain.run([*words, "RUN.rehearse=false", f"RUN.dir={folder}"], loop=loop)
