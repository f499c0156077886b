"""`phasetrain tokenize` writes the same bytes wherever it is killed."""

import gzip
import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from raising import raises

from phasetrain.addons.text.tokenize.tokenize import TokenizeOptions, tokenize
from phasetrain.addons.text.tokens import TokenFiles
from phasetrain.cli.main import main
from phasetrain.errors import ConfigError
from phasetrain.runtime.storage import Storage


class Killed(Exception):  # noqa: N818 - simulates a kill
    """Raised instead of a file operation."""


def kill_at(number: int) -> Storage:
    """Return access to files that is killed at its n-th change."""
    left = [number]

    def before(operation: str, path: str) -> None:
        if operation != "read":
            left[0] -= 1
            if left[0] < 0:
                raise Killed(f"{operation} {path}")

    return Storage(before)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder with a text, JSON lines, a compressed text and empty documents."""
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.txt").write_text("the second file, the second file")
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"body": one}) + "\n" for one in ("first", "", "second first", "third"))
    )
    (folder / "sub" / "c.txt.gz").write_bytes(gzip.compress("komprimiert: ä".encode()))
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").write_text("not read")
    return folder


def test_documents_are_in_the_order_of_the_names(texts: Path, tmp_path: Path) -> None:
    made = tokenize(str(tmp_path / "out"), [str(texts)], TokenizeOptions(field="body"))
    assert (made.documents, made.vocabulary, made.dtype, made.end) == (5, 257, "uint16", 256)
    tokens = TokenFiles(str(tmp_path / "out")).read(0, made.tokens).tolist()
    text = bytes(10 if one == 256 else one for one in tokens).decode()
    assert text.splitlines() == [
        "first",
        "second first",
        "third",
        "the second file, the second file",
        "komprimiert: ä",
    ]
    assert made.bytes == made.tokens - 5
    assert made.bytes_table is not None


@pytest.mark.feature(
    "tokenize",
    "token files by a resumable command, with a trained BPE on request",
    "`phasetrain tokenize`",
)
@pytest.mark.parametrize("trained", [False, True])
def test_killed_at_every_file_operation_writes_the_same_bytes(
    texts: Path, tmp_path: Path, trained: bool
) -> None:
    options = TokenizeOptions(field="body", shard_tokens=10, train_bpe=260 if trained else None)
    tokenize(str(tmp_path / "unbroken"), [str(texts)], options)
    whole = contents(tmp_path / "unbroken")
    assert len([name for name in whole if name.endswith(".tokens")]) == 3
    assert ("tokenizer.json" in whole) == trained
    kills = 0
    # A chain of attempts, each of which gets one file operation further than it would need.
    for number in range(60):
        out = tmp_path / f"killed-{number}"
        try:
            tokenize(str(out), [str(texts)], options, kill_at(number))
        except Killed:
            kills += 1
            tokenize(str(out), [str(texts)], options)
        assert contents(out) == whole
        if number >= kills:
            break
    assert kills > 30


def test_chain_of_kills_ends(texts: Path, tmp_path: Path) -> None:
    options = TokenizeOptions(field="body", shard_tokens=10)
    tokenize(str(tmp_path / "unbroken"), [str(texts)], options)
    for _ in range(30):
        try:
            tokenize(str(tmp_path / "out"), [str(texts)], options, kill_at(14))
        except Killed:
            continue
        break
    assert contents(tmp_path / "out") == contents(tmp_path / "unbroken")


def test_finished_folder_is_left_as_it_is(texts: Path, tmp_path: Path) -> None:
    out, options = str(tmp_path / "out"), TokenizeOptions(field="body")
    made = tokenize(out, [str(texts)], options)
    times = [path.stat().st_mtime_ns for path in sorted(Path(out).iterdir())]
    assert tokenize(out, [str(texts)], options) == made
    assert [path.stat().st_mtime_ns for path in sorted(Path(out).iterdir())] == times


def test_other_inputs_or_options_are_rejected(texts: Path, tmp_path: Path) -> None:
    out, options = str(tmp_path / "out"), TokenizeOptions(field="body", shard_tokens=10)
    with pytest.raises(Killed):
        tokenize(out, [str(texts)], options, kill_at(20))
    changed = TokenizeOptions(field="body", shard_tokens=20)
    with raises(ConfigError, code="tokens.other_source"):
        tokenize(out, [str(texts)], changed)
    tokenize(out, [str(texts)], options)
    (texts / "b.txt").write_text("another length")
    with raises(ConfigError, code="tokens.other_source"):
        tokenize(out, [str(texts)], options)


def test_command_that_failed_before_its_first_shard_can_be_corrected(
    texts: Path, tmp_path: Path
) -> None:
    wrong = TokenizeOptions(field="txt", train_bpe=260)
    right = TokenizeOptions(field="body")
    tokenize(str(tmp_path / "unbroken"), [str(texts)], right)
    for number in range(60):
        out = tmp_path / f"killed-{number}"
        with raises(ConfigError, code="tokens.invalid_input"):
            tokenize(str(out), [str(texts)], wrong)
        # As if the tokenizer had been trained before the failure.
        (out / "tokenizer.json").write_text("{}")
        try:
            tokenize(str(out), [str(texts)], right, kill_at(number))
        except Killed:
            tokenize(str(out), [str(texts)], right)
            assert contents(out) == contents(tmp_path / "unbroken")
            continue
        break
    assert number > 10
    assert contents(out) == contents(tmp_path / "unbroken")


def test_folder_with_other_files_is_not_touched(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with raises(ConfigError, code="tokens.not_empty"):
        tokenize(str(tmp_path / "out"), [str(texts)], TokenizeOptions(field="body"))
    assert list(contents(tmp_path / "out")) == ["mine"]


COMPRESSED = gzip.compress(b'{"text": "a"}\n' * 5, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.jsonl", b"{", "tokens.invalid_input"),
        ("a.jsonl", b'{"txt": "a"}', "tokens.invalid_input"),
        ("a.jsonl", b"[1]", "tokens.invalid_input"),
        ("a.txt", b"\xff\xfe", "tokens.invalid_input"),
        ("a.txt", b"", "tokens.no_input"),
        ("a.jsonl.gz", COMPRESSED[:-10], "tokens.invalid_input"),
        ("a.jsonl.gz", COMPRESSED[:20] + bytes(9) + COMPRESSED[29:], "tokens.invalid_input"),
        ("a.txt.gz", b"not compressed", "tokens.invalid_input"),
    ],
)
def test_bad_inputs_are_named(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(content)
    with raises(ConfigError, code=code):
        tokenize(str(tmp_path / "out"), [str(tmp_path / name)], TokenizeOptions(train_bpe=260))


def test_truncated_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(COMPRESSED[:-10])
    assert main(["tokenize", str(tmp_path / "out"), str(tmp_path / "a.jsonl.gz")]) == 2
    assert str(tmp_path / "a.jsonl.gz") in capsys.readouterr().err


def test_missing_inputs_and_contradicting_options_are_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, code="tokens.no_input"):
        tokenize(str(tmp_path / "out"), [str(tmp_path / "nothing")])
    with raises(ConfigError, code="cli.usage"):
        TokenizeOptions(tokenizer="a", train_bpe=300)
    with raises(ConfigError, code="cli.usage"):
        TokenizeOptions(shard_tokens=0)


def test_command_prints_what_was_written(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "out"), str(texts), "--field", "body", "--train-bpe", "300"]
    assert main(["tokenize", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["documents"], found["shards"], found["exact_bytes"]) == (5, 1, True)
    file = (tmp_path / "out" / "shard-00000.tokens").read_bytes()
    assert found["digest"] == sha256(sha256(file).hexdigest().encode()).hexdigest()
    assert len(np.frombuffer(file, "<u2")) == found["tokens"]
