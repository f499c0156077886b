"""The ledger has one record per update, of what was really computed, with equal bytes in equal
runs."""

import hashlib
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import KillAfter, SaveEachStep, newest, run_until_killed, status, train
from raising import raises

from phasetrain.checkpoint.commit import list_checkpoints
from phasetrain.engine.batch import Batch
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, NumericsError
from phasetrain.hooks import HOOKS, Hook, LedgerHook
from phasetrain.hooks.ledger_content import (
    copy_all,
    copy_entries,
    copy_weights,
    hash_bytes,
    select_entries,
    select_weights,
    to_array,
    to_memory_order,
)
from phasetrain.models.digest import hash_model
from phasetrain.optim.update import updater
from phasetrain.runs.ledger import (
    FILE,
    FULL,
    HEADER_BYTES,
    NORM,
    SAMPLED,
    Ledger,
    LedgerHeader,
    encode_ledger,
    parse_ledger,
)
from phasetrain.runtime.storage import Storage

RECORD_BYTES = 92
"""Size of a record in the version that new runs write."""

CUT = ("PHASES.epochs=2", "PHASES.limit.train=4")


def log(folder: Path) -> list[str]:
    return (folder / "log.txt").read_text().splitlines()


def ledger(folder: Path) -> Ledger:
    return parse_ledger((folder / FILE).read_bytes())


