"""Datasets of torchvision by name (`DATA.*.dataset=torchvision.FakeData`)."""

import inspect
from collections.abc import Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any, get_type_hints

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from phasetrain.config.registry import Factory, UnknownNameError
from phasetrain.data.datasets.base import DATASETS
from phasetrain.data.datasets.images import Mode, check_mode, import_pillow, to_tensor
from phasetrain.data.protocols import Samples
from phasetrain.errors import ConfigError

LEFT_OUT = ("transform", "target_transform", "transforms")
"""Parameters of torchvision that DATA.*.transforms replaces."""

OURS: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {"mode": (Mode, "RGB"), "classes": (int | None, None), "part": (str, "train")}
)
"""Type and default of additional parameters; parameters of torchvision's class take precedence."""


class TorchvisionSamples(Dataset[tuple[Any, Any]]):
    """A torchvision dataset, with images as float32 `(C, H, W)` in [0, 1].

    Args:
        data: the dataset.
        mode: mode to which images are converted, RGB or L.
        classes: number of classes; None uses the classes of the dataset.
        description: name and parameters, for the fingerprint.
    """

    def __init__(
        self,
        data: Samples,
        *,
        mode: Mode = "RGB",
        classes: int | None = None,
        description: str = "",
    ) -> None:
        check_mode(mode, None)
        self.data = data
        self.mode = mode
        self.description = description
        self._class_names = _find_class_names(data)
        self.classes = len(self._class_names) or classes

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL.Image import Image

        value, target = self.data[index]
        return (to_tensor(value, self.mode) if isinstance(value, Image) else value), target

    def facts(self) -> Mapping[str, Any]:
        """Return `classes` and `class_names` if known."""
        named = {"class_names": self._class_names} if self._class_names else {}
        if self.classes is None:
            return named
        return {"classes": self.classes, **named}

    def fingerprint(self) -> str:
        """Return the SHA-256 over the name, the parameters and the number of samples."""
        return sha256(f"{self.description} {len(self)}".encode()).hexdigest()


class LabelledTorchvisionSamples(TorchvisionSamples):
    """A torchvision dataset that knows the class of each sample without reading it."""

    def labels(self) -> NDArray[np.int64]:
        """Return the class of each sample, `(N,)`."""
        return np.asarray(_find_labels(self.data), dtype=np.int64)


def _find_labels(data: Any) -> Any:
    """Return the classes of all samples, which torchvision's datasets name differently; None: it is
    not known without reading them."""
    for name in ("targets", "labels"):
        values = vars(data).get(name)
        if values is not None and len(values) == len(data) and np.ndim(values) == 1:
            return values
    return None


@DATASETS.bridge("torchvision", "torchvision")
def find_torchvision_dataset(name: str) -> Factory[Samples] | None:
    """Return the factory of torchvision's dataset `name`; None if `name` is a path inside
    torchvision.

    It takes the parameters of torchvision's class except the transforms, and `mode` and `classes`.
    A parameter `train` is set by the split. Downloads are rejected.

    Raises:
        UnknownNameError: torchvision has no such dataset.
    """
    from torchvision import datasets

    if "." in name:
        return None
    classes = {
        class_name: thing for class_name, thing in vars(datasets).items() if inspect.isclass(thing)
    }
    kinds = {
        class_name: thing
        for class_name, thing in classes.items()
        if issubclass(thing, datasets.VisionDataset)
    }
    if name not in kinds:
        raise UnknownNameError(name, kinds)
    return _make_factory(name, kinds[name])


def _make_factory(name: str, kind: type[Any]) -> Factory[Samples]:
    takes = {
        parameter: p
        for parameter, p in inspect.signature(kind).parameters.items()
        if parameter not in LEFT_OUT
    }
    ours = {
        parameter: default for parameter, (_, default) in OURS.items() if parameter not in takes
    }

    def build(**arguments: Any) -> Samples:
        import_pillow(f"torchvision.{name}")
        own = ours | {
            parameter: arguments.pop(parameter) for parameter in ours if parameter in arguments
        }
        if arguments.get("download"):
            raise ConfigError(
                "download = true: nothing is downloaded while a run is built; call "
                f"torchvision.datasets.{name}(..., download=True) once yourself",
                code="config.download",
            )
        if "train" in takes:
            arguments = {"train": own.get("part") == "train"} | arguments
        # Without the root: the fingerprint must survive a move of the data.
        description = f"{name} {sorted(item for item in arguments.items() if item[0] != 'root')}"
        try:
            data = kind(**arguments)
        except RuntimeError as error:
            raise ValueError(
                f"{error}; nothing is downloaded while a run is built, so do it once yourself"
            ) from error
        has_labels = _find_labels(data) is not None
        adapter = LabelledTorchvisionSamples if has_labels else TorchvisionSamples
        return adapter(
            data, mode=own.get("mode", "RGB"), classes=own.get("classes"), description=description
        )

    optional = inspect.Parameter.KEYWORD_ONLY
    shown = [
        p.replace(kind=optional, default=None if parameter == "train" else p.default)
        for parameter, p in takes.items()
    ]
    shown += [
        inspect.Parameter(parameter, optional, default=default)
        for parameter, default in ours.items()
    ]
    hints = {
        parameter: hint
        for parameter, hint in get_type_hints(kind.__init__).items()
        if parameter in takes
    }
    # The registry reads signature and annotations to check and document parameters.
    vars(build)["__signature__"] = inspect.Signature(shown)
    build.__annotations__ = hints | {parameter: OURS[parameter][0] for parameter in ours}
    return build


def _find_class_names(data: Any) -> tuple[str, ...]:
    """Return the names of the classes, from the attribute `classes` that torchvision documents."""
    # Not getattr: some datasets compute `classes` in a property that reads all samples.
    places = [vars(data), *(vars(base) for base in type(data).__mro__)]
    names = next(
        (
            namespace["classes"]
            for namespace in places
            if isinstance(namespace.get("classes"), list | tuple)
        ),
        (),
    )
    return tuple(map(str, names))
