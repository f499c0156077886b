"""YAML text of configs."""

from typing import Any

import yaml
from omegaconf._utils import get_omega_conf_dumper


# The only internal of OmegaConf that is used: its public `to_yaml` takes a container of its own,
# and making one takes longer than all else that writes the files of a run. libyaml would be faster
# still, but escapes emojis and rejects the names of files that are no UTF-8.
class _Dumper(get_omega_conf_dumper()):  # type: ignore[misc]
    def ignore_aliases(self, data: Any) -> bool:
        """Write a value again where it occurs again."""
        return True


def write_yaml(values: Any) -> str:
    """Return plain values as YAML, as `OmegaConf.to_yaml` writes them."""
    text: str = yaml.dump(
        values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return text
