"""Clusters of features: files, samples without features, and what is rejected."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.addons.deploy.extract.cluster import ClusterSettings, cluster_features
from phasetrain.addons.deploy.extract.feature_files import FeatureFolder
from phasetrain.cli import main
from phasetrain.errors import ConfigError

pytestmark = pytest.mark.addon("vision")  # k-means

SETTINGS = ClusterSettings("trunk", clusters=3, iterations=5, device="cpu")
CORNERS = torch.arange(30) % 3


def write(path: Path, ids: torch.Tensor, model: str = "one") -> str:
    noise = torch.randn(30, 4, generator=torch.Generator().manual_seed(len(ids)))
    features = torch.eye(4)[CORNERS] * (1 + CORNERS[:, None]) + 0.05 * noise
    folder = FeatureFolder(str(path), "safetensors")
    folder.begin({"format": "safetensors", "model": model})
    columns = {"id": ids, "layer.trunk": features[ids % 30]}
    folder.finish([folder.write(0, 0, columns)], {})
    return str(path)


@pytest.mark.feature("cluster", "labels by k-means of features", "`phasetrain cluster`")
def test_samples_of_a_corner_get_one_label_in_every_folder(tmp_path: Path) -> None:
    train = write(tmp_path / "train", torch.arange(30))
    test = write(tmp_path / "test", torch.tensor([0, 1, 2, 5]))
    found = cluster_features([train, test], SETTINGS, f"{tmp_path}/out")
    labels = np.load(found.labels[train])
    assert labels.dtype == np.int64
    names = labels[:3]
    assert sorted(names) == [0, 1, 2]
    assert labels.tolist() == names[CORNERS.numpy()].tolist()
    assert np.load(found.labels[test]).tolist() == [*names, -1, -1, names[2]]
    assert np.load(found.centroids).shape == (3, 4)
    assert (found.largest, found.empty) == (10, 0)
    assert json.loads((tmp_path / "out" / "clusters.json").read_text())["largest"] == 10


def test_seed_and_samples_decide(tmp_path: Path) -> None:
    train = write(tmp_path / "train", torch.arange(30))

    def find(**changes: int) -> list[float]:
        settings = replace(SETTINGS, **changes)
        found = cluster_features([train], settings, f"{tmp_path}/out")
        return np.load(found.centroids).ravel().tolist()

    assert find() == find()
    assert len({tuple(find(seed=seed)) for seed in range(4)}) > 1
    assert find(samples=6) != find()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"clusters": 31}, "cluster.too_few_samples"),
        ({"samples": 2}, "cluster.too_few_samples"),
        ({"clusters": 0}, None),
        ({"iterations": 0}, None),
    ],
)
def test_invalid_settings_are_rejected(
    tmp_path: Path, changes: dict[str, int], code: str | None
) -> None:
    train = write(tmp_path / "train", torch.arange(30))
    with raises(ConfigError, code=code):
        cluster_features([train], replace(SETTINGS, **changes), f"{tmp_path}/out")


def test_folders_of_other_models_or_of_one_name_are_rejected(tmp_path: Path) -> None:
    train = write(tmp_path / "train", torch.arange(30))
    other = write(tmp_path / "other", torch.arange(30), "other")
    with raises(ConfigError, code="probe.other_weights"):
        cluster_features([train, other], SETTINGS, f"{tmp_path}/out")
    with raises(ConfigError):
        cluster_features([train, train], SETTINGS, f"{tmp_path}/out")


def test_command_names_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write(tmp_path / "train", torch.arange(30))
    words = ["cluster", train, "--layer", "trunk", "--clusters", "2", "--out", f"{tmp_path}/out"]
    assert main([*words, "--device", "cpu"]) == 0
    assert f"{tmp_path}/out/train_labels.npy" in capsys.readouterr().out
