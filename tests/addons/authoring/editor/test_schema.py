"""`phasetrain schema` accepts the configs that phasetrain accepts, and refuses the same mistakes."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf
from raising import raises
from test_docs import PAGES, Block, blocks

from phasetrain.addons.authoring.editor.schema import make_schema
from phasetrain.app.setup import import_modules
from phasetrain.app.slots import list_slots
from phasetrain.cli import main
from phasetrain.config.compose.composed import Composed, compose
from phasetrain.config.compose.merge import Merged
from phasetrain.config.compose.overrides import read_overrides
from phasetrain.config.compose.sources import ConfigFiles, Layer
from phasetrain.config.problems import collect_problems
from phasetrain.config.schema import default_schema
from phasetrain.config.validation import check_config
from phasetrain.errors import ConfigError
from phasetrain.losses import LOSSES
from phasetrain.testing.build import resolve_overrides

ROOT = Path(__file__).parents[4]
SCHEMA = default_schema()

KEYS_AND_TYPES = {
    "config.unknown_key",
    "config.unknown_section",
    "config.unknown_parameter",
    "config.unknown_part",
    "config.unknown_option",
    "config.wrong_type",
    "config.missing_part",
    "config.reserved_parameter",
    "config.dotted_key",
    "config.unchangeable",
}
"""Codes of mistakes that one file shows."""


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return make_schema()


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Draft7Validator:
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def read_yaml(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def errors(validator: Draft7Validator, values: Any) -> list[str]:
    """Return the path and the text of each error."""
    return [
        f"{'.'.join(map(str, one.absolute_path))}: {one.message[:200]}"
        for one in validator.iter_errors(values)
    ]


@pytest.mark.addon
def test_shipped_experiments_are_valid(validator: Draft7Validator) -> None:
    files = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))
    assert len(files) >= 10
    found = {file.name: errors(validator, read_yaml(file.read_text("utf-8"))) for file in files}
    assert {name: one for name, one in found.items() if one} == {}


@pytest.mark.parametrize("group", ["LOSS", "MODEL", "OPTIMIZER"])
@pytest.mark.addon
def test_shipped_files_of_a_group_are_valid(group: str) -> None:
    of_group = Draft7Validator(make_schema(group=group))
    files = sorted((ROOT / "configs" / group).glob("*.yaml"))
    assert files
    for file in files:
        values = read_yaml(file.read_text("utf-8"))
        assert errors(of_group, values) == [], file
        assert errors(of_group, {"defaults": ["_self_"], **values}) == [], file
        assert len(errors(of_group, {**values, "no_such_key": 1})) == 1, file


def test_defaults_of_all_keys_are_valid(validator: Draft7Validator) -> None:
    assert errors(validator, SCHEMA.defaults) == []


def list_experiments() -> Iterator[tuple[Path, Block, dict[str, Any]]]:
    """Yield page, block and values of each experiment in the docs."""
    for page in PAGES:
        for block in blocks(page.read_text("utf-8")):
            is_own = block.kind == "yaml" and "@package" not in block.text  # not of another project
            values = read_yaml(block.text) if is_own else None
            if isinstance(values, dict) and {"defaults", *SCHEMA.sections} & set(values):
                yield page, block, values


def needs_files(values: Mapping[str, Any]) -> bool:
    """Return whether an experiment has parts of its page, or starts from another experiment of
    it, so that only a schema that is made with it knows its parts."""
    builtin = ["_self_", *ConfigFiles(None).options("experiment")]
    starts = [one for one in values.get("defaults", ()) if isinstance(one, str)]
    return "imports" in values.get("RUN", {}) or any(one not in builtin for one in starts)


@pytest.mark.addon
def test_experiments_of_the_docs_are_valid(validator: Draft7Validator) -> None:
    checked = 0
    for page, block, values in list_experiments():
        if not needs_files(values):
            assert errors(validator, values) == [], f"{page.name}:{block.line}"
            checked += 1
    assert checked > 30


@pytest.mark.slow
@pytest.mark.addon
def test_experiments_with_parts_of_their_page_are_valid(tmp_path: Path) -> None:
    checked = 0
    for page, block, values in list_experiments():
        # Models of transformers load only with a torchvision for the same build of torch.
        if not needs_files(values) or not block.file or page.stem == "huggingface":
            continue
        folder = tmp_path / page.stem
        for one in blocks(page.read_text("utf-8")):
            if one.file:
                (folder / one.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / one.file).write_text(one.text)
        command = [sys.executable, "-m", "phasetrain", "schema", block.file, "--out", "keys.json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{page.name}:{block.line}: {done.stderr}"
        own = Draft7Validator(json.loads((folder / "keys.json").read_text()))
        assert errors(own, values) == [], f"{page.name}:{block.line}"
        checked += 1
    assert checked >= 2


VALUES = [True, -1, 0, 1, 0.5, 2.5, "word", None, [], ["a"], [1], [{}], {}, {"x": 1}, "cosine"]


@pytest.mark.by_default("MODEL")
@pytest.mark.parametrize("section", SCHEMA.sections)
def test_values_that_phasetrain_rejects_are_refused(
    section: str, validator: Draft7Validator
) -> None:
    """Every key with values of every type: the schema and the checker agree."""
    narrow = Draft7Validator(
        {
            "definitions": validator.schema["definitions"],
            "properties": {section: validator.schema["properties"][section]},
        }
    )
    different = []
    for path in [one for one in SCHEMA.keys if one == section or one.startswith(f"{section}.")]:
        for value in VALUES:
            values: Any = value
            for name in reversed(path.split(".")):
                values = {name: values}
            rejected = [one for one in check_values(values) if one.startswith(path)]
            if bool(rejected) != bool(errors(narrow, values)):
                different.append((path, value, rejected))
    # No custom loader is registered, so the editor cannot tell that this mapping needs a name.
    assert different == [
        (path, value, [path])
        for path in ("DATA.TRAIN.loader", "DATA.TEST.loader")
        for value in ({},)
        if section == "DATA"
    ]


def check_values(values: Mapping[str, Any]) -> list[str]:
    """Return the keys of the mistakes that the checker finds in a file with these values."""
    merged = Merged(SCHEMA)
    merged.apply(Layer("defaults", SCHEMA.defaults))
    # Without datasets there is no test split, and nothing of it is checked.
    merged.apply(Layer("data", {"DATA": {"TEST": {"dataset": "digits"}}}))
    merged.apply(Layer("file", values))
    merged.finish(Layer("defaults", SCHEMA.defaults))
    composed = Composed(merged.values, merged.origins, ("defaults", "file"), (), (), "", ())
    found = collect_problems(lambda: check_config(composed, list_slots(), SCHEMA))
    return [one.key for one in found if one.code != "config.missing_dataset"]


INTERPOLATED = """
RUN: {seed: "${oc.env:SEED}", dir: "???"}
DATA:
  TRAIN: {dataset: "${DATA.TEST.dataset}", batch_size: "???", transforms: "${DATA.TEST.transforms}"}
  VALID: ${DATA.TEST}
