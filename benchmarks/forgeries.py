"""Edits of a finished run, and of the weights exported from it, that `phasetrain verify` must not
pass, used by forged_runs.py.

Each edit is as consistent as somebody who knows the formats would make it: digests, manifests and
hash chains are written again.
"""

import json
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from phasetrain.checkpoint.commit import MANIFEST, Manifest
from phasetrain.checkpoint.reader import PROMISED
from phasetrain.runs.ledger import (
    FILE,
    PROCESSES_SHIFT,
    Ledger,
    LedgerHeader,
    LedgerRecord,
    encode_ledger,
    parse_ledger,
)
from phasetrain.runtime.storage import Storage

WEIGHTS = "model.safetensors"
PACK = "model.zip"
"""Names of the exported and the packed model in the folder of the run."""

TENSORS = "tensors.safetensors"

CLAIM = [{"updates": 2, "what": ["OPTIMIZER.lr 0.05 -> 0.01"]}]
"""What a checkpoint records about a change of the config after two updates."""


# The format of a run: everything that depends on an edited file is written again.


def list_folders(run: Path) -> list[Path]:
    """Return the folders of the checkpoints, oldest first."""
    return sorted(path.parent for path in run.glob(f"checkpoints/*/{MANIFEST}"))


def count_updates(checkpoint: Path) -> int:
    """Return the number of updates before a checkpoint."""
    manifest = Manifest.decode((checkpoint / MANIFEST).read_bytes())
    return int(manifest.state["updates"])


def edit_json(path: Path, **entries: Any) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def seal(checkpoint: Path, facts: dict[str, Any] | None = None, **state: Any) -> None:
    """Change the position and the facts of a checkpoint, and make the digests of its files fit."""
    manifest = Manifest.decode((checkpoint / MANIFEST).read_bytes())
    files = {name: Storage().hash_file(str(checkpoint / name)) for name in manifest.files}
    forged = replace(
        manifest,
        files=files,
        state={**manifest.state, **state},
        facts=replace(manifest.facts, **(facts or {})),
    )
    (checkpoint / MANIFEST).write_bytes(forged.encode())


def edit_tensors(checkpoint: Path, name: str = "task.model.weight") -> None:
    """Change a number in a checkpoint, which then has to be sealed."""
    content = load_file(checkpoint / TENSORS)
    content[name].view(-1)[0] += 1e-6
    save_file(content, checkpoint / TENSORS, {"format": "pt"})


def edit_promises(run: Path, edit: Callable[[dict[str, Any]], None], after: int = 0) -> None:
    """Change what checkpoints of later updates have recorded about their run."""
    for checkpoint in list_folders(run):
        if count_updates(checkpoint) > after:
            promised = json.loads((checkpoint / PROMISED).read_text())
            edit(promised)
            (checkpoint / PROMISED).write_text(json.dumps(promised))
            seal(checkpoint)


def edit_config(run: Path, key: str, value: str) -> None:
    """Change the value of a key in config.yaml."""
    text = (run / "config.yaml").read_text()
    edited, count = re.subn(rf"(?m)^( +{key}): .*$", rf"\1: {value}", text, count=1)
    assert count == 1, key
    (run / "config.yaml").write_text(edited)


def read_ledger(run: Path) -> Ledger:
    """Return the ledger of a run."""
    return parse_ledger((run / FILE).read_bytes())


def write_ledger(run: Path, records: list[LedgerRecord], header: LedgerHeader) -> None:
    """Replace the ledger of a run, and its roots in checkpoints and in status.json."""
    content = encode_ledger(records, header)
    (run / FILE).write_bytes(content)
    forged = parse_ledger(content)
    for checkpoint in list_folders(run):
        seal(checkpoint, {"ledger": forged.root_at(count_updates(checkpoint))})
    edit_json(run / "status.json", ledger=forged.root_at(forged.last))


def rewrite_log(run: Path, update: int) -> None:
    """Lower the loss of an update in the ledger, and make chain, roots and digests consistent."""
    ledger = read_ledger(run)
    records = [
        record._replace(loss=record.loss / 2) if record.updates == update else record
        for record in ledger.values()
    ]
    write_ledger(run, records, ledger.header)


# Edits of a run. Each returns the path to verify.


