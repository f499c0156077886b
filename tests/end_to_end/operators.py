"""Operators that torchvision looks up, for programs in which it is installed for another build of
torch."""

import importlib.util
from pathlib import Path

import torch


def declared_operators() -> torch.library.Library | None:
    """Declare the operators whose names `import torchvision` looks up, where the compiled ones
    cannot be loaded.

    That is so where it was built for CUDA and torch was not. Its models and transforms need none of
    them.

    Returns:
        What holds the operators, which live as long; None where they need not be declared.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        for compiled in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(compiled))
            return None
    except OSError:
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