MODEL: ${TASK.teacher}
OPTIMIZER: {lr: "${oc.env:LR}", SCHEDULES: {lr: "${OPTIMIZER.SCHEDULES.weight_decay}"}}
METERS: {accuracy: {topk: "${RUN.seed}"}}
PHASES: {stages: [{epochs: "${RUN.seed}"}], test_first: "${oc.env:FIRST}"}
HOOKS: {console: "${HOOKS.metrics}"}
"""

SHORT = """
RUN: {allow: PHASES, verbosity: normal}
DATA: {TRAIN: {sampler: lanes, collate: pad, transforms: [flatten, torch.nn.Flatten]}, TEST: null}
OPTIMIZER: {SCHEDULES: {lr: cosine, momentum: null}, scaler: none, others: null}
METERS: {accuracy: null, top5: null, loss: {}}
HOOKS: null
MODEL: {name: timm.resnet18, pretrained: true}
TASK: {name: "object:Mine-0123", whatever: 1}
CHECKPOINT: {verify: off, background: yes}
"""


@pytest.mark.parametrize("text", [INTERPOLATED, SHORT], ids=["interpolated", "short"])
def test_interpolations_and_short_forms_are_valid(text: str, validator: Draft7Validator) -> None:
    assert errors(validator, read_yaml(text)) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("MODLE: {}", ""),
        ("OPTIMIZER: adamw", "OPTIMIZER"),
        ("OPTIMIZER.lr: 0.1", ""),
        ("OPTIMIZER: {lrr: 1}", "OPTIMIZER"),
        ("OPTIMIZER: {params: 1}", "OPTIMIZER"),  # set by the program
        ("OPTIMIZER: {name: adamw, momentum: 0.9}", "OPTIMIZER"),
        ("OPTIMIZER: {name: adamw, SCHEDULES: {momentum: cosine}}", "OPTIMIZER.SCHEDULES"),
        ("MODEL: {name: smal_cnn}", "MODEL.name"),
        ("MODEL: {name: small_cnn, width: wide}", "MODEL.width"),
        ("MODEL: {ema: {decai: 1}}", "MODEL.ema"),
        ("MODEL: {name: trunk_head, head: {name: projektion}}", "MODEL.head.name"),
        ("METERS: {acuracy: {}}", "METERS.acuracy"),
        ("METERS: {accuracy: {top: 1}}", "METERS.accuracy"),
        ("DATA: {valid: {dataset: digits}}", "DATA"),
        ("DATA: {VALID: {dataset: digits, batchsize: 1}}", "DATA.VALID"),
        ("DATA: {TRAIN: {transforms: [{pixels: 1}]}}", "DATA.TRAIN.transforms.0"),
        ("DATA: {TRAIN: {transforms: [shift]}}", "DATA.TRAIN.transforms.0"),
        ("PHASES: {stages: [{epochs: 1, MODEL: {width: 3}}]}", "PHASES.stages.0.MODEL"),
        ("LOSS: {name: weighted_sum, losses: {a: {name: focl}}}", "LOSS.losses.a.name"),
    ],
)
def test_mistake_is_refused_where_it_is(text: str, place: str, validator: Draft7Validator) -> None:
    (found,) = errors(validator, read_yaml(text))
    assert found.partition(": ")[0] == place


def test_keys_have_meaning_default_and_class_for_resume(schema: dict[str, Any]) -> None:
    lr = schema["definitions"]["OPTIMIZER"]["properties"]["lr"]
    assert (lr["minimum"], lr["default"]) == (0, 0.1)
    meaning = SCHEMA.keys["OPTIMIZER.lr"].meaning
    assert lr["description"] == (
        f"{meaning}\ntype: float >= 0; default: 0.1; on resume adjustable: a change needs "
        "RUN.allow=OPTIMIZER.lr"
    )
    assert lr["markdownDescription"].startswith(f"{meaning}\n\n`float >= 0`, default `0.1`, ")
    assert schema["definitions"]["RUN"]["properties"]["seed"]["default"] == 0


def test_parameters_of_parts_have_types_defaults_and_texts(schema: dict[str, Any]) -> None:
    of_name = {
        one["if"]["properties"]["name"]["const"]: one["then"]
        for one in schema["definitions"]["MODEL"]["allOf"][:-1]
    }
    width = of_name["small_cnn"]["properties"]["width"]
    assert (width["type"], width["default"]) == (["integer", "string"], 32)
    assert width["description"] == (
        "channels after the first convolution.\ntype: int; default: 32; on resume forbidden: "
        "must not change"
    )
    assert of_name["small_cnn"]["properties"]["weights"] is True  # a key of the section
    assert of_name["small_cnn"]["additionalProperties"] is False
    every = schema["definitions"]["HOOKS"]["properties"]["watchdog"]["allOf"][1]["else"]
    assert "on resume free" in every["properties"]["seconds"]["description"]


@pytest.mark.feature("schema")
def test_parts_of_the_user_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # All are imported first: what registers in the meantime would be forgotten with the rest.
    monkeypatch.setattr(LOSSES, "_own", dict(LOSSES.items()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "losses_of_schema_test.py").write_text(
        "from phasetrain.losses import LOSSES\n\n"
        "@LOSSES.register('of_mine')\n"
        "def of_mine(output, target, gamma: float = 2.0): return output.mean()\n\n"
        "def other(output, target, slope: int = 1): return output.mean()\n"
    )
    words = ["RUN.imports=[losses_of_schema_test]", "LOSS.name=losses_of_schema_test.other"]
    assert main(["schema", *words, "--out", "keys.json"]) == 0
    assert capsys.readouterr().out == "keys.json\n"
    own = Draft7Validator(json.loads(Path("keys.json").read_text()))
    assert errors(own, {"LOSS": {"name": "of_mine", "gamma": 1}}) == []
    assert errors(own, {"LOSS": {"slope": 1}}) == []
    for wrong in ({"name": "of_mine", "gama": 1}, {"name": "losses_of_schema_test.other", "a": 1}):
        assert len(errors(own, {"LOSS": wrong})) == 1
    capsys.readouterr()


def test_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for group, key in {"DATA/TRAIN": "batch_size", "METERS": "logged", "HOOKS": "console"}.items():
        assert main(["schema", "--group", group]) == 0
        schema = json.loads(capsys.readouterr().out)
        Draft7Validator.check_schema(schema)
        assert key in schema["properties"]
        assert "defaults" in schema["properties"]


def test_mistakes_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--group", "MODLE"],
        ["MODEL.=1"],
        ["MODEL.name=no_such_module.Model"],
        ["RUN.imports=[no_such_module_at_all]"],
    ):
        assert main(["schema", *words, "--json"]) == 2
        (problem,) = json.loads(capsys.readouterr().out)["errors"]
        assert problem["code"].startswith("config.")


@pytest.fixture(scope="module")
def corpus() -> Any:
    sys.path.append(str(ROOT / "benchmarks"))
    import first_error_corpus

    yield first_error_corpus
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.feature(
    "schema", "JSON Schema of experiments, with the parts of the user", "`phasetrain schema`"
)
@pytest.mark.slow
def test_key_and_type_errors_of_the_corpus_are_refused(
    corpus: Any, validator: Draft7Validator, tmp_path: Path
) -> None:
    counts: Counter[str] = Counter()
    for case in [*corpus.broken(0), *corpus.good(0, corpus.GOOD)]:
        values = write_as_file(case.words, tmp_path / "case.yaml")
        composed = import_modules(compose([str(tmp_path / "case.yaml")]), None)
        codes = {
            one.code
            for one in collect_problems(lambda c=composed: check_config(c, list_slots(), SCHEMA))
        }
        is_mistake = bool(codes & KEYS_AND_TYPES)
        refused = errors(validator, values)
        if case.own == ("LOSS.name=phasetrain.losses.Nothing",):
            assert refused == []  # the schema cannot tell which dotted paths exist
        elif is_mistake:
            assert refused, case.own
            counts["key or type"] += 1
        elif refused:
            # Found in a stage, which the checker reads later.
            with raises(ConfigError, code="config.unchangeable"):
                resolve_overrides([str(tmp_path / "case.yaml")])
            counts["key or type"] += 1
        else:
            counts["good" if not case.fixes else "other mistake"] += 1
    assert counts == {"key or type": 110, "other mistake": 89, "good": 50}


def write_as_file(words: tuple[str, ...], path: Path) -> Any:
    """Write a file with the values of overrides, and the values of the options that they select;
    return what a YAML parser reads from it."""
    files = ConfigFiles(None)
    line = read_overrides([one.replace("{here}", str(path.parent)) for one in words], files, SCHEMA)
    merged = Merged(SCHEMA)
    for group, options in line.groups.items():
        for layer in files.select(group, options[0]):
            merged.apply(layer)
    merged.apply(Layer("command line", line.values))
    values = {"defaults": [line.experiment, "_self_"], **merged.values}
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(values)), "utf-8")
    return read_yaml(path.read_text("utf-8"))
