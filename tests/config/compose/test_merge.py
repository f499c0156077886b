from phasetrain.config.compose.merge import Merged, lookup, origin_of
from phasetrain.config.compose.sources import Layer
from phasetrain.config.schema import default_schema

SCHEMA = default_schema()


def merged(*layers: tuple[str, dict]) -> Merged:
    found = Merged(SCHEMA)
    for name, values in layers:
        found.apply(Layer(name, values))
    return found


def test_origin_of_a_leaf_is_the_layer_that_set_it_last() -> None:
    found = merged(("a", {"RUN": {"x": 1, "y": [1]}}), ("b", {"RUN": {"y": [2]}}))
    assert found.values == {"RUN": {"x": 1, "y": [2]}}
    assert found.origins == {"RUN.x": "a", "RUN.y": "b"}


def test_mapping_and_value_replace_each_other() -> None:
    found = merged(("a", {"RUN": {"x": {"y": 1, "z": {}}}}), ("b", {"RUN": {"x": 3}}))
    assert (found.values, found.origins) == ({"RUN": {"x": 3}}, {"RUN.x": "b"})
    found.apply(Layer("c", {"RUN": {"x": {"y": 2}}}))
    assert (found.values, found.origins) == ({"RUN": {"x": {"y": 2}}}, {"RUN.x.y": "c"})


def test_empty_mapping_is_a_leaf() -> None:
    found = merged(("a", {"METERS": {"loss": {}}}))
    assert found.origins == {"METERS.loss": "a"}
    found.apply(Layer("b", {"METERS": {"loss": {}}}))
    assert found.origins == {"METERS.loss": "a"}
    found.apply(Layer("c", {"METERS": {"loss": {"k": 1}}}))
    assert found.origins == {"METERS.loss.k": "c"}


def test_merging_does_not_change_the_layers() -> None:
    below = {"DATA": {"TRAIN": {"transforms": ["a"]}}}
    found = merged(("a", below), ("b", {"DATA": {"TRAIN": {"x": 1}}}))
    found.values["DATA"]["TRAIN"]["transforms"].append("b")
    assert below == {"DATA": {"TRAIN": {"transforms": ["a"]}}}


def test_dropped_mapping_gives_one_note() -> None:
    found = merged(
        ("a", {"LOSS": {"name": "x", "weights": {"a": 1, "b": 2}}}),
        ("b", {"LOSS": {"name": "y", "weights": {"c": 3}}}),
    )
    assert found.values["LOSS"] == {"name": "y", "weights": {"c": 3}}
    assert found.notes == ["LOSS.weights = {'a': 1, 'b': 2} (a) dropped: LOSS.name is now 'y' (b)"]


def test_label_is_the_default_name_of_a_meter() -> None:
    layers = (
        ("a", {"METERS": {"accuracy": {"top": 5}}}),
        ("b", {"METERS": {"accuracy": {"name": "accuracy"}}}),
    )
    assert merged(*layers).notes == []
    assert len(merged(layers[0], ("b", {"METERS": {"accuracy": {"name": "other"}}})).notes) == 1


def test_removing_reports_whether_the_key_existed() -> None:
    found = merged(("a", {"LOSS": {"name": "x", "gamma": 1}}))
    default = Layer("defaults.yaml", SCHEMA.defaults)
    assert found.remove("LOSS.gamma", default)
    assert not found.remove("LOSS.gamma", default)
    assert not found.remove("NONE.x", default)
    assert found.remove("LOSS.name", default)
    assert (found.values, found.origins) == (
        {"LOSS": {"name": "cross_entropy"}},
        {"LOSS.name": "defaults.yaml"},
    )


def test_small_questions() -> None:
    assert lookup({"a": {"b": 1}}, "a.b") == 1
    assert lookup({"a": 1}, "a.b") is None
    assert origin_of({"a.b": "x", "a.c": "y"}, "a") == "x"
    assert origin_of({"ab": "x"}, "a") == ""


class TestGroupsOfKeysInASplit:
    """`subset` is a group of the section's own keys among the parameters of a dataset."""

    def finished(self, *layers: tuple[str, dict]) -> Merged:
        default = Layer("defaults.yaml", SCHEMA.defaults)
        found = merged(("defaults.yaml", SCHEMA.defaults), *layers)
        found.finish(default)
        return found

    def test_another_dataset_drops_parameters_and_keeps_the_group(self) -> None:
        found = self.finished(
            (
                "a",
                {
                    "DATA": {
                        "TRAIN": {"dataset": "digits", "split": "all", "subset": {"samples": 5}}
                    }
                },
            ),
            ("b", {"DATA": {"TRAIN": {"dataset": "synthetic"}}}),
        )
        assert found.get("DATA.TRAIN.subset") == {
            "samples": 5,
            "seed": 0,
            "balanced": False,
            "skip": 0,
            "folds": None,
            "fold": 0,
            "complement": False,
        }
        assert found.get("DATA.TRAIN.split") is None
        assert [note.partition(" ")[0] for note in found.notes] == ["DATA.TRAIN.split"]

    def test_additional_split_gets_the_keys_that_it_does_not_set(self) -> None:
        found = self.finished(
            ("a", {"DATA": {"VALID": {"dataset": "digits", "subset": {"skip": 7}}}})
        )
        assert found.get("DATA.VALID.subset") == {
            "samples": None,
            "seed": 0,
            "balanced": False,
            "skip": 7,
            "folds": None,
            "fold": 0,
            "complement": False,
        }
        assert found.origins["DATA.VALID.subset.skip"] == "a"
        assert found.origins["DATA.VALID.subset.seed"] == "defaults.yaml"
        assert found.get("DATA.TEST") is None


def test_a_text_is_a_list_of_one_for_keys_that_take_lists() -> None:
    found = merged(
        ("a", {"RUN": {"imports": "a", "allow": "${RUN.name}", "name": "x"}}),
        ("b", {"RUN": {"imports": "b"}}),
    )
    assert found.values == {"RUN": {"imports": ["a", "b"], "allow": "${RUN.name}", "name": "x"}}
