"""A loader of a user's own saves its place with every checkpoint, or reads a pass again, or is
refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, die, newest, parted, train
from raising import raises
from reading_parts import Lengthless, Short, Stateful, Uneven

from phasetrain.data.bad_samples import SampleError
from phasetrain.data.datasets import load_digits
from phasetrain.data.loading.custom_loader import CustomLoaderSpec
from phasetrain.engine.batch import Batch
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.testing import assert_exact_resume
from phasetrain.testing.build import build_run

OWN = "DATA.TRAIN.loader=reading_parts.Stateful"
PLAIN = "DATA.TRAIN.loader={name: torch.utils.data.DataLoader, shuffle: true, drop_last: true}"
NO_TRANSFORMS = ("DATA.TRAIN.transforms=[]", "DATA.TRAIN.batch_size=24")


def first_steps(*words: str, steps: int = 3, start: int = 0) -> list[list[Batch]]:
    made = build_run(
        ["PHASES.epochs=1", "DATA.TRAIN.transforms=[]", "DATA.TRAIN.batch_size=48", *words]
    )
    phase = made.plan.phases[0]
    batches = made.task.parts.loaders["train"].batches(phase, start)
    return [next(batches) for _ in range(steps)]


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build_run(["PHASES.epochs=1", "DATA.TRAIN.transforms=[]", *words])
    return str(caught.value)


class TestBatches:
    def test_the_plan_has_its_length_and_a_step_its_micro_batches(self) -> None:
        words = ("DATA.TRAIN.transforms=[]", "DATA.TRAIN.batch_size=48", "OPTIMIZER.accumulate=2")
        made = build_run(["PHASES.epochs=1", *words, OWN])
        phase = made.plan.phases[0]
        assert (phase.steps, phase.end) == (1442 // 24 // 2, 1440)
        step = next(iter(made.task.parts.loaders["train"].batches(phase)))
        assert [batch.size for batch in step] == [24, 24]
        assert torch.cat([batch.ids for batch in step]).tolist() == list(range(48))

    def test_what_it_draws_is_a_function_of_the_place_and_the_generators_stay(self) -> None:
        loader = build_run(["DATA.TRAIN.transforms=[]", "PHASES.epochs=1", OWN])
        phase, steps = loader.plan.phases[0], []
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            steps.append(list(loader.task.parts.loaders["train"].batches(phase)))
            assert torch.equal(torch.get_rng_state(), before)
        one, other = steps
        assert all(torch.equal(a.input, b.input) for (a,), (b,) in zip(one, other, strict=True))
        assert not torch.equal(one[0][0].input, one[1][0].input)

    def test_names_of_inputs_hold_for_batches(self) -> None:
        [[batch]] = first_steps(OWN, "DATA.TRAIN.inputs=0", "DATA.TRAIN.targets=[]", steps=1)
        assert (batch.input.shape, batch.target) == ((48, 1, 8, 8), None)


class TestResume:
    def test_a_killed_run_goes_on_bit_for_bit(self) -> None:
        assert_exact_resume([*NO_TRANSFORMS, OWN, "OPTIMIZER.accumulate=2"], workers=None)

    def test_one_that_forgets_its_place_is_found(self) -> None:
        with pytest.raises(AssertionError, match="batch"):
            assert_exact_resume(
                [*NO_TRANSFORMS, "DATA.TRAIN.loader={name: reading_parts.Stateful, forget: true}"],
                steps=[2],
                workers=None,
            )

    def test_a_pass_cut_by_tests_goes_on(self, tmp_path: Path) -> None:
        words = (
            *NO_TRANSFORMS,
            OWN,
            "PHASES.test_every={updates: 2, epochs: null}",
            "PHASES.epochs=2",
        )
        train(tmp_path / "one", *words)
        die(tmp_path / "other", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(5)})
        assert newest(tmp_path / "other").state["task"]["data.train.loader"]["loader"]["place"] > 0
        train(tmp_path / "other", *words)
        assert parted(tmp_path / "one", tmp_path / "other") == []

    def test_without_a_state_a_pass_is_read_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        words = (*NO_TRANSFORMS, PLAIN, "DATA.TRAIN.fast_forward=true")
        train(tmp_path / "one", *words)
        die(tmp_path / "other", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)})
        train(tmp_path / "other", *words)
        assert parted(tmp_path / "one", tmp_path / "other") == []
        log = (tmp_path / "other" / "log.txt").read_text()
        assert "DATA.TRAIN.fast_forward: reading 3 batches to reach batch 3" in log

    def test_a_place_of_which_nothing_is_known_is_refused(self) -> None:
        with pytest.raises(
            ChangedError,
            match=r"DATA\.TRAIN\.loader",
        ):
            first_steps(OWN, start=5)


class TestRefusals:
    def own(self, loader: Any, **given: Any) -> CustomLoaderSpec:
        return CustomLoaderSpec(
            lambda seed: loader, "DATA.TRAIN", samples=64, batches=1, processes=1, **given
        )

    def test_without_a_state(self) -> None:
        assert "StatefulDataLoader, or set DATA.TRAIN.fast_forward=true" in refused(PLAIN)

    def test_without_a_length(self) -> None:
        with raises(ConfigError, key="DATA.TRAIN.loader"):
            self.own(Lengthless(load_digits()))

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                [OWN, "DATA.TRAIN.transforms=[flatten]"],
                "DATA.TRAIN.loader = 'reading_parts.Stateful': DATA.TRAIN.transfor",
            ),
            (
                ["DATA.TRAIN.loader=builtins.list"],
                "DATA.TRAIN.loader = 'builtins.list':",
            ),
            (
                ["DATA.TRAIN.loader={name: reading_parts.Stateful, rank: 1}"],
                "DATA.TRAIN.loader.rank = 1 (command line): th",
            ),
            (
                ["DATA.TRAIN.loader={name: reading_parts.Stateful, rnk: 1}"],
                "DATA.TRAIN.loader.rnk = 1 (command line): ",
            ),
        ],
    )
    def test_what_does_not_go_together(self, words: list[str], message: str) -> None:
        assert refused(*words).startswith(message)

    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            (Short, "DATA.TRAIN.loader ends after 2 batches of an epoch, and its length is 30"),
            (
                Uneven,
                "DATA.TRAIN.loader returns 5 samples in batch 0, expected 48 (DATA.TRAIN.micro_batch_size)",
            ),
        ],
    )
    def test_batches_that_are_not_as_told(self, kind: type, message: str) -> None:
        with pytest.raises(SampleError, match=re.escape(message)):
            first_steps(f"DATA.TRAIN.loader=reading_parts.{kind.__name__}")

    def test_it_is_what_the_test_believes(self) -> None:
        """The control: the same class without a fault passes."""
        assert len(first_steps("DATA.TRAIN.loader=reading_parts.WithoutRank")) == 3
        assert isinstance(Stateful(load_digits(), 4, 0), Stateful)
