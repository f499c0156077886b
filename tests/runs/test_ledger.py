"""steps.ledger: the bytes of a record, what is read back, and what counts as different."""

import math

import pytest

from phasetrain.runs.ledger import (
    FULL,
    HEADER,
    NORM,
    RECORD_BYTES,
    SAMPLED,
    SKIPPED,
    InvalidLedgerError,
    LedgerRecord,
    encode_ledger,
    list_differences,
    parse_ledger,
    parse_rows,
)

ONE = LedgerRecord(
    updates=7, phase=1, step=2, samples=64, flags=SAMPLED | NORM, ids=0x0123456789ABCDEF, content=5, weights=6,
    loss=0.1, norm=2.5, lr=0.05,
)  # fmt: skip


def test_the_bytes_are_these_for_ever() -> None:
    assert HEADER.hex() == "5048544c454447520100" + "00004c000000"
    assert RECORD_BYTES == 76
    assert ONE.encode().hex() == (
        "0700000000000000"  # updates
        "01000000" "02000000" "40000000" "06000000"  # phase, step, samples, flags
        "efcdab8967452301" "0500000000000000" "0600000000000000"  # digests
        "9a9999999999b93f" "0000000000000440" "9a9999999999a93f"  # loss, norm, lr
        "19cd0744"
    )  # fmt: skip


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
    assert (list(ledger), ledger.torn) == ([7], 75)


@pytest.mark.parametrize("place", range(len(HEADER), len(HEADER) + RECORD_BYTES))
def test_a_flipped_bit_leaves_its_record_out(place: int) -> None:
    data = bytearray(encode_ledger([ONE, ONE._replace(updates=8)]))
    data[place] ^= 1 << (place % 8)
    ledger = parse_ledger(bytes(data))
    assert (list(ledger), ledger.damaged) == ([8], (0,))


@pytest.mark.parametrize(
    "data", [b"", HEADER[:-1], b"X" + HEADER[1:], HEADER[:8] + b"\x02" + HEADER[9:]]
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
