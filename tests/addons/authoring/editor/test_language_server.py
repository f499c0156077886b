"""An editor's language server completes, explains and checks experiments with the schema."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phasetrain.addons.authoring.editor.schema import make_schema, write_schema

# The newest version that runs on Node.js 20.
PACKAGE = "yaml-language-server@1.25.0"
HEAD = "# yaml-language-server: $schema=phasetrain.json\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed"),
]


class LanguageServer:
    """The server of the extension of VS Code and of Neovim, over stdio."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            ["node", str(program), "--stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._calls = 0
        self._files = 0
        self._diagnostics: dict[str, list[Any]] = {}
        formats: dict[str, Any] = {
            "completion": {"completionItem": {"documentationFormat": ["markdown"]}},
            "hover": {"contentFormat": ["markdown"]},
        }
        self.call(
            "initialize",
            {
                "processId": os.getpid(),
                "rootUri": folder.as_uri(),
                "capabilities": {"textDocument": formats, "workspace": {"configuration": True}},
            },
        )
        self._notify("initialized", {})
        self._notify("workspace/didChangeConfiguration", {"settings": {}})

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def call(self, method: str, params: Any) -> Any:
        self._calls += 1
        number = self._calls
        self._send({"id": number, "method": method, "params": params})
        while True:
            message = self._read()
            if message.get("id") == number and "method" not in message:
                return message["result"]
            self._handle(message)

    def complete(self, text: str) -> list[str]:
        """Return the labels that are offered at the mark `|`."""
        found = self.call("textDocument/completion", self._open(text))
        return [one["label"] for one in found["items"]]

    def hover(self, text: str) -> str:
        """Return the text that is shown at the mark `|`."""
        found = self.call("textDocument/hover", self._open(text))
        return found["contents"]["value"]

    def check(self, text: str) -> list[tuple[int, str]]:
        """Return line (from 0) and message of each mistake."""
        uri = self._open(text + "|")["textDocument"]["uri"]
        while uri not in self._diagnostics:
            self._handle(self._read())
        return [(one["range"]["start"]["line"], one["message"]) for one in self._diagnostics[uri]]

    def _open(self, text: str) -> dict[str, Any]:
        self._files += 1
        uri = (self.folder / f"{self._files}.yaml").as_uri()
        before, _, after = text.rpartition("|")
        document = {"uri": uri, "languageId": "yaml", "version": 1, "text": HEAD + before + after}
        self._notify("textDocument/didOpen", {"textDocument": document})
        lines = (HEAD + before).split("\n")
        position = {"line": len(lines) - 1, "character": len(lines[-1])}
        return {"textDocument": {"uri": uri}, "position": position}

    def _handle(self, message: Any) -> None:
        if message.get("method") == "workspace/configuration":
            settings = {"validate": True, "hover": True, "completion": True}
            result = [settings if one["section"] == "yaml" else {} for one in _items(message)]
            self._send({"id": message["id"], "result": result})
        elif "id" in message and "method" in message:
            self._send({"id": message["id"], "result": None})
        elif message.get("method") == "textDocument/publishDiagnostics":
            self._diagnostics[message["params"]["uri"]] = message["params"]["diagnostics"]

    def _notify(self, method: str, params: Any) -> None:
        self._send({"method": method, "params": params})

    def _send(self, message: dict[str, Any]) -> None:
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout
        length = 0
        while line := self.process.stdout.readline().strip():
            name, _, value = line.decode().partition(": ")
            if name == "Content-Length":
                length = int(value)
        assert length, "the language server has ended"
        return json.loads(self.process.stdout.read(length))


def _items(message: Any) -> list[Any]:
    return message["params"]["items"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LanguageServer]:
    folder = tmp_path_factory.mktemp("editor")
    install = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    done = subprocess.run(
        [*install, PACKAGE], capture_output=True, text=True, timeout=200, check=False
    )
    if done.returncode:
        pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr[-300:]}")
    write_schema(make_schema(), folder / "phasetrain.json")
    program = folder / "node_modules" / "yaml-language-server" / "bin" / "yaml-language-server"
    made = LanguageServer(program, folder)
    yield made
    made.close()


