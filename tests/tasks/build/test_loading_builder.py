"""A split's section gives its order, samples and batches; runs with them resume exactly."""

from typing import Any

import numpy as np
import pytest
import torch

from phasetrain.engine.batch import Batch
from phasetrain.errors import ConfigError
from phasetrain.tasks.build.loading_builder import MOST_WORKERS, count_workers
from phasetrain.testing import assert_exact_resume, assert_world_size_invariant
from phasetrain.testing.build import BuiltRun, build_run

LENGTH = ("PHASES.epochs=1",)
NAMED = "DATA.TRAIN={dataset: reading_parts.Named, inputs: image, targets: label}"
MODEL = ("MODEL={name: mlp, classes: 10, input_shape: [1, 8, 8]}",)
SAMPLING = pytest.mark.addon("sampling")
MIXED = (
    "DATA.TRAIN={dataset: mixed, datasets: {a: {dataset: digits}, b: {dataset: digits, split: test}}}",
    "DATA.TRAIN.sampler={name: proportional, proportions: {a: 1, b: 3}}",
)


def made(*words: str) -> BuiltRun:
    return build_run([*LENGTH, *words])


def first_batch(*words: str, split: str = "train") -> Batch:
    found = made(*words)
    phase = next(phase for phase in found.plan.phases if phase.split == split)
    [batch] = next(iter(found.task.parts.loaders[split].batches(phase)))
    return batch


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        made(*words)
    return str(caught.value)


class TestSubset:
    def test_subset_has_its_samples_in_batches_and_plan(self) -> None:
        words = [
            "DATA.TRAIN.subset={samples: 100, balanced: true, seed: 3}",
            "DATA.TRAIN.batch_size=100",
        ]
        found = made(*words)
        assert [phase.samples for phase in found.plan.phases if phase.is_train] == [100]
        batch = first_batch(*words)
        assert np.bincount(batch.target, minlength=10).tolist() == [10] * 10
        assert int(batch.ids.max()) > 1000

    def test_training_and_validation_subsets_are_disjoint(self) -> None:
        words = [
            "DATA.TRAIN.subset={samples: 1200}",
            "DATA.VALID={dataset: digits, split: train, batch_size: 242, subset: {skip: 1200}}",
        ]
        found = made("DATA.TRAIN.batch_size=1200", *words)
        ids = {}
        for phase in found.plan.phases[:2]:
            assert phase.split in ("train", "test")
        for split in ("train", "valid"):
            phase = next(phase for phase in found.plan.phases if phase.split == split)
            [batch] = next(iter(found.task.parts.loaders[split].batches(phase)))
            ids[split] = set(batch.ids.tolist())
        assert (len(ids["train"]), len(ids["valid"])) == (1200, 242)
        assert not ids["train"] & ids["valid"]

    @SAMPLING
    def test_every_sampler_draws_from_the_subset(self) -> None:
        words = ["DATA.TRAIN.subset={samples: 40}", "DATA.TRAIN.batch_size=40"]
        chosen = set(first_batch(*words).ids.tolist())
        for sampler in (
            "sequential",
            "{name: repeated, times: 2}",
            "{name: weighted, balanced: true}",
            "power_law",
        ):
            assert set(first_batch(*words, f"DATA.TRAIN.sampler={sampler}").ids.tolist()) <= chosen

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ["DATA.TRAIN.subset.samples=1443"],
                "DATA.TRAIN.subset: samples = 1443 and skip = 0:",
            ),
            (
                ["DATA.TRAIN.subset.sample=3"],
                "DATA.TRAIN.subset.sample = 3 (command line):",
            ),
            (
                ["DATA.TRAIN.subset=3"],
                "DATA.TRAIN.subset = 3 (command line):",
            ),
            pytest.param(
                [
                    MIXED[0],
                    "DATA.TRAIN.subset.samples=9",
                    "DATA.TRAIN.sampler={name: proportional, proportions: {a: 1}}",
                ],
                "DATA.TRAIN.sampler (sampler 'proportional'): the sampler needs a dataset with several sources",
                marks=SAMPLING,
            ),
        ],
    )
    def test_bad_subsets_are_rejected(self, words: list[str], message: str) -> None:
        assert refused(*words).startswith(message)


