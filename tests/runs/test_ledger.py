"""steps.ledger: the bytes of a record, what is read back, and what counts as different."""

import math
from hashlib import blake2b
from zlib import crc32

import pytest

from phasetrain.runs.ledger import (
    FULL,
    HEADER_BYTES,
    NORM,
    SAMPLED,
    SKIPPED,
    InvalidLedgerError,
    LedgerHeader,
    LedgerRecord,
    count_records,
    encode_ledger,
    list_differences,
    parse_ledger,
    parse_rows,
)

RECORD_BYTES = 92
"""Size of a record in the version that new runs write."""

ONE = LedgerRecord(
    updates=7, phase=1, step=2, samples=64, flags=SAMPLED | NORM, ids=0x0123456789ABCDEF, content=5, weights=6,
    loss=0.1, norm=2.5, lr=0.05,
)  # fmt: skip


HEADER = LedgerHeader().encode()
FIRST = LedgerHeader(version=1)

FIELDS = (
    "0700000000000000"  # updates
    "01000000" "02000000" "40000000" "06000000"  # phase, step, samples, flags
    "efcdab8967452301" "0500000000000000" "0600000000000000"  # digests
    "9a9999999999b93f" "0000000000000440" "9a9999999999a93f"  # loss, norm, lr
)  # fmt: skip


def test_the_bytes_are_these_for_ever() -> None:
    assert FIRST.encode().hex() == "5048544c45444752010000004c000000"
    assert ONE.encode().hex() == FIELDS + "19cd0744"
    header = LedgerHeader(start=bytes(range(32)))
    assert header.encode().hex() == "5048544c45444752020000005c000000" + bytes(range(32)).hex()
    assert (len(header.encode()), header.record_bytes) == (HEADER_BYTES, RECORD_BYTES) == (48, 92)
    link = blake2b(
        blake2b(header.encode(), digest_size=16).digest() + bytes.fromhex(FIELDS), digest_size=16
    )
    data, found = ONE.encode_linked(header.first_link)
    assert (found, data.hex()[:-8]) == (link.digest(), FIELDS + link.hexdigest())
    assert link.hexdigest() == "b9ce1e5e722847c5c7c8609d8c1faad3"


class TestChain:
    RECORDS = (ONE, ONE._replace(updates=8), ONE._replace(updates=9))

    def test_root_is_the_hash_of_the_last_record(self) -> None:
        ledger = parse_ledger(encode_ledger(self.RECORDS))
        link = LedgerHeader().first_link
        assert ledger.root_at(0) == link.hex()
        for record in self.RECORDS:
            _, link = record.encode_linked(link)
            assert ledger.root_at(record.updates) == link.hex()
        assert ledger.root_at(10) == ""
        assert ledger.find_broken_link() is None

    @pytest.mark.feature(
        "verify",
        "the ledger is a hash chain with its root in checkpoints and exported weights; random "
        "segments are trained again and compared bit for bit",
        "`phasetrain verify RUN_OR_WEIGHTS`",
    )
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_a_record_that_was_replaced_breaks_the_chain(self, place: int) -> None:
        data = bytearray(encode_ledger(self.RECORDS))
        begin = HEADER_BYTES + place * RECORD_BYTES
        other = self.RECORDS[place]._replace(loss=7.0)
        link = bytes(data[begin + 72 : begin + 88])
        # with a checksum that fits, as somebody who edits the file would write it
        changed = other.encode()[:72] + link
        data[begin : begin + RECORD_BYTES] = changed + crc32(changed).to_bytes(4, "little")
        ledger = parse_ledger(bytes(data))
        assert (ledger.damaged, ledger[7 + place].loss) == ((), 7.0)
        assert ledger.find_broken_link() == 7 + place

    def test_a_record_that_was_cut_out_breaks_the_chain(self) -> None:
        data = encode_ledger(self.RECORDS)
        cut = data[: HEADER_BYTES + RECORD_BYTES] + data[HEADER_BYTES + 2 * RECORD_BYTES :]
        assert parse_ledger(cut).find_broken_link() == 9

    def test_other_initial_weights_break_the_chain(self) -> None:
        data = bytearray(encode_ledger(self.RECORDS, LedgerHeader(start=b"a" * 32)))
        assert parse_ledger(bytes(data)).find_broken_link() is None
        data[20] ^= 1
        assert parse_ledger(bytes(data)).find_broken_link() == 7

    def test_every_field_is_in_the_root(self) -> None:
        roots = {parse_ledger(encode_ledger([ONE])).root_at(7)}
        for name in LedgerRecord._fields:
            other = ONE._replace(**{name: getattr(ONE, name) + 1})
            roots.add(parse_ledger(encode_ledger([other])).root_at(other.updates))
        assert len(roots) == 1 + len(LedgerRecord._fields)


