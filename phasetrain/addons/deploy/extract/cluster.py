"""Label samples by k-means of extracted features (`phasetrain cluster`)."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from phasetrain.addons.deploy.extract.feature_files import read_columns
from phasetrain.addons.deploy.extract.linear_probe import check_origins
from phasetrain.addons.deploy.options import ClusterSettings
from phasetrain.config.addons import require_service
from phasetrain.errors import ConfigError
from phasetrain.runtime.machine import resolve_device, seed_of
from phasetrain.runtime.storage import open_storage

CLUSTER = "phasetrain cluster"
"""The command, for messages."""


@dataclass(frozen=True)
class Clustered:
    """The result of a clustering.

    Attributes:
        centroids: file with the centroids `(clusters, D)`.
        labels: feature folder -> file with the cluster of each sample, int64 `(N,)` by its index
            in the dataset; -1 for a sample without features.
        largest, empty: samples of the largest cluster of the first folder, and its clusters
            without a sample.
    """

    centroids: str
    labels: dict[str, str]
    largest: int
    empty: int


def cluster_features(folders: Sequence[str], settings: ClusterSettings, out: str) -> Clustered:
    """Find clusters of the features of one split, and write the cluster of each sample.

    Features are normalised, and clustered by their distance as in ClusterFit (Yan et al. 2020,
    arXiv:1912.03330).

    Args:
        folders: folders from `phasetrain extract`; the first one is clustered, and the samples of
            the others get the nearest centroid.
        settings: of the clustering.
        out: folder to write to.

    Raises:
        ConfigError: a folder is not complete or has no such layer, there are fewer samples than
            clusters, or a setting is invalid.
    """
    for name, number in (("clusters", settings.clusters), ("iterations", settings.iterations)):
        if number < 1:
            raise ConfigError(f"{name} = {number}: expected at least 1")
    names = [PurePosixPath(folder).name for folder in folders]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{', '.join(folders)}: the folders need different names; rename one of them"
        )
    assign_rows = require_service("assign_rows", "vision", CLUSTER)
    storage = open_storage(out)
    storage.make_folder(out)
    centroids = _find_centroids(_read_rows(folders[0], settings)[1], settings)
    files: dict[str, str] = {}
    sizes: list[int] = []
    for folder, name in zip(folders, names, strict=True):
        positions, rows = _read_rows(folder, settings)
        check_origins(folders[0], folder, centroids.shape[1], rows.shape[1])
        clusters = assign_rows(rows, centroids).cpu()
        sizes = sizes or torch.bincount(clusters, minlength=settings.clusters).tolist()
        labels = torch.full((int(positions.max()) + 1,), -1)
        labels[positions] = clusters
        files[folder] = f"{out}/{name}_labels.npy"
        storage.replace(files[folder], _encode(labels))
    storage.replace(f"{out}/centroids.npy", _encode(centroids.cpu()))
    result = Clustered(f"{out}/centroids.npy", files, max(sizes), sizes.count(0))
    content = {"settings": asdict(settings), **asdict(result)}
    storage.replace_json(f"{out}/clusters.json", content)
    return result


def _read_rows(folder: str, settings: ClusterSettings) -> tuple[Tensor, Tensor]:
    """Return the indices of samples `(N,)` and their normalised features `(N, D)`."""
    columns = read_columns(folder, [settings.layer, "id"])
    rows = normalize(columns[settings.layer].flatten(1).float(), dim=1)
    return columns["id"], rows.to(resolve_device(settings.device))


def _find_centroids(rows: Tensor, settings: ClusterSettings) -> Tensor:
    find_clusters = require_service("find_clusters", "vision", CLUSTER)
    seed = seed_of(settings.seed, "clusters")
    if settings.samples is not None:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
        rows = rows[order[: settings.samples].to(rows.device)]
    try:
        centroids: Tensor = find_clusters(rows, settings.clusters, settings.iterations, seed)
    except ValueError as error:
        raise ConfigError(f"clusters = {error}", code="cluster.too_few_samples") from error
    return centroids


def _encode(value: Tensor) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value.numpy())
    return buffer.getvalue()
