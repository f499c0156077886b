"""Prove on this machine that a config resumes bit-identically."""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from phasetrain.addons.experiments.certify.attempt import Order
from phasetrain.addons.experiments.certify.certificate import (
    compare_certificate,
    make_certificate,
    read_certificate,
)
from phasetrain.addons.experiments.certify.combination import Combination, Trial
from phasetrain.addons.experiments.certify.timing import Cost, measure_cost
from phasetrain.addons.experiments.operators.preflight import (
    Preflight,
    describe_findings,
    trace_first_batch,
)
from phasetrain.addons.experiments.options import CertifyOptions
from phasetrain.app.setup import Setup, resolve_config, world_size_of
from phasetrain.app.shorten import shorten_config
from phasetrain.cli.output import Outcome
from phasetrain.config.compose.override_text import quote_value
from phasetrain.config.nested import to_json_value
from phasetrain.errors import ConfigError
from phasetrain.hooks import HOOKS, Hook
from phasetrain.runtime.storage import Storage
from phasetrain.runtime.terminal import Terminal, plain_table

log = logging.getLogger(__name__)

NOT_EQUAL = 7
"""Exit code if the verdict is no, if the certified machine was another one, and with `--strict` if
values of the parts are not covered."""

HERE = ("RUN.engine=train", "LAUNCH.cluster=null")
"""Overrides with which the config is resolved: whatever it says, it is trained here."""

FIXED = (
    *HERE,
    "RUN.rehearse=false",  # the kills prove more than the rehearsal
    "RUN.give_up_after=null",
    "RUN.verbosity=quiet",
    "CHECKPOINT.every_epochs=1",
    "CHECKPOINT.every_minutes=null",
    "HOOKS.report=null",
)
"""Overrides of all attempts."""


def certify(
    overrides: Sequence[str],
    options: CertifyOptions,
    *,
    config_dir: str | None = None,
    terminal: Terminal | None = None,
) -> Outcome:
    """Train a shortened run of a config, kill it, resume it, compare every bit, and write a
    certificate.

    Args:
        overrides: describe the run.
        options: how.
        config_dir: folder with custom configs.
        terminal: where to print notes on the config; standard output by default.

    Raises:
        ConfigError: the config is invalid, or several processes were started.
    """
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "certify starts its processes itself; start it without torchrun or srun, with "
            "LAUNCH.processes=N for N processes",
            code="config.world_size",
        )
    began = time.perf_counter()
    setup = resolve_config(
        [*overrides, *HERE], config_dir=config_dir, terminal=terminal or Terminal()
    )
    folder = make_trial_folder(setup.config.RUN.dir, "certify")
    keeps = False
    try:
        outcomes, cost = _try_all(setup, overrides, options, folder)
        keeps = any(outcome.verdict == "no" for outcome in outcomes)
    finally:
        # After a `no`, both runs are needed to find the cause.
        if not keeps:
            shutil.rmtree(folder, ignore_errors=True)
    kernels = _trace_model(setup)
    content = make_certificate(setup, outcomes, cost, time.perf_counter() - began)
    content["nondeterministic"] = None
    if kernels is not None:
        content["nondeterministic"] = to_json_value(kernels.plain())
    Storage().replace_json(options.out, content, durable=False)
    own = outcomes[0].verdict
    exit_code = {"yes": 0, "no": NOT_EQUAL}.get(own, 1)
    if options.is_strict and not (exit_code or content["complete"]):
        exit_code = NOT_EQUAL
    lines = [_format_outcomes(setup, outcomes, cost)]
    if kernels is not None:
        device = setup.machine.device.type
        setting = setup.config.MACHINE.deterministic
        lines += describe_findings(kernels, device, deterministic=setting)
    text = "\n".join([*lines, f"written to {options.out}"])
    return Outcome(exit_code, text, content)


def check(path: str, overrides: Sequence[str], config_dir: str | None = None) -> Outcome:
    """Compare this machine with the certified one.

    Raises:
        ConfigError: the config is invalid, or the file is no certificate.
    """
    certificate = read_certificate(path)
    setup = resolve_config([*overrides, *HERE], config_dir=config_dir)
    changes = compare_certificate(certificate, setup)
    content = {"equal": not changes, "differences": changes, "verdict": certificate["verdict"]}
    if not changes:
        text = f"{path}: device and versions are the same here; verdict {content['verdict']}"
        return Outcome(0, text, content)
    rows = [(name, str(certified), str(here)) for name, (certified, here) in changes.items()]
    return Outcome(NOT_EQUAL, plain_table(path, ("", "certified", "here"), rows), content)


