"""A custom loader saves its position with every checkpoint, or is fast-forwarded, or is rejected."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, differences_of_runs, newest, run_until_killed, train
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


class TestBatches:
    def test_plan_has_its_length_and_a_step_has_the_micro_batches(self) -> None:
        words = ("DATA.TRAIN.transforms=[]", "DATA.TRAIN.batch_size=48", "OPTIMIZER.accumulate=2")
        made = build_run(["PHASES.epochs=1", *words, OWN])
        phase = made.plan.phases[0]
        assert (phase.steps, phase.end) == (1442 // 24 // 2, 1440)
        step = next(iter(made.task.parts.loaders["train"].batches(phase)))
        assert [batch.size for batch in step] == [24, 24]
        assert torch.cat([batch.ids for batch in step]).tolist() == list(range(48))

    def test_batches_depend_on_the_position_alone_and_generators_are_restored(self) -> None:
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

    @pytest.mark.parametrize("words", [(), ("DATA.TRAIN.subset={samples: 96}",)])
    def test_loader_reaches_the_dataset_behind_its_samples(self, words: tuple[str, ...]) -> None:
        made = build_run(
            [
                *("PHASES.epochs=1", "DATA.TRAIN.transforms=[]", "DATA.TRAIN.batch_size=48"),
                "DATA.TRAIN.loader=reading_parts.OfDataset",
                *words,
            ]
        )
        loader = made.task.parts.loaders["train"]
        [batch] = next(iter(loader.batches(made.plan.phases[0])))
        chosen = loader.reader.chosen
        labels = load_digits().labels()
        expected = labels if chosen is None else labels[chosen]
        assert batch.target.tolist() == expected[:48].tolist()

    def test_inputs_and_targets_are_selected_from_batches(self) -> None:
        [[batch]] = first_steps(OWN, "DATA.TRAIN.inputs=0", "DATA.TRAIN.targets=[]", steps=1)
        assert (batch.input.shape, batch.target) == ((48, 1, 8, 8), None)


class TestResume:
    @pytest.mark.feature("75")
    def test_killed_run_resumes_bit_identically(self) -> None:
        assert_exact_resume(
            [*NO_TRANSFORMS, OWN, "OPTIMIZER.accumulate=2"], steps=[1, 4], workers=None
        )

    def test_loader_that_forgets_its_position_fails_the_comparison(self) -> None:
        with pytest.raises(AssertionError, match="batch"):
            assert_exact_resume(
                [*NO_TRANSFORMS, "DATA.TRAIN.loader={name: reading_parts.Stateful, forget: true}"],
                steps=[2],
                workers=None,
            )

    def test_epoch_interrupted_by_tests_resumes_bit_identically(self, tmp_path: Path) -> None:
        words = (
            *NO_TRANSFORMS,
            OWN,
            "PHASES.test_every={updates: 2, epochs: null}",
            "PHASES.epochs=2",
        )
        train(tmp_path / "one", *words)
        run_until_killed(
            tmp_path / "other", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(5)}
        )
        assert newest(tmp_path / "other").state["task"]["data.train.loader"]["loader"]["place"] > 0
        train(tmp_path / "other", *words)
        assert differences_of_runs(tmp_path / "one", tmp_path / "other") == []

    def test_loader_without_state_is_fast_forwarded(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        words = (*NO_TRANSFORMS, PLAIN, "DATA.TRAIN.fast_forward=true")
        train(tmp_path / "one", *words)
        run_until_killed(
            tmp_path / "other", *words, hooks={"save": SaveEachStep(), "kill": KillAfter(3)}
        )
        train(tmp_path / "other", *words)
        assert differences_of_runs(tmp_path / "one", tmp_path / "other") == []
        log = (tmp_path / "other" / "log.txt").read_text()
        assert re.search(r"DATA\.TRAIN\.fast_forward.* 3 .* 3\b", log)

    def test_resume_without_a_saved_position_is_rejected(self) -> None:
        with raises(ChangedError, code="resume.loader_position"):
            first_steps(OWN, start=5)


class TestRefusals:
    def own(self, loader: Any, **given: Any) -> CustomLoaderSpec:
        return CustomLoaderSpec(
            lambda seed: loader, "DATA.TRAIN", samples=64, batches=1, processes=1, **given
        )

    def test_loader_without_state_is_rejected(self) -> None:
        with raises(ConfigError, code="config.invalid_loader", key="DATA.TRAIN.loader"):
            build_run(["PHASES.epochs=1", "DATA.TRAIN.transforms=[]", PLAIN])

    def test_loader_without_length_is_rejected(self) -> None:
        with raises(ConfigError, code="config.invalid_loader", key="DATA.TRAIN.loader"):
            self.own(Lengthless(load_digits()))

    @pytest.mark.parametrize(
        ("word", "key", "given"),
        [
            ("DATA.TRAIN.transforms=[flatten]", "DATA.TRAIN.loader", "'reading_parts.Stateful'"),
            ("DATA.TRAIN.loader=builtins.list", "DATA.TRAIN.loader", "'builtins.list'"),
            ("DATA.TRAIN.loader.rank=1", "DATA.TRAIN.loader.rank", "1"),
            ("DATA.TRAIN.loader.rnk=1", "DATA.TRAIN.loader.rnk", "1"),
        ],
    )
    def test_conflicting_parameters_are_rejected(self, word: str, key: str, given: str) -> None:
        words = ["PHASES.epochs=1", "DATA.TRAIN.transforms=[]"]
        with raises(ConfigError, key=key, given=given):
            build_run([*words, "DATA.TRAIN.loader={name: reading_parts.Stateful}", word])

    @pytest.mark.parametrize(
        ("kind", "code", "numbers"),
        [
            (Short, "data.loader_length", ["2", "30"]),
            (Uneven, "data.loader_batch_size", ["5", "0", "48"]),
        ],
    )
    def test_wrong_number_of_batches_or_samples_is_rejected(
        self, kind: type, code: str, numbers: list[str]
    ) -> None:
        with raises(SampleError, code=code) as caught:
            first_steps(f"DATA.TRAIN.loader=reading_parts.{kind.__name__}")
        assert re.findall(r"\d+", str(caught.value)) == numbers

    def test_loader_without_a_fault_passes(self) -> None:
        """The control: the same class without a fault passes."""
        assert len(first_steps("DATA.TRAIN.loader=reading_parts.WithoutRank")) == 3
        assert isinstance(Stateful(load_digits(), 4, 0), Stateful)