def forge_record(run: Path, draw: random.Random) -> Path:
    """Change a loss, and write the chain of the ledger again, but not the roots elsewhere."""
    ledger = read_ledger(run)
    update = draw.randint(1, ledger.last)
    records = [
        record._replace(loss=0.1) if record.updates == update else record
        for record in ledger.values()
    ]
    (run / FILE).write_bytes(encode_ledger(records, ledger.header))
    return run


def forge_log(run: Path, draw: random.Random) -> Path:
    """Lower the loss of an update, with all hashes."""
    rewrite_log(run, draw.randint(1, read_ledger(run).last))
    return run


def forge_start(run: Path, draw: random.Random) -> Path:
    """Claim other initial weights."""
    ledger = read_ledger(run)
    write_ledger(run, list(ledger.values()), LedgerHeader(start=draw.randbytes(32)))
    return run


def forge_ranks(run: Path, draw: random.Random) -> Path:
    """Lower a loss, and claim that two ranks made its segment, whose bits nobody can compare."""
    rewrite_log(run, update := draw.randint(1, read_ledger(run).last))
    ledger = read_ledger(run)
    segment = range(update - (update - 1) % 2, update + update % 2 + 1)
    records = [
        record._replace(flags=record.flags | 2 << PROCESSES_SHIFT)
        if record.updates in segment
        else record
        for record in ledger.values()
    ]
    write_ledger(run, records, ledger.header)
    return run


def forge_checkpoint(run: Path, draw: random.Random) -> Path:
    """Change a weight in one checkpoint, with its digests."""
    checkpoint = draw.choice(list_folders(run))
    edit_tensors(checkpoint)
    seal(checkpoint)
    return run


def forge_final_weights(run: Path, draw: random.Random) -> Path:
    """Replace the weights at the end, in the checkpoints, in status.json and in exported files."""
    last = max(map(count_updates, list_folders(run)))
    for checkpoint in list_folders(run):
        if count_updates(checkpoint) == last:
            edit_tensors(checkpoint)
            seal(checkpoint)
    weights = load_file(run / WEIGHTS)
    weights["weight"].view(-1)[0] += 1e-6
    save_file(weights, run / WEIGHTS, read_metadata(run))
    return run / draw.choice(("", WEIGHTS))


def forge_optimizer(run: Path, draw: random.Random) -> Path:
    """Change the momentum in one checkpoint, with its digests."""
    checkpoint = draw.choice(list_folders(run))
    edit_tensors(checkpoint, "task.updater.optimizer.0.momentum_buffer")
    seal(checkpoint)
    return run


def forge_average(run: Path, draw: random.Random) -> Path:
    """Change the average of the weights in one checkpoint, with its digests."""
    checkpoint = draw.choice(list_folders(run))
    edit_tensors(checkpoint, "task.ema.weight")
    seal(checkpoint)
    return run


def forge_place(run: Path, draw: random.Random) -> Path:
    """Move forged weights to a place that the run does not reach."""
    checkpoint = draw.choice(list_folders(run))
    edit_tensors(checkpoint)
    seal(checkpoint, phase=0, step=draw.randint(20, 90))
    return run


def forge_count(run: Path, draw: random.Random) -> Path:
    """Claim another number of updates before a checkpoint."""
    checkpoint = draw.choice(list_folders(run))
    updates = count_updates(checkpoint) + draw.choice((-1, 1, 999))
    seal(checkpoint, {"ledger": ""}, updates=updates)
    return run


def forge_samples(run: Path, draw: random.Random) -> Path:
    """Claim another number of samples before a checkpoint."""
    seal(draw.choice(list_folders(run)), samples=draw.randint(1_000, 10_000))
    return run


def forge_damage(run: Path, draw: random.Random) -> Path:
    """Flip a bit in a file of a checkpoint."""
    path = draw.choice([path for path in run.glob("checkpoints/*/*") if path.is_file()])
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1
    path.write_bytes(content)
    return run


def forge_departure(run: Path, draw: random.Random) -> Path:
    """Hide a forged loss behind a change that checkpoints and environment.json claim."""
    rewrite_log(run, draw.choice((3, 4)))
    edit_json(run / "environment.json", departures=CLAIM)
    edit_promises(run, lambda promised: promised.update(departures=CLAIM), after=2)
    return run