class Notes(Hook):
    """Keeps what the ledger is to hold, computed another way."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}
        self.rows: dict[int, tuple[float, float, float]] = {}

    def on_batch(self, run: Any, phase: Any, batch: Batch) -> None:
        if phase.is_train:
            data = b"".join(int(one).to_bytes(8, "little") for one in batch.ids)
            self.ids[run.state.updates + 1] = int.from_bytes(
                hashlib.blake2b(data, digest_size=8).digest(), "little"
            )

    def on_step(self, run: Any, phase: Any, out: Any) -> None:
        if phase.is_train:
            norm = run.task.updater.gradients.norm
            self.rows[run.state.updates] = (
                float(out.loss),
                run.task.updater.lr,
                0.0 if norm is None else float(norm),
            )


@pytest.mark.parametrize("words", [[], ["OPTIMIZER.clip_norm=0.5"]], ids=["plain", "clipped"])
def test_ledger_has_a_record_for_each_update(tmp_path: Path, words: list[str]) -> None:
    train(tmp_path, *CUT, *words, hooks={"notes": (notes := Notes())})
    found = ledger(tmp_path)
    assert [(r.updates, r.phase, r.step, r.samples) for r in found.values()] == [
        (1, 0, 1, 24), (2, 0, 2, 24), (3, 0, 3, 24), (4, 0, 4, 24),
        (5, 2, 1, 24), (6, 2, 2, 24), (7, 2, 3, 24), (8, 2, 4, 24),
    ]  # fmt: skip
    assert {
        number: (record.loss, record.lr, record.norm) for number, record in found.items()
    } == notes.rows
    assert {number: record.ids for number, record in found.items()} == notes.ids
    assert {record.flags for record in found.values()} == {SAMPLED | NORM if words else SAMPLED}
    assert len({record.weights for record in found.values()}) == 8
    assert (tmp_path / FILE).stat().st_size == 48 + 8 * 92


@pytest.mark.by_default("sampled")
@pytest.mark.parametrize("content", ["sampled", "full", "none"])
def test_reading_at_once_and_later_gives_the_same_bytes(tmp_path: Path, content: str) -> None:
    for name, deferred in (("now", "false"), ("later", "true")):
        words = (
            f"HOOKS.ledger.content={content}",
            f"HOOKS.ledger.deferred={deferred}",
            "HOOKS.ledger.flush_every=3",
        )
        train(tmp_path / name, *CUT, *words, "OPTIMIZER.clip_norm=0.5", "MACHINE.precision=bf16")
    assert (tmp_path / "now" / FILE).read_bytes() == (tmp_path / "later" / FILE).read_bytes()
    flags = {"sampled": SAMPLED, "full": FULL, "none": 0}[content]
    assert {record.flags for record in ledger(tmp_path / "now").values()} == {flags | NORM}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder, *CUT)
    return (folder / FILE).read_bytes()


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    run_until_killed(folder, *CUT, hooks={"kill": KillAfter(8)})
    return folder


@pytest.fixture
def killed(tmp_path: Path, killed_once: Path) -> Path:
    """Return a folder of this test alone: 6 updates were made, and the checkpoint is of update
    4."""
    shutil.copytree(killed_once, tmp_path / "killed")
    return tmp_path / "killed"


class TestResume:
    @pytest.mark.by_default("3")
    @pytest.mark.parametrize("step", [0, 1, 3, 4, 5, 6, 7, 10])
    def test_a_run_killed_anywhere_has_the_same_bytes(
        self, unbroken: bytes, tmp_path: Path, step: int
    ) -> None:
        run_until_killed(tmp_path, *CUT, hooks={"save": SaveEachStep(), "kill": KillAfter(step)})
        train(tmp_path, *CUT, "DATA.TRAIN.workers=1")
        assert (tmp_path / FILE).read_bytes() == unbroken

    def test_records_beyond_the_checkpoint_are_written_again(
        self, unbroken: bytes, killed: Path
    ) -> None:
        assert ledger(killed).last == 6
        data = bytearray((killed / FILE).read_bytes())
        data[HEADER_BYTES + 5 * RECORD_BYTES + 3] ^= 255
        (killed / FILE).write_bytes(bytes(data) + b"torn")
        train(killed, *CUT)
        assert (killed / FILE).read_bytes() == unbroken

    def test_the_comparison_sees_a_hook_that_forgets(
        self, unbroken: bytes, killed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(LedgerHook, "load_state_dict", lambda self, state: None)
        train(killed, *CUT)
        assert (killed / FILE).read_bytes() != unbroken

    @pytest.mark.by_default("2")
    @pytest.mark.parametrize("step", [1, 2, 5])
    def test_accumulation_and_skipped_updates(self, tmp_path: Path, step: int) -> None:
        words = (
            *CUT,
            "MACHINE.precision=fp16",
            "OPTIMIZER.accumulate=2",
            "OPTIMIZER.clip_norm=0.5",
        )
        words += ("OPTIMIZER.scaler={name: grad, init_scale: 1e6, growth_interval: 2}",)
        train(tmp_path / "unbroken", *words)
        found = [record.is_skipped for record in ledger(tmp_path / "unbroken").values()]
        assert found[0]
        assert not all(found)
        folder = tmp_path / "killed"
        run_until_killed(folder, *words, hooks={"save": SaveEachStep(), "kill": KillAfter(step)})
        train(folder, *words, "HOOKS.ledger.deferred=true")
        assert (folder / FILE).read_bytes() == (tmp_path / "unbroken" / FILE).read_bytes()

    @pytest.mark.by_default("3")
    @pytest.mark.parametrize("step", [2, 3, 4])
    def test_skip_that_the_device_reports_an_update_late(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
    ) -> None:
        class Break(Hook):
            def on_forward(self, run: Any, phase: Any, out: Any) -> None:
                if phase.is_train and run.state.updates in (1, 3):
                    out.loss = out.loss * float("nan")

        monkeypatch.setattr(updater, "choose_lag", lambda *_: 1)
        words = (*CUT, "OPTIMIZER.on_nonfinite=skip", "METERS.loss=null")
        train(tmp_path / "unbroken", *words, hooks={"break": Break()})
        found = ledger(tmp_path / "unbroken")
        assert [record.updates for record in found.values() if record.is_skipped] == [2, 4]
        assert [record.updates for record in found.values() if math.isnan(record.loss)] == [2, 4]
        folder = tmp_path / "killed"
        killing = {"break": Break(), "save": SaveEachStep(), "kill": KillAfter(step)}
        run_until_killed(folder, *words, hooks=killing)
        train(folder, *words, hooks={"break": Break()})
        assert (folder / FILE).read_bytes() == (tmp_path / "unbroken" / FILE).read_bytes()

    @pytest.mark.parametrize(
        "damage",
        [lambda data: data[: HEADER_BYTES + 2 * RECORD_BYTES + 5], lambda data: b"X" + data[1:]],
        ids=["truncated", "without a header"],
    )
    def test_damaged_file_is_continued_with_a_warning(self, killed: Path, damage: Any) -> None:
        (killed / FILE).write_bytes(damage((killed / FILE).read_bytes()))
        train(killed, *CUT)
        warnings = [line for line in log(killed) if "WARNING" in line and FILE in line]
        assert len(warnings) == 1, log(killed)
        assert " 4" in warnings[0]
        found = ledger(killed)
        assert list(found)[-4:] == [5, 6, 7, 8]
        assert found.damaged == ()

    def test_an_attempt_without_the_hook_leaves_a_gap(self, tmp_path: Path) -> None:
        run_until_killed(tmp_path, *CUT, hooks={"save": SaveEachStep(), "kill": KillAfter(2)})
        run_until_killed(
            tmp_path,
            *CUT,
            "HOOKS.ledger=null",
            hooks={"save": SaveEachStep(), "kill": KillAfter(2)},
        )
        train(tmp_path, *CUT)
        assert list(ledger(tmp_path)) == [1, 2, 5, 6, 7, 8]


class TestRoot:
    """The root of the chain in checkpoints and status.json, and the initial weights under it."""

    def test_each_manifest_has_the_root_up_to_its_update(
        self, killed_once: Path, killed: Path
    ) -> None:
        train(killed, *CUT)
        chain = ledger(killed)
        assert chain.find_broken_link() is None
        saved = list_checkpoints(Storage(), f"{killed}/checkpoints")[0]
        roots = {one.manifest.state["updates"]: one.manifest.facts.ledger for one in saved}
        assert roots == {number: chain.root_at(number) for number in (4, 8)}
        assert status(killed)["ledger"] == chain.root_at(8)

    def test_header_has_the_digest_of_the_initial_weights(self, tmp_path: Path) -> None:
        class Look(Hook):
            def on_phase_start(self, run: Any, phase: Any) -> None:
                digests.append(hash_model(run.task.model))

        digests: list[str] = []
        train(tmp_path, *CUT, hooks={"look": Look()})
        assert ledger(tmp_path).header.start.hex() == digests[0]

    def test_run_that_began_with_version_1_continues_with_it(
        self, killed: Path, unbroken: bytes
    ) -> None:
        records = list(ledger(killed).values())
        (killed / FILE).write_bytes(encode_ledger(records, LedgerHeader(version=1)))
        train(killed, *CUT)
        found = ledger(killed)
        assert (found.header.version, dict(found)) == (1, dict(parse_ledger(unbroken)))
        assert newest(killed).manifest.facts.ledger == ""
        assert "ledger" not in status(killed)


def test_a_weight_that_moves_shows_in_its_update(tmp_path: Path) -> None:
    class Nudge(Hook):
        def on_update(self, run: Any, phase: Any) -> None:
            if run.state.updates == 5:
                with torch.no_grad():
                    for weight in run.task.model.parameters():
                        weight.add_(1e-4)

    train(tmp_path / "one", *CUT)
    train(tmp_path / "other", *CUT, hooks={"nudge": Nudge()})
    one, other = ledger(tmp_path / "one"), ledger(tmp_path / "other")
    assert [number for number in one if one[number].weights != other[number].weights] == [6, 7, 8]
    assert [number for number in one if one[number].loss != other[number].loss] == [7, 8]


def test_an_update_that_ends_the_run_leaves_the_ones_before_it(tmp_path: Path) -> None:
    class Break(Hook):
        def on_forward(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == 3:
                out.loss = out.loss * float("nan")

    with pytest.raises(NumericsError):
        train(tmp_path, *CUT, hooks={"break": Break()})
    assert list(ledger(tmp_path)) == [1, 2, 3]


class TestPartOf:
    def test_few_samples_are_looked_at_in_many_places(self) -> None:
        batch = torch.arange(4 * 100, dtype=torch.float32).reshape(4, 10, 10)
        part = select_entries(
            to_array(batch), 4, 0
        )  # 16 entries of 4 bytes in 64 bytes, one every sixth
        assert part.shape == (4, 16, 1)
        assert part[1].ravel().tolist() == [100 + 6 * place for place in range(16)]

    def test_many_samples_are_looked_at_in_longer_runs(self) -> None:
        batch = torch.arange(128 * 100, dtype=torch.float32).reshape(128, 100)
        part = select_entries(to_array(batch), 128, 0)
        assert part.shape == (128, 2, 8)
        assert part[1].tolist() == [[*range(100, 108)], [*range(150, 158)]]

    @pytest.mark.parametrize(("count", "entries"), [(1, 100), (3, 101), (300, 40), (1000, 1)])
    def test_every_entry_is_met(self, count: int, entries: int) -> None:
        batch = torch.arange(count * entries).reshape(count, entries)
        met: set[int] = set()
        for turn in range(2000):
            met.update(select_entries(batch, count, turn).flatten().tolist())
        assert met == set(range(count * entries))

    @pytest.mark.parametrize(
        ("count", "shape"),
        [
            (1, (1, 16, 1)),
            (64, (64, 4, 4)),
            (256, (256, 1, 16)),
            (1024, (256, 1, 16)),
            (100_000, (256, 1, 16)),
        ],
    )
    def test_it_costs_about_the_same_for_any_batch(
        self, count: int, shape: tuple[int, ...]
    ) -> None:
        part = select_entries(torch.zeros(1).expand(count, 1000), count, 0)
        assert part.shape == shape

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,), ()])
    def test_empty_and_scalar_inputs(self, shape: tuple[int, ...]) -> None:
        hook = LedgerHook()
        batch = Batch({"odd": torch.zeros(shape)}, torch.arange(4), torch.arange(4), 4)
        state, phase = SimpleNamespace(state=RunState()), SimpleNamespace(is_train=True)
        hook.on_batch(state, phase, batch)  # type: ignore[arg-type]
        assert len(hook._pieces) == (2 if shape == () else 1)

    def test_short_samples_are_taken_whole(self) -> None:
        assert select_entries(torch.arange(12).reshape(3, 4), 3, 5).flatten().tolist() == list(
            range(12)
        )

    def test_channels_last_is_not_copied(self) -> None:
        batch = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
        assert select_entries(to_memory_order(batch), 4, 0).data_ptr() == batch.data_ptr()
        assert to_array(batch).shape == (4, 8, 8, 3)

    @pytest.mark.parametrize(
        "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.complex64]
    )
    def test_types_that_numpy_lacks_and_others(self, dtype: torch.dtype) -> None:
        value = torch.ones(3, 5, requires_grad=False).to(dtype)
        assert len(to_array(value).tobytes()) == 15 * value.element_size()
        assert to_array(torch.ones(3).to_sparse()).tolist() == [1.0, 1.0, 1.0]

    def test_nothing_has_a_hash(self) -> None:
        assert hash_bytes(b"") == int.from_bytes(
            hashlib.blake2b(b"", digest_size=8).digest(), "little"
        )


def test_settings_are_checked(tmp_path: Path) -> None:
    assert HOOKS["ledger"] is LedgerHook
    with pytest.raises(ValueError, match="flush_every = 0"):
        LedgerHook(flush_every=0)
    with pytest.raises(ValueError, match="content = 'some'"):
        LedgerHook("some")  # type: ignore[arg-type]
    with raises(ConfigError, code="config.duplicate_hook"):
        train(tmp_path, "HOOKS.again.name=ledger")


FORMS = {
    "floats": torch.randn(8, 16),
    "integers": torch.arange(8),
    "bfloat16": torch.randn(8, 5).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "large": torch.randn(4, 3, 32, 32),
    "many": torch.randn(700, 3),
    "channels_last": torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
    "transposed": torch.randn(7, 9).t(),
    "slice": torch.randn(9, 9)[2:5],
    "expanded": torch.randn(1, 4).expand(6, 4),
    "sparse": torch.eye(4).to_sparse(),
    "parameter": torch.nn.Parameter(torch.randn(20, 11)),
    "bias": torch.nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("name", list(FORMS))
def test_bytes_of_a_tensor_are_those_of_its_array(name: str) -> None:
    tensor = FORMS[name]
    count = len(tensor) if tensor.ndim else 1
    for turn in (0, 1, 7, 1000):
        entries = select_entries(to_array(tensor), count, turn)
        assert copy_entries(tensor, turn) == entries.tobytes()
        assert copy_weights(tensor, turn) == select_weights(to_array(tensor), turn).tobytes()
    assert copy_all(tensor) == to_array(tensor).tobytes()
