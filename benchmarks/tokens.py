"""Time and memory of a seek in token files.

    python benchmarks/tokens.py [--tokens 1000000000] [--seeks 1000] [--json FILE]

The file is sparse: its tokens are holes, except for those of the documents in `--documents`. Printed
are the time to open the folder, to read a window anywhere (median and slowest of the seeks), and
the memory that was allocated on the way. `--shuffled` packs the documents in a random order.
"""

import argparse
import json
import platform
import resource
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from phasetrain.addons.text.tokens import ByteCodec, Manifest, ShardRecord
from phasetrain.addons.text.tokens.dataset import Tokens


def write_sparse(folder: Path, tokens: int, documents: int) -> None:
    """Write a folder of `tokens` tokens in documents of equal length, all of them holes."""
    with open(folder / "shard-00000.tokens", "wb") as file:
        file.truncate(2 * tokens)
    ends = np.linspace(0, tokens, documents + 1).astype("<i8")[1:]
    (folder / "shard-00000.documents").write_bytes(ends.tobytes())
    shard = ShardRecord("shard-00000", documents, tokens, tokens - documents, "", "")
    manifest = Manifest("uint16", 257, 256, ByteCodec.digest, "", None, (shard,))
    (folder / "tokens.json").write_text(json.dumps(manifest.to_json()))


def measure(folder: Path, seeks: int, order: str) -> dict[str, float]:
    """Return seconds and bytes of opening a folder and of reading windows."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    data = Tokens(str(folder), 1024, order=order, verify="never")  # type: ignore[arg-type]
    opened = time.perf_counter() - begin
    places = np.random.default_rng(0).integers(0, len(data), seeks)
    times = []
    for place in places.tolist():
        begin = time.perf_counter()
        data[place]
        times.append(time.perf_counter() - begin)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "open_ms": 1e3 * opened,
        "seek_median_ms": 1e3 * median(times),
        "seek_slowest_ms": 1e3 * max(times),
        "memory_growth_mb": (after - before) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=10**9)
    parser.add_argument("--documents", type=int, default=10**6)
    parser.add_argument("--seeks", type=int, default=1000)
    parser.add_argument("--json")
    args = parser.parse_args()
    found = {"torch": torch.__version__, "machine": platform.machine(), "tokens": args.tokens}
    with tempfile.TemporaryDirectory() as name:
        write_sparse(Path(name), args.tokens, args.documents)
        for order in ("stored", "shuffled"):
            row = measure(Path(name), args.seeks, order)
            found[order] = row
            print(f"{order}: {', '.join(f'{key} {value:.2f}' for key, value in row.items())}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
