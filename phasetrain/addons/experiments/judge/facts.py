"""Facts about the runs of a contender, found out by a process before anything is trained.

    python -m phasetrain.addons.experiments.judge.facts ORDER.json FACTS.json

A process per contender, because two of them may register different parts under one name, or be two
revisions of one module.
"""

import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phasetrain import __version__
from phasetrain.addons.experiments.certify.certify import hook_words
from phasetrain.app.setup import Setup, find_first_metric, resolve_config
from phasetrain.app.stored.stored_config import read_newest_command
from phasetrain.app.train.source_code import hash_sources
from phasetrain.config.trust import trust_only
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.hooks.observers import list_observers
from phasetrain.runtime.terminal import Terminal


@dataclass(frozen=True)
class Order:
    """Whose facts are wanted.

    Attributes:
        words: overrides of its runs.
        stored: run folder whose config they change; empty for none.
        config_dir: folder with custom configs.
        is_trusted: whether the code that the run folder names may run.
    """

    words: tuple[str, ...]
    stored: str = ""
    config_dir: str | None = None
    is_trusted: bool = False

    def write(self, path: Path) -> None:
        """Write the order to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> "Order":
        """Read an order from a file."""
        content = json.loads(Path(path).read_bytes())
        # JSON has no tuples, which a frozen order needs.
        return cls(**content | {"words": tuple(content["words"])})


@dataclass(frozen=True)
class Facts:
    """Facts about the runs of a contender.

    Attributes:
        config: the resolved config.
        asked: the same with null where a rule has derived the value.
        monitor: metric by which its runs are compared, with a minus sign if smaller is better;
            empty if there is none.
        code: module -> SHA-256 of its source, of the user's modules.
        observers: labels of the hooks that only observe.
        versions: package -> version.
        short_words: further overrides of a short run: every update is recorded in full, and
            nothing is reported to others.
        error: code and message of the reason why there are no facts; empty if there are.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    monitor: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    observers: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    short_words: Sequence[str] = ()
    error: Mapping[str, str] = field(default_factory=dict)

    @property
    def seed(self) -> int:
        """RUN.seed of the config."""
        return int(self.config["RUN"]["seed"])


def list_versions() -> dict[str, str]:
    """Return the versions on which results depend, as environment.json has them."""
    return {"phasetrain": __version__, "torch": torch.__version__, "numpy": np.__version__}


def collect_facts(order: Order) -> Facts:
    """Resolve the config of a contender in this process, and return the facts.

    Raises:
        ConfigError: the config is invalid, or the run folder names code that is not trusted.
    """
    stored = None
    if order.stored:
        stored = replace(read_newest_command(order.stored), is_trusted=order.is_trusted)
    setup = resolve_config(
        order.words,
        config_dir=order.config_dir,
        stored=stored,
        terminal=Terminal(io.StringIO(), live=False),
    )
    config = setup.config.plain()
    with trust_only(setup.trusted_paths):
        return Facts(
            config=config,
            asked=setup.asked,
            monitor=_choose_monitor(setup),
            code=hash_sources(setup),
            observers=list(list_observers(config)),
            versions=list_versions(),
            # Observing hooks change no bit, so these words prove as much about the whole run.
            short_words=[*hook_words(config["HOOKS"]), "HOOKS.report=null"],
        )


def _choose_monitor(setup: Setup) -> str:
    monitor = setup.config.CHECKPOINT.best.monitor
    if monitor is not None:
        return str(monitor)
    # Without any metric, --metric is required; that is for the caller to say.
    with suppress(ConfigError):
        return find_first_metric(setup.config)
    return ""


def read_facts(path: Path) -> Facts | None:
    """Return the facts in a file; None if the process has not written any."""
    try:
        return Facts(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def main(words: Sequence[str]) -> int:
    """Write the facts of an order, or the error, and return the exit code."""
    order, out = words
    code = 0
    try:
        facts = collect_facts(Order.read(order))
    # In the file and not on standard error: the code is wanted as well as the message.
    except PhasetrainError as error:
        code = error.exit_code
        facts = Facts(error={"code": error.code, "message": str(error)})
    Path(out).write_text(json.dumps(asdict(facts)), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
