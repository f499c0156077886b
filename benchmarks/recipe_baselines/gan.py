"""Baselines of the recipe gan: distance of other pictures to the test pictures of Fashion-MNIST.

    python benchmarks/recipe_baselines/gan.py [RUN]

RUN is the folder of a run of experiment=gan_judge; by default it is trained in `runs/baselines`,
and the same command resumes it. Training pictures are a floor, and noise is a ceiling.
"""

import io
import json
import sys
from typing import Any

import torch
from torch import Tensor

import phasetrain
from phasetrain.addons.vision.frechet_distance import frechet_distance
from phasetrain.runtime.terminal import Terminal

FOLDER = "/usr/share/datasets/fashion-mnist"
COUNT = 10_000


def read_split(name: str) -> tuple[Tensor, Tensor]:
    """Return pictures `(N, 1, 28, 28)` in [-1, 1] and their classes."""
    from phasetrain.data.datasets.idx import load_idx

    found = load_idx(
        f"{FOLDER}/{name}-images-idx3-ubyte.gz", f"{FOLDER}/{name}-labels-idx1-ubyte.gz"
    )
    return found.inputs[:COUNT] * 2 - 1, found.targets[:COUNT]


@torch.no_grad()
def judge_images(judge: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return features and scores of pictures."""
    features: list[Tensor] = []
    hook = judge.head.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    scores = [judge(part) for part in images.split(500)]
    hook.remove()
    return torch.cat(features), torch.cat(scores)


def main() -> None:
    folder = "runs/baselines/gan-judge"
    if sys.argv[1:]:
        folder = sys.argv[1]
    else:
        quiet = Terminal(io.StringIO(), live=False)
        phasetrain.run(["experiment=gan_judge", f"RUN.dir={folder}"], terminal=quiet)
    judge = phasetrain.load(folder).model.eval()
    images, classes = read_split("t10k")
    real, scores = judge_images(judge, images)
    training, labels = read_split("train")
    torch.manual_seed(0)
    noise = torch.rand_like(images) * 2 - 1
    found = {"test pictures": {"accuracy": (scores.argmax(1) == classes).float().mean().item()}}
    for name, pictures, truth in (
        ("training pictures", training, labels),
        ("noise", noise, classes),
    ):
        features, scores = judge_images(judge, pictures)
        found[name] = {
            "frechet": frechet_distance(features, real),
            "accuracy": (scores.argmax(1) == truth).float().mean().item(),
        }
    print(json.dumps({name: _round(values) for name, values in found.items()}))


def _round(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


if __name__ == "__main__":
    main()
