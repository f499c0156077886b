import re
import sys
import time
from pathlib import Path

import pytest

from phasetrain.config.addons import explain_missing
from phasetrain.config.compose.composed import compose
from phasetrain.config.engines import list_engines
from phasetrain.config.plugins import load_plugins, run_imports
from phasetrain.config.problems import format_value, raise_all
from phasetrain.config.schema import default_schema
from phasetrain.config.validation import PartLocation, check_config
from phasetrain.errors import ConfigError, Problem

SCHEMA = default_schema()


def find_problems(slots: list[PartLocation], *overrides: str, **options) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        check_config(compose(overrides, **options), slots, SCHEMA)
    return caught.value.problems


def find_problem(slots: list[PartLocation], *overrides: str, **options) -> Problem:
    (problem,) = find_problems(slots, *overrides, **options)
    return problem


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["LOSS=label_smoothing", "OPTIMIZER=adamw", "MODEL=mlp"],
        ["OPTIMIZER.SCHEDULES.momentum=linear", "OPTIMIZER.scaler={name: none}"],
        ["DATA.TRAIN.transforms=[flatten, {name: normalize, mean: [0], std: [1.0]}]"],
        ["DATA.TRAIN.collate.pad=1", "DATA.VAL={dataset: digits, split: test}", "DATA.TEST=null"],
        ["METERS.top5={name: accuracy, top: 5}", "HOOKS.console.every_steps=3"],
        ["LOSS.name=focal", "LOSS.classes=null"],
        ["LOSS.name=Free", "LOSS.params={b: 2}", "LOSS.a=2"],
        ["LOSS.name=collections.OrderedDict"],
    ],
)
def test_valid_configs_have_no_problems(slots: list[PartLocation], overrides: list[str]) -> None:
    check_config(compose(overrides), slots, SCHEMA)  # raises if there is one


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("OPTIMIZER.lrr=1", "OPTIMIZER.lr"),
        ("MODLE.name=x", "MODEL.name"),
        ("MODLE.width=3", "MODEL.width"),
        ("DATA.TRAIN.batchsize=3", "DATA.TRAIN.batch_size"),
        ("DATA.train.batch_size=3", "DATA.TRAIN.batch_size"),
        ("data.train.batch_size=3", "DATA.TRAIN.batch_size"),
        ("DATA.batch_size=3", "DATA.TRAIN.batch_size"),
        ("OPTIMIZER.batch_size=3", "DATA.TRAIN.batch_size"),
        ("lr=0.1", "OPTIMIZER.lr"),
        ("epochs=5", "PHASES.epochs"),
        ("seed=1", "RUN.seed"),
        ("optimizer.lr=1", "OPTIMIZER.lr"),
        ("Optimizer.LR=1", "OPTIMIZER.lr"),
        ("OPTIMIZER.Momentum=0.5", "OPTIMIZER.momentum"),
        ("PHASES.epoch=3", "PHASES.epochs"),
        ("PHASES.test_evry.epochs=3", "PHASES.test_every.epochs"),
        ("CHECKPOINT.keep_lasts=3", "CHECKPOINT.keep_last"),
        ("LOSS.label_smooth=0.1", "LOSS.label_smoothing"),
        ("MODEL.label_smoothing=0.1", "LOSS.label_smoothing"),
        ("HOOKS.console.every_step=3", "HOOKS.console.every_steps"),
        ("METERS.accuracy.topp=3", "METERS.accuracy.top"),
        ("MODEL.adapters={rnak: 3}", "MODEL.adapters.rank"),  # of the default adapter
        ("OPTIMIZER.SCHEDULES.lr.warmpu=0.2", "OPTIMIZER.SCHEDULES.lr.warmup"),
        ("DATA.TRAIN.transforms=[{name: normalize, maen: [0]}]", "DATA.TRAIN.transforms[0].mean"),
    ],
)
def test_suggestion_for_an_unknown_key(slots: list[PartLocation], override: str, near: str) -> None:
    problem = find_problem(slots, override)
    assert problem.suggestion == near
    assert problem.code.startswith("config.unknown_")
    assert f"; did you mean {near}?" in problem.message
    assert "(command line): " in problem.message


