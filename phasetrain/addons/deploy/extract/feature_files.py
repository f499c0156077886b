"""Feature folders: the rows of one split in shards, with an index (RUN.engine=extract)."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from phasetrain.errors import ChangedError, ConfigError, did_you_mean
from phasetrain.runtime.storage import Storage, open_storage, tree_digest

INDEX = "index.json"
VERSION = 1
LAYER = "layer."
"""Prefix of the columns with outputs of layers."""


@dataclass(frozen=True)
class Shard:
    """A file of rows.

    Attributes:
        file: its name.
        first: index of its first sample in the split.
        rows: number of rows; less than the samples if some could not be read.
        size: bytes.
        digest: `tree_digest` of its content.
        columns: name -> type and shape of one row.
    """

    file: str
    first: int
    rows: int
    size: int
    digest: str
    columns: Mapping[str, Sequence[Any]]


class FeatureFolder:
    """The shards of one split while they are written.

    A shard is written atomically, and its record, which confirms it, after it. Once all shards are
    complete, the index replaces the records.

    Args:
        path: the folder.
        form: `safetensors` or `npz`.
    """

    def __init__(self, path: str, form: str) -> None:
        self.path = path
        self.form = form
        self._storage = open_storage(path)
        self._index: dict[str, Any] = {}

    def begin(self, request: Mapping[str, Any]) -> None:
        """Create the folder for a request, or reopen it.

        Raises:
            ChangedError: it holds the features of another request; names the first difference.
        """
        request = json.loads(json.dumps(request))  # tuples become lists, as in the stored one
        with self._explain_errors():
            index = self._storage.read_json(f"{self.path}/{INDEX}")
            if index is None:
                self._storage.make_folder(self.path)
                self._write_index(
                    {"format_version": VERSION, "complete": False, "request": request}
                )
                return
        before = index.get("request", {})
        for key in dict.fromkeys([*before, *request]):
            if before.get(key) != request.get(key):
                raise ChangedError(
                    f"{self.path!r} contains features with {key} = {before.get(key)!r}, and now it "
                    f"is {request.get(key)!r}; set EXTRACT.dir to another folder, or delete this "
                    "one"
                )

    def abandon(self) -> None:
        """Delete the folder if nothing but the request is in it."""
        if self._storage.list_names(self.path) == [INDEX]:
            self._storage.remove(self.path)

    def read_intact(self, number: int) -> Shard | None:
        """Return the shard if it exists and is intact, otherwise None."""
        name = self._file_name(number)
        record = self._storage.read_json(f"{self.path}/{name}.json") or self._read_records().get(
            name
        )
        if not isinstance(record, dict) or not self._storage.exists(f"{self.path}/{name}"):
            return None
        shard = Shard(**record)
        # Read as a whole: a damaged shard is made again now instead of failing a reader later.
        content, digest = self._storage.read_hashed(f"{self.path}/{name}")
        if (len(content), digest) == (shard.size, shard.digest):
            return shard
        return None

    def write(self, number: int, first: int, columns: Mapping[str, Tensor]) -> Shard:
        """Write a shard durably, then its record."""
        name = self._file_name(number)
        content = encode_columns(columns, self.form)
        kinds = {key: [_name_type(value), list(value.shape[1:])] for key, value in columns.items()}
        rows = len(columns["id"])
        shard = Shard(name, first, rows, len(content), tree_digest(content), kinds)
        with self._explain_errors():
            self._storage.replace(f"{self.path}/{name}", content)
            # after the shard: a record confirms that its shard is complete
            self._storage.replace_json(f"{self.path}/{name}.json", asdict(shard))
        return shard

    def finish(self, shards: Iterable[Shard], column_info: Mapping[str, Any]) -> None:
        """Write the index of all shards, which completes the folder, and delete all other files."""
        listed = list(shards)
        request = (self._storage.read_json(f"{self.path}/{INDEX}") or {})["request"]
        rows = sum(shard.rows for shard in listed)
        columns = listed[0].columns if listed else {}
        content = {
            "format_version": VERSION,
            "complete": True,
            "format": self.form,
            "rows": rows,
            "columns": columns,
            **column_info,
        }
        shown = [
            {key: value for key, value in asdict(shard).items() if key != "columns"}
            for shard in listed
        ]
        with self._explain_errors():
            self._write_index({**content, "request": request, "shards": shown})
            records = {f"{shard.file}.json" for shard in listed}
            # The index comes first: a process that is killed in between leaves too many records,
            # but never a shard without any. Half-written files of killed processes go as well.
            for name in self._storage.list_names(self.path):
                if name in records or ".tmp-" in name:
                    self._storage.remove(f"{self.path}/{name}")

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Turn an error of the file system into a ConfigError about the folder."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"EXTRACT.dir: {self.path!r} cannot be written: {error.strerror or error} "
                f"(errno {error.errno}); set EXTRACT.dir to a writable folder on a disk with free "
                "space, and start again: completed shards are kept",
                code="file.not_writable",
            ) from error

    def _read_records(self) -> dict[str, Any]:
        """Return the records in the index of a complete folder."""
        if not self._index:
            self._index = self._storage.read_json(f"{self.path}/{INDEX}") or {}
        columns = self._index.get("columns")
        return {
            record["file"]: {**record, "columns": columns}
            for record in self._index.get("shards", [])
        }

    def _file_name(self, number: int) -> str:
        return f"shard-{number:05d}.{self.form}"

    def _write_index(self, content: Mapping[str, Any]) -> None:
        self._storage.replace_json(f"{self.path}/{INDEX}", content)


def encode_columns(columns: Mapping[str, Tensor], form: str) -> bytes:
    """Return the content of a shard, a function of its columns alone."""
    if form == "safetensors":
        return save({name: value.contiguous() for name, value in columns.items()})
    file = io.BytesIO()
    np.savez(file, **{name: value.numpy() for name, value in columns.items()})  # type: ignore[arg-type]
    return file.getvalue()


def decode_columns(content: bytes, form: str) -> dict[str, Tensor]:
    """Return the columns of a shard."""
    if form == "safetensors":
        return load(content)
    # No pickles: the folder may come from somebody else, and a pickle can run any code.
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def read_index(path: str) -> dict[str, Any]:
    """Return the index of a feature folder.

    Raises:
        ConfigError: there is none, or it is not complete.
    """
    path = path.rstrip("/")
    index = open_storage(path).read_json(f"{path}/{INDEX}")
    if not isinstance(index, dict):
        raise ConfigError(
            f"{path!r} contains no features ({INDEX} is missing); make them with "
            "RUN.engine=extract",
            code="extract.no_features",
        )
    if not index.get("complete"):
        raise ConfigError(
            f"{path!r} is not complete; re-run the same `phasetrain extract`, which resumes it",
            code="extract.incomplete",
        )
    return index


def read_columns(path: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Return columns of all rows of a feature folder, each `(rows, ...)`, after verifying the
    digests.

    Args:
        path: folder of one split.
        names: names of columns, or of layers.

    Raises:
        ConfigError: the folder is not complete, has no such column, or a file is damaged.
    """
    path = path.rstrip("/")
    index = read_index(path)
    storage = open_storage(path)
    wanted = {name: _find_column(path, name, index["columns"]) for name in names}
    parts_by_name: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for shard in index["shards"]:
        columns = decode_columns(_read_verified(storage, path, shard), index["format"])
        for name, column in wanted.items():
            parts_by_name[name].append(columns[column])
    return {name: torch.cat(parts) for name, parts in parts_by_name.items()}


def _find_column(path: str, name: str, columns: Mapping[str, Any]) -> str:
    for column in (f"{LAYER}{name}", name):
        if column in columns:
            return column
    names = [column.removeprefix(LAYER) for column in columns]
    raise ConfigError(
        f"{path!r} has no {name!r}{did_you_mean(name, names) or '.'} It has {', '.join(names)}",
        code="extract.unknown_column",
    )


def _read_verified(storage: Storage, path: str, shard: Mapping[str, Any]) -> bytes:
    name = f"{path}/{shard['file']}"
    try:
        content, digest = storage.read_hashed(name)
    except OSError as error:
        raise ConfigError(
            f"{name!r} cannot be read ({error}); re-run the same `phasetrain extract`",
            code="extract.unreadable_shard",
        ) from error
    if digest != shard["digest"]:
        raise ConfigError(
            f"{name!r} is damaged: its digest differs from the index; re-run the same "
            "`phasetrain extract`",
            code="extract.damaged_shard",
        )
    return bytes(content)


def _name_type(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
