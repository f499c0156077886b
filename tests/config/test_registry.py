import collections
import json
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from phasetrain.config.registry import (
    Registry,
    UnknownNameError,
    free_parameters,
    parameter_types,
    parameters,
    source_of,
    unknown_parameter,
)
from phasetrain.errors import ConfigError


class Focal:
    def __init__(self, gamma: float = 2.0, *, classes: int) -> None:
        if gamma < 0:
            raise ValueError(f"gamma must be 0 or more, got {gamma}")
        self.gamma, self.classes = gamma, classes


class Library:
    def __init__(self, weight: int = 1, **kwargs: Any) -> None:
        self.weight, self.more = weight, kwargs


@pytest.fixture
def losses() -> Registry[Any]:
    made: Registry[Any] = Registry("test loss", "LOSS", library=lambda: {"LibraryLoss": Library})
    made.register("focal")(Focal)
    made.register("mean")(lambda: "mean")
    return made


def test_registering_returns_what_was_registered(losses: Registry[Any]) -> None:
    assert losses.register("again")(Focal) is Focal


def test_registry_is_a_mapping_in_order_of_names(losses: Registry[Any]) -> None:
    assert list(losses) == ["focal", "mean"]
    assert losses["focal"] is Focal
    assert len(losses) == 2
    assert "LibraryLoss" not in losses


@pytest.mark.parametrize("name", ["Focal", "my.focal", ""])
def test_names_other_than_lower_case_without_dots_are_rejected(
    losses: Registry[Any], name: str
) -> None:
    with raises(ConfigError, code="config.invalid"):
        losses.register(name)(Focal)


