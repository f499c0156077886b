"""Heads that project features, and a model made of a trunk and such a head."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from phasetrain.config.registry import Registry
from phasetrain.errors import did_you_mean, is_out_of_memory
from phasetrain.models.base import MODELS, check_sizes
from phasetrain.models.trunk_heads import MakeModel

HEADS: Registry[nn.Module] = Registry("head", "MODEL.head")


@runtime_checkable
class Embedding(Protocol):
    """A model that gives embeddings: `(N, dimensions)` for a batch, and a list of them for a list
    of views.

    Attributes:
        dimensions: size of an embedding.
    """

    dimensions: int

    def as_teacher(self) -> nn.Module:
        """Return a copy that makes what a student's outputs are compared with."""
        ...


@HEADS.register("projection")
class ProjectionHead(nn.Sequential):
    """Fully connected layers with ReLU between them: `(N, features)` to `(N, dimensions)`.

    Args:
        features: fact; size of what it gets.
        dimensions: size of what it gives.
        hidden: width of each hidden layer; empty makes it linear.
        batch_norm: batch norm behind each hidden layer.
        last_batch_norm: batch norm behind the last layer too, without weights.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        features: int,
        dimensions: int = 128,
        hidden: Sequence[int] = (),
        *,
        batch_norm: bool = False,
        last_batch_norm: bool = False,
    ) -> None:
        check_sizes(features=features, dimensions=dimensions, hidden=min(hidden, default=1))
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(features, width, bias=not batch_norm)]
            layers += [nn.BatchNorm1d(width)] if batch_norm else []
            layers += [nn.ReLU(inplace=True)]
            features = width
        layers += [nn.Linear(features, dimensions, bias=not last_batch_norm)]
        layers += [nn.BatchNorm1d(dimensions, affine=False)] if last_batch_norm else []
        super().__init__(*layers)


@HEADS.register("prototypes")
class PrototypeHead(nn.Module):
    """Layers with GELU, then cosines with prototypes: `(N, features)` to scores `(N, dimensions)`.

    As in DINO (Caron et al. 2021, arXiv:2104.14294, appendix C).

    Args:
        features: fact; size of what it gets.
        dimensions: number of prototypes.
        hidden: width of each hidden layer.
        bottleneck: size of what is compared with the prototypes.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        features: int,
        dimensions: int = 65536,
        hidden: Sequence[int] = (2048, 2048),
        bottleneck: int = 256,
    ) -> None:
        super().__init__()
        check_sizes(
            features=features,
            dimensions=dimensions,
            hidden=min(hidden, default=1),
            bottleneck=bottleneck,
        )
        layers: list[nn.Module] = []
        for width in hidden:
            layers += [nn.Linear(features, width), nn.GELU()]
            features = width
        self.layers = nn.Sequential(*layers, nn.Linear(features, bottleneck))
        self.prototypes = nn.Parameter(normalize(torch.randn(dimensions, bottleneck), dim=1))

    def forward(self, features: Tensor) -> Tensor:
        """Return scores `(N, dimensions)` in [-1, 1]; the length of a prototype does not matter."""
        return linear(normalize(self.layers(features), dim=1), normalize(self.prototypes, dim=1))


@MODELS.register("trunk_head")
class TrunkHead(nn.Module):
    """A trunk, a head on its features, and perhaps a predictor on what the head gives.

    A batch `(N, ...)` becomes embeddings `(N, dimensions)`. A list of views becomes a list of them:
    the trunk sees all neighbouring views of one shape at once, the head all views.

    Args:
        trunk: `name` of a model, its parameters, and `cut`: name of a module of it, such as its
            last layer, that is taken out, so that what goes into it are the features `(N, F)`.
        head: `name` of a head and its parameters.
        input_shape: fact; shape of one sample.
        make_model: fact; makes the trunk.
        predictor: `name` of a head and its parameters; a teacher has none.

    Attributes:
        trunk, head, predictor: the modules; the predictor is an identity where there is none.
        features: F.
        dimensions: size of an embedding.

    Raises:
        ValueError: the trunk has no module to take out, does not take such samples, or gives no
            features `(N, F)`.
    """

    def __init__(
        self,
        trunk: Mapping[str, Any],
        head: Mapping[str, Any],
        input_shape: Sequence[int],
        make_model: MakeModel,
        predictor: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if "name" not in trunk:
            raise ValueError("trunk.name is missing; it is the name of a model, such as small_cnn")
        self.trunk = make_model(
            {key: one for key, one in trunk.items() if key != "cut"}, "MODEL.trunk", {}
        )
        if (cut := trunk.get("cut")) is not None:
            _take_out(self.trunk, cut)
        self.features = _width(self.trunk, (2, *input_shape), "MODEL.trunk")
        self.head = _head(head, "MODEL.head", {"features": self.features})
        self.dimensions = _width(self.head, (2, self.features), "MODEL.head")
        self.predictor: nn.Module = nn.Identity()
        if predictor is not None:
            facts = {"features": self.dimensions, "dimensions": self.dimensions}
            self.predictor = _head(predictor, "MODEL.predictor", facts)

    def forward(self, views: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Return the embeddings `(N, dimensions)` of a batch, or those of each of several views."""
        if isinstance(views, Tensor):
            found: Tensor = self.predictor(self.head(self.trunk(views)))
            return found
        sizes = [list(group) for _, group in groupby(views, key=lambda view: view.shape[1:])]
        features = torch.cat([self.trunk(torch.cat(group)) for group in sizes])
        embeddings: Tensor = self.predictor(self.head(features))
        return list(torch.split(embeddings, [len(view) for view in views]))

    def as_teacher(self) -> nn.Module:
        """Return a copy without predictor."""
        copy = deepcopy(self)
        copy.predictor = nn.Identity()
        return copy


def _head(section: Mapping[str, Any], where: str, facts: Mapping[str, Any]) -> nn.Module:
    if "name" not in section:
        raise ValueError(f"{where}.name is missing; known: {', '.join(HEADS)}")
    params = {key: value for key, value in section.items() if key != "name"}
    return HEADS.build(section["name"], params, where=where, facts=facts)


def _take_out(trunk: nn.Module, name: str) -> None:
    """Put an identity in the place of a module."""
    names = [known for known, _ in trunk.named_modules() if known]
    if name not in names:
        near = did_you_mean(name, names)
        raise ValueError(
            f"trunk.cut = {name!r}: the trunk has no module of this name{near or '.'} It has: {names}"
        )
    trunk.set_submodule(name, nn.Identity())


@torch.no_grad()
def _width(module: nn.Module, shape: Sequence[int], where: str) -> int:
    """Return F, where inputs of a shape become `(N, F)`; running statistics stay as they are."""
    was_training = module.training
    try:
        found = module.eval()(torch.zeros(*shape))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{where} does not take samples of shape {tuple(shape[1:])}: {error}"
        ) from error
    finally:
        module.train(was_training)
    if not isinstance(found, Tensor) or found.ndim != 2:
        if isinstance(found, Tensor):
            given = f"a tensor of shape {tuple(found.shape)}"
        else:
            given = type(found).__name__
        raise ValueError(
            f"{where} gives {given} for 2 samples, expected (2, F); "
            "cut a layer out of the trunk (MODEL.trunk.cut) or take another one"
        )
    return found.shape[1]
