"""What recording costs: a step of about 20 ms with and without the probe of `phasetrain audit`.

    python benchmarks/audit_overhead.py [--rounds N]

Interleaved: each round runs one process without the probe and one with it. Printed are the medians
over all rounds of the CPU time of a step; the first steps, in which the probe measures its own cost,
are left out.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

from phasetrain.addons.audit.probe import FOLDER
from phasetrain.addons.audit.runs import SITE

STEPS, FIRST = 120, 20

SCRIPT = f"""
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 320), nn.ReLU(), nn.Linear(320, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(SIZE, 3, 32, 32), torch.randint(10, (SIZE,)))
loader = DataLoader(data, BATCH)
count = 0
for epoch in range({STEPS}):
    for inputs, targets in loader:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        if count == {FIRST}:
            began = time.process_time()
        if count == {STEPS}:
            print((time.process_time() - began) / {STEPS - FIRST})
            raise SystemExit
"""


def run(script: str, folder: str) -> float:
    """Return the CPU seconds of a step, recorded if there is a folder for the records."""
    environment = dict(os.environ)
    if folder:
        environment.update({FOLDER: folder, "PYTHONPATH": str(SITE)})
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    return float(done.stdout)


def main() -> None:
    """Print the cost for two sizes of batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for batch in (64, 176):
        script = SCRIPT.replace("BATCH", str(batch)).replace("SIZE", str(batch * 10))
        bare, recorded = [], []
        for _ in range(rounds):
            bare.append(run(script, ""))
            with tempfile.TemporaryDirectory() as folder:
                recorded.append(run(script, folder))
        without, with_probe = statistics.median(bare), statistics.median(recorded)
        print(
            f"batches of {batch}: {1000 * without:.1f} ms without, {1000 * with_probe:.1f} ms with "
            f"the probe ({with_probe / without - 1:+.1%})"
        )


if __name__ == "__main__":
    main()
