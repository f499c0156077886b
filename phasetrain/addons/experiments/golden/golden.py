"""Record a golden run, and train it again to check that every bit is the same."""

import json
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from phasetrain.addons.experiments.certify.attempt import Order, read_trace
from phasetrain.addons.experiments.certify.certificate import (
    OF_FOLDER,
    compare_certificate,
    describe_machine,
    describe_versions,
)
from phasetrain.addons.experiments.certify.certify import (
    FIXED,
    HERE,
    NOT_EQUAL,
    hook_words,
    make_trial_folder,
)
from phasetrain.addons.experiments.certify.combination import Trial, describe_failure
from phasetrain.addons.experiments.golden.components import (
    LEDGER,
    START,
    FirstDifference,
    find_first_difference,
    summarize_traces,
)
from phasetrain.addons.experiments.golden.golden_file import (
    GoldenRecord,
    read_golden,
    write_golden,
)
from phasetrain.addons.experiments.judge.contenders import OWN_KEYS
from phasetrain.addons.experiments.options import RecordOptions
from phasetrain.app.preflight.preview import list_changed_values
from phasetrain.app.setup import Setup, resolve_config, world_size_of
from phasetrain.app.shorten import EPOCHS, shorten_config
from phasetrain.app.train.source_code import hash_sources
from phasetrain.cli.output import Outcome
from phasetrain.config.compose.override_text import key_of, quote_value
from phasetrain.config.nested import leaves, to_json_value
from phasetrain.config.problems import format_value
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError, PhasetrainError
from phasetrain.runs.ledger import FILE, parse_ledger
from phasetrain.runtime.format import join_first
from phasetrain.runtime.machine import read_cpu_flags, resolve_device
from phasetrain.runtime.redaction import Redaction
from phasetrain.runtime.terminal import Terminal

NO_RECORD = 9
"""Exit code if the file has no record for this platform."""

MOST_LISTED = 5
"""Number of changed keys, files and versions that a line names."""

CHANGES = {"config": "changed config", "sources": "changed source", "facts": "changed machine"}
"""Kind of changes -> begin of the line that names them."""

Launch = Callable[[Path, Path], int]


def record_golden(
    overrides: Sequence[str],
    options: RecordOptions,
    *,
    config_dir: str | None = None,
    terminal: Terminal | None = None,
) -> Outcome:
    """Train a short run of a config, and write its digests for this platform to a file.

    Records of other platforms in the file stay.

    Args:
        overrides: describe the run.
        options: how.
        config_dir: folder with custom configs.
        terminal: where to print notes on the config; standard output by default.

    Raises:
        ConfigError: the config is invalid, or the file is not a golden run.
        PhasetrainError: the run has failed (code `golden.run_failed`).
    """
    records = read_golden(options.out) if Path(options.out).exists() else {}
    setup, words = _resolve(overrides, config_dir, terminal)
    record, seconds = _train(setup, words, options.updates, options.launch)
    # The file is to be committed. Trackers are off, so the run needs no secret.
    clean = Redaction(os.environ).redact_words(overrides)
    record = replace(record, overrides=clean, config_dir=config_dir)
    name = name_platform(setup)
    stale = [
        other
        for other, before in records.items()
        if other != name and (before.config, before.sources) != (record.config, record.sources)
    ]
    write_golden(options.out, {**records, name: record})
    updates = record.steps[-1]["update"]
    lines = [f"{options.out}: recorded {updates} updates on {name} in {seconds:.0f} s; commit it"]
    if stale:
        lines.append(
            f"the records of {join_first(stale, MOST_LISTED)} are of another config or source: "
            "record them again on machines of these platforms"
        )
    content = {"platform": name, "updates": updates, "file": options.out, "stale": stale}
    return Outcome(0, "\n".join(lines), content)


def check_golden(
    path: str,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    terminal: Terminal | None = None,
    launch: Launch | None = None,
) -> Outcome:
    """Train a recorded run again, and name the first difference.

    Args:
        path: file of the golden run.
        overrides: changes of the recorded run.
        config_dir: folder with custom configs; by default the recorded one.
        terminal: where to print notes on the config; standard output by default.
        launch: runs the order in a file; by default in new processes.

    Raises:
        ConfigError: the file cannot be read, or the config is no longer valid.
        PhasetrainError: the run has failed (code `golden.run_failed`).
    """
    records = read_golden(path)
    if not records:
        raise ConfigError(
            f"{path} has no record of any platform; record it with `phasetrain golden record`",
            code="golden.unreadable",
        )
    # Any record will do to name this platform: the device and the capability are in the config.
    first = next(iter(records.values()))
    setup, words = _resolve(
        [*first.overrides, *overrides], config_dir or first.config_dir, terminal
    )
    name = name_platform(setup)
    recorded = records.get(name)
    if recorded is None:
        return _report_missing(path, name, list(records), first)
    if recorded is not first:
        setup, words = _resolve(
            [*recorded.overrides, *overrides], config_dir or recorded.config_dir, terminal
        )
    record, _ = _train(setup, words, recorded.updates, launch)
    difference = compare_records(recorded, record)
    changes = list_changes(recorded, record) | {
        "facts": compare_certificate(recorded.facts, setup),
    }
    return _report_check(path, name, recorded, difference, changes)


