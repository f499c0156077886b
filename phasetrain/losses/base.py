"""The registry of losses (section LOSS).

A loss is a torch.nn.Module, called as `loss(output, target)` with what the model returned and the target of the
batch; it returns the mean over the samples of the batch (or over its tokens), a scalar with a graph.
"""

from collections.abc import Mapping
from inspect import isclass

from torch import nn

from phasetrain.registry import Factory, Registry


def _losses_of_torch() -> Mapping[str, Factory[nn.Module]]:
    classes = {name: found for name, found in vars(nn).items() if isclass(found) and issubclass(found, nn.Module)}
    return {name: found for name, found in classes.items() if name.endswith("Loss")}


LOSSES: Registry[nn.Module] = Registry("loss", "LOSS", library=_losses_of_torch)
