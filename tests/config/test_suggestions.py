import pytest

from phasetrain.config.suggestions import KnownPaths

KNOWN = KnownPaths(
    [
        "RUN.name",
        "DATA.TRAIN.batch_size",
        "DATA.TRAIN.dataset",
        "OPTIMIZER.lr",
        "OPTIMIZER.eps",
        "PHASES.epochs",
        "PHASES.test_every.epochs",
    ]
)


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("OPTIMIZER.lrr", "OPTIMIZER.lr"),
        ("OPTIMISER.lr", "OPTIMIZER.lr"),
        ("optimizer.LR", "OPTIMIZER.lr"),
        ("lr", "OPTIMIZER.lr"),
        ("DATA.TRAIN.batchsize", "DATA.TRAIN.batch_size"),
        ("OPTIMIZER.epochs", "PHASES.epochs"),  # and not OPTIMIZER.eps, although that is near
        ("OPTIMIZER.epss", "OPTIMIZER.eps"),
        ("batchsize", "DATA.TRAIN.batch_size"),
        ("LOSS.batch_sizes", "DATA.TRAIN.batch_size"),
        ("DATA.TRAIN.datasets.clean.batch_sizes", None),
        ("DATA.TRAIN.name", "DATA.TRAIN.dataset"),
        ("PHASES.test_every.epoch", "PHASES.test_every.epochs"),
        ("RUN.type", "RUN.name"),  # another word for it
        ("PHASES.type", None),
        ("xyz", None),
        ("LOSS.xyz", None),
    ],
)
def test_nearest_key_is_suggested(given: str, near: str | None) -> None:
    assert KNOWN.near(given) == near
