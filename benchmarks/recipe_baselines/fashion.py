"""Linear probes on raw pixels and on features of random weights, for the recipe `fashion`.

The runs are in `runs/baselines`, and are resumed by the same command.
"""

import io
import json

import phasetrain
from phasetrain.runtime.terminal import Terminal

BASELINES = {
    "random features": ["experiment=fashion_probe", "MODEL.weights=null"],
    "raw pixels": [
        *("experiment=fashion", "MODEL.name=mlp", "MODEL.hidden=[]", "OPTIMIZER.weight_decay=0"),
        *("DATA.TRAIN.batch_size=256", "OPTIMIZER.lr=0.02", "PHASES.epochs=10"),
        "DATA.TRAIN.transforms=[{name: normalize, mean: 0.286, std: 0.353}]",
    ],
}


def main() -> None:
    found = {}
    for name, words in BASELINES.items():
        folder = f"RUN.dir=runs/baselines/fashion-{name.replace(' ', '-')}"
        quiet = Terminal(io.StringIO(), live=False)
        result = phasetrain.run([*words, folder], terminal=quiet)
        found[name] = {"test/accuracy": round(result.last["test/accuracy"], 4)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
