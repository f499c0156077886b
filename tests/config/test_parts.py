"""The tables of declared parts."""

import importlib
import pkgutil

import pytest

import phasetrain
from phasetrain.config.addons import OWN_PACKAGE
from phasetrain.config.parts import DECLARED_PARTS, REGISTRIES
from phasetrain.config.registry import find_registry


@pytest.fixture(scope="module")
def _whole_core() -> None:
    for module in pkgutil.walk_packages(phasetrain.__path__, "phasetrain."):
        if not f"{module.name}.".startswith(f"{OWN_PACKAGE}."):
            importlib.import_module(module.name)


def is_core(module: str) -> bool:
    return module.startswith("phasetrain.") and not module.startswith(f"{OWN_PACKAGE}.")


def test_each_kind_has_a_registry() -> None:
    assert DECLARED_PARTS.keys() == REGISTRIES.keys()
    assert {kind: find_registry(kind).kind for kind in REGISTRIES} == {
        kind: kind for kind in REGISTRIES
    }


@pytest.mark.usefixtures("_whole_core")
@pytest.mark.parametrize("kind", REGISTRIES)
def test_declared_are_the_parts_that_modules_register(kind: str) -> None:
    registered = {
        name: factory.__module__
        for name, factory in find_registry(kind)._own.items()
        if is_core(factory.__module__)
    }
    assert registered == DECLARED_PARTS[kind]
