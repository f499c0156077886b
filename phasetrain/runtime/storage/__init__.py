"""File access: every operation on a run folder goes through iopath and a callback for tests.

Two backends: `Storage` for local file systems, where a rename commits, and `ObjectStorage` for
paths such as `mem://...` of a registered iopath handler, which can neither rename nor append.
"""

from phasetrain.runtime.storage.digest import FileRecord, tree_digest
from phasetrain.runtime.storage.logs import LogFile
from phasetrain.runtime.storage.objects import HANDLERS, ObjectStorage, open_storage
from phasetrain.runtime.storage.posix import TEMPORARY, Storage, Unfinished

__all__ = [
    "HANDLERS",
    "TEMPORARY",
    "FileRecord",
    "LogFile",
    "ObjectStorage",
    "Storage",
    "Unfinished",
    "open_storage",
    "tree_digest",
]
