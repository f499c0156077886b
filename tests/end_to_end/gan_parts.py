"""Overrides of a run of the task `gan` on digits."""

from pathlib import Path

import torch

from phasetrain.models import SmallCNN

SHORT = (
    "PHASES={epochs: 3, limit: {train: 5, test: 2}}",
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST.batch_size=32",
    "HOOKS.console=null",
    "RUN.rehearse=false",
)
"""Three epochs of five updates, with a test of two steps after each."""


def make_words(folder: Path) -> list[str]:
    """Return the words of a run whose judge has random weights, in a file of `folder`."""
    torch.manual_seed(0)
    torch.save(SmallCNN(10, width=4).state_dict(), folder / "judge.pt")
    return [
        "experiment=digits",
        f"TASK={{name: gan, judge: {{name: small_cnn, width: 4, weights: {folder / 'judge.pt'}}}}}",
        "MODEL={name: conditional_gan, size: 8, noise: 4, width: 8}",
        "METERS={loss: null, accuracy: {splits: [TEST]}}",
        "METERS.frechet={name: frechet_distance, splits: [TEST]}",
        "DATA.TRAIN.transforms=[]",
        "OPTIMIZER={name: adam, lr: 0.003}",
        "OPTIMIZER.others.critic={name: adam, lr: 0.003, match: critic.*}",
        "MACHINE.threads=1",
    ]