def forge_departure_alone(run: Path, draw: random.Random) -> Path:
    """Hide a forged loss behind a change that only environment.json claims."""
    rewrite_log(run, draw.choice((3, 4)))
    edit_json(run / "environment.json", departures=CLAIM)
    return run


def forge_tail(run: Path, draw: random.Random) -> Path:
    """Delete the last checkpoints, and hide a forged loss after them behind a claimed change."""
    rewrite_log(run, draw.choice((7, 8)))
    for checkpoint in list_folders(run):
        if count_updates(checkpoint) > 6:
            shutil.rmtree(checkpoint)
    claim = [{"updates": 6, "what": ["OPTIMIZER.lr 0.05 -> 0.01"]}]
    edit_json(run / "environment.json", departures=claim)
    return run


def forge_failure(run: Path, draw: random.Random) -> Path:
    """Delete the last checkpoints, and hide a forged loss after them behind a failure."""
    rewrite_log(run, draw.choice((7, 8)))
    for checkpoint in list_folders(run):
        if count_updates(checkpoint) > 6:
            shutil.rmtree(checkpoint)
    edit_json(run / "status.json", state="failed")
    return run


def forge_machine(run: Path, draw: random.Random) -> Path:
    """Lower a loss, and claim that another processor computed the run."""
    rewrite_log(run, draw.randint(1, read_ledger(run).last))
    edit_promises(run, lambda promised: promised.update(platform={"cpu": "Other 9000"}))
    return run


def forge_data(run: Path, draw: random.Random) -> Path:
    """Claim other data."""
    edit_promises(run, lambda promised: promised["data"].update(train=draw.randbytes(20).hex()))
    return run


def forge_config(run: Path, draw: random.Random) -> Path:
    """Change a key in config.yaml."""
    edit_config(run, *draw.choice((("lr", "0.777"), ("momentum", "0.8"), ("seed", "3"))))
    return run


def forge_config_of_unfinished(run: Path, draw: random.Random) -> Path:
    """Change a key in config.yaml of a run that claims to be interrupted."""
    edit_json(run / "status.json", state=draw.choice(("interrupted", "paused", "running")))
    return forge_config(run, draw)


def forge_config_without_end(run: Path, draw: random.Random) -> Path:
    """Change a key in config.yaml, and delete the last checkpoints, which have the true value."""
    for checkpoint in list_folders(run):
        if count_updates(checkpoint) > 6:
            shutil.rmtree(checkpoint)
    return forge_config(run, draw)


def forge_every_config(run: Path, draw: random.Random) -> Path:
    """Change a key in config.yaml and in all checkpoints."""
    value = draw.choice((0.04, 0.06))
    edit_config(run, "lr", str(value))
    edit_promises(run, lambda promised: promised["config"]["OPTIMIZER"].update(lr=value))
    return run


def forge_seed(run: Path, draw: random.Random) -> Path:
    """Claim another seed everywhere."""
    seed = draw.randint(1, 9)
    edit_config(run, "seed", str(seed))
    edit_promises(run, lambda promised: promised["config"]["RUN"].update(seed=seed))
    return run


def forge_length(run: Path, draw: random.Random) -> Path:
    """Cut off the last updates of a run, which still claims to be complete."""
    last = draw.choice((2, 4, 6))
    complete = list_folders(run)[-1]
    for checkpoint in list_folders(run):
        if count_updates(checkpoint) > last:
            shutil.rmtree(checkpoint)
    final = list_folders(run)[-1]
    seal(final, finished="completed")
    shutil.copytree(final, complete)
    seal(complete, phase=1, step=0)
    ledger = read_ledger(run)
    records = [record for record in ledger.values() if record.updates <= last]
    write_ledger(run, records, ledger.header)
    edit_json(run / "status.json", updates=last, reached=last)
    return run


def forge_early_stop(run: Path, draw: random.Random) -> Path:
    """Cut off the last updates of a run, which claims to have stopped early."""
    last = draw.choice((2, 4, 6))
    for checkpoint in list_folders(run):
        if count_updates(checkpoint) > last:
            shutil.rmtree(checkpoint)
    seal(final := list_folders(run)[-1], finished="early stop")
    ledger = read_ledger(run)
    records = [record for record in ledger.values() if record.updates <= last]
    write_ledger(run, records, ledger.header)
    edit_json(
        run / "status.json",
        updates=last,
        reached=last,
        reason="early stop",
        digest="",
        checkpoint=final.name,
    )
    return run


