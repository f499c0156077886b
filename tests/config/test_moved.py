"""Imports from former places."""

import importlib
import subprocess
import sys
from importlib.util import find_spec

import pytest

from phasetrain.config.moved import MOVED, NAMES, find_new_name


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        pytest.param(
            *("phasetrain.commands.sweep", "Results", "phasetrain.addons.experiments.sweep"),
            marks=pytest.mark.addon("experiments"),
        ),
        pytest.param(
            *("phasetrain.commands.export", "export", "phasetrain.addons.deploy.export"),
            marks=pytest.mark.addon("deploy"),
        ),
        ("phasetrain.commands.runs.list_runs", "list_runs", "phasetrain.app.list_runs"),
        pytest.param(
            *("phasetrain.app.runs.diff", "diff", "phasetrain.addons.experiments.compare.diff"),
            marks=pytest.mark.addon("experiments"),
        ),
        pytest.param(
            "phasetrain.losses.self_supervised.clustering",
            "find_clusters",
            "phasetrain.losses.clustering",
            marks=pytest.mark.addon("vision"),
        ),
        pytest.param(
            *("phasetrain.hooks.trackers.csv", "CSV", "phasetrain.addons.observe.trackers.csv"),
            marks=pytest.mark.addon("observe"),
        ),
        pytest.param(
            *(
                "phasetrain.losses.self_supervised.multi_view",
                "gather_embeddings",
                "phasetrain.addons.vision.self_supervised_losses.multi_view",
            ),
            marks=pytest.mark.addon("vision"),
        ),
        pytest.param(
            *("phasetrain.runs.report", "read_run", "phasetrain.addons.report.page"),
            marks=pytest.mark.addon("report"),
        ),
    ],
)
def test_module_is_imported_from_its_former_place_with_a_warning(
    old: str, name: str, new: str
) -> None:
    program = (
        f"import warnings\n"
        f"with warnings.catch_warnings(record=True) as caught:\n"
        f"    warnings.simplefilter('always')\n"
        f"    from {old} import {name} as old\n"
        f"from {new} import {name} as new\n"
        f"import {new}\n"
        f"assert old is new and {new}.__spec__.name == {new!r}\n"
        "print({(w.category.__name__, w.filename, w.lineno) for w in caught})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "{('FutureWarning', '<string>', 4)}"


@pytest.mark.addon
@pytest.mark.parametrize("package", NAMES)
def test_names_that_a_package_had_are_found_with_a_warning(package: str) -> None:
    module = importlib.import_module(package)
    for name, place in NAMES[package].items():
        with pytest.warns(FutureWarning, match=name):
            value = module.__getattr__(name)
        assert value is vars(importlib.import_module(place))[name]


@pytest.mark.addon
def test_present_places_exist() -> None:
    assert [new for new in MOVED.values() if find_spec(new) is None] == []


def test_other_modules_are_not_found() -> None:
    assert find_new_name("phasetrain.commandsx") is None
    assert find_new_name("phasetrain.engine") is None
    with pytest.warns(FutureWarning), pytest.raises(ImportError, match="no_such"):
        importlib.import_module("phasetrain.commands.no_such")
    with pytest.raises(AttributeError, match="Nothing"):
        importlib.import_module("phasetrain.hooks").__getattr__("Nothing")