def test_duplicate_name_is_rejected_with_both_locations(losses: Registry[Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.register("focal")(Library)
    message = str(caught.value)
    assert "'focal'" in message
    assert message.count("test_registry.py:") == 2


def test_part_with_kwargs_is_rejected(losses: Registry[Any]) -> None:
    with pytest.raises(ConfigError, match=r"\*\*kwargs"):
        losses.register("library")(Library)


def test_find_accepts_registered_library_and_dotted_names(losses: Registry[Any]) -> None:
    assert losses.find("focal") is Focal
    assert losses.find("LibraryLoss") is Library
    assert losses.find("collections.Counter") is collections.Counter


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "focl",
            r"LOSS\.name = 'focl': .*'focal'.* focal, mean, and 1 ",
        ),
        ("libraryloss", r"'libraryloss': .*'LibraryLoss'"),
        ("zzz", r"LOSS\.name = 'zzz': .*focal, mean"),
        (
            "no_such_module.Thing",
            r"LOSS\.name = 'no_such_module\.Thing': .*'no_such_module'",
        ),
        (
            "collections.Countr",
            "'collections' .*'Countr'.*'Counter'",
        ),
        ("collections.abc", "'abc'"),
    ],
)
def test_unknown_name_is_rejected_with_a_suggestion(
    losses: Registry[Any], name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        losses.find(name)


def test_library_is_loaded_only_when_needed() -> None:
    asked = []
    registry: Registry[Any] = Registry(
        "test loss", "LOSS", library=lambda: asked.append(1) or {"A": Library}
    )
    registry.register("own")(Focal)
    registry.find("own")
    registry.find("collections.Counter")
    assert asked == []
    registry.find("A")
    registry.find("A")
    assert asked == [1]


def test_build_passes_parameters_and_facts(losses: Registry[Any]) -> None:
    used: dict[str, Any] = {}
    made = losses.build("focal", {"gamma": 3.0}, facts={"classes": 10, "updates": 5}, used=used)
    assert (made.gamma, made.classes) == (3.0, 10)
    assert used == {"LOSS.classes": 10}


def test_config_has_priority_over_facts(losses: Registry[Any]) -> None:
    used: dict[str, Any] = {}
    assert losses.build("focal", {"classes": 2}, facts={"classes": 10}, used=used).classes == 2
    assert used == {}


def test_role_of_a_split_replaces_no_other_default_of_a_custom_dataset() -> None:
    datasets: Registry[Any] = Registry("test dataset", "DATA.*")

    def points(split: str = "all", part: int = 0, classes: int = 2) -> Any:
        return split, part, classes

    def bridged(split: str = "all", part: int = 0, classes: int = 2) -> Any:
        return split, part, classes

    bridged.__module__ = "phasetrain.addons.libraries.torchvision"
    datasets.register("points")(points)
    datasets.register("bridged")(bridged)
    datasets.register("roles")(lambda split="train", part="test": (split, part))
    datasets.register("required")(lambda split, part: (split, part))
    facts = {"split": "test", "part": "test", "classes": 10}
    used: dict[str, Any] = {}
    assert datasets.build("points", facts=facts, used=used) == ("all", 0, 10)
    assert used == {"DATA.*.classes": 10}
    assert datasets.build("points", {"split": "train"}, facts=facts) == ("train", 0, 10)
    assert datasets.build("bridged", facts=facts) == ("test", "test", 10)
    assert datasets.build("roles", facts=facts) == ("test", "test")
    assert datasets.build("required", facts=facts) == ("test", "test")


def test_missing_parameters_are_reported_together(losses: Registry[Any]) -> None:
    def make(width: int, classes: int, depth: int = 1) -> int:
        return width * classes * depth

    losses.register("wide")(make)
    with pytest.raises(ConfigError) as caught:
        losses.build("wide")
    assert [problem.key for problem in caught.value.problems] == ["LOSS.width", "LOSS.classes"]
    assert losses.build("wide", {"width": 3}, facts={"classes": 2}) == 6


def test_params_are_passed_as_keywords(losses: Registry[Any]) -> None:
    made = losses.build("LibraryLoss", {"weight": 2, "params": {"a": 1}})
    assert (made.weight, made.more) == (2, {"a": 1})
    assert losses.build("LibraryLoss", {"params": None}).more == {}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"gama": 1, "classes": 2},
            r"METERS\.x\.gama: .*'gamma'.* gamma, classes",
        ),
        (
            {},
            r"METERS\.x\.classes: .*'focal'",
        ),
        ({"gamma": -1, "classes": 2}, r"METERS\.x \(test loss 'focal'\): .*-1"),
        ({"gamma": "a", "classes": 2}, r"METERS\.x \(test loss 'focal'\): '<'"),
    ],
)
def test_bad_parameters_are_rejected(
    losses: Registry[Any], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        losses.build("focal", params, where="METERS.x")


def test_part_of_a_library_that_fails_points_to_the_registered_one() -> None:
    made: Registry[Any] = Registry(
        "test loss", "LOSS", library=lambda: {"Focal": Focal, "Other": Focal}
    )
    made.register("focal")(Focal)

    def reason(name: str) -> str:
        with raises(ConfigError, code="config.rejected_by_part") as caught:
            made.build(name, {"gamma": -1, "classes": 2}, where="LOSS")
        return str(caught.value)

    assert "'focal'" in reason("Focal")
    assert "'focal'" not in reason("Other")
    assert reason("focal").count("'focal'") == 1


def test_parameters_that_no_config_can_hold_are_not_listed(losses: Registry[Any]) -> None:
    with pytest.raises(ConfigError, match=r"It takes: gamma\.$"):
        losses.build("focal", {"gama": 1}, facts={"classes": object()})
    with pytest.raises(ConfigError, match=r"It takes: gamma, classes\.$"):
        losses.build("focal", {"gama": 1}, facts={"classes": 10})


def test_config_error_of_a_part_is_not_wrapped(losses: Registry[Any]) -> None:
    def fails() -> None:
        raise ConfigError("LOSS.gamma: told")

    losses.register("fails")(fails)
    with raises(ConfigError, key="LOSS.gamma"):
        losses.build("fails")


def test_parameters_types_and_source_of_callables() -> None:
    assert list(parameters(Focal)) == ["gamma", "classes"]
    assert parameter_types(Focal) == {"gamma": float, "classes": int}
    assert (free_parameters(Focal), free_parameters(Library)) == (False, True)
    assert "test_registry.Focal" in source_of(Focal)
    assert source_of(len) == "builtins.len"


def test_unresolvable_annotation_is_omitted() -> None:
    def part(a: "NoSuchType") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert parameter_types(part) == {}


def test_unknown_parameter_of_a_part_without_parameters() -> None:
    assert unknown_parameter("LOSS", "a", "mean", []) == (
        "LOSS.a: 'mean' has no such parameter. It takes: no parameters."
    )


def test_class_without_init_takes_no_parameters() -> None:
    import torch

    losses: Registry[torch.nn.Module] = Registry("test loss", "LOSS")

    @losses.register("plain")
    class Plain(torch.nn.Module):
        pass

    assert isinstance(losses.build("plain"), Plain)
    with raises(ConfigError, code="config.unknown_parameter", key="LOSS.gamma"):
        losses.build("plain", {"gamma": 1})


class TestBridges:
    """Names of another library, here `collections`, whose parts are those that begin with C."""

    @pytest.fixture
    def bridged(self, losses: Registry[Any]) -> Registry[Any]:
        @losses.bridge("collections", "more")
        def resolve(name: str) -> Any:
            if "." in name:
                return None
            if name != "Chain":
                raise UnknownNameError(name, ["Chain", "Counter"])
            return collections.ChainMap

        return losses

    def test_bridge_finds_names_and_dotted_paths(self, bridged: Registry[Any]) -> None:
        assert bridged.find("collections.Chain") is collections.ChainMap
        assert bridged.find("collections.abc.Mapping") is collections.abc.Mapping
        assert bridged.find("json.loads") is json.loads

    def test_unknown_name_of_a_bridge_gets_a_suggestion(self, bridged: Registry[Any]) -> None:
        with raises(
            ConfigError,
            code="config.unknown_part",
            key="M",
            given="'collections.Chian'",
            suggestion="Chain",
        ):
            bridged.find("collections.Chian", "M")
        with raises(ConfigError, code="config.unknown_part", key="LOSS.name"):
            bridged.find("collections.zzzzz")
        with raises(ConfigError, code="config.unknown_part", key="LOSS.name"):
            bridged.find("zzzzz")

    def test_missing_library_is_a_config_error(self, losses: Registry[Any]) -> None:
        losses.bridge("no_such_library", "more")(lambda name: None)
        with raises(ConfigError, code="config.import_failed", key="LOSS.name"):
            losses.find("no_such_library.Thing")

    def test_broken_torchvision_is_a_config_error(
        self, losses: Registry[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "broken_bridge.py").write_text(
            "raise RuntimeError('operator torchvision::nms does not exist')"
        )
        monkeypatch.syspath_prepend(tmp_path)
        losses.bridge("broken_bridge", "more")(lambda name: None)
        with raises(ConfigError, code="config.import_failed", key="LOSS.name"):
            losses.find("broken_bridge.Thing")

    def test_error_of_a_library_is_a_config_error(self, losses: Registry[Any]) -> None:
        @losses.bridge("collections", "more")
        def resolve(_name: str) -> Any:
            try:
                raise RuntimeError("operator torchvision::nms does not exist")
            except RuntimeError as error:
                raise ModuleNotFoundError("no Bert") from error

        with raises(ConfigError, code="config.import_failed", key="LOSS.name"):
            losses.find("collections.Thing")


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), MemoryError()])
def test_part_that_exhausts_the_memory_is_not_called_wrong(error: Exception) -> None:
    def make_huge() -> None:
        raise error

    parts: Registry[Any] = Registry("test loss", "LOSS")
    parts.register("huge")(make_huge)
    with pytest.raises(type(error)) as caught:
        parts.build("huge")
    assert caught.value is error
