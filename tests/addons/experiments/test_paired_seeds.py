"""Configs of a sweep with the same seed share what makes their differences small."""

from pathlib import Path

import pytest
from harness import train

from phasetrain.runs.ledger import FILE, Ledger, parse_ledger

SHORT = ("PHASES.epochs=1", "PHASES.limit.train=4", "HOOKS.ledger.content=full", "RUN.seed=3")


def read_ledger(folder: Path, *overrides: str) -> Ledger:
    train(folder, *SHORT, *overrides)
    return parse_ledger((folder / FILE).read_bytes())


def list_ids(ledger: Ledger) -> list[int]:
    return [record.ids for record in ledger.values()]


def list_batches(ledger: Ledger) -> list[int]:
    return [record.content for record in ledger.values()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """Return the ledger of a run with augmentation and dropout."""
    return read_ledger(tmp_path_factory.mktemp("base"))


@pytest.mark.by_default(2)
@pytest.mark.parametrize(
    "override",
    [
        "OPTIMIZER.lr=0.01",
        "OPTIMIZER={name: adamw, lr: 0.001}",
        "LOSS.label_smoothing=0.1",
        "OPTIMIZER.SCHEDULES.lr=constant",
    ],
)
def test_config_with_the_same_seed_has_equal_weights_order_and_augmentation(
    base: Ledger, tmp_path: Path, override: str
) -> None:
    other = read_ledger(tmp_path, override)
    assert other.header.start == base.header.start
    assert list_ids(other) == list_ids(base)
    assert list_batches(other) == list_batches(base)
    assert other[4].weights != base[4].weights


def test_larger_model_shares_the_batches_alone(base: Ledger, tmp_path: Path) -> None:
    other = read_ledger(tmp_path, "MODEL.width=8")
    assert other.header.start != base.header.start
    assert list_batches(other) == list_batches(base)


def test_other_batch_size_shares_the_weights_alone(base: Ledger, tmp_path: Path) -> None:
    other = read_ledger(tmp_path, "DATA.TRAIN.batch_size=20")
    assert other.header.start == base.header.start
    assert not set(list_batches(other)) & set(list_batches(base))


def test_other_seed_shares_nothing(base: Ledger, tmp_path: Path) -> None:
    other = read_ledger(tmp_path, "RUN.seed=4")
    assert other.header.start != base.header.start
    assert not set(list_ids(other)) & set(list_ids(base))
    assert not set(list_batches(other)) & set(list_batches(base))