def forge_digest(run: Path, draw: random.Random) -> Path:
    """Claim another digest of the final weights in status.json."""
    edit_json(run / "status.json", digest=draw.randbytes(32).hex())
    return run


def forge_root(run: Path, draw: random.Random) -> Path:
    """Claim another root of the ledger in status.json."""
    edit_json(run / "status.json", ledger=draw.randbytes(16).hex())
    return run


def forge_plan(run: Path, draw: random.Random) -> Path:
    """Claim another plan in the later checkpoints."""

    def shift(promised: dict[str, Any]) -> None:
        promised["plan"]["phases"][0]["epoch"] += 1

    edit_promises(run, shift, after=draw.choice((0, 2, 4)))
    return run


def forge_promise(run: Path, draw: random.Random) -> Path:
    """Replace an entry of what a checkpoint has recorded about its run by nonsense."""
    checkpoint = draw.choice(list_folders(run))
    name = draw.choice(("config", "plan", "data", "environment", "platform"))
    edit_json(checkpoint / PROMISED, **{name: draw.choice((None, "x", [1]))})
    seal(checkpoint)
    return run


# Edits of exported and packed weights.


def read_metadata(run: Path) -> dict[str, str]:
    """Return the metadata of the exported weights."""
    with safe_open(run / WEIGHTS, "pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


def write_weights(run: Path, tensors: dict[str, Tensor], **metadata: str) -> Path:
    """Replace the exported weights, and return their file."""
    save_file(tensors, run / WEIGHTS, read_metadata(run) | metadata)
    return run / WEIGHTS


def edit_value(tensors: dict[str, Tensor], draw: random.Random) -> dict[str, Tensor]:
    """Return tensors with one changed number."""
    chosen = draw.choice(sorted(tensors))
    flat = tensors[chosen].view(-1)
    flat[draw.randrange(flat.numel())] += 1e-6
    return tensors


def forge_file(run: Path, draw: random.Random) -> Path:
    """Change a number."""
    return write_weights(run, edit_value(load_file(run / WEIGHTS), draw))


def forge_part(run: Path, draw: random.Random) -> Path:
    """Leave out tensors."""
    kept = draw.choice(("weight", "bias"))
    return write_weights(run, {kept: load_file(run / WEIGHTS)[kept]})


def forge_extra(run: Path, draw: random.Random) -> Path:
    """Add a tensor."""
    tensors = load_file(run / WEIGHTS)
    return write_weights(run, {**tensors, f"extra{draw.randint(0, 9)}": torch.ones(3)})


def forge_type(run: Path, draw: random.Random) -> Path:
    """Store the numbers in another type."""
    dtype = draw.choice((torch.float64, torch.float16, torch.bfloat16))
    return write_weights(
        run, {name: one.to(dtype) for name, one in load_file(run / WEIGHTS).items()}
    )


def forge_lost_origin(run: Path, draw: random.Random) -> Path:
    """Change a number, and name a checkpoint that is not kept."""
    tensors = edit_value(load_file(run / WEIGHTS), draw)
    name = f"p0000-s0000000{draw.choice((1, 3, 5, 7))}"
    return write_weights(run, tensors, checkpoint=name, ledger="")


def forge_retention(run: Path, draw: random.Random) -> Path:
    """Change a number, and delete the checkpoint that the file names."""
    tensors = edit_value(load_file(run / WEIGHTS), draw)
    shutil.rmtree(run / "checkpoints" / read_metadata(run)["checkpoint"])
    return write_weights(run, tensors)


def forge_other_checkpoint(run: Path, draw: random.Random) -> Path:
    """Name the checkpoint of another update."""
    name = draw.choice(list_folders(run)[:3]).name
    return write_weights(run, load_file(run / WEIGHTS), checkpoint=name, ledger="")


def forge_which(run: Path, draw: random.Random) -> Path:
    """Call the trained weights their average."""
    return write_weights(run, load_file(run / WEIGHTS), weights=draw.choice(("ema", "swa")))


def forge_pack(
    run: Path, edit: Callable[[dict[str, Any], dict[str, bytes]], dict[str, bytes]]
) -> Path:
    """Replace members of the packed model, and its digests."""
    from phasetrain.addons.deploy.pack.archive import encode_archive

    with zipfile.ZipFile(run / PACK) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    index = json.loads(members.pop("pack.json"))
    members = edit(index, members)
    for name in ("format", "version", "files"):
        index.pop(name)
    (run / PACK).write_bytes(encode_archive(index, members))
    return run / PACK


def forge_packed_weights(run: Path, draw: random.Random) -> Path:
    """Change a number."""

    def edit(index: dict[str, Any], members: dict[str, bytes]) -> dict[str, bytes]:
        tensors = edit_value(load(members["weights.safetensors"]), draw)
        return {**members, "weights.safetensors": save(tensors)}

    return forge_pack(run, edit)


def forge_packed_config(run: Path, draw: random.Random) -> Path:
    """Change the config, with which the model would be built, or remove it."""
    key, value = draw.choice((("seed", 7), ("name", "other"), ("", None)))

    def edit(index: dict[str, Any], members: dict[str, bytes]) -> dict[str, bytes]:
        config = json.loads(members["config.json"])
        if key:
            config["RUN" if key == "seed" else "MODEL"][key] = value
        return {**members, "config.json": json.dumps(config if key else None).encode()}

    return forge_pack(run, edit)


def forge_packed_origin(run: Path, draw: random.Random) -> Path:
    """Change a number, and name a checkpoint that is not kept."""

    def edit(index: dict[str, Any], members: dict[str, bytes]) -> dict[str, bytes]:
        tensors = edit_value(load(members["weights.safetensors"]), draw)
        card = json.loads(members["card.json"]) | {"checkpoint": "p0000-s00000003", "ledger": ""}
        return {
            **members,
            "weights.safetensors": save(tensors),
            "card.json": json.dumps(card).encode(),
        }

    return forge_pack(run, edit)


def forge_packed_member(run: Path, draw: random.Random) -> Path:
    """Add a member that no packed model has."""
    name = draw.choice(("evil.pkl", "code.py", "weights.pt"))
    return forge_pack(run, lambda index, members: {**members, name: draw.randbytes(20)})


EDITS: dict[str, Callable[[Path, random.Random], Path]] = {
    "a loss, chain rewritten": forge_record,
    "a loss, all hashes rewritten": forge_log,
    "other initial weights": forge_start,
    "a loss, said to be of two ranks": forge_ranks,
    "a loss, said to be of another machine": forge_machine,
    "a loss behind a change claimed everywhere": forge_departure,
    "a loss behind a change claimed in environment.json": forge_departure_alone,
    "a loss behind a claimed change at the end": forge_tail,
    "a loss behind a claimed failure": forge_failure,
    "weights of a checkpoint": forge_checkpoint,
    "weights at the end": forge_final_weights,
    "momentum of a checkpoint": forge_optimizer,
    "average of a checkpoint": forge_average,
    "place of a checkpoint": forge_place,
    "updates before a checkpoint": forge_count,
    "samples before a checkpoint": forge_samples,
    "damage to a checkpoint": forge_damage,
    "plan of checkpoints": forge_plan,
    "data of checkpoints": forge_data,
    "promise of a checkpoint": forge_promise,
    "config.yaml": forge_config,
    "config.yaml of a run said to be unfinished": forge_config_of_unfinished,
    "config.yaml without the last checkpoint": forge_config_without_end,
    "config everywhere": forge_every_config,
    "seed everywhere": forge_seed,
    "end of the run": forge_length,
    "end of the run, said to be an early stop": forge_early_stop,
    "digest in status.json": forge_digest,
    "root in status.json": forge_root,
    "exported weights": forge_file,
    "exported weights, tensors missing": forge_part,
    "exported weights, a tensor more": forge_extra,
    "exported weights, another type": forge_type,
    "exported weights, checkpoint not kept": forge_lost_origin,
    "exported weights, checkpoint deleted": forge_retention,
    "exported weights of another checkpoint": forge_other_checkpoint,
    "exported weights, said to be an average": forge_which,
    "packed weights": forge_packed_weights,
    "packed weights, checkpoint not kept": forge_packed_origin,
    "packed config": forge_packed_config,
    "packed member more": forge_packed_member,
}
"""What is forged -> its function, which gets a copy of a finished run and returns what to verify."""
