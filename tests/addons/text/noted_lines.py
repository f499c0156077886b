"""The dataset `noted_lines`, which records what it reads."""

import os
from collections.abc import Iterator
from typing import Any

from phasetrain.addons.text.lines import LineFiles, Lines
from phasetrain.data import DATASETS, StreamDataset


class _Noting(LineFiles):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log = ""

    def read(self, shard: int, start: int) -> Iterator[bytes]:
        with open(self.log, "a", buffering=1) as log:
            log.write("open\n")
            for line in super().read(shard, start):
                log.write(f"{len(line)}\n")
                yield line


@DATASETS.register("noted_lines")
class NotedLines(Lines):
    """Lines that record in a file per process how often a file is opened and which parts are read.

    Args:
        files: as for the dataset `lines`.
        log: prefix of the file name; `-RANK` is appended.
    """

    def __init__(self, files: str, log: str, classes: int = 10) -> None:
        super().__init__(files, classes=classes)
        stream = _Noting(self.shards)
        stream.log = f"{log}-{os.environ.get('RANK', '0')}"
        StreamDataset.__init__(self, stream)