def test_key_like_nothing_gets_no_suggestion(slots: list[PartLocation]) -> None:
    problem = find_problem(slots, "OPTIMIZER.zzzzzz=3")
    assert problem == Problem(
        code="config.unknown_parameter",
        message="OPTIMIZER.zzzzzz = 3 (command line): 'sgd' has no such parameter. It takes: lr, "
        "momentum, nesterov, weight_decay",
        key="OPTIMIZER.zzzzzz",
        given="3",
        expected="'sgd' has no such parameter. It takes: lr, momentum, nesterov, weight_decay",
    )


def test_unknown_sections_of_files_are_one_problem_each(
    slots: list[PartLocation], user_dir
) -> None:
    own = user_dir({"experiment/mine.yaml": "trainer: {gpus: 1, nodes: 2}\noptimizer: {lr: 3}\n"})
    first, second = find_problems(
        slots,
        "experiment=mine",
        "DATA.TRAIN.dataset=digits",
        "PHASES.epochs=1",
        config_dir=own,
    )
    assert (first.key, first.given) == ("trainer", "{'gpus': 1, 'nodes': 2}")
    assert (second.key, second.suggestion) == ("optimizer.lr", "OPTIMIZER.lr")
    assert f"({own}/experiment/mine.yaml)" in second.message


def test_code_tells_unknown_sections_keys_and_parameters_apart(slots: list[PartLocation]) -> None:
    overrides = ["MODLE.name=x", "RUN.sed=1", "OPTIMIZER.lrr=1", "METERS.accuracy.topp=1"]
    assert [(one.code, one.suggestion) for one in find_problems(slots, *overrides)] == [
        ("config.unknown_key", "RUN.seed"),
        ("config.unknown_section", "MODEL.name"),
        ("config.unknown_parameter", "METERS.accuracy.top"),
        ("config.unknown_parameter", "OPTIMIZER.lr"),
    ]


@pytest.mark.parametrize(
    ("override", "key", "given", "suggestion"),
    [
        ("LOSS.name=focl", "LOSS.name", "'focl'", "focal"),
        ("MODEL.name=zzz", "MODEL.name", "'zzz'", ""),
        ("DATA.TRAIN.dataset=digit", "DATA.TRAIN.dataset", "'digit'", "digits"),
        ("METERS.acuracy={}", "METERS.acuracy", "'acuracy'", "accuracy"),
        ("METERS.x.name=acuracy", "METERS.x.name", "'acuracy'", "accuracy"),
        ("MODEL.adapters={name: lorra}", "MODEL.adapters.name", "'lorra'", "lora"),
        ("HOOKS.consol={}", "HOOKS.consol", "'consol'", "console"),
        ("OPTIMIZER.SCHEDULES.lr=cosin", "OPTIMIZER.SCHEDULES.lr.name", "'cosin'", "cosine"),
        ("DATA.TRAIN.transforms=[flaten]", "DATA.TRAIN.transforms[0]", "'flaten'", "flatten"),
        ("DATA.TRAIN.sampler=shufled", "DATA.TRAIN.sampler", "'shufled'", "shuffled"),
    ],
)
def test_unknown_name_of_a_part_is_reported(
    slots: list[PartLocation], override: str, key: str, given: str, suggestion: str
) -> None:
    found = find_problem(slots, override)
    assert (found.code, found.key, found.given, found.suggestion) == (
        "config.unknown_part",
        key,
        given,
        suggestion,
    )


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        (
            "DATA.TRAIN.transforms=[{mean: [0]}]",
            "DATA.TRAIN.transforms[0]",
            "names no transform; set DATA.TRAIN.transforms[0].name. Known: flatten, normalize",
        ),
        (
            "DATA.TRAIN.transforms=[3]",
            "DATA.TRAIN.transforms[0]",
            "expected a name or a mapping with `name`. Known: flatten, normalize",
        ),
        (
            "OPTIMIZER.SCHEDULES.momentum.end=3",
            "OPTIMIZER.SCHEDULES.momentum",
            "names no schedule; set OPTIMIZER.SCHEDULES.momentum.name. Known: cosine, linear",
        ),
        (
            "METERS.x=accuracy",
            "METERS.x",
            "expected a mapping of parameters; a meter is named by METERS.x.name=accuracy",
        ),
        (
            "OPTIMIZER.scaler=${HOOKS}",
            "OPTIMIZER.scaler",
            "names no scaler; set OPTIMIZER.scaler.name. Known: auto, none",
        ),
        (
            "METERS.x.name=null",
            "METERS.x.name",
            "names no meter; set METERS.x.name. Known: accuracy, loss",
        ),
        (
            "METERS.x=3",
            "METERS.x",
            "expected a mapping of parameters. Known: accuracy, loss",
        ),
    ],
)
def test_section_without_a_part_is_reported(
    slots: list[PartLocation], override: str, key: str, expected: str
) -> None:
    found = find_problem(slots, override)
    assert (found.code, found.key, found.expected) == ("config.missing_part", key, expected)


