import pytest

from phasetrain.errors import (
    ChangedError,
    ConfigError,
    FolderInUseError,
    InvalidCheckpointError,
    NoValidCheckpointError,
    PhasetrainError,
    did_you_mean,
    nearest,
    plain,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PhasetrainError, 1),
        (ConfigError, 2),
        (ChangedError, 3),
        (FolderInUseError, 4),
        (NoValidCheckpointError, 5),
        (InvalidCheckpointError, 1),
    ],
)
def test_each_error_has_the_exit_code_that_scripts_see(
    error: type[PhasetrainError], code: int
) -> None:
    assert error("told").exit_code == code
    assert issubclass(error, PhasetrainError)


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="told"):
        raise ConfigError("told")


@pytest.mark.parametrize(
    ("given", "known", "near"),
    [
        ("lrr", ["lr", "momentum"], "lr"),
        ("LR", ["lr"], "lr"),
        ("batchsize", ["batch_size"], "batch_size"),
        ("batch-size", ["batch_size"], "batch_size"),
        ("Adam_W", ["adamw", "adam"], "adamw"),
        ("zzz", ["lr"], None),
        ("lr", [], None),
        ("a_b", ["ab", "AB"], "ab"),
    ],
)
def test_nearest(given: str, known: list[str], near: str | None) -> None:
    assert nearest(given, known) == near


def test_nearest_as_like_as_asked() -> None:
    assert nearest("epochs", ["eps"]) == "eps"
    assert nearest("epochs", ["eps"], likeness=0.8) is None


def test_did_you_mean() -> None:
    assert did_you_mean("focl", ["focal"]) == "; did you mean 'focal'?"
    assert did_you_mean("zzz", ["focal"]) == ""


def test_plain() -> None:
    assert plain("Batch_Size-2") == "batchsize2"
