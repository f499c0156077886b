"""A text depends on prompt, seed and number alone, with and without cached keys and values."""

from collections.abc import Sequence

import pytest
import torch
from raising import raises
from torch import Tensor, nn

from phasetrain.addons.text.generation import Sampling, TextGenerator
from phasetrain.addons.text.tokens import ByteCodec
from phasetrain.addons.text.transformer import KeyValueCache
from phasetrain.errors import ConfigError
from phasetrain.models import MODELS

CPU = torch.device("cpu")


class Numbers(ByteCodec):
    """Tokens as numbers, because most of them are no valid UTF-8."""

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


def model(context: int = 10) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocabulary": 257, "context": context, "width": 16, "depth": 2, "heads": 2}
    made = MODELS.build("transformer", sizes).eval()
    # Initial weights of a usual size would make all tokens about equally probable.
    for parameter in made.parameters():
        parameter.data.mul_(8)
    return made


def texts(
    made: nn.Module,
    prompt: str = "abc",
    count: int = 6,
    *,
    cache: bool = True,
    codec: ByteCodec | None = None,
    **values: float,
) -> list[str]:
    generator = TextGenerator(made, codec or ByteCodec(), CPU, uses_cache=cache)
    with torch.no_grad():
        return generator.generate(prompt, count, 2, Sampling(**values))  # type: ignore[arg-type]


def test_cached_scores_are_those_of_the_whole_input() -> None:
    made = model(20).double()
    tokens = torch.arange(20)[None] * 7
    with torch.no_grad():
        whole = made(tokens)
        cache = KeyValueCache()
        parts = [made(tokens[:, a:b], cache) for a, b in ((0, 5), (5, 6), (6, 17), (17, 20))]
    assert cache.length == 20
    assert float((torch.cat(parts, 1) - whole).abs().max()) < 1e-10
    with pytest.raises(ValueError, match="context"):
        made(tokens[:, :5], cache)


@pytest.mark.feature(
    "generate",
    "text from a run: greedy, temperature, top-k, top-p, seeded, with cached keys and values",
    "`phasetrain generate`, `task.generate`",
)
@pytest.mark.parametrize("values", [{"temperature": 0}, {"top_k": 40}, {"top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("count", [6, 12])  # within the context, and beyond it
def test_cache_changes_no_token(count: int, values: dict[str, float]) -> None:
    made = model().double()
    found = texts(made, count=count, codec=Numbers(), **values)
    assert found == texts(made, count=count, cache=False, codec=Numbers(), **values)
    assert all(found)


def test_text_depends_on_seed_and_number() -> None:
    made = model()
    found = texts(made, codec=Numbers())
    assert found == texts(made, codec=Numbers())
    assert len({*found, *texts(made, codec=Numbers(), seed=1)}) == 4


def test_text_ends_with_its_document_and_begins_with_one() -> None:
    class Counter(nn.Module):
        """After a token comes the next one, after `f` the end."""

        def forward(self, tokens: Tensor) -> Tensor:
            following = torch.where(tokens == ord("f"), 256, (tokens + 1) % 257)
            following[tokens == 256] = ord("a")
            return nn.functional.one_hot(following, 257).float()

    assert texts(Counter(), "bc", temperature=0) == ["def", "def"]
    assert texts(Counter(), "", temperature=0) == ["abcdef", "abcdef"]
    assert texts(Counter(), "", 2, temperature=0) == ["ab", "ab"]


def test_model_without_scores_of_tokens_is_rejected() -> None:
    class Classifier(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens[:, :3].float()

    with raises(ConfigError, code="generate.wrong_model"):
        texts(Classifier())
