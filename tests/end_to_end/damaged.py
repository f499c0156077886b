"""The names of the checkpoints of the run that tests of damage look at, see `killed` in
conftest.py."""

from pathlib import Path

from harness import newest

NEWEST, PREVIOUS, OLDEST = "p0002-s00000002", "p0002-s00000001", "p0001-s00000002"


def newest_valid_name(folder: Path) -> str:
    """Return the name of the checkpoint that a resume would use."""
    return Path(newest(folder).path).name
