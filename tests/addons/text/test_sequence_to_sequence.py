"""The sequence-to-sequence task."""

from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.addons.text.sequence_to_sequence import (
    SequenceToSequence,
    mark_cut,
    split_references,
)
from phasetrain.data.loading.collate import make_pad
from phasetrain.data.transforms import Pipeline
from phasetrain.engine.batch import Batch, SequenceOutput
from phasetrain.errors import ConfigError
from phasetrain.testing.build import build_run

WORDS = (
    "RUN.imports=[sequence_parts]",
    "TASK.name=sequence_to_sequence",
    "DATA.TRAIN={dataset: reversed_tokens, collate: pad, batch_size: 12, transforms: []}",
    "DATA.TEST={dataset: reversed_tokens, collate: pad, batch_size: 12}",
    "MODEL={name: seq2seq_gru, width: 8}",
    "METERS={loss: {}, accuracy: {}, per: {name: token_error_rate}}",
    "MACHINE.threads=1",
)


def build(*words: str) -> tuple[SequenceToSequence, Any]:
    made = build_run([*WORDS, *words])
    assert isinstance(made.task, SequenceToSequence)
    return made.task, made.plan


def batch(*targets: list[int], mask: list[bool] | None = None) -> Batch:
    size = len(targets)
    return Batch(
        {"input": torch.ones(size, 3).long(), "mask": torch.ones(size, 3).bool()},
        torch.tensor(targets),
        torch.arange(size),
        size,
        None if mask is None else torch.tensor(mask),
    )


def test_references_end_at_their_end_and_missing_ones_repeat_the_first() -> None:
    targets = torch.tensor([[3, 4, 0, 5, 0, 0], [2, 0, -100, -100, -100, -100]])
    found = split_references(targets, end=0)
    rows = [[[token for token in one if token >= 0] for one in row] for row in found.tolist()]
    assert rows == [[[3, 4], [5], []], [[2], [2], [2]]]


def test_weight_is_the_number_of_tokens_of_first_sequences() -> None:
    task, _ = build()
    assert task.weight_of(batch([3, 4, 0, 5, 0], [2, 0, -100, -100, -100])) == 5
    assert task.weight_of(batch([3, 4, 0], [2, 0, -100], mask=[False, True])) == 2


def test_scores_depend_on_the_tokens_before_and_start_with_the_end() -> None:
    task, _ = build()
    seen = []
    forward = task.model.forward
    task.model.forward = lambda inputs, prefix: seen.append(prefix) or forward(inputs, prefix)  # type: ignore[func-returns-value,assignment]
    out = task.forward(batch([3, 4, 0], [2, 0, -100]))
    assert seen[0].tolist() == [[0, 3, 4], [0, 2, 0]]
    assert (out.output.shape, out.weight) == ((6, 6), 5)
    assert out.mask is not None
    assert out.mask.tolist() == [True] * 5 + [False]


def test_only_tests_decode_and_padding_samples_are_left_out() -> None:
    task, plan = build()
    for phase in plan.phases[:2]:
        task.begin(phase, fresh=True)
        out = task.forward(batch([3, 4, 0], [2, 0, -100], mask=[True, False]))
        assert isinstance(out, SequenceOutput)
        assert (out.decoded is None) == phase.is_train
        if out.references is not None:
            assert out.references.tolist() == [[[3, 4, -100]]]


def test_sequence_that_is_cut_differs_from_a_reference_of_its_length() -> None:
    inputs = torch.ones(1, 3).long()
    errors = {}
    for length in (2, 5):
        task, plan = build(f"TASK.max_length={length}", "METERS.ser={name: sequence_error_rate}")
        decoded = task.predict(inputs)[0].tolist()
        assert (len(decoded), min(decoded) > 0) == (length, True)  # untrained, it does not end
        task.begin(plan.phases[1], fresh=True)
        for target in ([*decoded[:2], 0], [*decoded, 0]):
            task.meters["ser"].reset()
            task.meters["ser"].update(task.forward(batch(target)))
            errors[length, len(target) - 1] = task.meters["ser"].compute()
    assert errors == {(2, 2): 1.0, (5, 2): 1.0, (5, 5): 1.0}
    references = torch.tensor([[[3, 4]], [[3, -100]], [[3, 4]]])
    found = mark_cut(torch.tensor([[3, 4, 5], [3, 4, 5], [3, 4, -100]]), references, 2)
    assert found.tolist() == [[3, 4, -1], [3, 4, -100], [3, 4, -100]]


def test_prediction_is_decoded() -> None:
    task, _ = build("TASK.beams=2", "TASK.max_length=4")
    found = task.predict(torch.tensor([[1, 2, 3], [3, 2, 1]]))
    assert found.shape[0] == 2
    assert found.shape[1] <= 4


def make_transform(collate: Any) -> Any:
    from phasetrain.addons.deploy.input_transform import InputTransform

    return InputTransform("DATA.TEST", Pipeline(), collate=collate)


@pytest.mark.addon("deploy")
def test_sources_of_any_length_are_predicted_as_a_list() -> None:
    task, _ = build("TASK.max_length=4")
    sources = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    masked = make_pad()([(source, 0) for source in sources])[0]
    expected = task.predict(masked)
    assert task.predict(sources).equal(expected)
    assert task.predict([[1, 2, 3], [4, 5]], transform=False).equal(expected)
    assert task.predict(masked["input"]).shape[0] == 2
    task.transform = make_transform(make_pad())
    assert task.predict(sources, transform=True).equal(expected)
    assert task.predict(sources[0][None]).equal(expected[:1])
    for wrong in (masked["input"], {"input": masked["input"]}, sources[0], [torch.ones(2)], [3]):
        with raises(ConfigError, code="predict.wrong_input"):
            task.predict(wrong)


@pytest.mark.addon("deploy")
def test_sources_reach_the_model_as_in_tests() -> None:
    task, _ = build("TASK.max_length=2")
    task.transform = make_transform(make_pad(mask=None))
    seen: list[torch.Tensor] = []
    tokens = torch.tensor([[1, 2, 3], [3, 2, 1]])
    start = task.model.start
    task.model.start = lambda inputs: seen.append(inputs) or start(tokens)  # type: ignore[func-returns-value,assignment]
    images = torch.rand(2, 3, 4, 4)
    for given in (images, images.numpy(), tokens):
        assert task.predict(given).shape[0] == 2
    assert task.predict(list(images), transform=True).shape[0] == 2
    assert all(map(torch.equal, seen, (images, images, tokens, images)))
    task.transform = make_transform(make_pad())
    with raises(ConfigError, code="predict.wrong_input"):
        task.predict(images)


def test_wrong_targets_are_rejected() -> None:
    task, _ = build("TASK.end=3")
    with raises(ConfigError, code="data.wrong_target"):
        task.check_targets("train", torch.tensor([2, 1, 0]))
    with raises(ConfigError, code="data.wrong_target"):
        task.check_targets("train", 3)
    unpadded = Batch(torch.ones(2, 3).long(), torch.zeros(2).long(), torch.arange(2), 2)
    with raises(ConfigError, code="data.wrong_target"):
        task.forward(unpadded)


def test_model_that_cannot_decode_is_rejected_if_a_meter_needs_it() -> None:
    words = [word for word in WORDS if not word.startswith("MODEL")]
    mlp = "MODEL={name: mlp, classes: 3, input_shape: [3]}"
    with raises(ConfigError, code="config.conflict"):
        build_run([*words, mlp])
    build_run([*words, mlp, "METERS.per=null"])
