"""Heads that project features, and a model with a trunk and such a head."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

from phasetrain.addons.vision.trunk_heads import MakeModel, build_trunk
from phasetrain.config.checks import check_at_least
from phasetrain.errors import is_out_of_memory
from phasetrain.models.base import HEADS, MODELS
from phasetrain.models.mlp import ACTIVATIONS, Activation


@HEADS.register("projection")
class ProjectionHead(nn.Sequential):
    """Fully connected layers with an activation between them: `(N, features)` to `(N,
    dimensions)`.

    Args:
        features: fact; input size.
        dimensions: output size.
        hidden: width of each hidden layer; empty makes the head linear.
        batch_norm: batch norm after each hidden layer.
        last_batch_norm: batch norm without weights after the last layer.
        last_bias: whether the last layer has a bias, without a batch norm after it.
        last_hidden: treat the last layer like a hidden one, with batch norm and activation.
        activation: function after each hidden layer; `none` makes the head linear.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(  # noqa: PLR0913 - parameters of the part, which a config names
        self,
        features: int,
        dimensions: int = 128,
        hidden: Sequence[int] = (),
        *,
        batch_norm: bool = False,
        last_batch_norm: bool = False,
        last_bias: bool = True,
        last_hidden: bool = False,
        activation: Activation = "relu",
    ) -> None:
        check_at_least(1, features=features, dimensions=dimensions, hidden=min(hidden, default=1))
        layers: list[nn.Module] = []
        for width in [*hidden, dimensions] if last_hidden else hidden:
            # Batch norm subtracts the mean, so a bias before it would have no effect.
            layers += [nn.Linear(features, width, bias=not batch_norm)]
            if batch_norm:
                layers += [nn.BatchNorm1d(width)]
            layers += [ACTIVATIONS[activation]()]
            features = width
        if not last_hidden:
            layers += [nn.Linear(features, dimensions, bias=last_bias and not last_batch_norm)]
        if last_batch_norm:
            layers += [nn.BatchNorm1d(dimensions, affine=False)]
        super().__init__(*layers)


@HEADS.register("prototypes")
class PrototypeHead(nn.Module):
    """Hidden layers, then cosines with prototypes: `(N, features)` to scores `(N, dimensions)`.

    As in DINO (Caron et al. 2021, arXiv:2104.14294, appendix C).

    Args:
        features: fact; input size.
        dimensions: number of prototypes.
        hidden: width of each hidden layer.
        bottleneck: size of the vectors that are compared with the prototypes.
        batch_norm: batch norm and ReLU instead of GELU after hidden layers, as in SwAV.
        trained_scale: each score is multiplied by a trained scale of its prototype, which starts
            at 1: the norm of a weight norm, which DINO fixes for large models only.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self,
        features: int,
        dimensions: int = 65536,
        hidden: Sequence[int] = (2048, 2048),
        bottleneck: int = 256,
        *,
        batch_norm: bool = False,
        trained_scale: bool = False,
    ) -> None:
        super().__init__()
        check_at_least(
            1,
            features=features,
            dimensions=dimensions,
            hidden=min(hidden, default=1),
            bottleneck=bottleneck,
        )
        layers: list[nn.Module] = []
        for width in hidden:
            # With a bias even before a batch norm, so that weights of SwAV fit.
            layers += [nn.Linear(features, width)]
            if batch_norm:
                layers += [nn.BatchNorm1d(width), nn.ReLU()]
            else:
                layers += [nn.GELU()]
            features = width
        self.layers = nn.Sequential(*layers, nn.Linear(features, bottleneck))
        self.prototypes = nn.Parameter(normalize(torch.randn(dimensions, bottleneck), dim=1))
        self.scales: nn.Parameter | None = None
        if trained_scale:
            # With two dimensions like the weights of a layer, which rules for norms leave out.
            self.scales = nn.Parameter(torch.ones(dimensions, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Return scores `(N, dimensions)`, in [-1, 1] if they have no scales; the norm of a
        prototype does not matter."""
        # Normalised on each call instead of a weight norm, whose fixed gain would be one more
        # parameter to freeze.
        prototypes = normalize(self.prototypes, dim=1)
        if self.scales is not None:
            prototypes = prototypes * self.scales
        return linear(normalize(self.layers(features), dim=1), prototypes)


