"""Caches for what each of thousands of small runs would compute again from what does not change
while tests run: the files of the package, the words of overrides, and the git tree around tests.

They keep results of the code under test, so its mistakes show. A process that a test starts has no
caches; its fork server has them.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from phasetrain.app.train.run_documents import SourceTree
from phasetrain.config.compose.sources import ConfigFiles, Layer
from phasetrain.runtime.redaction import Redaction

ROOT = Path(__file__).parents[2]


def keep_results() -> None:
    """Install the caches in this process."""
    ConfigFiles.select = _keep_layers(ConfigFiles.select)  # type: ignore[method-assign]
    OverridesParser.parse_override = _keep_overrides(OverridesParser.parse_override)
    with suppress(ModuleNotFoundError):  # a deleted add-on
        from phasetrain.addons.experiments import source_tree

        source_tree.describe_source = _keep_source(source_tree.describe_source)


def _keep_layers(select: Callable[..., list[Layer]]) -> Callable[..., list[Layer]]:
    kept: dict[Any, list[Layer]] = {}

    def keep(
        self: ConfigFiles, group: str, option: str, *, replaced: Sequence[str] = ()
    ) -> list[Layer]:
        # Tests of the config have a package of their own.
        key = (self._builtin.path, group, option, frozenset(replaced))
        is_builtin = self._user is None and self._given is None
        if not is_builtin or key not in kept:
            count = len(self.problems)
            layers = select(self, group, option, replaced=replaced)
            if not is_builtin or len(self.problems) > count:
                return layers
            kept[key] = layers
        return copy.deepcopy(kept[key])

    return keep


def _keep_overrides(parse: Callable[..., Override]) -> Callable[..., Override]:
    kept: dict[Any, Override] = {}

    def keep(self: OverridesParser, s: str) -> Override:
        key = (s, frozenset(self.functions.functions))
        if key not in kept:
            kept[key] = parse(self, s)
        return copy.deepcopy(kept[key])

    return keep


def _keep_source(describe: Callable[..., SourceTree | None]) -> Callable[..., SourceTree | None]:
    kept: dict[Any, SourceTree | None] = {}

    def keep(
        folder: Path, redaction: Redaction, *, diff: str, skip: Path | None = None
    ) -> SourceTree | None:
        if folder != ROOT or (skip is not None and skip.is_relative_to(ROOT)):
            return describe(folder, redaction, diff=diff, skip=skip)
        key = (redaction, diff)
        if key not in kept:
            kept[key] = describe(folder, redaction, diff=diff, skip=skip)
        return copy.deepcopy(kept[key])

    return keep
