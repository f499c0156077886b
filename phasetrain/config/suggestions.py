"""Suggestions for misspelt keys."""

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from phasetrain.errors import nearest, plain

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "learningrate": "OPTIMIZER.lr",
        "accumulategradbatches": "OPTIMIZER.accumulate",
        "gradientaccumulationsteps": "OPTIMIZER.accumulate",
        "gradientclipval": "OPTIMIZER.clip_norm",
        "maxgradnorm": "OPTIMIZER.clip_norm",
        "gradnorm": "HOOKS.gradient_norm",
        "maxepochs": "PHASES.epochs",
        "numepochs": "PHASES.epochs",
        "numtrainepochs": "PHASES.epochs",
        "maxsteps": "PHASES.updates",
        "limittrainbatches": "PHASES.limit.train",
        "overfitbatches": "PHASES.overfit",
        "valcheckinterval": "PHASES.test_every.updates",
        "checkvaleverynepoch": "PHASES.test_every.epochs",
        "accelerator": "MACHINE.device",
        "devices": "LAUNCH.processes",
        "defaultrootdir": "RUN.dir",
        "numworkers": "DATA.TRAIN.workers",
        "perdevicetrainbatchsize": "DATA.TRAIN.micro_batch_size",
        "resumefromcheckpoint": "RUN.resume",
        "outputdir": "RUN.dir",
        "savesteps": "CHECKPOINT.every_updates",
        "savetotallimit": "CHECKPOINT.keep_last",
        "scheduler": "OPTIMIZER.SCHEDULES",
        "lrscheduler": "OPTIMIZER.SCHEDULES",
        "augmentation": "DATA.TRAIN.transforms",
        "gpus": "LAUNCH.processes",
        "amp": "MACHINE.precision",
        "mixedprecision": "MACHINE.precision",
    }
)
"""Name in Lightning, transformers, timm and others, without case and separators -> the key here."""


SYNONYMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lr": ("learningrate", "eta"),
        "path": ("folder", "dir", "directory", "root", "file", "filename", "location"),
        "betas": ("beta", "beta1", "beta2"),
        "eps": ("epsilon",),
        "topk": ("k", "top"),
        "size": ("imagesize", "imgsize", "resolution"),
        "dropout": ("droprate", "pdrop"),
        "name": ("type", "class", "target", "kind"),
        "dataset": ("name",),
        "classes": ("numclasses", "nclasses", "numlabels"),
        "weight_decay": ("wd", "l2"),
        "workers": ("numworkers",),
        "cuda": ("gpu", "cuda:0"),
        "fp16": ("float16", "half"),
        "bf16": ("bfloat16",),
        "fp32": ("float32", "float"),
    }
)
"""Name of a parameter or a value here -> other words for it, without case and separators."""

_MEANINGS = {word: name for name, words in SYNONYMS.items() for word in words}


def find_synonym(name: str, known: Container[str]) -> str | None:
    """Return the known parameter that another word means, such as `path` for `folder`, or None."""
    synonym = _MEANINGS.get(plain(name))
    if synonym is not None and synonym in known:
        return synonym
    return None


class KnownPaths:
    """The dotted paths a config may have, in order of preference.

    Tried in turn: the same place with other spelling (`OPTIMIZER.lrr`, `optimizer.lr`,
    `MODLE.name`); another word for a name in the same place (`DATA.TRAIN.root`); the only longer
    name in the same place that begins or ends with it (`LOSS.smoothing`); the same last name
    elsewhere (`OPTIMIZER.batch_size`, `lr`); names of other tools; a less similar name in the same
    place; a similar name elsewhere.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._by_name: dict[str, str] = {}
        self._tree: dict[str, Any] = {}
        for path in paths:
            # The first path wins: DATA.TRAIN comes before other splits.
            # Without case and separators, since other tools write learningRate, learning-rate or
            # learning_rate for the same thing.
            self._by_name.setdefault(plain(path.rpartition(".")[2]), path)
            node = self._tree
            for name in path.split("."):
                node = node.setdefault(name, {})

    def near(self, path: str) -> str | None:
        """Return the known path that was probably meant, or None."""
        last = plain(path.rpartition(".")[2])
        # Precise rules come first: a very similar name in the same place is a misspelling, while
        # names elsewhere may be similar by accident.
        return (
            self._walk(path, likeness=0.8)
            or self._synonym(path)
            or self._longer(path)
            or self._by_name.get(last)
            or self._elsewhere(last)
            or self._walk(path, likeness=0.6)
            # Not for a name deep in a section, which somebody has placed there on purpose.
            or (path.count(".") < 3 and self._similar(last))
            or None
        )

    def _similar(self, last: str) -> str | None:
        return self._by_name.get(nearest(last, self._by_name, likeness=0.8) or "")

    def _longer(self, path: str) -> str | None:
        parent, _, last = path.rpartition(".")
        near = self._below(parent)
        candidates = [
            name for name in near if name.startswith(f"{last}_") or name.endswith(f"_{last}")
        ]
        # With several candidates a suggestion would be a guess.
        if parent and len(candidates) == 1:
            return f"{parent}.{candidates[0]}"
        return None

    def _below(self, path: str) -> Mapping[str, Any]:
        node = self._tree
        for name in filter(None, path.split(".")):
            node = node.get(name, {})
        return node

    def _synonym(self, path: str) -> str | None:
        parent, _, last = path.rpartition(".")
        name = find_synonym(last, self._below(parent))
        if parent and name is not None:
            return f"{parent}.{name}"
        return None

    def _elsewhere(self, last: str) -> str | None:
        path = ELSEWHERE.get(last, "")
        # A schema may lack the key, as in tests of single sections.
        if path in self._by_name.values():
            return path
        return None

    def _walk(self, path: str, *, likeness: float) -> str | None:
        node = self._tree
        keys = []
        for name in path.split("."):
            key = name if name in node else nearest(name, node, likeness=likeness)
            if key is None:
                return None
            keys.append(key)
            node = node[key]
        return ".".join(keys)
