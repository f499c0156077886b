"""Raw inputs become the batch that the reader of a test split would make."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.addons.deploy.input_transform import InputTransform, describe_transform
from phasetrain.data.loading.collate import Collate, make_pad
from phasetrain.data.transforms import Noise, Normalize, Pipeline, Resize
from phasetrain.errors import ConfigError

NORMALIZE = Normalize([0.5], [0.25])
IMAGES = torch.tensor([0.0, 0.25, 0.5, 1.0]).view(1, 1, 2, 2).repeat(3, 1, 1, 1)


def test_batches_arrays_and_lists_of_samples_give_the_same_batch() -> None:
    transform = InputTransform("DATA.TEST", Pipeline([NORMALIZE]))
    expected = torch.tensor([-2.0, -1.0, 0.0, 2.0]).view(1, 1, 2, 2).repeat(3, 1, 1, 1)
    for inputs in (IMAGES, IMAGES.numpy(), list(IMAGES)):
        assert torch.equal(transform(inputs), expected)


def test_samples_of_other_shapes_are_resized_into_one_batch() -> None:
    transform = InputTransform("DATA.TEST", Pipeline([Resize(4), NORMALIZE]))
    batch = transform([torch.full((1, 8, 8), 0.75), torch.full((1, 5, 3), 0.25)])
    assert batch.shape == (2, 1, 4, 4)
    assert batch[:, 0, 0, 0].tolist() == [1.0, -1.0]


def test_functions_of_one_sample_and_collate_functions_are_applied() -> None:
    pipeline = Pipeline([lambda sample: 2 * sample])
    transform = InputTransform("DATA.TEST", pipeline, collate=make_pad(mask=None))
    batch = transform([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert batch.tolist() == [[2.0, 4.0], [6.0, 0.0]]


def test_random_transforms_are_repeatable_and_leave_generators_alone() -> None:
    def jitter(sample: torch.Tensor) -> torch.Tensor:
        return sample + torch.rand(()) + float(np.random.rand())

    for one in (jitter, Noise(0.5)):
        transform = InputTransform("DATA.TEST", Pipeline([one]))
        torch.manual_seed(7)
        expected = torch.rand(2)
        torch.manual_seed(7)
        first = transform(IMAGES)
        assert torch.equal(torch.rand(2), expected)
        # A prediction depends on the sample alone, not on its place among others.
        for same in (transform(IMAGES[1:]), transform(list(IMAGES[:2]))):
            assert torch.equal(same, first[:2])


def test_wrong_inputs_are_rejected() -> None:
    transform = InputTransform("DATA.TEST", Pipeline([NORMALIZE]))
    for inputs in (torch.zeros(2, 3), [torch.zeros(1, 2, 2), torch.zeros(1, 3, 3)], 5):
        with raises(ConfigError, code="predict.wrong_input"):
            transform(inputs)


def _skip_targets(samples: Sequence[Any]) -> Any:
    assert all(target is None for _, target in samples)
    return torch.stack([sample for sample, _ in samples]), None


def _stack_targets(samples: Sequence[Any]) -> Any:
    noise = torch.rand(len(samples), 1)
    inputs = torch.stack([sample for sample, _ in samples])
    return inputs + 0 * noise, torch.tensor([target for _, target in samples])


def _prepend_target(samples: Sequence[Any]) -> Any:
    return torch.stack([torch.cat([torch.tensor([t]), x]) for x, t in samples]), None


def _pad_boxes(samples: Sequence[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), [target["boxes"] for _, target in samples]


@pytest.mark.feature(
    "predict.collate",
    "a custom collate function gets no invented target whose value matters",
    "`task.predict`, `phasetrain predict`",
)
@pytest.mark.parametrize(
    ("collate", "code"),
    [
        (_skip_targets, None),
        (_stack_targets, None),
        (_prepend_target, "predict.collate"),
        (_pad_boxes, "predict.collate"),
    ],
)
def test_inputs_of_a_custom_collate_function_do_not_depend_on_a_target(
    collate: Collate, code: str | None
) -> None:
    transform = InputTransform("DATA.TEST", Pipeline(()), collate=collate)
    if code is None:
        assert transform([torch.ones(3), torch.zeros(3)]).tolist() == [[1.0] * 3, [0.0] * 3]
        return
    with raises(ConfigError, code=code, key="DATA.TEST.collate"):
        transform([torch.ones(3), torch.zeros(3)])


def test_transform_is_described_by_its_config() -> None:
    assert describe_transform("flatten") == "flatten"
    assert describe_transform({"name": "flatten"}) == "flatten"
    text = describe_transform({"name": "normalize", "mean": (0.5,), "std": [0.25]})
    assert text == "normalize(mean=[0.5], std=[0.25])"
    found = repr(InputTransform("DATA.TEST", Pipeline([NORMALIZE]), [text]))
    assert found == f"InputTransform(DATA.TEST: {text})"
