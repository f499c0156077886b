"""What the modules of a model return while it runs, by their names."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from phasetrain.errors import ConfigError, did_you_mean
from phasetrain.runtime.format import join_first

Pool = Literal["none", "mean", "first"]
"""What is kept of an output with more than one place: all of it, the mean over places, or the first
token."""


class Layers:
    """Takes the outputs of named modules; a context that puts hooks on the model and takes them
    away again.

    What is taken is a copy: a later layer may change an output in place.

    Args:
        model: called inside of the context.
        names: of modules, as in `model.named_modules()`.
        pool: `mean` makes `(N, C)` of `(N, C, H, W)` and `(N, D)` of tokens `(N, T, D)`, `first`
            takes the first token.
        where: the key that gave the names, for messages.

    Raises:
        ConfigError: there is no such module; near misses are named.

    Example:
        >>> with Layers(model, ["features"], "mean") as layers:
        ...     scores = model(images)
        ...     features = layers.taken()["features"]
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
                known = [known for known in self._modules if known]
                raise ConfigError(
                    f"{where}[{number}] = {name!r}: the model has no such module{did_you_mean(name, known) or '.'} It "
                    f"has {join_first(known, 12)}"
                )
        self.names = tuple(dict.fromkeys(names))
        self._handles: list[RemovableHandle] = []
        self._taken: dict[str, Tensor] = {}

    def __enter__(self) -> "Layers":
        for name in self.names:
            self._handles.append(self._modules[name].register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *error: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def taken(self) -> dict[str, Tensor]:
        """Return what the modules have returned since the last call, by name, and forget it.

        Raises:
            ConfigError: a module was not called.
        """
        found, self._taken = self._taken, {}
        for name in self.names:
            if name not in found:
                raise ConfigError(
                    f"{self._where}: {name!r} is not called when the model runs; name another module"
                )
        return {name: found[name] for name in self.names}

    def _hook(self, name: str) -> Any:
        def take(module: nn.Module, inputs: Any, output: Any) -> None:
            if name in self._taken:
                raise ConfigError(
                    f"{self._where}: {name!r} is called more than once when the model runs; name a module that is "
                    "called once"
                )
            if not isinstance(output, Tensor):
                raise ConfigError(
                    f"{self._where}: {name!r} ({type(module).__name__}) returns {type(output).__name__}, not a "
                    "tensor; name a module inside of it"
                )
            self._taken[name] = pooled(output.detach(), self._pool, f"{self._where}: {name!r}")

        return take


def pooled(output: Tensor, pool: Pool, what: str) -> Tensor:
    """Return a copy of what is kept of an output, its first dimension N.

    Raises:
        ConfigError: it has no tokens of which one would be the first.
    """
    if pool == "first":
        if output.ndim != 3:
            raise ConfigError(
                f"{what} returns {tuple(output.shape)}, and EXTRACT.pool = 'first' takes the first of tokens "
                "(N, T, D); set EXTRACT.pool to mean or none"
            )
        return output[:, 0].clone()
    if pool == "none" or output.ndim < 3:
        return output.clone()
    if output.ndim == 3:
        return output.mean(1)
    return output.flatten(2).mean(2)
