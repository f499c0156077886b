"""The commits between two revisions, and which one to test next."""

from collections.abc import Collection

from phasetrain.addons.experiments.judge.revisions import find_commit, run_git
from phasetrain.errors import ConfigError


def parse_range(text: str, folder: str) -> tuple[str, str]:
    """Return the commits A and B of a range `A..B`; without B, HEAD.

    Raises:
        ConfigError: it is no range, or A is no ancestor of B (code `bisect.range`).
    """
    first, dots, last = text.partition("..")
    if not (first and dots) or last.startswith("."):
        raise ConfigError(
            f"--rev {text}: expected A..B, a revision without the difference and a later one with "
            "it, such as v1.0..main",
            code="bisect.range",
        )
    good, bad = find_commit(first, folder), find_commit(last or "HEAD", folder)
    try:
        run_git(["merge-base", "--is-ancestor", good, bad], folder)
    except ConfigError:
        bad_is_older = True
    else:
        bad_is_older = good == bad
    if bad_is_older:
        raise ConfigError(
            f"--rev {text}: expected two revisions of which the first one is an ancestor of the "
            "second; swap them, or name their merge base as A",
            code="bisect.range",
        )
    return good, bad


def list_suspects(folder: str, good: Collection[str], bad: str) -> list[str]:
    """Return the commits that may be the first bad one, as git bisect chooses them: the one first
    that divides the others best; the bad one is the last."""
    words = ["rev-list", "--bisect-all", bad, *(f"^{commit}" for commit in sorted(good))]
    commits = [line.split()[0] for line in run_git(words, folder).splitlines() if line]
    return [*(commit for commit in commits if commit != bad), bad]


def describe_commit(commit: str, folder: str) -> str:
    """Return abbreviated name and subject of a commit."""
    return run_git(["log", "-1", "--format=%h %s", commit], folder)
