"""Several optimizers that act as one, each for other weights (OPTIMIZER.others)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from phasetrain.errors import ConfigError
from phasetrain.optim.groups import SELECTORS, Weight, select_weights

MAIN = ""
"""Label of the optimizer in OPTIMIZER itself, which has the weights that OPTIMIZER.others does not
select."""


class MultiOptimizer(Optimizer):
    """Steps all of its optimizers or none, and looks like one with the groups of all.

    Parameters and state are numbered through all of them, in order. It can withhold a step on the
    device if each of them can.

    Args:
        optimizers: label -> optimizer; the first one is the main one.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        main, *_ = self.optimizers.values()
        # Copies of the groups: `Optimizer.__init__` writes defaults into the dicts that it gets.
        # They are replaced by the shared ones below.
        super().__init__(
            [dict(group) for inner in self.optimizers.values() for group in inner.param_groups], {}
        )
        self.defaults = main.defaults
        self._share_groups()
        if all(
            vars(optimizer).get("_step_supports_amp_scaling", False)
            for optimizer in self.optimizers.values()
        ):
            # Torch's private mark of an optimizer whose kernels read `found_inf`: GradScaler then
            # hands over the flag instead of reading it on the host. A single optimizer without it
            # would step alone.
            self._step_supports_amp_scaling = True

    def _share_groups(self) -> None:
        self.param_groups = [
            group for optimizer in self.optimizers.values() for group in optimizer.param_groups
        ]

    @property
    def state(self) -> Any:
        """State of all optimizers, by parameter."""
        return {
            weight: kept
            for optimizer in self.optimizers.values()
            for weight, kept in optimizer.state.items()
        }

    @state.setter
    def state(self, value: Any) -> None:
        """Accept the empty state that `Optimizer.__init__` sets."""
        assert not value, "each optimizer has its own state"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step each of them, skipped on the device if `found_inf` is set."""
        own = vars(self)
        gate: dict[str, Any] = {
            name: own[name] for name in ("grad_scale", "found_inf") if name in own
        }
        for optimizer in self.optimizers.values():
            vars(optimizer).update(gate)
            try:
                optimizer.step()
            finally:
                # A flag left behind would gate the next step of an optimizer that runs without a
                # scaler.
                for name in gate:
                    del vars(optimizer)[name]

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Drop the gradients."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state by number of parameter, and the groups."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer in self.optimizers.values():
            first = sum(len(group["params"]) for group in groups)
            saved = optimizer.state_dict()
            state |= {first + number: kept for number, kept in saved["state"].items()}
            groups += [
                group | {"params": [first + number for number in group["params"]]}
                for group in saved["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, each optimizer its part."""
        first = 0
        groups = list(state_dict["param_groups"])
        for optimizer in self.optimizers.values():
            mine = groups[: len(optimizer.param_groups)]
            groups = groups[len(optimizer.param_groups) :]
            count = sum(len(group["params"]) for group in mine)
            state = {
                int(number) - first: kept
                for number, kept in state_dict["state"].items()
                if first <= int(number) < first + count
            }
            own = [
                group | {"params": [number - first for number in group["params"]]} for group in mine
            ]
            optimizer.load_state_dict({"state": state, "param_groups": own})
            first += count
        self._share_groups()


def assign_weights(
    weights: Sequence[Weight], others: Mapping[str, Mapping[str, Any]], where: str = "OPTIMIZER"
) -> dict[str, list[Weight]]:
    """Return the weights of each optimizer by label; first `MAIN`, with the remaining weights.

    Args:
        weights: trained weights.
        others: label -> rule, with the selectors of `phasetrain.optim.groups.group_weights`.
        where: config path of the section, for messages.

    Raises:
        ConfigError: a rule has no selectors or selects nothing, two rules select one weight, or no
            weight is left for the main optimizer.
    """
    assigned: dict[str, list[Weight]] = {}
    owners: dict[str, str] = {}
    for label, rule in others.items():
        selectors = {key: rule[key] for key in (*SELECTORS, "name") if key in rule}
        names = select_weights(selectors, weights, f"{where}.others.{label}")
        for name in sorted(names & owners.keys()):
            raise ConfigError(
                f"{where}.others: {name} is selected by two optimizers, {owners[name]} and "
                f"{label}; change their rules so that only one of them selects it"
            )
        owners |= dict.fromkeys(names, label)
        assigned[label] = [weight for weight in weights if weight.name in names]
    left = [weight for weight in weights if weight.name not in owners]
    if not left:
        raise ConfigError(
            f"{where}.others: {', '.join(others)} select all {len(weights)} trained weights, and "
            f"none are left for {where}.name; move one of these optimizers to {where} itself"
        )
    return {MAIN: left} | assigned


def refuse_closures(optimizer: Optimizer, where: str) -> None:
    """Reject an optimizer that evaluates the loss several times per step.

    Raises:
        ConfigError: it is torch's LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            f"{where}.name = 'LBFGS': this optimizer evaluates the loss several times per step (a "
            "closure), and an update here has one gradient; use another optimizer, such as adamw, "
            "or call LBFGS in a custom loop over engine.steps() (docs/task.md)"
        )