class TestOrder:
    @SAMPLING
    def test_length_of_the_sampler_is_that_of_the_epoch(self) -> None:
        found = made("DATA.TRAIN.sampler={name: repeated, times: 2}", "DATA.TRAIN.batch_size=100")
        train = next(phase for phase in found.plan.phases if phase.is_train)
        assert (train.end, train.steps) == (2800, 28)

    @SAMPLING
    def test_endless_sampler_fits_a_run_of_updates(self) -> None:
        words = [
            "DATA.TRAIN.sampler=infinite",
            "PHASES.epochs=null",
            "PHASES.updates=100",
            "DATA.TRAIN.batch_size=64",
        ]
        found = made(*words)
        assert [phase.steps for phase in found.plan.phases if phase.is_train] == [100]

    def test_torch_sampler_gets_the_dataset(self) -> None:
        first = first_batch("DATA.TRAIN.sampler={name: reading_parts.Backwards, step: 2}").ids
        assert ((first[:-1] - first[1:]) % 1442 == 2).all()
        some = first_batch(
            "DATA.TRAIN.sampler=torch.utils.data.RandomSampler", "DATA.TRAIN.subset.samples=70"
        )
        assert len(set(some.ids.tolist())) == 64

    def test_sampler_gets_the_lengths_of_the_shards(self) -> None:
        words = ["DATA.TRAIN={dataset: stream_parts.sharded_part}", *MODEL]
        words += ["DATA.TRAIN.batch_size=100", "DATA.TRAIN.sampler=stream_parts.last_shard_first"]
        assert first_batch(*words).ids.tolist() == [*range(50, 100), *range(50)]
        assert refused(*words, "DATA.TRAIN.subset.samples=70").startswith("DATA.TRAIN.")

    @SAMPLING
    def test_mixture_follows_its_proportions(self) -> None:
        ids = first_batch(*MIXED, "DATA.TRAIN.batch_size=100").ids
        assert int((ids >= 1442).sum()) == 75

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ["DATA.TRAIN.sampler=reading_parts.Counting"],
                "DATA.TRAIN.sampler: Counting ",
            ),
            (
                ["DATA.TRAIN.sampler=torch.utils.data.DistributedSampler"],
                "DATA.TRAIN.sampler = 'torch.utils.data.DistributedSampler':",
            ),
            pytest.param(
                ["DATA.TRAIN.sampler=weighted"],
                "DATA.TRAIN.sampler (sampler 'weighted'):",
                marks=SAMPLING,
            ),
            pytest.param(
                ["DATA.TRAIN.sampler={name: power_law, source: 3}"],
                "DATA.TRAIN.sampler.source = 3 (command line):",
                marks=SAMPLING,
            ),
            pytest.param(
                [MIXED[0], "DATA.TRAIN.sampler={name: proportional, proportions: {c: 1}}"],
                "DATA.TRAIN.sampler (sampler 'proportional'): proportions.c:",
                marks=SAMPLING,
            ),
            (
                ["DATA.TRAIN.sampler=builtins.int"],
                "DATA.TRAIN.sampler: it returned int,",
            ),
        ],
    )
    def test_bad_samplers_are_rejected(self, words: list[str], message: str) -> None:
        assert refused(*words).startswith(message)


class TestSelection:
    def test_fields_are_selected_by_name(self) -> None:
        one, other = first_batch(NAMED, *MODEL), first_batch()
        assert torch.equal(one.input, other.input)
        assert torch.equal(one.target, other.target)

    @pytest.mark.parametrize(
        ("word", "target"),
        [
            ("targets=[]", None),
            ("label_type=zero", [0] * 5),
            ("label_type=sample_index", [0, 1, 2, 3, 4]),
        ],
    )
    def test_targets_are_omitted_or_generated(self, word: str, target: Any) -> None:
        found = first_batch(f"DATA.TEST.{word}", "DATA.TEST.batch_size=5", split="test").target
        assert (None if found is None else found.tolist()) == target

    def test_targets_both_read_and_generated_are_rejected(self) -> None:
        assert refused("DATA.TRAIN.targets=1", "DATA.TRAIN.label_type=zero").startswith(
            "DATA.TRAIN.label_type = 'zero' and DATA.TRAIN.targets = 1:"
        )