@MODELS.register("trunk_head")
class TrunkHead(nn.Module):
    """A trunk, a head on its features, and optionally a predictor on the output of the head.

    A batch `(N, ...)` becomes embeddings `(N, dimensions)`. A list of views becomes a list of
    embeddings.

    Args:
        trunk: `name` of a model, its parameters, and `cut`: name of a module, such as the last
            layer, that is replaced by an identity so that its inputs are the features `(N, F)`.
        head: `name` of a head and its parameters.
        input_shape: fact; shape of one sample.
        make_model: fact; builds the trunk.
        predictor: `name` of a head and its parameters; a teacher has none.

    Attributes:
        trunk, head, predictor: the modules; without a predictor it is an identity.
        features: F.
        dimensions: size of an embedding.

    Raises:
        ValueError: the trunk lacks the module to cut, rejects such samples, or does not return
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
            raise ValueError("trunk.name: required; the name of a model, such as small_cnn")
        self.trunk = build_trunk(trunk, make_model)
        # Measured instead of declared: any model may be a trunk, and few say how wide their
        # features are. Two samples, because some layers drop a first dimension of 1.
        self.features = _measure_width(self.trunk, (2, *input_shape), "MODEL.trunk")
        self.head = _build_head(head, "MODEL.head", {"features": self.features})
        self.dimensions = _measure_width(self.head, (2, self.features), "MODEL.head")
        self.predictor: nn.Module = nn.Identity()
        if predictor is not None:
            facts = {"features": self.dimensions, "dimensions": self.dimensions}
            self.predictor = _build_head(predictor, "MODEL.predictor", facts)

    def forward(self, views: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Return the embeddings `(N, dimensions)` of a batch, or of each of several views."""
        if isinstance(views, Tensor):
            embedding: Tensor = self.predictor(self.head(self.trunk(views)))
            return embedding
        # One trunk pass per run of views of equal shape, so batch norm sees all of them together.
        sizes = [list(group) for _, group in groupby(views, key=lambda view: view.shape[1:])]
        features = torch.cat([self.trunk(torch.cat(group)) for group in sizes])
        embeddings: Tensor = self.predictor(self.head(features))
        return list(torch.split(embeddings, [len(view) for view in views]))

    def as_teacher(self) -> nn.Module:
        """Return a copy without predictor."""
        # The predictor is what makes the student differ from the teacher; without it BYOL
        # collapses.
        copy = deepcopy(self)
        copy.predictor = nn.Identity()
        return copy


def _build_head(section: Mapping[str, Any], where: str, facts: Mapping[str, Any]) -> nn.Module:
    if "name" not in section:
        raise ValueError(f"{where}.name: required; known: {', '.join(HEADS)}")
    params = {key: value for key, value in section.items() if key != "name"}
    return HEADS.build(section["name"], params, where=where, facts=facts)


@torch.no_grad()
def _measure_width(module: nn.Module, shape: Sequence[int], where: str) -> int:
    """Return F if inputs of a shape become `(N, F)`."""
    was_training = module.training
    try:
        # In eval mode, so that the pass of zeros does not change running statistics.
        features = module.eval()(torch.zeros(*shape))
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(f"{where} rejects samples of shape {tuple(shape[1:])}: {error}") from error
    finally:
        module.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        if isinstance(features, Tensor):
            received = f"a tensor of shape {tuple(features.shape)}"
        else:
            received = type(features).__name__
        raise ValueError(
            f"{where} returns {received} for 2 samples, expected (2, F); cut another layer of the "
            "trunk (MODEL.trunk.cut)"
        )
    return features.shape[1]