@pytest.mark.parametrize(
    ("override", "code", "key", "suggestion"),
    [
        (
            "OPTIMIZER.SCHEDULES.lrr=cosine",
            "config.unknown_option",
            "OPTIMIZER.SCHEDULES.lrr",
            "lr",
        ),
        ("LOSS.name=no.such.Loss", "config.import_failed", "LOSS.name", ""),
        ("OPTIMIZER.params=[1]", "config.reserved_parameter", "OPTIMIZER.params", ""),
    ],
)
def test_bad_parameters_of_parts_are_reported(
    slots: list[PartLocation], override: str, code: str, key: str, suggestion: str
) -> None:
    found = find_problem(slots, override)
    assert (found.code, found.key, found.suggestion) == (code, key, suggestion)


@pytest.mark.parametrize(
    ("override", "given", "expected"),
    [
        ("OPTIMIZER.lr=fast", "'fast'", "float >= 0"),
        ("DATA.TEST.workers=-1", "-1", "int >= 0 and <= 1024 or 'auto'"),
        ("DATA.TEST.workers=1025", "1025", "int >= 0 and <= 1024 or 'auto'"),
        ("PHASES.epochs=1000001", "1000001", "int >= 0 and <= 1000000 or null"),
        ("DATA.TRAIN.drop_last=1", "1", "bool"),
        (
            "RUN.engine=trian",
            "'trian'",
            f"{' or '.join(map(repr, list_engines()))}; did you mean 'train'?{explain_missing()}",
        ),
        ("RUN.imports=[{a: 1}]", "[{'a': 1}]", "list of str"),
        ("MODEL.width=wide", "'wide'", "int"),
        ("MODEL.width=3.5", "3.5", "int"),
        ("MODEL.width=true", "true", "int"),
        ("MODEL.width=null", "null", "int"),
        ("OPTIMIZER.SCHEDULES.lr.warmup=[1]", "[1]", "float or str"),
        ("RUN.seed={a: 1}", "{'a': 1}", "int >= 0"),
        ("LOSS.name={a: 3}", "{'a': 3}", "str"),
        ("OPTIMIZER.scaler=[1]", "[1]", "str or mapping"),
        ("MACHINE.compile={fullgraph: 1}", "1", "bool"),
        ("MODEL.ema={decay: 1.0}", "1.0", "float >= 0 and < 1"),
        ("MODEL.ema={every: 1 epochs}", "'1 epochs'", "int >= 1"),
        ("MODEL.ema={warmup: 3}", "3", "bool"),
        ("MODEL.swa={batches: 0}", "0", "int >= 1"),
        ("MODEL.swa={every: null}", "null", "float or str"),
        ("MODEL.swa=0.75", "0.75", "mapping or null with keys start, every, batches, test"),
        ("OPTIMIZER.sam={rho: 0.0}", "0.0", "float > 0"),
        ("OPTIMIZER.sam={rho: far}", "'far'", "float > 0"),
        ("OPTIMIZER.sam={adaptive: 1}", "1", "bool"),
        ("OPTIMIZER.auto_lr_scaling={base_batch_size: 0}", "0", "int >= 1"),
    ],
)
def test_wrong_type_is_reported(
    slots: list[PartLocation], override: str, given: str, expected: str
) -> None:
    found = find_problem(slots, override)
    assert (found.code, found.given) == ("config.wrong_type", given)
    assert found.expected == f"expected {expected}"
    assert override.startswith(found.key.rpartition(".")[0])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("DATA.TEST=3", "DATA.TEST"),
        ("DATA.TRAIN=3", "DATA.TRAIN"),
        ("MODEL={name: mlp, hidden: [a]}", "MODEL.hidden"),
        ("LOSS={name: 3}", "LOSS.name"),
    ],
)
def test_wrong_type_of_a_section_or_in_a_mapping_is_reported(
    slots: list[PartLocation], override: str, key: str
) -> None:
    found = find_problem(slots, override)
    assert (found.code, found.key) == ("config.wrong_type", key)


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        ("MACHINE.compile", "backedn", "backend"),
        ("MODEL.ema", "decy", "decay"),
        ("OPTIMIZER.sam", "roh", "rho"),
        ("OPTIMIZER.auto_lr_scaling", "base_batch", "base_batch_size"),
    ],
)
def test_unknown_key_in_a_mapping_with_known_keys_is_reported(
    slots: list[PartLocation], path: str, wrong: str, right: str
) -> None:
    found = find_problem(slots, f"{path}={{{wrong}: 1}}")
    assert (found.code, found.key) == ("config.unknown_key", f"{path}.{wrong}")
    assert found.suggestion == f"{path}.{right}"


