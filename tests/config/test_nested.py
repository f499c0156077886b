"""Walks over the values of a config keep order and name paths as messages do."""

from types import MappingProxyType

from phasetrain.config.attrdict import AttrDict
from phasetrain.config.nested import iter_texts, leaves, to_plain

NESTED = AttrDict({"b": {"z": "x", "a": [1.0, ("y", {"k": "w"})]}, "a": {}, "c": None})


def test_leaves_are_named_by_their_paths() -> None:
    assert leaves({"a": {"b": {}, "c": [1]}, "d": None}) == {"a.b": {}, "a.c": [1], "d": None}
    assert list(leaves(NESTED, "TASK").items()) == [
        ("TASK.b.z", "x"),
        ("TASK.b.a", (1.0, ("y", {"k": "w"}))),
        ("TASK.a", {}),
        ("TASK.c", None),
    ]


def test_texts_are_found_at_any_depth() -> None:
    texts = [("b.z", "x"), ("b.a[1][0]", "y"), ("b.a[1][1].k", "w")]
    assert list(iter_texts(NESTED)) == texts
    assert list(iter_texts("x", "LOSS.name")) == [("LOSS.name", "x")]


def test_plain_values_are_new_dicts_and_lists() -> None:
    plain = to_plain(NESTED)
    assert plain == {"b": {"z": "x", "a": [1.0, ["y", {"k": "w"}]]}, "a": {}, "c": None}
    assert (type(plain["b"]), type(plain["b"]["a"][1])) == (dict, list)
    plain["b"]["z"] = "changed"
    assert NESTED.b.z == "x"


def test_leaves_and_keys_of_plain_values_can_be_changed() -> None:
    value = MappingProxyType({1: (2, 3)})
    assert to_plain(value, lambda number: number + 1) == {1: [3, 4]}
    assert to_plain(value, text_keys=True) == {"1": [2, 3]}