@pytest.mark.feature("schema")
@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("|", ["RUN", "DATA", "MODEL", "HOOKS", "defaults"]),
        ("MOD|", ["MODEL"]),
        ("defaults:\n  - |", ["digits", "_self_", "/MODEL"]),
        ("defaults:\n  - /MODEL: |", ["mlp", "resnet20", "small_cnn"]),
        ("MODEL:\n  |", ["name", "width", "ema", "freeze"]),
        ("MODEL:\n  name: |", ["mlp", "small_cnn", "trunk_head"]),
        ("MODEL:\n  name: small_cnn\n  |", ["width", "dropout", "ema"]),
        ("MODEL:\n  name: trunk_head\n  trunk:\n    name: |", ["small_cnn"]),
        ("MODEL:\n  ema:\n    |", ["decay", "warmup"]),
        ("MACHINE:\n  precision: |", ["fp32", "bf16"]),
        ("MACHINE:\n  deterministic: |", ["true", "false"]),
        ("METERS:\n  |", ["accuracy", "logged"]),
        ("METERS:\n  accuracy:\n    |", ["topk", "splits"]),
        ("DATA:\n  TRAIN:\n    dataset: |", ["digits", "image_folder"]),
        ("DATA:\n  TRAIN:\n    sampler: |", ["shuffled", "lanes"]),
        ("DATA:\n  VALID:\n    |", ["dataset", "batch_size", "every"]),
        ("DATA:\n  TRAIN:\n    transforms:\n      - |", ["name", "random_shift"]),
        ("DATA:\n  TRAIN:\n    transforms:\n      - name: random_shift\n        |", ["pixels"]),
        ("OPTIMIZER:\n  name: |", ["sgd", "adamw", "RAdam"]),
        ("OPTIMIZER:\n  name: adamw\n  SCHEDULES:\n    |", ["lr", "weight_decay"]),
        ("OPTIMIZER:\n  SCHEDULES:\n    lr:\n      name: |", ["cosine", "step"]),
        ("PHASES:\n  stages:\n    - |", ["epochs", "DATA", "OPTIMIZER"]),
        ("HOOKS:\n  early|", ["early_stopping"]),
    ],
)
def test_completion(text: str, wanted: list[str], server: LanguageServer) -> None:
    found = server.complete(text)
    assert [one for one in wanted if one not in found] == []
    # Parameters of other parts are not offered.
    assert "momentum" not in found
    if "name: small_cnn" in text:
        assert "hidden" not in found


@pytest.mark.feature("schema")
@pytest.mark.parametrize(
    ("text", "meaning", "resume"),
    [
        ("OPTIMIZER:\n  l|r: 0.1\n", "learning rate", "adjustable"),
        ("DATA:\n  TRAIN:\n    batch|_size: 3\n", "samples per update", "adjustable"),
        ("DATA:\n  TRAIN:\n    work|ers: 3\n", "data loading processes", "free"),
        ("MODEL:\n  na|me: small_cnn\n", "Three convolutions", "forbidden"),
        ("MODEL:\n  name: small_cnn\n  wid|th: 3\n", "first convolution", "forbidden"),
        ("MODEL:\n  e|ma: {decay: 0.9}\n", "exponential moving average", "forbidden"),
        ("MACHINE:\n  preci|sion: bf16\n", "autocast", "forbidden"),
        ("METERS:\n  accu|racy: {}\n", "Fraction of samples", "forbidden"),
        ("HOOKS:\n  watch|dog: {seconds: 3}\n", "stack of every thread", "free"),
        ("HOOKS:\n  watchdog: {sec|onds: 3}\n", "default", "free"),
        ("PHASES:\n  stages:\n    - ep|ochs: 3\n", "length of the stage", "adjustable"),
        ("CHECKPOINT:\n  best:\n    mon|itor: a/b\n", "minus sign", "free"),
    ],
)
def test_hover(text: str, meaning: str, resume: str, server: LanguageServer) -> None:
    found = server.hover(text)
    assert meaning in found
    assert f"on resume {resume}" in found.replace("*", "")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("MODLE: {}\n", 1, "Property MODLE is not allowed."),
        ("MODEL:\n  name: smal_cnn\n", 2, "Value is not accepted. Valid values: "),
        ("MODEL:\n  name: small_cnn\n  widht: 3\n", 3, "Property widht is not allowed."),
        ("OPTIMIZER:\n  lr: fast\n", 2, "expected float >= 0"),
        ("OPTIMIZER: adamw\n", 1, "expected a mapping"),
        ("OPTIMIZER: {name: adamw, SCHEDULES: {momentum: cosine}}\n", 1, "Valid values: "),
        ("PHASES:\n  epochs: -1\n", 2, "Value is below the minimum of 0."),
        ("METERS:\n  acuracy: {}\n", 2, 'Missing property "name".'),
        ("DATA: {TRAIN: {transforms: [{name: shift}]}}\n", 1, "random_shift"),
    ],
)
def test_mistake_is_underlined(text: str, line: int, message: str, server: LanguageServer) -> None:
    ((found_line, found),) = server.check(text)
    assert found_line == line
    assert message in found


def test_shipped_experiments_have_no_underlines(server: LanguageServer) -> None:
    for file in sorted((Path(__file__).parents[4] / "configs" / "experiment").glob("*.yaml")):
        assert server.check(file.read_text("utf-8")) == [], file.name
    assert (
        server.check('CHECKPOINT: {background: yes, verify: off}\nRUN: {dir: "${oc.env:X}"}\n')
        == []
    )