@pytest.mark.parametrize(
    ("section", "key"),
    [("TASK", "TASK.name"), ("CHECKPOINT.best", "CHECKPOINT.best.monitor"), ("RUN", "RUN.name")],
)
def test_empty_section_is_rejected_with_what_to_do(
    slots: list[PartLocation], section: str, key: str
) -> None:
    found = find_problem(slots, f"{section}=null")
    assert (found.code, found.key, found.given) == ("config.wrong_type", section, "null")
    assert found.expected.endswith(
        f"; leave {section} out for its defaults, or set a key, as in {key}=..."
    )


def test_split_without_a_dataset_is_a_misspelt_key(slots: list[PartLocation]) -> None:
    found = find_problem(slots, "DATA.TRIAN.batch_size=3")
    assert (found.code, found.key, found.suggestion) == (
        "config.missing_dataset",
        "DATA.TRIAN",
        "TRAIN",
    )


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["experiment=null", "PHASES.epochs=1"], "DATA.TRAIN"),
        (["DATA.TEST.dataset=Free"], "DATA.TRAIN"),
        (["experiment=null", "DATA.TRAIN.dataset=digits", "DATA.TEST.datset=digits"], "DATA.TEST"),
    ],
)
def test_missing_dataset_is_reported(
    slots: list[PartLocation], overrides: list[str], key: str
) -> None:
    found = find_problems(slots, *overrides)
    assert ("config.missing_dataset", key) in [(one.code, one.key) for one in found]


def test_no_training_data_is_needed_without_training(slots: list[PartLocation]) -> None:
    words = ("experiment=null", "DATA.TEST.dataset=digits")
    for engine in ("test", *({"extract"} & set(list_engines()))):
        check_config(compose([*words, f"RUN.engine={engine}"]), slots, SCHEMA)


def test_free_parameters_go_into_one_mapping(slots: list[PartLocation]) -> None:
    found = find_problem(slots, "LOSS.name=Free", "LOSS.b=2")
    assert "It takes: a, and others in one mapping `params`" in found.message
    wrong = find_problem(slots, "LOSS.name=Free", "LOSS.params=3")
    assert (wrong.key, wrong.expected) == ("LOSS.params", "expected mapping")


def test_required_parameters_may_be_missing(slots: list[PartLocation]) -> None:
    assert "classes" not in compose([]).config["MODEL"]
    check_config(compose([]), slots, SCHEMA)


def test_all_problems_are_listed_at_once_with_those_of_composition(
    slots: list[PartLocation],
) -> None:
    overrides = ["OPTIMIZER.lrr=1", "LOSS.name=focl", "A.b=1,2", "MODEL.width=a", "zzz=1"]
    found = find_problems(slots, *overrides)
    assert sorted(one.key for one in found) == [
        "A.b",
        "LOSS.name",
        "MODEL.width",
        "OPTIMIZER.lrr",
        "zzz",
    ]
    with pytest.raises(ConfigError, match=r"^5 .*:\n  1\. "):
        raise_all(found)


