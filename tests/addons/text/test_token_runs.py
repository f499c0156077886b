"""Runs on token files: the same bits after kills, with other workers and ranks, and in mixtures."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import KillAfter, SaveEachStep, differences, differences_of_runs, newest, records
from processes import Launcher
from raising import raises

import phasetrain
from phasetrain.addons.text.blocks import load_alice
from phasetrain.addons.text.tokenize.tokenize import TokenizeOptions, tokenize
from phasetrain.addons.text.tokens import LibraryCodec, Tokens
from phasetrain.app.api import run
from phasetrain.cli.main import main
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.testing import Killed, assert_exact_resume, assert_world_size_invariant

QUIET = ("HOOKS.console=null", "HOOKS.metrics.every_updates=1", "MACHINE.threads=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with tokens of a trained BPE, of other text with it, and of bytes."""
    folder = tmp_path_factory.mktemp("tokens")
    alice = bytes(load_alice("test").inputs.flatten().clamp(max=255).byte().tolist()).decode(
        errors="replace"
    )
    for name, part in (("train", alice[:9000]), ("test", alice[9000:12000])):
        lines = [json.dumps({"text": text}) + "\n" for text in part.split("\n\n") if text]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    bpe = TokenizeOptions(train_bpe=300, shard_tokens=1500)
    tokenize(f"{folder}/train", [f"{folder}/train.jsonl"], bpe)
    given = TokenizeOptions(tokenizer=f"{folder}/train")
    tokenize(f"{folder}/test", [f"{folder}/test.jsonl"], given)
    tokenize(f"{folder}/bytes", [f"{folder}/test.jsonl"])
    return folder


def words(data: Path, **changes: str) -> list[str]:
    train = changes.get("train", f"{{dataset: tokens, path: {data}/train, context: 16}}")
    return [
        "experiment=text_tiny",
        f"DATA.TRAIN={train}",
        f"DATA.TEST={{dataset: tokens, path: {data}/test, context: 16, batch_size: 16}}",
        *("DATA.TRAIN.batch_size=12", "DATA.TRAIN.drop_last=false"),
        *("DATA.TRAIN.document_mask=true", "DATA.TEST.document_mask=true"),
        "MODEL={width: 16, depth: 1, heads: 2, dropout: 0.1}",
        "METERS={loss: {}, bits_per_byte: {}}",
        *("PHASES.epochs=2", "PHASES.limit={train: 4, test: 2}", "RUN.rehearse=false"),
        *QUIET,
    ]


@pytest.mark.feature("data.tokens")
@pytest.mark.by_default(1)
@pytest.mark.parametrize("order", ["shuffled", "stored"])
def test_killed_run_resumes_exactly_with_other_workers(data: Path, order: str) -> None:
    given = [*words(data), f"DATA.TRAIN.order={order}"]
    assert_exact_resume(given, steps=[2, 5], workers=(0, 2) if order == "shuffled" else None)


@pytest.mark.addon("sampling")
def test_mixture_with_another_dataset_resumes_exactly(data: Path) -> None:
    source = "{{dataset: tokens, path: {}, context: 16}}"
    sources = f"a: {source.format(data / 'train')}, b: {source.format(data / 'test')}"
    train = f"{{dataset: mixed, datasets: {{{sources}}}}}"
    given = [one for one in words(data, train=train) if "document_mask" not in one]
    order = "DATA.TRAIN.sampler={name: proportional, proportions: {a: 1, b: 2}}"
    assert_exact_resume([*given, order], steps=[2], workers=None)


def test_ranks_read_the_samples_of_one(data: Path) -> None:
    assert_world_size_invariant(words(data))


