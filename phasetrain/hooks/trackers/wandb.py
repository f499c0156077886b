"""Sends records to Weights & Biases, into one run over all attempts, offline or online."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS
from phasetrain.hooks.trackers.base import Record
from phasetrain.hooks.trackers.spooled import Backend, Ending, Remote, Target

BLOCK = 32768
"""Bytes of a block of a `.wandb` file, which has the format of LevelDB's logs after a head of 7
bytes."""

Mode = Literal["offline", "online"]


@HOOKS.register("wandb")
class WandB(Remote):
    """One run of Weights & Biases for all attempts; needs the extra `wandb`.

    Offline, each attempt leaves a folder `wandb/offline-run-*` in the run folder, for `wandb sync`.
    The step that W&B counts is the number of the record; curves are drawn over `updates`.

    Args:
        project, entity: where the run belongs.
        run_name: its name; None: that of the run folder.
        group, tags: as in `wandb.init`.
        mode: `offline` needs no network and no account; `online` needs `wandb login` or
            WANDB_API_KEY.
        every_updates, live, wait_seconds, hparams: see `Remote`.
    """

    kind = "wandb"

    def __init__(
        self,
        project: str = "phasetrain",
        entity: str | None = None,
        run_name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Mode = "offline",
        every_updates: int = 10,
        wait_seconds: float = 30.0,
        *,
        live: bool = False,
        hparams: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(every_updates, wait_seconds, live=live, hparams=hparams)
        if mode not in ("offline", "online"):
            raise ValueError(f"mode = {mode!r}: expected 'offline' or 'online'")
        self.mode: Mode = mode
        self._words = {
            "project": project,
            "entity": entity,
            "name": run_name,
            "group": group,
            "tags": list(tags),
        }

    def backend(self, target: Target) -> Backend:
        """Return W&B's run; raises ConfigError where the package or, online, the key is missing."""
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                'HOOKS.wandb needs Weights & Biases: pip install "phasetrain[wandb]", or HOOKS.wandb=null'
            ) from error
        if self.mode == "online" and not wandb.api.api_key:
            raise ConfigError(
                "HOOKS.wandb.mode = 'online' needs an API key: run `wandb login` once, set WANDB_API_KEY, or set "
                "HOOKS.wandb.mode=offline"
            )
        return WandBRun(
            target, self.mode, {**self._words, "name": self._words["name"] or target.folder.name}
        )


class WandBRun(Backend):
    """A run of W&B under an id of ours.

    Args:
        target: the run.
        mode: whether it goes over the network.
        words: further arguments of `wandb.init`.
    """

    def __init__(self, target: Target, mode: Mode, words: Mapping[str, Any]) -> None:
        self._target = target
        self._mode = mode
        self._words = words
        self._run: Any = None

    def connect(self) -> int:
        """Start W&B's service and open the run."""
        import wandb

        if self._mode == "online":
            has = 0
        else:
            has = count_offline(self._target.folder, self._target.identity)
        quiet = wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            disable_git=True,
            save_code=False,
            reinit="create_new",
        )
        self._run = wandb.init(
            id=self._target.identity,
            dir=str(self._target.folder),
            mode=self._mode,
            resume="allow",
            config=dict(self._target.hparams),
            allow_val_change=True,
            settings=quiet,
            **self._words,
        )
        self._run.define_metric("updates")
        self._run.define_metric("*", step_metric="updates")
        if self._mode == "online":
            return int(self._run.step)
        return has

    def send(self, first: int, records: Sequence[Record]) -> None:
        """Log records under their numbers."""
        for number, record in enumerate(records, first):
            place = {"updates": record.updates, "epoch": record.epoch, "samples": record.samples}
            self._run.log({**record.named(), **place, "_timestamp": record.at}, step=number)

    def note(self, name: str, value: str) -> None:
        """Put a word into the summary of the run."""
        self._run.summary[name] = value

    def close(self, ending: Ending) -> None:
        """Finish the attempt; W&B calls a run with an exit code failed."""
        self._run.finish(exit_code=0 if ending == "finished" else 1)

    def abandon(self) -> None:
        """End the service of a run that has failed; the next one gets a service of its own."""
        import wandb

        with suppress(OSError):
            wandb.teardown()
        self._run = None


def count_offline(folder: Path, identity: str) -> int:
    """Return how many records W&B has in the offline folders of a run: one more than the last step
    it has written."""
    files = folder.glob(f"wandb/offline-run-*/run-{identity}.wandb")
    return max((step + 1 for file in files for step in history_steps(file.read_bytes())), default=0)


def history_steps(content: bytes) -> Iterator[int]:
    """Yield the step of each row of history in a `.wandb` file; a torn end is left out."""
    for values in history(content):
        with suppress(KeyError, ValueError):
            yield int(values["_step"])


def history(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the rows of history in a `.wandb` file as name -> value; a torn end is left out."""
    from wandb.proto import wandb_internal_pb2

    for data in _records(content):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of chunks (crc, length, kind), of
    which one or more."""
    at = 7
    held = b""
    while True:
        if BLOCK - at % BLOCK < 7:  # the end of a block is too short for the head of a chunk
            at += BLOCK - at % BLOCK
        if at + 7 > len(content):
            return
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        at += 7
        if kind == 0 or at + length > len(content):
            return
        held, at = held + content[at : at + length], at + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            yield held
            held = b""
