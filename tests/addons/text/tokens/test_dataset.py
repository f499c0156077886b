"""The dataset `tokens`: windows, document masks, and a billion tokens without reading them."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises

from phasetrain.addons.text.blocks import IGNORED
from phasetrain.addons.text.tokens import Tokens
from phasetrain.addons.text.tokens.token_files import TokenFiles
from phasetrain.data import DATASETS
from phasetrain.data.datasets import load_digits
from phasetrain.errors import ConfigError

Write = Callable[..., str]


@pytest.mark.parametrize("context", [1, 7, 73, 100])
@pytest.mark.parametrize("order", ["stored", "shuffled"])
def test_every_token_is_a_target_once(write: Write, context: int, order: str) -> None:
    data = DATASETS.build("tokens", {"path": write(), "context": context, "order": order})
    assert isinstance(data, Tokens)
    targets = torch.cat([data[index][1] for index in range(len(data))])
    stored = data.files.read(0, 73).tolist()
    kept = targets[targets != IGNORED].tolist()
    assert sorted(kept) == sorted(stored)
    assert (kept == stored) == (order == "stored")
    assert all(len(data[index][0]) == context for index in range(len(data)))
    with pytest.raises(IndexError):
        data[len(data)]


def test_with_a_mask_inputs_have_the_positions_in_their_documents(write: Write) -> None:
    data = Tokens(write(), 8, document_mask=True)
    inputs, targets = data[0]
    assert inputs["input_ids"].tolist() == [256, *[97] * 5, 256, 98]
    assert inputs["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert targets.tolist() == [*[97] * 5, 256, 98, 256]


def test_facts_and_fingerprint(write: Write) -> None:
    one, other = Tokens(write("one"), 8), Tokens(write("other", (5, 1, 12)), 8)
    facts = dict(one.facts())
    counts = facts.pop("token_bytes")
    assert [counts[0], counts[255], counts[256], len(counts)] == [1, 1, 0, 257]
    tokenizer = facts.pop("tokenizer_digest")
    assert facts == {"vocabulary": 257, "classes": 257, "context": 8, "end_token": 256}
    assert one.fingerprint() != other.fingerprint()
    assert one.fingerprint().split(",")[0] == other.fingerprint().split(",")[0]
    assert one.fingerprint().startswith(f"tokenizer {tokenizer[:16]}, ")


def test_another_tokenizer_than_that_of_the_training_is_rejected(write: Write) -> None:
    with raises(ConfigError, code="tokens.other_tokenizer"):
        DATASETS.build("tokens", {"path": write()}, facts={"tokenizer_digest": "0" * 64})


@pytest.mark.addon("sampling")
def test_sources_of_a_mixture_need_the_same_tokens_and_windows(write: Write) -> None:
    from phasetrain.addons.sampling.mixture import MixedDataset

    first, longer = Tokens(write("one"), 8), Tokens(write("two"), 9)
    with pytest.raises(ValueError, match="'b' has context = 9, and it is 8 in 'a'"):
        MixedDataset({"a": first, "b": longer}).facts()
    with pytest.raises(ValueError, match="'b' has classes"):
        MixedDataset({"a": first, "b": load_digits("test")}).facts()
    with raises(ConfigError, code="tokens.other_tokenizer"):
        MixedDataset(
            {"a": first, "b": _Described(first.facts() | {"tokenizer_digest": "0"})}
        ).facts()
    facts = {key: value for key, value in first.facts().items() if key != "tokenizer_digest"}
    with raises(ConfigError, code="tokens.other_tokenizer"):
        MixedDataset({"a": first, "b": _Described(facts)}).facts()
    assert MixedDataset({"a": first, "b": Tokens(write("three"), 8)}).facts()["context"] == 8


class _Described:
    def __init__(self, facts: dict[str, Any]) -> None:
        self._facts = facts

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return index

    def facts(self) -> dict[str, Any]:
        return self._facts


@pytest.mark.feature("data.tokens")
def test_a_billion_tokens_are_not_read(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(write())
    content = json.loads((folder / "tokens.json").read_text())
    shard = content["shards"][0] | {"tokens": 10**9, "documents": 0}
    content["shards"] = [shard]
    (folder / "tokens.json").write_text(json.dumps(content))
    (folder / "shard-00000.documents").write_bytes(b"")
    with open(folder / "shard-00000.tokens", "wb") as file:
        file.truncate(2 * 10**9)  # holes take no space
        file.seek(2 * 999_999_990)
        file.write(np.arange(10, dtype="<u2").tobytes())
    data = Tokens(str(folder), 1024)  # beyond 1 GiB, `auto` reads nothing
    reads = []
    read = TokenFiles.read

    def count(self: TokenFiles, begin: int, end: int) -> object:
        reads.append(end - begin)
        return read(self, begin, end)

    monkeypatch.setattr(TokenFiles, "read", count)
    tracemalloc.start()
    for index in np.linspace(0, len(data) - 1, 20).astype(int):
        data[int(index)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(data) == 976_563
    # One read of a window for each sample, wherever it is.
    assert reads == [1024, *[1025] * 18, 10**9 - 976_562 * 1024 + 1]
    assert peak < 2**20
    assert data[len(data) - 1][1][:512][-10:].tolist() == list(range(10))
