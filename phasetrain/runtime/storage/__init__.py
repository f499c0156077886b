"""File access: every operation on a run folder goes through iopath and a callback for tests.

`Storage` is for local file systems, where a rename commits. The add-on `remote` has the storage of
paths such as `s3://...`, which can neither rename nor append, and verified copies of data and
weights elsewhere.
"""

from phasetrain.runtime.storage.digest import FileRecord, tree_digest
from phasetrain.runtime.storage.elsewhere import (
    HANDLERS,
    CachedFile,
    RemoteError,
    fetch,
    list_urls,
    open_copies,
    open_run_storage,
    open_storage,
    stat_url,
)
from phasetrain.runtime.storage.logs import LogFile
from phasetrain.runtime.storage.posix import TEMPORARY, Storage, Unfinished
from phasetrain.runtime.storage.urls import is_url, strip_file_scheme

__all__ = [
    "HANDLERS",
    "TEMPORARY",
    "CachedFile",
    "FileRecord",
    "LogFile",
    "RemoteError",
    "Storage",
    "Unfinished",
    "fetch",
    "is_url",
    "list_urls",
    "open_copies",
    "open_run_storage",
    "open_storage",
    "stat_url",
    "strip_file_scheme",
    "tree_digest",
]
