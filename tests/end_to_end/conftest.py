"""Fixtures of the end-to-end tests."""

from run_fixtures import (
    fork_server,
    killed,
    killed_copy,
    launcher,
    starter,
    unbroken,
    unbroken_by_three_ranks,
)

__all__ = [
    "fork_server",
    "killed",
    "killed_copy",
    "launcher",
    "starter",
    "unbroken",
    "unbroken_by_three_ranks",
]
