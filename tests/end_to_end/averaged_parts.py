"""Tasks that forget averages, as a negative control of the checks that they are saved."""

from phasetrain.tasks import Stateful, Supervised


class WithoutEMA(Supervised):
    """Does not save the running mean."""

    def stateful(self) -> dict[str, Stateful]:
        return {name: part for name, part in super().stateful().items() if name != "ema"}


class WithoutCount(Supervised):
    """Does not save the number of weights in the plain mean."""

    def stateful(self) -> dict[str, Stateful]:
        return {name: part for name, part in super().stateful().items() if name != "swa.taken"}