def test_ledger_of_version_1_is_read_without_a_chain() -> None:
    records = [ONE, ONE._replace(updates=8, loss=math.inf)]
    ledger = parse_ledger(encode_ledger(records, FIRST))
    assert dict(ledger) == {7: records[0], 8: records[1]}
    assert (ledger.header, ledger.root_at(8), ledger.find_broken_link()) == (FIRST, "", None)


def test_records_are_counted_by_the_version_in_the_header() -> None:
    for header, size in ((FIRST, 16 + 2 * 76), (LedgerHeader(), 48 + 2 * 92)):
        data = encode_ledger([ONE, ONE._replace(updates=8)], header)
        assert (len(data), count_records(data[:HEADER_BYTES], size)) == (size, 2)
        assert count_records(data[:HEADER_BYTES], size - 1) == 1
    assert count_records(b"", 10_000) == 0


def test_what_was_written_is_read_back() -> None:
    records = [
        ONE._replace(updates=number, loss=loss)
        for number, loss in [(1, 0.1), (2, -0.0), (4, math.inf)]
    ]
    ledger = parse_ledger(encode_ledger(records))
    assert dict(ledger) == {1: records[0], 2: records[1], 4: records[2]}
    assert (ledger.last, ledger.torn, ledger.damaged) == (4, 0, ())
    assert math.copysign(1, ledger[2].loss) == -1
    assert 3 not in ledger
    assert parse_ledger(HEADER).last == 0


def test_a_torn_record_at_the_end_is_left_out() -> None:
    ledger = parse_ledger(encode_ledger([ONE, ONE._replace(updates=8)])[:-1])
    assert (list(ledger), ledger.torn) == ([7], 91)


@pytest.mark.parametrize("place", range(len(HEADER), len(HEADER) + RECORD_BYTES))
def test_a_flipped_bit_leaves_its_record_out(place: int) -> None:
    data = bytearray(encode_ledger([ONE, ONE._replace(updates=8)]))
    data[place] ^= 1 << (place % 8)
    ledger = parse_ledger(bytes(data))
    assert (list(ledger), ledger.damaged) == ([8], (0,))


@pytest.mark.parametrize(
    "data", [b"", HEADER[:-1], b"X" + HEADER[1:], HEADER[:8] + b"\x03" + HEADER[9:]]
)
def test_what_is_no_ledger_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidLedgerError):
        parse_ledger(data)


class TestDifferent:
    def test_equal_records(self) -> None:
        assert list_differences(ONE, ONE._replace()) == []
        assert (
            list_differences(ONE._replace(loss=math.nan), ONE._replace(loss=-math.nan)) == []
        )  # no sign that means a thing
        assert (
            list_differences(ONE, ONE._replace(phase=3, step=1)) == []
        )  # where the plan cuts phases

    @pytest.mark.parametrize(
        ("change", "component"),
        [
            ({"samples": 63}, "samples"),
            ({"ids": 1}, "samples"),
            ({"content": 1}, "batch content"),
            ({"lr": 0.05000000000000001}, "lr"),
            ({"loss": 0.10000000000000002}, "loss"),
            ({"norm": 2.5000000000000004}, "gradient norm"),
            ({"flags": SAMPLED, "norm": 0.0}, "gradient norm"),
            ({"weights": 7}, "weights"),
            ({"flags": SAMPLED | NORM | SKIPPED}, "weights"),
        ],
    )
    def test_one_component(self, change: dict[str, float], component: str) -> None:
        assert list_differences(ONE, ONE._replace(**change)) == [component]  # type: ignore[arg-type]

    def test_they_come_in_the_order_of_cause_and_effect(self) -> None:
        other = ONE._replace(weights=1, loss=1.0, ids=1, norm=1.0, lr=1.0, content=1)
        assert list_differences(ONE, other) == [
            "samples",
            "batch content",
            "lr",
            "loss",
            "gradient norm",
            "weights",
        ]

    def test_content_of_different_kinds_is_not_compared(self) -> None:
        assert list_differences(ONE, ONE._replace(flags=FULL | NORM, content=1)) == []
        assert list_differences(ONE, ONE._replace(flags=NORM, content=0)) == []


def test_records_as_text() -> None:
    assert ONE.format_component("samples") == "64 samples, 0123456789abcdef"
    assert ONE.format_component("batch content") == "0000000000000005 of a part"
    assert ONE.format_component("loss") == "0.1"
    assert ONE._replace(flags=0).format_component("gradient norm") == "not computed"
    assert ONE._replace(flags=0).format_component("batch content") is None
    assert ONE._replace(flags=SKIPPED).format_component("weights") == "0000000000000006 skipped"


def test_rows_as_they_stand_in_the_file() -> None:
    found = parse_rows(
        encode_ledger([ONE, ONE._replace(updates=ONE.updates + 1, loss=0.5)]) + b"torn"
    )
    assert found["updates"].tolist() == [ONE.updates, ONE.updates + 1]
    assert found["loss"].tolist() == [ONE.loss, 0.5]
    assert len(parse_rows(encode_ledger([]))) == 0
    with pytest.raises(InvalidLedgerError):
        parse_rows(b"")
