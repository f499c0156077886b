"""File access: every operation on a run folder goes through iopath and a callback for tests.

Two backends: `Storage` for local file systems, where a rename commits, and `ObjectStorage` for
paths such as `s3://...`, which can neither rename nor append: through a registered iopath handler,
or through fsspec. Data and weights elsewhere come through `fetch`, which keeps verified copies.
"""

from phasetrain.runtime.storage.cache import CachedFile, fetch
from phasetrain.runtime.storage.digest import FileRecord, tree_digest
from phasetrain.runtime.storage.logs import LogFile
from phasetrain.runtime.storage.objects import (
    HANDLERS,
    CachedObjects,
    ObjectStorage,
    open_run_storage,
    open_storage,
)
from phasetrain.runtime.storage.posix import TEMPORARY, Storage, Unfinished
from phasetrain.runtime.storage.remote import RemoteError, is_url, strip_file_scheme

__all__ = [
    "HANDLERS",
    "TEMPORARY",
    "CachedFile",
    "CachedObjects",
    "FileRecord",
    "LogFile",
    "ObjectStorage",
    "RemoteError",
    "Storage",
    "Unfinished",
    "fetch",
    "is_url",
    "open_run_storage",
    "open_storage",
    "strip_file_scheme",
    "tree_digest",
]
