"""Probable causes of a difference and their fixes, by the path of the first value that differs."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

_HIDDEN = (
    "holds something that is not in its state_dict (a Python number, a list, a buffer with "
    "persistent=False), uses a random generator that the run does not seed, or reads the clock"
)
_KEEP = (
    "register a buffer, implement get_extra_state and set_extra_state, or draw from torch's global "
    "generator, which is seeded in every step"
)

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        # Values of a step, causes before their effects.
        "batch*": (
            "another batch: a dataset, transform, sampler, collate function or hook uses a random "
            "generator that the run does not seed, counts its calls, caches what it has drawn, or "
            "reads the clock; let it draw from the global generators, which are seeded before each "
            "sample and each batch, or take keys (BatchTransform)"
        ),
        "output*": (
            f"the same batch gave another output: the model {_HIDDEN}, or it has an operator that "
            f"gives other bits each time; {_KEEP}"
        ),
        "loss*": (
            f"the same output gave another loss: the loss or a custom task {_HIDDEN}; {_KEEP}"
        ),
        "generator*": (
            "the model or a hook draws another number of random numbers in this step; it counts "
            "its calls, or branches on a value that is not in its state_dict"
        ),
        "gradient*": (
            "the same loss gave another gradient: an operator of the model or of the loss has a "
            "backward pass that gives other bits each time; MACHINE.deterministic=true rejects "
            "those of torch, and `phasetrain plan` names them"
        ),
        "logs*": "a part logs a value that is not a function of the step, such as a time",
        "metrics*": (
            "the meter holds something that is not in its state_dict; declare it with `add_sum`, "
            "or register a buffer"
        ),
        "state*": (
            f"the part {_HIDDEN}, or its load_state_dict does not load all of its state; keep it "
            "in the state (an optimizer: in `self.state[parameter]`); if weights differ after "
            "equal gradients, that is the optimizer"
        ),
        "hooks*": (
            "the hook's state_dict is incomplete, or its load_state_dict does not load all of it"
        ),
        # A part outside of a run.
        "restored*": "load_state_dict does not restore the state that state_dict returned",
        "result*": f"the part {_HIDDEN}",
        # Updates in the ledgers of two runs, whose configs may differ.
        "ledger.samples": "the order of the data, its length, the batch size or the seed differs",
        "ledger.batch content": "the data itself, a transform or its randomness differs",
        "ledger.lr": "the learning rate or its schedule differs",
        "ledger.loss": (
            "the forward pass differs: the loss or its parameters, the model, its randomness "
            "(dropout) or its buffers, the precision, the number of threads; or weights that are "
            "not recorded differ"
        ),
        "ledger.gradient norm": (
            "the backward pass differs, or only one of them clips the norm (OPTIMIZER.clip_norm)"
        ),
        "ledger.weights": (
            "the update differs: the optimizer, its settings or its state (momentum), gradient "
            "clipping, or one of them skipped it"
        ),
        "ledger.metrics": (
            "a meter, buffers of the model, the test data, or what a hook logs differs; or an "
            "attribute of the loss, the task or the model that train steps set and tests read, "
            "which a resume in a test does not have: keep it in a buffer"
        ),
        # Samples of one step at two world sizes.
        "samples.ids": (
            "the sampler or the dataset depends on the rank, or uses a random generator that is "
            "not seeded with the given seed"
        ),
        "samples.content": (
            "a transform or the collate function depends on the other samples of a batch (their "
            "mean, the longest), on the rank, or on a random generator that the run does not seed"
        ),
    }
)
"""Pattern of a path -> probable cause and what to do; the first pattern that matches counts."""

SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "batch": "DATA",
        "output": "MODEL",
        "generator": "MODEL",
        "loss": "LOSS",
        "gradient": "MODEL",
        "model": "MODEL",
        "updater": "OPTIMIZER",
    }
)
"""First component of a path -> section of the config to look at."""


def explain(path: str) -> str:
    """Return the probable cause of a difference at a path, and the remedy."""
    return next(text for pattern, text in CAUSES.items() if fnmatchcase(path, pattern))


def name_section(path: str) -> str:
    """Return the section of the config to look at for a path of a trace, such as `MODEL` or
    `METERS.accuracy`."""
    first, _, rest = path.removeprefix("state.").partition(".")
    label = rest.partition(".")[0]
    if first == "metrics":
        return f"METERS.{label.partition('/')[0]}"
    if first == "meter":
        return f"METERS.{label}"
    if first == "hooks":
        return f"HOOKS.{label}"
    if first == "data":
        return f"DATA.{label.upper()}"
    return SECTIONS.get(first, "TASK")
