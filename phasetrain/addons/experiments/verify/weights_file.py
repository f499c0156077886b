"""Weights that were written from a run, compared with the checkpoint that they claim to be."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phasetrain.addons.experiments.verify.evidence import Evidence, Finding, count_updates
from phasetrain.checkpoint.promised import FOLDER
from phasetrain.checkpoint.reader import CheckpointReader
from phasetrain.checkpoint.weights import holds_plain_weights
from phasetrain.config.addons import require_service
from phasetrain.config.changes import trajectory_digest
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError
from phasetrain.hooks.observers import classify_hooks
from phasetrain.models.sources.files import flatten_tensors, without_tied
from phasetrain.proof.compare import is_equal
from phasetrain.runs.ledger import FILE
from phasetrain.runtime.format import format_count, join_first

MAX_LISTED = 3
"""Maximum number of tensors that are named."""


@dataclass(frozen=True)
class WeightsFile:
    """Weights and their origin as their file names it.

    Attributes:
        path: as the user named it.
        tensors: name -> tensor.
        checkpoint: name of the checkpoint that they are of.
        updates: number of updates before it.
        which: which of its weights, such as `model` or `ema`; empty if an earlier release wrote the
            file.
        root: root of the ledger up to this update; empty if the run had no chain.
        config_digest: of the config of the run; empty if the file does not name one.
        config: the config of the run in a packed model; None in other files.
    """

    path: str
    tensors: Mapping[str, Tensor]
    checkpoint: str
    updates: int
    which: str
    root: str
    config_digest: str = ""
    config: Mapping[str, Any] | None = None


def is_weights_file(path: str) -> bool:
    """Return whether a path is a file."""
    return Path(path).is_file()


def read_weights_file(path: str) -> WeightsFile:
    """Read a file from `phasetrain export` (safetensors) or `phasetrain pack`.

    Raises:
        ConfigError: it is neither (code `verify.no_weights`), or a packed model that was changed
            after it was packed (codes of `phasetrain.addons.deploy.pack.archive`).
    """
    if path.endswith(".zip"):
        read_pack = require_service("read_pack", "deploy", f"{path}: a packed model")
        facts, tensors = read_pack(path)
    else:
        try:
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path!r}: expected the folder of a run, weights from `phasetrain export` "
                f"(safetensors), or a model from `phasetrain pack`; it cannot be read: {error}",
                code="verify.no_weights",
            ) from error
    try:
        return WeightsFile(
            path,
            tensors,
            str(facts["checkpoint"]),
            int(facts["updates"]),
            str(facts.get("weights", "")),
            str(facts.get("ledger", "")),
            str(facts.get("config", "")),
            facts.get("run_config"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path!r}: it does not say which checkpoint of which run it was written from; "
            "write it with `phasetrain export` or `phasetrain pack`",
            code="verify.no_weights",
        ) from error


def find_run(path: str) -> str:
    """Return the run folder that contains a file.

    Raises:
        ConfigError: it is in none.
    """
    # Not recorded in the file: the path of a folder on one machine means nothing on another.
    for folder in Path(path).resolve().parents:
        if (folder / FILE).is_file():
            return str(folder)
    raise ConfigError(
        f"{path!r}: the weights alone show nothing but the root that is written into them; name "
        "the run that they are from: --run RUN_FOLDER",
        code="verify.run_needed",
    )


def compare_weights(weights: WeightsFile, evidence: Evidence) -> tuple[list[Finding], list[str]]:
    """Return the differences between weights and their run, and sentences about the parts that
    could not be compared."""
    findings = list(_compare_root(weights, evidence))
    by_name = {saved.name: saved for saved in evidence.saved}
    saved = by_name.get(weights.checkpoint)
    if saved is None or count_updates(saved) != weights.updates:
        return findings, [
            f"the weights in {weights.path} were not compared: checkpoint {weights.checkpoint} of "
            f"update {weights.updates}, from which they claim to be, is not kept"
        ]
    reader = CheckpointReader(f"{evidence.folder}/{FOLDER}", evidence.storage)
    loaded = reader.load(evidence.path_of(saved))
    config = loaded.promised["config"]
    if weights.config not in (None, config):
        text = f"{weights.path} does not have the config of checkpoint {saved.name}"
        findings.append(Finding("weights", weights.updates, ("config",), text))
    elif weights.config_digest not in ("", _hash_config(config)):
        # Another release may compute another digest: this accuses nobody.
        return findings, [
            f"the weights in {weights.path} were not compared: the file names the config "
            f"{weights.config_digest}, checkpoint {saved.name} has {_hash_config(config)}"
        ]
    if not holds_plain_weights(loaded):
        return findings, [
            f"the weights in {weights.path} were not compared: checkpoint {saved.name} has "
            "adapters, or leaves weights out (CHECKPOINT.exclude)"
        ]
    learned = loaded.state["task"]
    # Earlier releases did not write which weights of the checkpoint a file holds.
    names = [weights.which] if weights.which else list(learned)
    states = [flatten_tensors(learned[name]) for name in names if _holds_tensors(learned.get(name))]
    problems = [_find_problem(weights.tensors, state) for state in states]
    equal = [state for state, problem in zip(states, problems, strict=True) if not problem]
    if not equal:
        reason = next(iter(problems), f"it has no weights {weights.which!r}")
        text = f"{weights.path} does not have the weights of checkpoint {saved.name}: {reason}"
        findings.append(Finding("weights", weights.updates, ("exported weights",), text))
        return findings, []
    missing = min((without_tied(state).keys() - weights.tensors.keys() for state in equal), key=len)
    if missing:
        # Perhaps excluded from the export, which the file does not record: this accuses nobody.
        return findings, [
            f"{weights.path} lacks {format_count(len(missing), 'tensor')} of checkpoint "
            f"{saved.name}: {join_first(sorted(missing), MAX_LISTED)}"
        ]
    return findings, []


def _compare_root(weights: WeightsFile, evidence: Evidence) -> Iterator[Finding]:
    root = evidence.ledger.root_at(weights.updates)
    if weights.root and weights.root != root:
        text = (
            f"{weights.path} was written from another ledger: its root of update "
            f"{weights.updates} is {weights.root}, the run has {root or 'none'}; it is of another "
            "run, or the ledger was rewritten"
        )
        yield Finding("chain", weights.updates, ("root",), text)


def _hash_config(config: Mapping[str, Any]) -> str:
    return trajectory_digest(config, classify_hooks(default_schema(), config))


def _holds_tensors(state: object) -> bool:
    return isinstance(state, Mapping) and any(isinstance(value, Tensor) for value in state.values())


def _find_problem(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Return which tensors are not in a state, bit for bit; empty if all are."""
    unknown = [name for name in tensors if name not in state]
    # A file without tensors would be equal to anything.
    if unknown or not tensors:
        return f"{join_first(unknown, MAX_LISTED)} are not in it"
    differing = [name for name, tensor in tensors.items() if not is_equal(tensor, state[name])]
    if not differing:
        return ""
    return f"{join_first(differing, MAX_LISTED)} differ"
