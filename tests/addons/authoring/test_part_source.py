"""Parameters that are read from the source of a part are those of the part itself."""

import pytest

from phasetrain.addons.authoring.part_source import read_signature
from phasetrain.config.addons import list_parts
from phasetrain.config.parts import REGISTRIES
from phasetrain.config.registry import Signature, find_registry, signature_of
from phasetrain.config.sections.value_types import describe_type

INHERIT = {
    "loss": {"byol"},
    "meter": {
        *("precision_at_k", "recall_at_k", "perplexity", "dice", "mean_iou"),
        *("token_error_rate", "sequence_error_rate"),
    },
    "hook": {"gradient_norm"},
    "strategy": {"zero"},
    "task": {"lightning"},
    "transform": {"flatten", "rotate"},
}
"""Declared parts that inherit parameters, so that they have to be imported for them."""


def describe(signature: Signature) -> tuple[object, ...]:
    types = {name: describe_type(annotation) for name, annotation in signature.types.items()}
    return signature.names, types, signature.optional, signature.takes_any


@pytest.mark.parametrize("kind", REGISTRIES)
def test_source_and_part_agree(kind: str) -> None:
    for name, module in list_parts(kind).items():
        read = read_signature(module, kind, name)
        assert (read is None) == (name in INHERIT.get(kind, ())), name
        if read is not None:
            assert describe(read) == describe(signature_of(find_registry(kind)[name])), name


def test_source_of_another_package_is_not_read() -> None:
    assert read_signature("torch.optim.sgd", "optimizer", "sgd") is None