def compare_records(recorded: GoldenRecord, record: GoldenRecord) -> FirstDifference | None:
    """Return the first difference of a run from the recorded one, or None."""
    if recorded.start != record.start:
        return FirstDifference(1, "before the first step", START)
    difference = find_first_difference(recorded.steps, record.steps)
    if difference is None and recorded.ledger_root != record.ledger_root:
        return FirstDifference(record.steps[-1]["update"], "end of the run", LEDGER)
    return difference


def list_changes(recorded: GoldenRecord, record: GoldenRecord) -> dict[str, Any]:
    """Return what has changed since a record.

    Returns:
        `config`: path -> both values, None for the default; `defaults`: whether only a default has
        changed; `sources`: modules whose source has changed, or that only one of both uses.
    """
    config = _list_changed(recorded.config, record.config)
    is_equal = recorded.config_sha256 == record.config_sha256
    return {
        "config": {key: [recorded.config.get(key), record.config.get(key)] for key in config},
        "defaults": not (config or is_equal),
        "sources": _list_changed(recorded.sources, record.sources),
    }


def _list_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [key for key in {**before, **now} if before.get(key) != now.get(key)]


def name_platform(setup: Setup) -> str:
    """Return the key of this platform in a file: system, architecture, device, CPU instructions.

    Versions are not part of it, so that a check shows whether another version changes a bit.
    """
    # Not the device of this process, which is the CPU if it starts several.
    chosen = resolve_device(setup.config.MACHINE.device)
    device = chosen.type
    if device == "cuda":
        device = torch.cuda.get_device_name(chosen).replace(" ", "_")
    return "-".join((platform.system().lower(), platform.machine(), device, _capability(setup)))


def _capability(setup: Setup) -> str:
    # The limit holds for the new processes; this one may have computed before.
    return str(setup.config.MACHINE.cpu_capability or torch.backends.cpu.get_cpu_capability())


def _resolve(
    overrides: Sequence[str], config_dir: str | None, terminal: Terminal | None
) -> tuple[Setup, list[str]]:
    """Return the config of a golden run, and its overrides."""
    if "WORLD_SIZE" in os.environ:
        raise ConfigError(
            "golden starts its processes itself; start it without torchrun or srun, with "
            "LAUNCH.processes=N for N processes",
            code="config.world_size",
        )
    words = [*overrides, *HERE]
    setup = resolve_config(words, config_dir=config_dir, terminal=terminal or Terminal())
    more = _portable_words(setup)
    if more:
        words += more
        setup = resolve_config(words, config_dir=config_dir, terminal=terminal or Terminal())
    return setup, words


def _portable_words(setup: Setup) -> list[str]:
    """Return overrides with which CPUs with other instructions or numbers of cores give equal bits.

    Values that the config sets stay.
    """
    composed = setup.composed

    def is_set(key: str) -> bool:
        return composed.origins.get(key, "") not in {"", *composed.assumed}

    words = []
    # torch does not check whether the CPU has what it is limited to.
    has_avx2 = "avx2" in (read_cpu_flags() or ())
    if has_avx2 and not is_set("MACHINE.cpu_capability"):
        words.append("MACHINE.cpu_capability=AVX2")
    # The order of sums depends on the number of threads, whose default depends on the cores.
    if not is_set("MACHINE.threads"):
        words.append("MACHINE.threads=1")
    return words


def _train(
    setup: Setup, words: Sequence[str], updates: int | None, launch: Launch | None
) -> tuple[GoldenRecord, float]:
    """Train the short run, and return its record and the seconds that it took."""
    began = time.perf_counter()
    config = setup.config
    folder = make_trial_folder(config.RUN.dir, "golden")
    processes = world_size_of(config, setup.place)
    order = Order(
        (
            *words,
            *shorten_config(config),
            *_length_words(setup, updates),
            *FIXED,
            *hook_words(config.HOOKS),
            "CHECKPOINT.every_epochs=null",
            "RUN.exact=false",  # nothing resumes
            f"RUN.dir={quote_value(str(folder / 'trial' / 'run'))}",
        ),
        setup.config_dir,
        trace=str(folder / "trial" / "trace"),
    )
    try:
        trial = Trial(folder / "trial", order, 0, processes, launch)
        code, output = trial.launch_order("golden", order)
        if code:
            raise PhasetrainError(
                f"golden: {describe_failure(code, output)}", code="golden.run_failed"
            )
        traces = [read_trace(order.trace, rank).trace for rank in range(processes)]
        start, root = _read_ledger(folder / "trial" / "run" / FILE)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    facts = {"machine": describe_machine(setup), "versions": describe_versions(setup)}
    facts["machine"]["cpu_capability"] = _capability(setup)
    record = GoldenRecord(
        overrides=[],
        config_dir=None,
        updates=updates,
        config=to_json_value(_list_result_values(setup)),
        config_sha256=_digest_config(setup),
        sources=hash_sources(setup),
        facts=to_json_value(facts),
        start=start,
        ledger_root=root,
        steps=summarize_traces(traces),
    )
    return record, time.perf_counter() - began