@pytest.mark.parametrize(
    ("collate", "scale"),
    [
        ("reading_parts.as_batch", 1.0),
        ("{name: reading_parts.as_batch, scale: 5.0}", 5.0),
        ("{name: reading_parts.scaled_by, scale: 2.0}", 2.0),
        ("reading_parts.Sized", 3.0),
    ],
)
def test_collate_function_is_found_by_its_dotted_path(collate: str, scale: float) -> None:
    assert torch.equal(
        first_batch(f"DATA.TRAIN.collate={collate}").input, first_batch().input * scale
    )


class TestWorkers:
    def test_auto_is_0_for_data_in_memory_and_all_cores_but_one_otherwise(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = made("DATA.TRAIN.workers=auto", NAMED, *MODEL).task.parts.loaders["train"]
        whole = made("DATA.TRAIN.workers=auto").task.parts.loaders["train"]
        assert whole.settings.workers == 0
        found = []
        for cores, processes in ((4, 1), (64, 1), (64, 16), (1, 1), (2, 4)):
            monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
            found.append(count_workers("auto", one.reader))
        assert found == [3, MOST_WORKERS, 3, 0, 0]
        assert count_workers(5, one.reader) == 5

    def test_other_words_for_workers_are_rejected(self) -> None:
        assert refused("DATA.TRAIN.workers=many").startswith("DATA.TRAIN.workers = 'many' ")


EXACT = {
    "weighted": ("DATA.TRAIN.sampler={name: weighted, balanced: true, samples: 120}",),
    "stratified": (
        "DATA.TRAIN.sampler={name: stratified, classes_per_batch: 4}",
        "DATA.TRAIN.subset.samples=700",
    ),
    "split": ("DATA.TRAIN.sampler={name: reading_parts.Heavy, limit: 400}",),
    "proportional": MIXED,
    "torch": ("DATA.TRAIN.sampler=reading_parts.Backwards",),
    "repeated": ("DATA.TRAIN.sampler=repeated", "DATA.TRAIN.transforms=[{name: noise, std: 0.1}]"),
}


ADDONS = {
    **dict.fromkeys(("proportional", "repeated", "weighted"), SAMPLING),
    "stratified": pytest.mark.addon("vision"),
}

NAMES = [pytest.param(name, marks=[ADDONS[name]] if name in ADDONS else []) for name in EXACT]


@pytest.mark.parametrize("name", NAMES)
def test_updates_get_the_same_samples_with_any_world_size(name: str) -> None:
    assert_world_size_invariant([*EXACT[name], "DATA.TRAIN.batch_size=24"], sizes=(1, 3))


@pytest.mark.parametrize(
    "name", ["split", pytest.param("proportional", marks=[SAMPLING, pytest.mark.slow])]
)
def test_killed_run_resumes_bit_identically(name: str) -> None:
    assert_exact_resume([*EXACT[name], "DATA.TRAIN.batch_size=24"], steps=[2, 5], workers=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_killed_run_with_workers_resumes_bit_identically(name: str) -> None:
    assert_exact_resume([*EXACT[name], "DATA.TRAIN.batch_size=24"])


def test_sampler_that_counts_its_epochs_fails_the_comparison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: without the check at the start, the kit finds what it would do."""
    monkeypatch.setattr(
        "phasetrain.data.samplers.torch_sampler.np.array_equal", lambda one, other: True
    )
    with pytest.raises(AssertionError, match="batch"):
        assert_exact_resume(["DATA.TRAIN.sampler=reading_parts.Counting"], steps=[4], workers=None)