@pytest.mark.parametrize("override", ["OPTIMIZER.lr=???", "MODEL.width=${no.such}"])
def test_problem_of_composition_is_not_reported_again(
    slots: list[PartLocation], override: str
) -> None:
    assert find_problem(slots, override).code in ("config.missing_value", "config.interpolation")


def test_raise_all() -> None:
    raise_all([])
    with pytest.raises(ConfigError, match=r"^only$"):
        raise_all(["only", "only"])


def test_shown_is_yaml_and_short() -> None:
    assert (format_value(None), format_value(True), format_value("a"), format_value(1)) == (
        "null",
        "true",
        "'a'",
        "1",
    )
    assert format_value("x" * 100) == "'" + "x" * 56 + "..."


def test_imports_register_parts_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parts_of_the_current_folder.py").write_text("VALUE = 3\n")
    assert run_imports(["parts_of_the_current_folder"]) == []
    assert run_imports(["colorsys", "zlib"]) == []
    (tmp_path / "colorsys.py").write_text("")
    (tmp_path / "xmlrpc").mkdir()
    (tmp_path / "xmlrpc" / "__init__.py").write_text("")
    for name, file in (("colorsys", "colorsys.py"), ("xmlrpc", "xmlrpc/__init__.py")):
        (hidden,) = run_imports([name])
        assert (hidden.code, hidden.key) == ("config.import_failed", "RUN.imports")
        assert f"hides {tmp_path}/{file}" in hidden.message
    assert sys.modules.pop("parts_of_the_current_folder").VALUE == 3
    assert sys.path[-1] == str(tmp_path)


def test_each_broken_import_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_losses.py").write_text("x = 1\ny = 1 / 0\n")
    (tmp_path / "my_fine.py").write_text("")
    (tmp_path / "my_syntax.py").write_text("x = (\n")
    (tmp_path / "my_needs.py").write_text("import no_such_library\n")
    register = "from phasetrain.config.registry import Registry\nR = Registry('loss', 'LOSS')\n"
    (tmp_path / "my_twice.py").write_text(
        register + "@R.register('a')\ndef f(): ...\n@R.register('a')\ndef g(): ...\n"
    )
    found = run_imports(
        ["my_losses", "my_syntax", "my_needs", "my_lossess", "my_twice", "my_fine.py"]
    )
    assert {one.code for one in found} == {"config.import_failed"}
    texts = [one.message for one in found]
    assert f"ZeroDivisionError: division by zero ({tmp_path}/my_losses.py:2)" in texts[0]
    assert texts[1].endswith("my_syntax.py:1)")
    assert "ModuleNotFoundError: No module named 'no_such_library'" in texts[2]
    assert found[3].suggestion == "my_losses"
    assert re.search(r"defined twice: my_twice.f \(.*py:3\) and my_twice.g \(.*py:5\)", texts[4])
    assert texts[4].endswith("my_twice.py:5)"), "not the place of the registry"
    assert found[5].suggestion == "my_fine"


def test_a_stale_plugin_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "stale-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stale\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phasetrain]\nmine = stale_module_of_mine\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (warning,) = load_plugins()
    assert "plugin 'mine' of stale" in warning
    assert "stale_module_of_mine" in warning


def test_composing_and_checking_is_fast(slots: list[PartLocation]) -> None:
    overrides = ["LOSS=label_smoothing", "OPTIMIZER.lr=0.2", "PHASES.epochs=3", "MODEL.width=16"]
    times = []
    for _ in range(3):
        start = time.process_time()
        check_config(compose(overrides), slots, SCHEMA)
        times.append(time.process_time() - start)
    assert min(times) < 0.12, "seconds of CPU"


