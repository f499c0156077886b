import pytest
import torch
from raising import raises

from phasetrain.data.datasets import DATASETS, Described, Fingerprinted, TensorSamples
from phasetrain.errors import ConfigError


def samples(**names):
    return TensorSamples(torch.arange(12.0).view(3, 1, 2, 2), torch.tensor([0, 2, 1]), **names)


def test_sample_and_batch_have_the_same_data():
    data = samples()
    assert len(data) == 3
    assert data[1][0].tolist() == [[[4.0, 5.0], [6.0, 7.0]]]
    assert data[1][1].item() == 2
    inputs, targets = data.__getitems__(torch.tensor([2, 1, 1]))
    assert inputs[:, 0, 0, 0].tolist() == [8.0, 4.0, 4.0]
    assert targets.tolist() == [1, 2, 2]


def test_facts_describe_images_and_vectors():
    assert samples().facts() == {
        "classes": 3,
        "class_names": ("0", "1", "2"),
        "input_shape": (1, 2, 2),
        "channels": 1,
    }
    vectors = TensorSamples(torch.zeros(2, 5), torch.tensor([0, 1]), class_names=["cat", "dog"])
    assert vectors.facts() == {"classes": 2, "class_names": ("cat", "dog"), "input_shape": (5,)}
    names = ("cat", "dog", "cow", "hen")  # the split has no cow and no hen
    part = TensorSamples(torch.zeros(2, 5), torch.tensor([0, 1]), class_names=names)
    assert part.facts() == {"classes": 4, "class_names": names, "input_shape": (5,)}


def test_number_of_classes_may_exceed_those_that_occur():
    assert samples(classes=7).facts()["classes"] == 7


def test_tensor_samples_are_described_and_a_list_is_not():
    assert isinstance(samples(), Described)
    assert not isinstance([(1, 2)], Described)


def test_facts_and_fingerprint_count_by_themselves() -> None:
    class WithFacts:
        def facts(self) -> dict[str, int]:
            return {"classes": 3}

    class WithFingerprint:
        def fingerprint(self) -> str:
            return "ab"

    assert isinstance(WithFacts(), Described)
    assert not isinstance(WithFacts(), Fingerprinted)
    assert isinstance(WithFingerprint(), Fingerprinted)


def test_fingerprint_is_a_hash_of_the_content():
    assert (
        samples().fingerprint()
        == "bee259bf316a242998492e270b883482cf5a83bd2de6b085ddb1bc341c062b8a"
    )


@pytest.mark.parametrize("change", ["value", "type", "shape", "target"])
def test_fingerprint_changes_with_the_content(change):
    changed = samples()
    if change == "value":
        changed.inputs[0, 0, 0, 0] = 1e-6
    elif change == "type":
        changed.inputs = changed.inputs.view(torch.int32)  # equal bytes
    elif change == "shape":
        changed.inputs = changed.inputs.view(3, 4)
    else:
        changed.targets[0] = 1
    assert changed.fingerprint() != samples().fingerprint()


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (torch.zeros(3, 2), torch.zeros(2), r"3 inputs .*\(3,\).*\(2,\)"),
        (
            torch.zeros(3, 2),
            torch.zeros(3, 1),
            r"\(3,\).*\(3, 1\).*torch\.utils\.data\.TensorDataset",
        ),
        (torch.zeros(0, 2), torch.zeros(0), "sample"),
    ],
)
def test_targets_of_another_shape_are_rejected(inputs, targets, message):
    with pytest.raises(ValueError, match=message):
        TensorSamples(inputs, targets)


def test_wrong_number_of_class_names_is_rejected():
    with pytest.raises(ValueError, match=r"3 classes .*class_names.* 2"):
        samples(class_names=("a", "b"))


def test_unknown_name_gets_a_suggestion():
    with raises(
        ConfigError, code="config.unknown_part", key="DATA.TRAIN.name", suggestion="digits"
    ):
        DATASETS.build("digit", where="DATA.TRAIN")
