"""The certificate: verdicts, machine, versions and config, as JSON."""

import json
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from phasetrain import __version__
from phasetrain.addons.experiments.certify.combination import Combination
from phasetrain.addons.experiments.certify.timing import Cost
from phasetrain.app.preflight.preview import list_changed_values
from phasetrain.app.setup import Setup, world_size_of
from phasetrain.app.train.resume import describe_environment, list_packages
from phasetrain.config.nested import to_json_value
from phasetrain.errors import ConfigError
from phasetrain.runtime.environment import describe_host, describe_numerics, list_devices

FORMAT = 1
"""Version of the file; raised if a key is renamed or removed."""

OF_FOLDER = ("RUN.dir", "RUN.name", "RUN.engine", "RUN.step", "RUN.resume")
"""Keys that are not in a certificate of this format, nor in its digest of the config."""

DRIVER = Path("/proc/driver/nvidia/version")


def make_certificate(
    setup: Setup, outcomes: list[Combination], cost: Cost | None, seconds: float
) -> dict[str, Any]:
    """Return the content of certificate.json; no name of the machine and no path of a folder is in
    it, unless the config has one.

    Args:
        setup: the resolved config.
        outcomes: with the configured setting of MACHINE.deterministic first.
        cost: of deterministic kernels; None: it was not measured.
        seconds: time that all took.
    """
    config = {path: value for path, value, _ in list_changed_values(setup) if path not in OF_FOLDER}
    machine = setup.config.plain()["MACHINE"]
    certificate = {
        "format": FORMAT,
        "verdict": outcomes[0].verdict,
        "complete": not outcomes[0].unchanged,
        "combinations": [_describe_combination(outcome) for outcome in outcomes],
        "determinism": asdict(cost) if cost is not None else None,
        "precision": machine["precision"],
        "compile": machine["compile"],
        "strategy": setup.config.DISTRIBUTED.strategy,
        "reduction": setup.config.DISTRIBUTED.reduction,
        "processes": world_size_of(setup.config, setup.place),
        "config": config,
        "config_sha256": _digest_config(setup),
        "machine": describe_machine(setup),
        "versions": describe_versions(setup),
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }
    content: dict[str, Any] = to_json_value(certificate)
    return content


def describe_machine(setup: Setup) -> dict[str, Any]:
    """Return device, driver, libraries of the device, processor and threads."""
    host = describe_host()
    numerics = describe_numerics(deterministic=True)
    environment = describe_environment(setup, setup.machine)
    return {
        "device": environment["device"],
        "devices": list_devices(environment["device"]),
        "driver": _read_driver(),
        "cuda": numerics["cuda"],
        "cudnn": numerics["cudnn.version"],
        "cpu": host["cpu"],
        "cpu_capability": numerics["cpu_capability"],
        "architecture": environment["machine"],
        "system": platform.system(),
        "threads": environment["threads"],
    }


def describe_versions(setup: Setup) -> dict[str, Any]:
    """Return the versions of Python and of the packages that compute."""
    environment = describe_environment(setup, setup.machine)
    own = {name: environment[name] for name in ("python", "torch", "numpy")}
    return {"phasetrain": __version__, **own, "packages": list_packages()}


def compare_certificate(content: Mapping[str, Any], setup: Setup) -> dict[str, tuple[Any, Any]]:
    """Return name -> both values of each difference between the certified machine and this one."""
    # Through JSON, because the certificate has been: tuples are lists there.
    here: dict[str, Any] = to_json_value(
        {"machine": describe_machine(setup), "versions": describe_versions(setup)}
    )
    return {
        f"{part}.{name}": (content[part].get(name), value)
        for part, values in here.items()
        for name, value in values.items()
        if content[part].get(name) != value
    }


def read_certificate(path: str) -> dict[str, Any]:
    """Read a certificate.

    Raises:
        ConfigError: it is missing, or no certificate of a known format.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--check {path}: expected a certificate.json: {error}", code="certify.unreadable"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(
            f"--check {path}: expected a certificate of format {FORMAT}; make it again",
            code="certify.unreadable",
        )
    return content


def _describe_combination(outcome: Combination) -> dict[str, Any]:
    combination = asdict(outcome)
    # A path of this machine, which the reader of a certificate cannot open.
    del combination["folder"]
    return combination


def _digest_config(setup: Setup) -> str:
    """Return a digest of the whole config, without the keys that belong to a folder."""
    config = setup.config.plain()
    for path in OF_FOLDER:
        section, _, key = path.partition(".")
        config[section].pop(key, None)
    text = json.dumps(to_json_value(config), sort_keys=True)
    return sha256(text.encode()).hexdigest()


def _read_driver() -> str | None:
    """Return the version of NVIDIA's driver, or None."""
    # From the kernel module: nvidia-smi takes a second, and may be missing in a container.
    with suppress(OSError):
        match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER.read_text(encoding="utf-8"))
        if match:
            return match[1]
    return None
