"""The probe by SVMs: VISSL's values, samples drawn per class, and what is rejected."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.addons.deploy.extract.feature_files import FeatureFolder
from phasetrain.addons.deploy.extract.svm_probe import (
    SvmSettings,
    choose_cost,
    draw_shots,
    probe_by_svm,
)
from phasetrain.cli import main
from phasetrain.errors import ConfigError

pytestmark = pytest.mark.addon("metrics")  # it computes average precisions

VISSL = [0.9210130942329086, 0.9239583333333333, 0.9318948595264384]
"""Computed once with VISSL's SVMTrainer on these features, with C = 1."""

SETTINGS = SvmSettings("trunk", costs=(0.01, 1.0, 100.0))


def make(count: int, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features and a table of three labels, some unknown, that no generator has drawn."""
    at = np.arange(first, first + count)[:, None]
    features = np.sin(at * np.array([[0.7, 1.3, 2.1, 3.7]]) + np.arange(4.0))
    mixture = np.array([[1, -1, 0.5], [0.5, 1, -1], [-1, 0.5, 1], [0.2, 0.3, 0.4]])
    scores = features @ mixture + 0.8 * np.sin(at * 5.1 + np.arange(3))
    labels = (scores > 0.3).astype(np.int64)
    labels[at[:, 0] % 7 == 0, 1] = -1
    return features, labels


def write(path: Path, features: np.ndarray, labels: np.ndarray) -> str:
    folder = FeatureFolder(str(path), "safetensors")
    folder.begin({"format": "safetensors", "model": "one"})
    columns = {"id": torch.arange(len(labels)), "target": torch.from_numpy(labels)}
    columns["layer.trunk"] = torch.from_numpy(features)
    folder.finish([folder.write(0, 0, columns)], {})
    return str(path)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    return write(tmp_path / "train", *make(60, 0)), write(tmp_path / "test", *make(40, 100))


@pytest.mark.feature(
    "probe.svm",
    "probe by SVMs, with few samples per class on request",
    "`phasetrain probe --kind svm`",
)
def test_average_precisions_are_those_of_vissl(folders: tuple[str, str], tmp_path: Path) -> None:
    settings = replace(SETTINGS, costs=(1.0,))
    found = probe_by_svm(*folders, settings)
    assert found.average_precision == pytest.approx(VISSL, abs=1e-3)
    assert found.mean == pytest.approx(np.mean(VISSL), abs=1e-3)
    written = json.loads((tmp_path / "probe.json").read_text())
    assert written["average_precision"] == found.average_precision
    assert probe_by_svm(*folders, settings) == found


def test_cost_is_chosen_for_each_class() -> None:
    features, labels = make(90, 0)
    found = [choose_cost(features, column > 0, SETTINGS) for column in labels.T]
    assert found == [0.01, 0.01, 1.0]


def test_classes_are_separated_one_by_one(tmp_path: Path) -> None:
    labels = np.arange(60) % 3
    corners = np.eye(4)[labels] + 0.1 * make(60, 0)[0]
    labels[0] = -1
    train, test = write(tmp_path / "train", corners, labels), write(tmp_path / "t", corners, labels)
    found = probe_by_svm(train, test, SETTINGS)
    assert (found.samples, found.mean, len(found.costs)) == ((59, 59), 1.0, 3)


@pytest.mark.feature("probe.svm")
def test_few_samples_are_drawn_per_class() -> None:
    _, table = make(60, 0)
    found = draw_shots(table, 3, 4, np.random.default_rng(0))
    assert [[int((column == value).sum()) for value in (1, 0)] for column in found.T] == [
        [4, 8]
    ] * 3
    assert (found == table)[found >= 0].all()
    classes = np.arange(30) % 3
    drawn = draw_shots(classes, 3, 2, np.random.default_rng(0))
    rows = (drawn >= 0).all(axis=1)
    assert np.bincount(classes[rows]).tolist() == [2, 2, 2]
    assert (drawn[rows].argmax(axis=1) == classes[rows]).all()


def test_few_samples_have_a_mean_over_draws(folders: tuple[str, str]) -> None:
    settings = replace(SETTINGS, costs=(1.0, 10.0), shots=(1, 8), draws=2)
    found = probe_by_svm(*folders, settings)
    assert found.mean is None
    assert list(found.shots) == [1, 8]
    assert all(one["min"] <= one["mean"] <= one["max"] for one in found.shots.values())
    assert found.shots[8]["mean"] > found.shots[1]["mean"]
    assert probe_by_svm(*folders, settings) == found


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (replace(SETTINGS, shots=(100,)), "probe.too_few_samples"),
        (replace(SETTINGS, folds=50), "probe.too_few_samples"),
        (replace(SETTINGS, layer="turnk"), "extract.unknown_column"),
        (replace(SETTINGS, costs=(0.0,)), None),
        (replace(SETTINGS, folds=1), None),
        (replace(SETTINGS, draws=0), None),
    ],
)
def test_invalid_settings_are_rejected(
    folders: tuple[str, str], settings: SvmSettings, code: str | None
) -> None:
    with raises(ConfigError, code=code):
        probe_by_svm(*folders, settings)


def test_scikit_learn_is_named_if_it_is_missing(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.svm", None)
    with raises(ConfigError, code="config.missing_library"):
        probe_by_svm(*folders, replace(SETTINGS, costs=(1.0,)))


def test_missing_addon_is_named_before_anything_is_fitted(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasetrain.config.addons.load_addons", lambda: ())
    with raises(ConfigError, code="addon.missing"):
        probe_by_svm(*folders, SETTINGS)


def test_command_prints_a_table(
    folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["probe", "--kind", "svm", "--train", folders[0], "--test", folders[1]]
    assert main([*words, "--layer", "trunk", "--costs", "1"]) == 0
    assert "mean average precision" in capsys.readouterr().out
