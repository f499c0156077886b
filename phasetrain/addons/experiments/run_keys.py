"""Keys of section RUN for experiments."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phasetrain.config.sections.keys import Section, key

if TYPE_CHECKING:
    from phasetrain.app.setup import Setup


@dataclass(frozen=True, kw_only=True)
class RunKeys(Section):
    """Keys of section RUN for experiments."""

    step: int | None = key(
        None,
        "number of the update to replay with RUN.engine=replay, as in metrics.jsonl",
        scope="command",
        ge=1,
    )
    # Free, since a fork ends with the bits of the run from scratch.
    reuse_prefix: bool = key(
        False,
        "start from a checkpoint of a run next to RUN.dir whose first updates are the same for "
        "certain; a sweep trains updates that its runs share once",
        scope="run",
    )


def prepare_training(setup: "Setup") -> None:
    """Fork the run of a config if RUN.reuse_prefix asks for it."""
    keys: RunKeys = setup.config["RUN"]
    if keys.reuse_prefix:
        from phasetrain.addons.experiments.fork.reuse_prefix import reuse_prefix

        reuse_prefix(setup)