def _length_words(setup: Setup, updates: int | None) -> list[str]:
    """Return overrides of the shortened run for another number of updates."""
    if updates is None:
        return []
    phases = setup.config.PHASES
    # All stages stay; without any, the two epochs with their tests become longer or shorter.
    epochs = len(phases.stages) or EPOCHS
    steps = -(-updates // epochs)
    words = [f"PHASES.limit.train={min(phases.limit.train or steps, steps)}"]
    if not phases.stages:
        words += ["PHASES.epochs=null", f"PHASES.updates={updates}"]
    if phases.test_every.updates is not None:
        words.append(f"PHASES.test_every.updates={phases.test_every.updates}")
    return words


def _list_result_values(setup: Setup) -> dict[str, Any]:
    """Return path -> value of the keys that affect a result and differ from the defaults."""
    schema = default_schema()
    return {
        path: value
        for path, value, _ in list_changed_values(setup)
        if path not in OF_FOLDER and schema.scope(path) == "result"
    }


def _digest_config(setup: Setup) -> str:
    """Return a digest of all values that affect a result, defaults included."""
    schema = default_schema()
    values = {
        path: value
        for path, value in leaves(setup.config.plain()).items()
        if path not in OF_FOLDER and schema.scope(path) == "result"
    }
    return sha256(json.dumps(to_json_value(values), sort_keys=True).encode()).hexdigest()


def _read_ledger(path: Path) -> tuple[str, str]:
    """Return the digest of the initial weights and the root of the ledger of a run."""
    if not path.exists():
        return "", ""
    ledger = parse_ledger(path.read_bytes())
    return ledger.header.start.hex(), ledger.root_at(ledger.last)


def _report_missing(path: str, name: str, known: Sequence[str], record: GoldenRecord) -> Outcome:
    command = shlex.join(["phasetrain", "golden", "record", *record.overrides, "--out", path])
    text = (
        f"{path} has no record for {name}, only for {join_first(known, MOST_LISTED)}; "
        f"add one on this machine and commit it: {command}"
    )
    content = {
        "verdict": "no record",
        "code": "golden.no_record",
        "platform": name,
        "platforms": list(known),
    }
    return Outcome(NO_RECORD, text, content)


def _report_check(
    path: str,
    name: str,
    recorded: GoldenRecord,
    difference: FirstDifference | None,
    changes: Mapping[str, Any],
) -> Outcome:
    listed = {
        "config": ["a default of phasetrain"] * changes["defaults"]
        + [
            f"{key} {_format_setting(before)} -> {_format_setting(now)}"
            for key, (before, now) in changes["config"].items()
        ],
        "sources": [_name_source(module) for module in changes["sources"]],
        "facts": [f"{key} {before} -> {now}" for key, (before, now) in changes["facts"].items()],
    }
    lines = [
        f"{text}: {join_first(listed[category], MOST_LISTED)}"
        for category, text in CHANGES.items()
        if listed[category]
    ]
    content: dict[str, Any] = {"platform": name, "changed": changes}
    if difference is None:
        head = f"{path}: identical on {name}: {recorded.steps[-1]['update']} updates"
        return Outcome(0, "\n".join([head, *lines]), {"verdict": "identical", **content})
    head = (
        f"{path}: different on {name}, first at update {difference.update} ({difference.at}), "
        f"{difference.component}: {difference.cause}"
    )
    if not lines:
        lines.append("no config value, source file, version or machine has changed: look at data")
    command = shlex.join(["phasetrain", "golden", "record", *recorded.overrides, "--out", path])
    # The digests say nothing about quality; the commit of the file has the former code.
    words = [word for word in recorded.overrides if key_of(word) not in OWN_KEYS]
    revision = f"$(git log -1 --format=%h -- {shlex.quote(path)})"
    lines += [
        f"if the change is intended: {command}",
        f"better or worse: phasetrain judge --rev {revision} {shlex.join(words)}".rstrip(),
    ]
    content |= {
        "verdict": "different",
        "update": difference.update,
        "at": difference.at,
        "component": difference.component,
    }
    return Outcome(NOT_EQUAL, "\n".join([head, *lines]), content)


def _format_setting(value: Any) -> str:
    # Only values that differ from the defaults are recorded.
    return "default" if value is None else format_value(value)


def _name_source(module: str) -> str:
    """Return the path of the source of a module; its name if it is not imported any more."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return os.path.relpath(file) if file else module
