"""A small project with custom parts, and mutations of it that move no bit or are a first difference.

`benchmarks/golden_mutations.py` applies many of them.
"""

from dataclasses import dataclass
from pathlib import Path

MODULE = "golden_parts"
"""Name of the module with the parts of the project."""

SOURCE = """\
import math
from typing import Any

import torch
from torch import Tensor, nn


class Network(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(64, 16)
        self.head = nn.Linear(16, classes)

    def forward(self, image: Tensor) -> Tensor:
        hidden = torch.relu(self.body(image.flatten(1)))
        output: Tensor = self.head(hidden)
        return output


class Scaled(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        return loss * math.sqrt(4.0)


class Brighten:
    def __call__(self, image: Any) -> Any:
        return image * 0.5
"""

WORDS = (
    f"MODEL.name={MODULE}.Network",
    "MODEL.classes=10",
    f"LOSS.name={MODULE}.Scaled",
    f"DATA.TRAIN.transforms=[{MODULE}.Brighten]",
    "DATA.TRAIN.batch_size=24",
    "DATA.TEST=null",
    "OPTIMIZER.lr=0.05",
)
"""Overrides of its run."""


@dataclass(frozen=True)
class Mutation:
    """A change of the project.

    Attributes:
        name: of the change.
        component: first component that differs; empty: none.
        before, after: a text of the source and its replacement.
        words: overrides in addition.
        update: first update that differs.
    """

    name: str
    component: str = ""
    before: str = ""
    after: str = ""
    words: tuple[str, ...] = ()
    update: int = 1

    def apply(self, folder: Path) -> None:
        """Write the changed source."""
        assert self.before in SOURCE, self.name
        (folder / f"{MODULE}.py").write_text(SOURCE.replace(self.before, self.after, 1))


NEUTRAL = (
    Mutation("comment", "", "import math\n", "# The root of the scale.\nimport math\n"),
    Mutation("workers", words=("DATA.TRAIN.workers=2",)),
    Mutation(
        "order of imports",
        "",
        "import math\nfrom typing import Any\n",
        ("from typing import Any\nimport math\n"),
    ),
    Mutation("run folder", words=("RUN.dir=elsewhere/run",)),
    Mutation(
        "name of a variable",
        "",
        "loss = nn.functional.cross_entropy(output, target)\n        return loss",
        "mean = nn.functional.cross_entropy(output, target)\n        return mean",
    ),
    Mutation("docstring", "", "(nn.Module):\n", '(nn.Module):\n    """A part."""\n\n'),
    Mutation(
        "unused function",
        "",
        "class Brighten",
        "def darken() -> None:\n    pass\n\n\nclass Brighten",
    ),
    Mutation("equal constant", "", "math.sqrt(4.0)", "2.0"),
)
"""Changes that move no bit."""

# The rate of the first update is zero, since the schedule begins with a warm-up.
OTHERS = (
    Mutation("learning rate", "optimizer", words=("OPTIMIZER.lr=0.06",), update=2),
    Mutation("loss", "loss", "math.sqrt(4.0)", "math.sqrt(3.0)"),
    Mutation("seed", "initial weights", words=("RUN.seed=1",)),
    Mutation("order of samples", "samples", words=("DATA.TRAIN.sampler=sequential",)),
    Mutation("transform", "batch", "image * 0.5", "image * 0.25"),
    Mutation("forward", "output", "torch.relu(", "torch.tanh("),
    Mutation(
        "initialization",
        "initial weights",
        "        self.head = ",
        ("        nn.init.zeros_(self.body.bias)\n        self.head = "),
    ),
    Mutation("momentum", "optimizer", words=("OPTIMIZER.momentum=0.5",), update=2),
    Mutation(
        "gradient",
        "gradient",
        "return loss * math.sqrt(4.0)",
        (
            "return loss * 2.0 + (loss - loss.detach()) * 0.0 + (output.sum() - output.sum().detach())"
        ),
    ),
)
"""Changes that move bits."""