def _try_all(
    setup: Setup, overrides: Sequence[str], options: CertifyOptions, folder: Path
) -> tuple[list[Combination], Cost | None]:
    config = setup.config
    settings = [config.MACHINE.deterministic]
    if not options.is_quick:
        settings.append(not config.MACHINE.deterministic)
    processes = world_size_of(config, setup.place)
    words = (*overrides, *shorten_config(config), *FIXED, *hook_words(config.HOOKS))
    hooks = config.HOOKS.items()
    if not any(section.get("name", label) == "recheck" for label, section in hooks):
        # The kills show what hidden state changes; `recheck` needs the promise.
        words = (*words, "RUN.exact=false")
    workers = config.DATA.TRAIN.workers
    # `auto` depends on the cores; the number of workers changes no bit.
    if not isinstance(workers, int):
        workers = 0
    outcomes: list[Combination] = []
    cost: Cost | None = None
    for setting in settings:
        name = "deterministic" if setting else "other"
        order = Order((*words, f"MACHINE.deterministic={setting}"), setup.config_dir)
        trial = Trial(folder / name, order, workers, processes, options.launch)
        log.info("certify: MACHINE.deterministic = %s", str(setting).lower())
        outcomes.append(trial.run(deterministic=setting, is_quick=options.is_quick))
        # With the deterministic setting, which cuBLAS wants to know before its first call.
        if setting and not options.is_quick:
            cost = measure_cost(trial, order)
    return outcomes, cost


def _trace_model(setup: Setup) -> Preflight | None:
    """Return the operators without a deterministic kernel; None if the model cannot be built."""
    # On the CPU: the memory of the device belongs to the attempts, and values are not needed.
    machine = replace(setup.machine, device=torch.device("cpu"))
    builder = replace(setup, machine=machine).builder()
    try:
        data = builder.data()
        plan = builder.plan(data)
        return trace_first_batch(builder.task(builder.parts(data, plan)), plan)
    # An attempt has failed for the same reason, and its error is in the verdict.
    except Exception as error:  # noqa: BLE001
        log.debug("the model could not be built: %s", error)
        return None


def hook_words(section: Mapping[str, Any]) -> list[str]:
    """Return overrides that leave out hooks which report to others, and compare each update."""
    words = []
    for label, options in section.items():
        hook = HOOKS.get(options.get("name", label))
        if isinstance(hook, type) and issubclass(hook, Hook) and hook.reports_elsewhere:
            # A tracker would show the attempts to others as if they were runs.
            words.append(f"HOOKS.{quote_value(label)}=null")
    if "metrics" in section:
        words.append("HOOKS.metrics.every_updates=1")
    if "ledger" in section:
        words.append("HOOKS.ledger.content=full")
    return words


def make_trial_folder(run_folder: str, name: str) -> Path:
    """Return a new folder next to the run folder, which has room for checkpoints, or a temporary
    one.

    Args:
        run_folder: RUN.dir.
        name: the command, which the name of the folder contains.
    """
    parent = Path(run_folder).absolute().parent
    while not parent.exists():
        parent = parent.parent
    if "://" in run_folder or not os.access(parent, os.W_OK):
        return Path(tempfile.mkdtemp(prefix=f"phasetrain-{name}-"))
    # Hidden, so that `phasetrain runs list` leaves it out.
    return Path(tempfile.mkdtemp(prefix=f".{name}-", dir=parent))


def _format_outcomes(setup: Setup, outcomes: Sequence[Combination], cost: Cost | None) -> str:
    config = setup.config
    processes = world_size_of(config, setup.place)
    run = [config.MACHINE.precision, "compiled" if config.MACHINE.compile else "not compiled"]
    run.append(f"{processes} processes ({config.DISTRIBUTED.strategy})")
    if processes == 1:
        run[-1] = "1 process"
    head = ("MACHINE.deterministic", "bit-identical", "kills", "updates", "values compared")
    rows = [
        (
            str(outcome.deterministic).lower(),
            outcome.verdict,
            str(len(outcome.kills)),
            str(outcome.updates),
            f"{outcome.values:,}",
        )
        for outcome in outcomes
    ]
    lines = [plain_table(f"{config.RUN.name}: {', '.join(run)}", head, rows)]
    lines += [
        f"not covered, since it has not changed in {outcomes[0].updates} updates: {text}"
        for text in outcomes[0].unchanged
    ]
    if outcomes[0].unchanged:
        lines.append(
            "the certified run had each stage, with shorter epochs, and the start of each test; a "
            "change at a later update, epoch or batch ends a run at its next save, with the code "
            "resume.not_exact"
        )
    for outcome in outcomes:
        setting = f"MACHINE.deterministic = {str(outcome.deterministic).lower()}"
        if outcome.verdict == "no":
            lines.append(
                f"{setting}: no, update {outcome.update}, {outcome.component or outcome.path}: "
                f"{outcome.reason}\n"
                f"  phasetrain runs diff {outcome.folder}/reference {outcome.folder}/killed"
            )
        elif outcome.verdict == "not tried":
            lines.append(f"{setting}: not tried: {outcome.reason}")
    if cost is not None:
        lines.append(f"cost of deterministic kernels: {cost}")
    return "\n".join(lines)
