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
    made: Registry[Any] = Registry("loss", "LOSS", library=lambda: {"LibraryLoss": Library})
    made.register("focal")(Focal)
    made.register("mean")(lambda: "mean")
    return made


def test_registering_returns_what_was_registered(losses: Registry[Any]) -> None:
    assert losses.register("again")(Focal) is Focal


def test_it_is_a_mapping_in_order_of_names(losses: Registry[Any]) -> None:
    assert list(losses) == ["focal", "mean"]
    assert losses["focal"] is Focal
    assert len(losses) == 2
    assert "LibraryLoss" not in losses


@pytest.mark.parametrize("name", ["Focal", "my.focal", ""])
def test_names_are_lower_case_without_dots(losses: Registry[Any], name: str) -> None:
    with pytest.raises(ConfigError, match="registered names are lower case without dots"):
        losses.register(name)(Focal)


def test_two_of_one_name_are_refused_with_both_places(losses: Registry[Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.register("focal")(Library)
    message = str(caught.value)
    assert "the loss name 'focal' is defined twice" in message
    assert message.count("test_registry.py:") == 2


def test_parts_that_would_swallow_a_typo_are_refused(losses: Registry[Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"takes \*\*kwargs, so a misspelt parameter would go unnoticed"
    ):
        losses.register("library")(Library)


def test_find_knows_three_spellings(losses: Registry[Any]) -> None:
    assert losses.find("focal") is Focal
    assert losses.find("LibraryLoss") is Library
    assert losses.find("collections.Counter") is collections.Counter


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "focl",
            "LOSS.name = 'focl': no loss has this name; did you mean 'focal'? Known: focal, mean, and 1 of the ",
        ),
        ("libraryloss", "did you mean 'LibraryLoss'?"),
        ("zzz", "LOSS.name = 'zzz': no loss has this name. Known: focal, mean"),
        (
            "no_such_module.Thing",
            "LOSS.name = 'no_such_module.Thing': module 'no_such_module' cannot be imported",
        ),
        (
            "collections.Countr",
            "module 'collections' has no callable 'Countr'; did you mean 'Counter'?",
        ),
        ("collections.abc", "has no callable 'abc'"),
    ],
)
def test_an_unknown_name_is_told_with_the_near_miss(
    losses: Registry[Any], name: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.find(name)
    assert message in str(caught.value)


def test_the_library_is_looked_at_only_when_needed() -> None:
    asked = []
    registry: Registry[Any] = Registry(
        "loss", "LOSS", library=lambda: asked.append(1) or {"A": Library}
    )
    registry.register("own")(Focal)
    registry.find("own")
    registry.find("collections.Counter")
    assert asked == []
    registry.find("A")
    registry.find("A")
    assert asked == [1]


def test_build_passes_parameters_and_the_facts_asked_for(losses: Registry[Any]) -> None:
    used: dict[str, Any] = {}
    made = losses.build("focal", {"gamma": 3.0}, facts={"classes": 10, "updates": 5}, used=used)
    assert (made.gamma, made.classes) == (3.0, 10)
    assert used == {"LOSS.classes": 10}


def test_the_config_goes_before_facts(losses: Registry[Any]) -> None:
    used: dict[str, Any] = {}
    assert losses.build("focal", {"classes": 2}, facts={"classes": 10}, used=used).classes == 2
    assert used == {}


def test_free_parameters_go_through_one_mapping(losses: Registry[Any]) -> None:
    made = losses.build("LibraryLoss", {"weight": 2, "params": {"a": 1}})
    assert (made.weight, made.more) == (2, {"a": 1})
    assert losses.build("LibraryLoss", {"params": None}).more == {}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"gama": 1, "classes": 2},
            "METERS.x.gama: 'focal' has no such parameter; did you mean 'gamma'? It takes: gamma, classes.",
        ),
        (
            {},
            "METERS.x.classes: loss 'focal' needs a value and neither the config nor the data gives one",
        ),
        ({"gamma": -1, "classes": 2}, "METERS.x (loss 'focal'): gamma must be 0 or more, got -1"),
        ({"gamma": "a", "classes": 2}, "METERS.x (loss 'focal'): '<' not supported"),
    ],
)
def test_what_build_refuses(losses: Registry[Any], params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        losses.build("focal", params, where="METERS.x")
    assert message in str(caught.value)


def test_a_config_error_of_a_part_is_not_wrapped(losses: Registry[Any]) -> None:
    def fails() -> None:
        raise ConfigError("LOSS.gamma: told")

    losses.register("fails")(fails)
    with raises(ConfigError, key="LOSS.gamma"):
        losses.build("fails")


def test_questions_about_callables() -> None:
    assert list(parameters(Focal)) == ["gamma", "classes"]
    assert parameter_types(Focal) == {"gamma": float, "classes": int}
    assert (free_parameters(Focal), free_parameters(Library)) == (False, True)
    assert "test_registry.Focal" in source_of(Focal)
    assert source_of(len) == "builtins.len"


def test_an_annotation_that_cannot_be_resolved_is_left_out() -> None:
    def part(a: "NoSuchType") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert parameter_types(part) == {}


def test_unknown_parameter_without_any() -> None:
    assert unknown_parameter("LOSS", "a", "mean", []) == (
        "LOSS.a: 'mean' has no such parameter. It takes: no parameters."
    )


def test_a_class_without_an_init_of_its_own_takes_nothing() -> None:
    import torch

    losses: Registry[torch.nn.Module] = Registry("loss", "LOSS")

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

    def test_a_name_behind_a_bridge_and_a_path_beside_it(self, bridged: Registry[Any]) -> None:
        assert bridged.find("collections.Chain") is collections.ChainMap
        assert bridged.find("collections.abc.Mapping") is collections.abc.Mapping
        assert bridged.find("json.loads") is json.loads

    def test_a_near_miss(self, bridged: Registry[Any]) -> None:
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

    def test_a_library_that_is_not_installed(self, losses: Registry[Any]) -> None:
        losses.bridge("no_such_library", "more")(lambda name: None)
        with raises(ConfigError, code="config.import_failed", key="LOSS.name"):
            losses.find("no_such_library.Thing")

    def test_a_library_beside_a_torchvision_for_another_torch(
        self, losses: Registry[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "broken_bridge.py").write_text(
            "raise RuntimeError('operator torchvision::nms does not exist')"
        )
        monkeypatch.syspath_prepend(tmp_path)
        losses.bridge("broken_bridge", "more")(lambda name: None)
        with raises(ConfigError, code="config.import_failed", key="LOSS.name"):
            losses.find("broken_bridge.Thing")

    def test_what_a_library_raises_on_the_way_is_told(self, losses: Registry[Any]) -> None:
        @losses.bridge("collections", "more")
        def resolve(_name: str) -> Any:
            try:
                raise RuntimeError("operator torchvision::nms does not exist")
            except RuntimeError as error:
                raise ModuleNotFoundError("no Bert") from error

        with raises(ConfigError, code="config.import_failed", key="LOSS.name"):
            losses.find("collections.Thing")
