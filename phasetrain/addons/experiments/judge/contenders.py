"""The things that are judged: run folders, experiments, and revisions of a project."""

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from phasetrain.addons.experiments.judge.facts import Facts, Order, read_facts
from phasetrain.addons.experiments.judge.processes import Launch, WorkingFolder
from phasetrain.addons.experiments.sweep.results import read_last_line
from phasetrain.config.compose.folders import EXPERIMENT, is_file_word
from phasetrain.config.compose.override_text import key_of
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError
from phasetrain.runs.paths import check_run_folder
from phasetrain.runtime.storage import open_storage

FACTS = "phasetrain.addons.experiments.judge.facts"
"""Module of the process that collects facts."""

OWN_KEYS = ("RUN.seed", "RUN.dir", "RUN.resume", "RUN.pause_at", "RUN.engine")
"""Keys that `judge` sets for each run."""


@dataclass(frozen=True)
class Contender:
    """The baseline or a candidate.

    Attributes:
        label: as the user named it.
        words: overrides of its runs.
        stored: folder of the run whose config the overrides change; empty for none.
        commit: the revision of the project; empty for the files as they are.
        working_folder: working directory of its runs.
        facts: facts about its runs.
    """

    label: str
    words: tuple[str, ...] = ()
    stored: str = ""
    commit: str = ""
    working_folder: WorkingFolder = field(default_factory=WorkingFolder)
    facts: Facts = field(default_factory=Facts)

    @property
    def digest(self) -> str:
        """8 hex digits that depend on its name, config, code and versions."""
        asked = dict(self.facts.asked)
        schema = default_schema()
        run = {
            key: value
            for key, value in asked.get("RUN", {}).items()
            if key != "seed" and not schema.is_of_one_run(f"RUN.{key}")
        }
        # The words as well: the same config with its keys in another order has other runs, by
        # which it is shown that the order does not matter.
        content = [
            self.commit or self.label,
            list(self.words),
            asked | {"RUN": run},
            dict(self.facts.code),
            dict(self.facts.versions),
        ]
        return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=4).hexdigest()

    @property
    def name(self) -> str:
        """The label, with the revision."""
        if self.commit:
            return f"{self.label} ({self.commit[:10]})"
        return self.label


def parse_contenders(
    words: Sequence[str], working_folder: WorkingFolder, *, command: str = "judge"
) -> list[Contender]:
    """Return the contenders that the words of a command line name.

    Args:
        words: run folders, experiment files and names of experiments, each of them perhaps followed
            by overrides within the same word; other words `SECTION.key=value` are for all of them.
        working_folder: the working directory.
        command: the command, for messages.

    Raises:
        ConfigError: fewer than two contenders, or one is named twice.
    """
    shared = [word for word in words if _is_override(word)]
    named = [word for word in words if not _is_override(word)]
    if len(named) < 2:
        raise ConfigError(
            f"phasetrain {command}: expected a baseline and a candidate, each a run folder, an "
            'experiment, or an experiment with overrides in quotes ("wide.yaml '
            'OPTIMIZER.lr=0.05"); or --rev REVISION and the words of a run',
            code="cli.usage",
        )
    repeated = [word for word in named if named.count(word) > 1]
    if repeated:
        raise ConfigError(
            f"{repeated[0]}: it is named twice, and nothing can differ; `phasetrain rerun` repeats "
            "a run and compares every bit",
            code="judge.named_twice",
        )
    check_words(shared)
    return [_parse_contender(word, shared, working_folder) for word in named]


def _is_override(word: str) -> bool:
    key, sign, value = word.partition("=")
    if _is_folder(word) or (key == EXPERIMENT and len(value.split()) > 1):
        return False
    # A value may have spaces; an experiment with overrides has one before the first sign.
    return word.startswith("~") or (bool(sign) and len(key.split()) == 1)


def _is_folder(word: str) -> bool:
    # Many overrides in one word are longer than a path may be, which is an error for pathlib.
    with suppress(OSError):
        return Path(word).is_dir()
    return False


def _parse_contender(text: str, shared: Sequence[str], working_folder: WorkingFolder) -> Contender:
    # A folder whose name has spaces or quotes is no list of words.
    if _is_folder(text):
        first, rest = text, list[str]()
    else:
        first, *rest = shlex.split(text)
    check_words(rest)
    words = (*shared, *rest)  # its own come last, and win
    if _is_folder(first):
        check_run_folder(first, open_storage(first))
        return Contender(text, words, stored=first.rstrip("/"), working_folder=working_folder)
    if "/" in first and not is_file_word(first) and "=" not in first:
        check_run_folder(first, open_storage(first))  # there is none: says what is there
    if not is_file_word(first) and "=" not in first:
        first = f"experiment={first}"
    return Contender(text, (first, *words), working_folder=working_folder)


def check_words(words: Sequence[str]) -> None:
    """Reject overrides of keys that differ between the runs of one contender.

    Raises:
        ConfigError: names the first one (code `judge.own_key`).
    """
    for word in words:
        if key_of(word) in OWN_KEYS:
            raise ConfigError(
                f"{word}: judge chooses seeds and folders itself; remove it, and limit the number "
                "of seeds with --pairs",
                code="judge.own_key",
            )


def add_facts(
    contender: Contender, launch: Launch, *, config_dir: str | None, trust: bool
) -> Contender:
    """Return the contender with the facts about its runs.

    Raises:
        ConfigError: its config is invalid.
    """
    order = Order(contender.words, contender.stored, config_dir, trust)
    # The files are gone before training begins, so that a kill leaves nothing behind.
    with tempfile.TemporaryDirectory(prefix="phasetrain-judge-") as folder:
        order_file, out, log = (Path(folder, name) for name in ("order.json", "facts.json", "log"))
        order.write(order_file)
        code = launch([FACTS, str(order_file), str(out)], contender.working_folder, log)
        facts = read_facts(out)
        if facts is None:
            raise ConfigError(
                f"{contender.name}: its config cannot be read (exit code {code}): "
                f"{read_last_line(log)}",
                code="judge.no_facts",
            )
    if facts.error:
        raise ConfigError(f"{contender.name}: {facts.error['message']}", code=facts.error["code"])
    return replace(contender, facts=facts)


def list_by_digest(contenders: Sequence[Contender]) -> Mapping[str, Contender]:
    """Return digest -> contender.

    Raises:
        ConfigError: two of them would have the same runs.
    """
    by_digest: dict[str, Contender] = {}
    for contender in contenders:
        # Two names of one commit, or the same words twice: both would be trained in one folder.
        if contender.digest in by_digest:
            raise ConfigError(
                f"{contender.name} and {by_digest[contender.digest].name}: they are the same, and "
                "nothing can differ; name another revision or config",
                code="judge.named_twice",
            )
        by_digest[contender.digest] = contender
    return by_digest