@pytest.mark.feature("data.tokens")
@pytest.mark.slow
def test_killed_run_of_two_ranks_resumes_exactly_also_as_one(
    launcher: Launcher, data: Path, tmp_path: Path
) -> None:
    given = (
        *words(data),
        *("RUN.imports=[process_parts]", "CHECKPOINT.every_updates=2"),
        *("DISTRIBUTED.reduction=ordered", "DISTRIBUTED.virtual_shards=2"),
    )
    kill = "HOOKS.strike={rank: 1, update: 5}"
    assert launcher.run(tmp_path / "unbroken", 2, *given).codes == [0, 0]
    for size in (2, 1):
        folder = tmp_path / f"run{size}"
        assert launcher.run(folder, 2, *given, kill).codes[1] == -9
        done = launcher.run(folder, size, *given, *([kill] if size == 2 else []))
        assert done.codes == [0] * size, done.outputs
        if size == 2:
            assert differences_of_runs(tmp_path / "unbroken", folder) == []
        # With one rank, the counts of meters are in one file instead of two.
        states = [newest(path).state["task"] for path in (tmp_path / "unbroken", folder)]
        for part in ("model", "updater"):
            assert differences(states[0][part], states[1][part], part) == []


def test_resume_with_other_tokens_and_tests_with_another_tokenizer_are_rejected(
    data: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(data / "train", tmp_path / "copy")
    train = f"{{dataset: tokens, path: {copy}, context: 16}}"
    given = [*words(data, train=train), f"RUN.dir={tmp_path}/run"]
    with pytest.raises(Killed):
        run(given, hooks={"save": SaveEachStep(), "kill": KillAfter(2)})
    shutil.rmtree(copy)
    shutil.copytree(data / "test", copy)
    with raises(ChangedError, code="resume.data_changed", key="DATA.TRAIN") as caught:
        run(given)
    before, after = re.findall(r"tokenizer (\w+), tokens (\w+)", str(caught.value))
    assert before[0] == after[0]
    assert before[1] != after[1]
    shutil.rmtree(copy)
    shutil.copytree(data / "bytes", copy)
    with raises(ConfigError, code="tokens.other_tokenizer"):
        run(given)


def test_small_vocabulary_is_rejected_before_the_first_step(data: Path, tmp_path: Path) -> None:
    with raises(ConfigError, code="tokens.outside_vocabulary"):
        run([*words(data), "MODEL.vocabulary=299", f"RUN.dir={tmp_path}"])


@pytest.mark.feature("meters.bits_per_byte")
def test_bits_per_byte_and_text_of_a_finished_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run([*words(data), "PHASES.limit.test=null", f"RUN.dir={tmp_path}/run"])
    assert done.last is not None
    # All tokens of the test split are targets once, so its bytes are those of the text.
    tokens = Tokens(f"{data}/test", 16)
    nats = done.last["test/loss"] * tokens.manifest.tokens
    bits = nats / tokens.manifest.bytes / 0.6931471805599453
    assert done.last["test/bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert any(one["kind"] == "phase" for one in records(tmp_path / "run"))

    task = phasetrain.load(tmp_path / "run", device="cpu")
    [first, second] = task.generate(["The", ""], tokens=6, samples=2)
    assert task.generate("", tokens=6) == [second[:1]]
    assert len({*first, *second}) == 4
    wrong: list[dict[str, Any]] = [{"tokens": "6"}, {"tokens": 0}, {"samples": 1.5}, {"prompts": 3}]
    for arguments in wrong:
        with raises(ConfigError, code="generate.range"):
            task.generate(**arguments)
    command = ["generate", f"{tmp_path}/run", "--prompt", "The", "--tokens", "6", "--json"]
    capsys.readouterr()
    assert main([*command, "--samples", "2", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["generated"] == [{"prompt": "The", "texts": first}]
    (tmp_path / "text.txt").write_text("The Queen")
    [guess] = task.predict(str(tmp_path / "text.txt"))[:, -1].argmax(-1).tolist()
    assert 0 <= guess < LibraryCodec(Path(data, "train", "tokenizer.json").read_bytes()).vocabulary
