"""Fixtures of the end-to-end tests, for runs of add-ons."""

from run_fixtures import fork_server, launcher, unbroken_by_three_ranks

__all__ = ["fork_server", "launcher", "unbroken_by_three_ranks"]
