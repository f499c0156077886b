"""Sends records to Weights & Biases, offline or online."""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from phasetrain.addons.observe.trackers.base import Record
from phasetrain.addons.observe.trackers.spooled import Backend, Ending, SpooledTracker, Target
from phasetrain.errors import ConfigError
from phasetrain.hooks.base import HOOKS

BLOCK_BYTES = 32768
"""Bytes per block of a `.wandb` file: a LevelDB log after a header of 7 bytes."""

Mode = Literal["offline", "online"]


@HOOKS.register("wandb")
class WandB(SpooledTracker):
    """One W&B run for all attempts; needs the extra `wandb`.

    Offline, each attempt writes a folder `wandb/offline-run-*` in the run folder, for `wandb sync`.
    W&B's step is the number of the record; curves are drawn over `updates`.

    Args:
        project, entity, group, tags: arguments of `wandb.init`.
        run_name: name of the run; None uses the name of the run folder.
        mode: `offline` needs no network and no account; `online` needs `wandb login` or
            WANDB_API_KEY.
        every_updates, live, wait_seconds, hparams: see `SpooledTracker`.
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
        self._init_arguments = {
            "project": project,
            "entity": entity,
            "name": run_name,
            "group": group,
            "tags": list(tags),
        }

    def make_backend(self, target: Target) -> Backend:
        """Return the W&B run, not yet connected.

        Raises:
            ConfigError: the package is not installed, or the API key is missing in online mode.
        """
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                'HOOKS.wandb needs Weights & Biases: pip install "phasetrain[wandb]", or '
                "HOOKS.wandb=null",
                code="config.missing_package",
            ) from error
        if self.mode == "online" and not wandb.api.api_key:
            raise ConfigError(
                "HOOKS.wandb.mode = 'online': no API key found; run `wandb login` once, set "
                "WANDB_API_KEY, or set HOOKS.wandb.mode=offline",
                code="config.missing_api_key",
            )
        name = self._init_arguments["name"] or target.folder.name
        return WandBRun(target, self.mode, {**self._init_arguments, "name": name})


class WandBRun(Backend):
    """A W&B run with a given id.

    Args:
        target: the run.
        mode: `offline` or `online`.
        init_arguments: further arguments of `wandb.init`.
    """

    def __init__(self, target: Target, mode: Mode, init_arguments: Mapping[str, Any]) -> None:
        self._target = target
        self._mode = mode
        self._init_arguments = init_arguments
        self._run: Any = None

    def connect(self) -> int:
        """Start W&B's service and open the run."""
        import wandb

        if self._mode == "online":
            has = 0
        else:
            # Before `init`, which adds the folder of this attempt.
            has = count_offline(self._target.folder, self._target.identity)
        # By default W&B captures the terminal, polls the machine in a process, and reads the git
        # repository: none of it belongs to a tracker of a reproducible run.
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
            # A resume may change free keys of the config.
            allow_val_change=True,
            settings=quiet,
            **self._init_arguments,
        )
        self._run.define_metric("updates")
        self._run.define_metric("*", step_metric="updates")
        if self._mode == "online":
            return int(self._run.step)
        return has

    def send(self, first: int, records: Sequence[Record]) -> None:
        """Log records under their numbers."""
        for number, record in enumerate(records, first):
            position = {"updates": record.updates, "epoch": record.epoch, "samples": record.samples}
            values = {**record.values_by_name(), **position, "_timestamp": record.at}
            if record.item:
                values[record.item["tag"]] = _open_media(self._target.folder, record.item)
            self._run.log(values, step=number)

    def note(self, name: str, value: str) -> None:
        """Add a value to the summary of the run."""
        self._run.summary[name] = value

    def close(self, ending: Ending) -> None:
        """Finish the attempt; W&B shows a nonzero exit code as failed."""
        self._run.finish(exit_code=0 if ending == "finished" else 1)

    def abandon(self) -> None:
        """End W&B's service process; the next connection starts a new one."""
        import wandb

        # The service process may be dead already.
        with suppress(OSError):
            wandb.teardown()
        self._run = None


def _open_media(folder: Path, item: Mapping[str, str]) -> Any:
    """Return an item as an object of W&B; a text if its file cannot be read."""
    import wandb

    path = folder / item["file"]
    try:
        if item["kind"] == "text":
            return path.read_text("utf-8")
        return (wandb.Image if item["kind"] == "image" else wandb.Audio)(str(path))
    # A file that is missing, or a package that W&B needs, must not hold back all later records.
    except (OSError, wandb.Error) as error:
        return f"{item['file']}: {error}"


def count_offline(folder: Path, identity: str) -> int:
    """Return the number of records in the offline folders of a run: its last step plus one."""
    count = 0
    for file in folder.glob(f"wandb/offline-run-*/run-{identity}.wandb"):
        for values in history_rows(file.read_bytes()):
            with suppress(KeyError, ValueError):
                count = max(count, int(values["_step"]) + 1)
    return count


def history_rows(content: bytes) -> Iterator[dict[str, Any]]:
    """Yield the history rows of a `.wandb` file as name -> value, without a torn end."""
    from wandb.proto import wandb_internal_pb2

    for data in _log_records(content):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            yield {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }


def _log_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log; a record is one or more chunks (crc, length, kind)."""
    # W&B's own reader raises on the torn end that a kill leaves.
    at = 7
    chunks = b""
    while True:
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:  # the end of a block is too short for a chunk header
            at += BLOCK_BYTES - at % BLOCK_BYTES
        if at + 7 > len(content):
            return
        _, length, chunk_type = struct.unpack("<IHB", content[at : at + 7])
        at += 7
        # A kind of 0 is padding; a chunk beyond the end was torn by a kill.
        if chunk_type == 0 or at + length > len(content):
            return
        chunks += content[at : at + length]
        at += length
        if chunk_type in (1, 4):  # a whole record, or the last chunk of one
            yield chunks
            chunks = b""