class TestKeysNextToAPart:
    def test_keys_next_to_a_part_are_accepted(self, slots: list[PartLocation]) -> None:
        check_config(compose(["METERS.accuracy={output: head, top: 2}"]), slots, SCHEMA)

    def test_wrong_type_and_suggestion(self, slots: list[PartLocation]) -> None:
        wrong = find_problem(slots, "METERS.accuracy.output=0.5")
        assert (wrong.code, wrong.expected) == ("config.wrong_type", "expected str or int or null")
        unknown = find_problem(slots, "METERS.accuracy.outptu=head")
        assert unknown.suggestion == "METERS.accuracy.output"

    def test_place_that_exists_for_one_value_of_a_key(self, slots: list[PartLocation]) -> None:
        slots.append(PartLocation("LOSS.losses.*", "loss", only=("LOSS", "focal")))
        override = "LOSS.losses={focal: {weight: a}}"
        found = find_problems(slots, "LOSS.name=focal", override)
        assert "LOSS.losses.focal.weight" in [one.key for one in found]
        (other,) = find_problems(slots, override)
        assert (other.code, other.key) == ("config.unknown_parameter", "LOSS.losses")

    def test_place_inside_of_a_part_in_a_list(self, slots: list[PartLocation]) -> None:
        transforms = next(slot for slot in slots if slot.path == "DATA.*.transforms[]")
        inner = "DATA.*.transforms[].parts[].of"
        slots.append(PartLocation(inner, "transform", only=(transforms.path, "flatten")))
        words = "{name: flatten, parts: [{of: {name: flatten}}, {of: {name: flaten}}]}"
        found = find_problems(slots, f"DATA.TRAIN.transforms=[{words}]")
        assert ("DATA.TRAIN.transforms[0].parts[1].of.name", "flatten") in [
            (one.key, one.suggestion) for one in found
        ]


def test_parameters_of_a_misspelt_part_are_checked_with_it(slots: list[PartLocation]) -> None:
    name, parameter = find_problems(slots, "LOSS={name: focl, gama: 2, other: 1}")
    assert (name.key, name.suggestion) == ("LOSS.name", "focal")
    assert (parameter.key, parameter.suggestion) == ("LOSS.gama", "LOSS.gamma")


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ("OPTIMIZER: {lr: 0,1}", "OPTIMIZER.1", "a decimal number has a point"),
        ("METERS: [accuracy]", "METERS", "METERS: {accuracy: {}}"),
        ("HOOKS: [console]", "HOOKS", "HOOKS: {console: {}}"),
        ("RUN: {name: yes}", "RUN.name", "unless in quotes"),
        ("OPTIMIZER: {SCHEDULES: cosine}", "OPTIMIZER.SCHEDULES", "{lr: cosine}"),
        ("MODEL: small_cnn", "MODEL", "MODEL: {name: small_cnn}"),
        ("DATA: {TRAIN: {workers: '2'}}", "DATA.TRAIN.workers", "write it without quotes"),
        ("DATA: {TRAIN: {transforms: flatten}}", "DATA.TRAIN.transforms", "write [flatten]"),
        ("PHASES: {updates: None}", "PHASES.updates", "did you mean null?"),
        ("LAUNCH: {cluster: slrum}", "LAUNCH.cluster", "did you mean 'slurm'?"),
        ("MODEL: {ema: true}", "MODEL.ema", "write {} for its defaults"),
        ("MACHINE: {device: gpu}", "MACHINE.device", "did you mean 'cuda'?"),
        ("MODEL: {ema: 0.99}", "MODEL.ema", "with keys decay"),
        ("METERS: {accuracy: true}", "METERS.accuracy", "METERS.accuracy={}"),
        (
            "OPTIMIZER: {SCHEDULES: {learning_rate: cosine}}",
            "OPTIMIZER.SCHEDULES.learning_rate",
            "'lr'",
        ),
        ("METERS: {acc: {}}", "METERS.acc", "did you mean 'accuracy'?"),
        ("OPTIMIZER: {adamw: {}}", "OPTIMIZER.adamw", "OPTIMIZER.name=adamw"),
        (
            "DATA: {TRAIN: {transforms: [{normalize: {mean: [0], std: [1]}}]}}",
            "DATA.TRAIN.transforms[0]",
            "write {name: normalize, mean: ..., std: ...}",
        ),
    ],
)
def test_other_form_of_a_value_in_a_file_shows_the_right_one(
    slots: list[PartLocation], user_dir, text: str, key: str, says: str
) -> None:
    own = user_dir({"experiment/mine.yaml": f"defaults: [digits, _self_]\n{text}\n"})
    found = find_problem(slots, "experiment=mine", config_dir=own)
    assert found.key == key
    assert says in found.message


def test_misspelt_experiment_is_suggested(slots: list[PartLocation]) -> None:
    assert find_problem(slots, "Experiment=digits").suggestion == "experiment"
