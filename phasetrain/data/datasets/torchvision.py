"""Data sets of torchvision by name (`DATA.*.dataset=torchvision.FakeData`)."""

import inspect
from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any, get_type_hints

from torch.utils.data import Dataset

from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.datasets.images import Mode, check_mode, pillow, pixels
from phasetrain.data.protocols import Samples
from phasetrain.errors import ConfigError

LEFT_OUT = ("transform", "target_transform", "transforms")
"""Parameters of torchvision in whose place stands DATA.*.transforms."""

OURS: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {"mode": (Mode, "RGB"), "classes": (int | None, None), "part": (str, "train")}
)
"""Type and default of the parameters that stand beside those of torchvision's class; its own
win."""


class TorchvisionSamples(Dataset[tuple[Any, Any]]):
    """A data set of torchvision, its images as float32 `(C, H, W)` in [0, 1].

    Args:
        data: the data set.
        mode: what images are converted to, RGB or L.
        classes: number of classes; None takes what the data set knows.
        described: what it was made from, for the fingerprint.
    """

    def __init__(
        self, data: Samples, *, mode: Mode = "RGB", classes: int | None = None, described: str = ""
    ) -> None:
        check_mode(mode, None)
        self.data = data
        self.mode = mode
        self.described = described
        self._class_names = _class_names(data)
        self.classes = len(self._class_names) or classes

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL.Image import Image

        value, target = self.data[index]
        return (pixels(value, self.mode) if isinstance(value, Image) else value), target

    def facts(self) -> Mapping[str, Any]:
        """Return `classes` and `class_names` as far as they are known."""
        named = {"class_names": self._class_names} if self._class_names else {}
        if self.classes is None:
            return named
        return {"classes": self.classes, **named}

    def fingerprint(self) -> str:
        """Return the SHA-256 over the name, the parameters and the number of samples."""
        return sha256(f"{self.described} {len(self)}".encode()).hexdigest()


@DATASETS.bridge("torchvision", "torchvision")
def torchvision_dataset(name: str) -> Factory[Samples] | None:
    """Return what makes torchvision's data set `name`; None for what is the path of a module of
    torchvision.

    It takes the parameters of torchvision's class but the transforms, and `mode` and `classes`
    beside. One that has a parameter `train` gets it by the split. Downloads are refused.

    Raises:
        UnknownNameError: torchvision has no such data set.
    """
    from torchvision import datasets

    if "." in name:
        return None
    found = {one: thing for one, thing in vars(datasets).items() if inspect.isclass(thing)}
    kinds = {
        one: thing for one, thing in found.items() if issubclass(thing, datasets.VisionDataset)
    }
    if name not in kinds:
        raise UnknownNameError(name, kinds)
    return _factory(name, kinds[name])


def _factory(name: str, kind: type[Any]) -> Factory[Samples]:
    takes = {one: p for one, p in inspect.signature(kind).parameters.items() if one not in LEFT_OUT}
    ours = {one: default for one, (_, default) in OURS.items() if one not in takes}

    def build(**given: Any) -> Samples:
        pillow(f"torchvision.{name}")
        own = ours | {one: given.pop(one) for one in ours if one in given}
        if given.get("download"):
            raise ConfigError(
                f"download = true: nothing is downloaded while a run is built; call torchvision.datasets.{name}(..., "
                "download=True) once yourself"
            )
        if "train" in takes:
            given = {"train": own.get("part") == "train"} | given
        described = (
            f"{name} {sorted((one, value) for one, value in given.items() if one != 'root')}"
        )
        try:
            data = kind(**given)
        except RuntimeError as error:
            raise ValueError(
                f"{error}; nothing is downloaded while a run is built, so do it once yourself"
            ) from error
        return TorchvisionSamples(
            data, mode=own.get("mode", "RGB"), classes=own.get("classes"), described=described
        )

    optional = inspect.Parameter.KEYWORD_ONLY
    shown = [
        p.replace(kind=optional, default=None if one == "train" else p.default)
        for one, p in takes.items()
    ]
    shown += [inspect.Parameter(one, optional, default=default) for one, default in ours.items()]
    hints = {one: hint for one, hint in get_type_hints(kind.__init__).items() if one in takes}
    vars(build)["__signature__"] = inspect.Signature(shown)
    build.__annotations__ = hints | {one: OURS[one][0] for one in ours}
    return build


def _class_names(data: Any) -> tuple[str, ...]:
    """Return the names of the classes, where the data set has the attribute `classes` that
    torchvision documents."""
    places = [vars(data), *(vars(kind) for kind in type(data).__mro__)]
    found = next(
        (place["classes"] for place in places if isinstance(place.get("classes"), list | tuple)), ()
    )
    return tuple(map(str, found))
