"""Imports from former places."""

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from phasetrain.config.moved import MOVED, NAMES, find_new_name

FORMER_PLACES = (
    ("phasetrain.commands.runs.list_runs", "list_runs", "phasetrain.app.list_runs", None),
    (
        "phasetrain.app.runs.diff",
        "diff",
        "phasetrain.addons.experiments.compare.diff",
        "experiments",
    ),
    (
        "phasetrain.losses.self_supervised.clustering",
        "find_clusters",
        "phasetrain.addons.vision.clustering",
        "vision",
    ),
    ("phasetrain.commands.sweep", "Results", "phasetrain.addons.experiments.sweep", "experiments"),
    ("phasetrain.commands.export", "export", "phasetrain.addons.deploy.export", "deploy"),
    ("phasetrain.hooks.trackers.csv", "CSV", "phasetrain.addons.observe.trackers.csv", "observe"),
    (
        "phasetrain.losses.self_supervised.multi_view",
        "gather_embeddings",
        "phasetrain.addons.vision.self_supervised_losses.multi_view",
        "vision",
    ),
    (
        "phasetrain.meters.classification.ranking",
        "compute_auroc",
        "phasetrain.addons.metrics.ranking",
        "metrics",
    ),
    (
        "phasetrain.meters.classification.class_scores",
        "read_scores",
        "phasetrain.meters.class_scores",
        "metrics",  # the former package is this add-on
    ),
    ("phasetrain.runs.report", "read_run", "phasetrain.addons.report.page", "report"),
)
"""Former module, a name in it, present module, its add-on."""

# Imports names from their former places, before anything else of the package is imported, and
# prints for each whether it is the present one, and the warnings.
PROGRAM = """
import json
import sys
import warnings
from importlib import import_module

results = {}
for old, name, new in json.loads(sys.argv[1]):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(f"\\nfrom {old} import {name} as former")
        except ImportError as error:  # an add-on that is missing
            results[old] = str(error)
            continue
    present = import_module(new)
    is_present = former is vars(present)[name] and present.__spec__.name == new
    texts = sorted({f"{w.category.__name__} {w.filename}:{w.lineno}" for w in caught})
    results[old] = [is_present, texts]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def imports() -> dict[str, Any]:
    """Return what importing from each former place in a new process gives."""
    rows = json.dumps([row[:3] for row in FORMER_PLACES])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, rows], capture_output=True, text=True, check=True
    )
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize(
    "old",
    [
        pytest.param(old, marks=[pytest.mark.addon(addon)] if addon else [])
        for old, _, _, addon in FORMER_PLACES
    ],
)
def test_module_is_imported_from_its_former_place_with_a_warning(
    imports: dict[str, Any], old: str
) -> None:
    assert imports[old] == [True, ["FutureWarning <string>:2"]]


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
