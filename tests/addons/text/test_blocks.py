"""Text is packed into blocks: every token is a target once, and padding is none."""

from pathlib import Path

import pytest
import torch

from phasetrain.addons.text.blocks import IGNORED, ByteTokenizer, PackedTokens, load_alice
from phasetrain.data import DATASETS

FINGERPRINT = "961af44615231f24cbf4d3eca9ab3e7d09822c428dd95a3bbab4110af0b11ba5"
TRAIN_TOKENS, TEST_TOKENS = 125_391, 22_588


class TestByteTokenizer:
    def test_tokens_are_bytes_and_an_end_of_document(self) -> None:
        tokens = ByteTokenizer().encode("aé".encode())
        assert tokens.tolist() == [97, 195, 169, 256]
        assert tokens.dtype == torch.int64

    def test_decoding_inverts_encoding(self) -> None:
        tokenizer = ByteTokenizer()
        assert tokenizer.decode(tokenizer.encode("Wärme\n".encode())) == "Wärme\n"
        assert tokenizer.decode(tokenizer.encode("Wärme\n")) == "Wärme\n"
        assert tokenizer.encode("aé", add_end=False).tolist() == [97, 195, 169]
        assert tokenizer.decode(torch.tensor([195, 256])) == "\ufffd"
        assert tokenizer.decode([97, 256]) == "a"
        assert tokenizer.encode(b"").tolist() == [256]


class TestPackedTokens:
    def test_documents_are_packed_one_after_the_other(self) -> None:
        data = PackedTokens(
            [torch.tensor([1, 2, 9]), torch.tensor([3, 4, 5, 9])], vocabulary=10, context=4
        )
        assert len(data) == 2
        assert [value.tolist() for value in data[0]] == [[1, 2, 9, 3], [2, 9, 3, 4]]
        assert [value.tolist() for value in data[1]] == [[4, 5, 0, 0], [5, 9, IGNORED, IGNORED]]
        assert data.facts() == {"vocabulary": 10, "classes": 10, "context": 4}

    @pytest.mark.parametrize("context", [1, 2, 3, 5, 6, 7, 100])
    def test_every_token_but_the_first_is_a_target_once(self, context: int) -> None:
        data = PackedTokens([torch.arange(7)], vocabulary=7, context=context)
        targets = torch.cat([data[index][1] for index in range(len(data))])
        assert targets[targets != IGNORED].tolist() == [1, 2, 3, 4, 5, 6]

    def test_batches_are_read_at_once(self) -> None:
        data = PackedTokens([torch.arange(9)], vocabulary=9, context=2)
        inputs, targets = data.__getitems__(torch.tensor([3, 0]))
        assert inputs.tolist() == [[6, 7], [0, 1]]
        assert targets.tolist() == [[7, 8], [1, 2]]

    @pytest.mark.parametrize(
        ("documents", "context"), [([], 4), ([torch.tensor([1])], 4), ([torch.arange(4)], 0)]
    )
    def test_documents_without_targets_are_rejected(
        self, documents: list[torch.Tensor], context: int
    ) -> None:
        with pytest.raises(ValueError, match="expected"):
            PackedTokens(documents, 10, context)

    def test_fingerprint_depends_on_content_and_context(self) -> None:
        made = [PackedTokens([torch.arange(9)], 9, 2), PackedTokens([torch.arange(9)], 9, 4)]
        other = PackedTokens([torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, 8])], 9, 2)
        assert len({data.fingerprint() for data in [*made, other]}) == 3
        assert made[0].fingerprint() == PackedTokens([torch.arange(9)], 9, 2).fingerprint()


class TestAlice:
    def test_text_has_this_fingerprint(self) -> None:
        assert load_alice("all").fingerprint() == FINGERPRINT

    def test_splits_are_whole_chapters(self) -> None:
        train, test, whole = (load_alice(split, context=256) for split in ("train", "test", "all"))
        tokens = [int((data.targets != IGNORED).sum()) + 1 for data in (train, test, whole)]
        assert tokens == [TRAIN_TOKENS, TEST_TOKENS, TRAIN_TOKENS + TEST_TOKENS]
        tokenizer = ByteTokenizer()
        assert "Down the Rabbit-Hole" in tokenizer.decode(train[0][0])
        assert tokenizer.decode(test[0][0]).startswith("CHAPTER XI\n")
        assert int((whole.inputs == tokenizer.end).sum()) == 11

    def test_unknown_split_is_rejected(self) -> None:
        with pytest.raises(ValueError, match=r"split = 'tset':.*'test'"):
            load_alice("tset")  # type: ignore[arg-type]


def test_files_are_documents_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, content in (("b.txt", "de"), ("a.txt", "abc"), ("c.log", "no")):
        (tmp_path / name).write_text(content)
    data = DATASETS.build("text", {"files": f"{tmp_path}/*.txt", "context": 6})
    inputs, _ = data[0]
    assert ByteTokenizer().decode(inputs) == "abcde"
    assert inputs.tolist() == [97, 98, 99, 256, 100, 101]


def test_pattern_without_files_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="files = "):
        DATASETS["text"](f"{tmp_path}/*.txt")
