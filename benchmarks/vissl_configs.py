"""Shares of VISSL's complete configs that convert, and that build.

    python benchmarks/vissl_configs.py

Converts the configs in tests/data/vissl, and builds data, model, loss and optimizer of each at batch
size 4 on generated images. Trunks are small: transformers have a width of 16 per head and at most four
blocks, heads of convolutional networks are measured at 64 pixels, and weights keep the values of their
memory. Clusterings have two clusters. Experiments that differ in numbers only are built once. Takes about ten minutes on 2 cores; needs
the extras image, torchvision and timm.
"""

import gzip
import json
import re
import sys
import tempfile
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision import models

from phasetrain.addons.vissl.compose import VisslConfig
from phasetrain.addons.vissl.draft import to_yaml
from phasetrain.addons.vissl.vissl import convert_vissl
from phasetrain.testing.build import build_run

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "vissl" / "configs.json.gz"
TOO_LARGE = ("regnet10B",)
NUMBERS = re.compile(
    r"'(classes|depth|embed_dim|num_heads|drop_path_rate|patch_size|mlp_ratio)': [0-9.]+"
)


def write_images(folder: Path) -> None:
    """Write images of two classes, and lists of them."""
    draw = np.random.default_rng(0)
    for name in "ab":
        (folder / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = draw.integers(0, 255, (240, 260, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    paths = [f"images/{name}/{number}.png" for name in "ab" for number in range(8)]
    np.save(folder / "images.npy", np.array(paths))
    np.save(folder / "labels.npy", np.array([0] * 8 + [1] * 8))


def shrink(experiment: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return an experiment on the generated images, with a small trunk and without weights."""
    for split in experiment["DATA"].values():
        _shrink_split(split, folder)
    model = experiment.get("MODEL", {})
    for section in (model, model.get("trunk", {})):
        section.pop("weights", None)
        _shrink_trunk(section, probes=model.get("name") == "trunk_heads")
    if model.get("name") == "trunk_head" and "torchvision" in model["trunk"]["name"]:
        model["input_shape"] = [3, 64, 64]
    teacher = experiment.get("TASK", {}).get("teacher")
    if teacher is not None and teacher["name"] == "trunk_head":
        _shrink_trunk(teacher["trunk"], probes=False)
        # A file with one tensor is enough, if all others are named as new.
        head = teacher["head"]
        name = f"head.layers.{2 * len(head['hidden'])}.bias"
        torch.save({name: torch.zeros(head["bottleneck"])}, folder / "teacher.pt")
        others = ["trunk.*", "head.prototypes", "head.layers.*.weight"]
        others += [f"head.layers.{2 * number}.bias" for number in range(len(head["hidden"]))]
        teacher["weights"] = {"path": str(folder / "teacher.pt"), "reinit": others}
    elif teacher is not None:
        name = teacher["name"].removeprefix("torchvision.")
        trained = models.get_model(name, weights=None, num_classes=teacher.get("classes", 1000))
        torch.save(trained.state_dict(), folder / "teacher.pt")
        teacher["weights"] = str(folder / "teacher.pt")
    loss = experiment.get("LOSS", {})
    if "clusters" in loss:
        loss["clusters"] = [2] * len(loss["clusters"])
    for section, key in (("RUN", "engine"), ("RUN", "checkpoint"), ("MACHINE", "precision")):
        experiment.get(section, {}).pop(key, None)
    experiment.pop("LAUNCH", None)
    experiment.setdefault("PHASES", {"epochs": 1})
    experiment.setdefault("RUN", {})["dir"] = str(folder / "run")
    return experiment


def _shrink_split(split: dict[str, Any], folder: Path) -> None:
    for key in ("workers", "start_method", "subset", "pin_memory", "prefetch_to_device"):
        split.pop(key, None)
    split["batch_size"] = 4
    if split["dataset"].startswith("torchvision."):
        split["dataset"] = "image_folder"
        for key in ("root", "train", "split"):
            split.pop(key, None)
    if split["dataset"] == "image_folder":
        split["path"] = str(folder / "images")
    elif split["dataset"] == "file_list":
        split["images"] = str(folder / "images.npy")
        for key in ("replace_prefix", "local_copy"):
            split.pop(key, None)
        if "labels" in split:
            split["labels"] = str(folder / "labels.npy")
    else:
        split["samples"] = 16


def _shrink_trunk(section: dict[str, Any], *, probes: bool) -> None:
    params = section.get("params", {})
    if "timm." in section.get("name", "") and isinstance(params.get("depth"), int):
        # Probes name the last blocks, so these keep their number.
        if params["depth"] > 4 and not probes and "num_heads" in params:
            params["depth"] = 4
        if "num_heads" in params:
            per_head = "convit" in section["name"]
            params["embed_dim"] = 16 if per_head else 16 * params["num_heads"]


def describe_structure(experiment: dict[str, Any]) -> str:
    """Return what decides whether an experiment can be built."""
    found = deepcopy(experiment)
    for key in ("HOOKS", "CHECKPOINT", "PHASES", "MACHINE", "DISTRIBUTED", "RUN"):
        found.pop(key, None)
    optimizer = found.get("OPTIMIZER", {})
    optimizer.pop("lr", None)
    optimizer.pop("weight_decay", None)
    schedules = optimizer.get("SCHEDULES", {})
    optimizer["SCHEDULES"] = sorted((key, one["name"]) for key, one in schedules.items())
    for split in found["DATA"].values():
        split["transforms"] = sorted({one["name"] for one in split["transforms"]})
        split.pop("drop_last", None)
    return NUMBERS.sub("", str(found))


def build(experiment: dict[str, Any], folder: Path) -> str:
    """Return why an experiment cannot be built; empty if it can."""
    path = folder / "experiment.yaml"
    path.write_text("# @package _global_\n" + to_yaml(experiment))
    try:
        build_run([str(path)])
    except Exception as error:  # noqa: BLE001 - every reason is listed
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Print the shares, and the reason for each config that does not build."""
    # Initial weights take most of the time of a build, and do not decide whether it succeeds.
    names = [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]
    vars(nn.init).update({name: lambda tensor, *_args, **_kwargs: tensor for name in names})
    configs = json.loads(gzip.decompress(CONFIGS.read_bytes()))
    counts: Counter[str] = Counter()
    known: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder)
        for config, given in configs.items():
            found = convert_vissl(VisslConfig(given))
            counts["converted" if not found.missing else "with gaps"] += 1
            if any(word in config for word in TOO_LARGE):
                counts["too large to build"] += 1
                continue
            experiment = shrink(json.loads(json.dumps(found.experiment)), folder)
            structure = describe_structure(experiment)
            if structure not in known:
                known[structure] = build(experiment, folder)
            counts["built" if not known[structure] else "not built"] += 1
            if known[structure]:
                gaps = ", ".join(sorted({one.text for one in found.missing})) or "none"
                sys.stdout.write(f"{config}: {known[structure]} (gaps: {gaps})\n")
    for what, count in counts.items():
        sys.stdout.write(f"{what}: {count} of {len(configs)} ({count / len(configs):.0%})\n")


if __name__ == "__main__":
    main()
