"""Intermediate outputs of a model, by the names of its modules."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import join_first

Pool = Literal["none", "mean", "first"]
"""Reduction of an output with several positions: none, the mean over positions, or the first
token."""


class LayerOutputs:
    """Collects the outputs of named modules with forward hooks, while used as a context manager.

    Args:
        model: the model, called inside the context.
        names: names of modules, as in `model.named_modules()`.
        pool: `mean` turns `(N, C, H, W)` into `(N, C)` and tokens `(N, T, D)` into `(N, D)`,
            `first` selects the first token.
        where: the config key with the names, for messages.

    Raises:
        ConfigError: there is no such module; a suggestion is given.

    Example:
        >>> with LayerOutputs(model, ["features"], "mean") as layers:
        ...     scores = model(images)
        ...     features = layers.pop_outputs()["features"]
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        pool: Pool = "none",
        where: str = "EXTRACT.layers",
    ) -> None:
        self._modules = dict(model.named_modules())
        self._pool = pool
        self._where = where
        for number, name in enumerate(names):
            if name not in self._modules or not name:
                module_names = [module_name for module_name in self._modules if module_name]
                near = did_you_mean(name, module_names) or "."
                raise ConfigError(
                    f"{where}[{number}] = {name!r}: the model has no such module{near} It has "
                    f"{join_first(module_names, 12)}",
                    code="config.no_match",
                )
        # Without duplicates, because a second hook on a module would look like a second call.
        self.names = tuple(dict.fromkeys(names))
        self._handles: list[RemovableHandle] = []
        self._outputs: dict[str, Tensor] = {}

    def __enter__(self) -> "LayerOutputs":
        for name in self.names:
            self._handles.append(self._modules[name].register_forward_hook(self._make_hook(name)))
        return self

    def __exit__(self, *error: object) -> None:
        # After an error in the forward pass too: with hooks left over, the next use would see every
        # module called twice.
        while self._handles:
            self._handles.pop().remove()

    def pop_outputs(self) -> dict[str, Tensor]:
        """Return the outputs since the last call by module name, and clear them.

        Raises:
            ConfigError: a module was not called.
        """
        outputs = self._outputs
        self._outputs = {}
        for name in self.names:
            if name not in outputs:
                raise ConfigError(
                    f"{self._where}: {name!r} is not called in the forward pass; name another "
                    "module",
                    code="config.module_not_called",
                )
        return {name: outputs[name] for name in self.names}

    def _make_hook(self, name: str) -> Any:
        def keep_output(module: nn.Module, inputs: Any, output: Any) -> None:
            if name in self._outputs:
                raise ConfigError(
                    f"{self._where}: {name!r} is called more than once in the forward pass; name a "
                    "module that is called once",
                    code="config.module_called_twice",
                )
            if not isinstance(output, Tensor):
                raise ConfigError(
                    f"{self._where}: {name!r} ({type(module).__name__}) returns "
                    f"{type(output).__name__}, not a tensor; name a module inside it",
                    code="config.module_output",
                )
            # A copy (see pool_output), because a later layer may change the output in place.
            self._outputs[name] = pool_output(
                output.detach(), self._pool, f"{self._where}: {name!r}"
            )

        return keep_output


def pool_output(output: Tensor, pool: Pool, what: str) -> Tensor:
    """Return a copy of an output after pooling, first dimension N.

    Raises:
        ConfigError: the first token is requested, and the output has no tokens.
    """
    if pool == "first":
        if output.ndim != 3:
            raise ConfigError(
                f"{what} returns {tuple(output.shape)}, and EXTRACT.pool = 'first' needs tokens "
                "(N, T, D); set EXTRACT.pool to mean or none",
                code="config.module_output",
            )
        # A view would keep the whole output in memory.
        return output[:, 0].clone()
    if pool == "none" or output.ndim < 3:
        return output.clone()
    if output.ndim == 3:
        return output.mean(1)
    return output.flatten(2).mean(2)
