"""Which of the known dotted paths a mistyped one was meant to be."""

from collections.abc import Iterable
from typing import Any

from phasetrain.errors import nearest, plain


class KnownPaths:
    """The dotted paths a config may have, in order of preference.

    Tried in turn: the same place with other spelling (`OPTIMIZER.lrr`, `optimizer.lr`, `MODLE.name`); the same last
    name elsewhere (`OPTIMIZER.batch_size`, `lr`); a less like name in the same place; a like name elsewhere.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._by_name: dict[str, str] = {}
        self._tree: dict[str, Any] = {}
        for path in paths:
            self._by_name.setdefault(plain(path.rpartition(".")[2]), path)
            node = self._tree
            for name in path.split("."):
                node = node.setdefault(name, {})

    def near(self, path: str) -> str | None:
        """Return the known path that was probably meant, or None."""
        last = plain(path.rpartition(".")[2])
        return (
            self._walk(path, likeness=0.8)
            or self._by_name.get(last)
            or self._walk(path, likeness=0.6)
            or self._by_name.get(nearest(last, self._by_name, likeness=0.75) or "")
        )

    def _walk(self, path: str, *, likeness: float) -> str | None:
        node, found = self._tree, []
        for name in path.split("."):
            known = name if name in node else nearest(name, node, likeness=likeness)
            if known is None:
                return None
            found.append(known)
            node = node[known]
        return ".".join(found)
