import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from phasetrain.config.compose.composed import compose
from phasetrain.config.schema import default_schema
from phasetrain.config.sections.keys import key
from phasetrain.config.validation import Slot, check, load_plugins, raise_all, run_imports, shown
from phasetrain.errors import ConfigError

SCHEMA = default_schema()


def refused(slots: list[Slot], *overrides: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        check(compose(overrides, **options), slots, SCHEMA)
    return str(caught.value)


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
def test_what_is_right_passes(slots: list[Slot], overrides: list[str]) -> None:
    check(compose(overrides), slots, SCHEMA)


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
        ("OPTIMIZER.SCHEDULES.lr.warmpu=0.2", "OPTIMIZER.SCHEDULES.lr.warmup"),
        ("DATA.TRAIN.transforms=[{name: normalize, maen: [0]}]", "DATA.TRAIN.transforms[0].mean"),
    ],
)
def test_the_near_miss_of_an_unknown_key(slots: list[Slot], override: str, near: str) -> None:
    message = refused(slots, override)
    assert f"; did you mean {near}?" in message
    assert "(command line): " in message
    assert "\n" not in message, "one mistake, one line"


def test_a_key_like_nothing_gets_no_near_miss(slots: list[Slot]) -> None:
    message = refused(slots, "OPTIMIZER.zzzzzz=3")
    assert message == (
        "OPTIMIZER.zzzzzz = 3 (command line): 'sgd' has no such parameter. It takes: lr, momentum, nesterov, "
        "weight_decay"
    )


def test_unknown_sections_of_files_are_one_line_each(slots: list[Slot], user_dir) -> None:
    own = user_dir({"experiment/mine.yaml": "trainer: {gpus: 1, nodes: 2}\noptimizer: {lr: 3}\n"})
    lines = refused(slots, "experiment=mine", "PHASES.epochs=1", config_dir=own).splitlines()
    assert lines[0] == "2 problems in the config:"
    assert lines[1].startswith(
        f"  1. trainer = {{'gpus': 1, 'nodes': 2}} ({own}/experiment/mine.yaml): no such key"
    )
    assert lines[2].startswith(
        f"  2. optimizer.lr = 3 ({own}/experiment/mine.yaml): no such key; did you mean OPTIMIZER.lr?"
    )


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        (
            "LOSS.name=focl",
            "LOSS.name = 'focl'",
            "no loss has this name; did you mean 'focal'? Known: cross_entropy",
        ),
        (
            "MODEL.name=zzz",
            "MODEL.name = 'zzz'",
            "no model has this name. Known: mlp, resnet_cifar, small_cnn",
        ),
        (
            "DATA.TRAIN.dataset=digit",
            "DATA.TRAIN.dataset = 'digit'",
            "no data set has this name; did you mean 'digits'?",
        ),
        (
            "METERS.acuracy={}",
            "METERS.acuracy = 'acuracy'",
            "no meter has this name; did you mean 'accuracy'?",
        ),
        (
            "METERS.x.name=acuracy",
            "METERS.x.name = 'acuracy'",
            "no meter has this name; did you mean 'accuracy'?",
        ),
        (
            "HOOKS.consol={}",
            "HOOKS.consol = 'consol'",
            "no hook has this name; did you mean 'console'?",
        ),
        (
            "OPTIMIZER.SCHEDULES.lr=cosin",
            "OPTIMIZER.SCHEDULES.lr.name = 'cosin'",
            "no schedule has this name",
        ),
        (
            "DATA.TRAIN.transforms=[flaten]",
            "DATA.TRAIN.transforms[0] = 'flaten'",
            "no transform has this name",
        ),
        (
            "DATA.TRAIN.sampler=shufled",
            "DATA.TRAIN.sampler = 'shufled'",
            "no sampler has this name",
        ),
        (
            "DATA.TRAIN.transforms=[{mean: [0]}]",
            "DATA.TRAIN.transforms[0] = {'mean': [0]}",
            "names no transform; set DATA.TRAIN.transforms[0].name. Known: flatten, normalize",
        ),
        (
            "DATA.TRAIN.transforms=[3]",
            "DATA.TRAIN.transforms[0] = 3",
            "expected a name or a mapping with `name`",
        ),
        (
            "OPTIMIZER.SCHEDULES.momentum.end=3",
            "OPTIMIZER.SCHEDULES.momentum = {'end': 3}",
            "names no schedule; set OPTIMIZER.SCHEDULES.momentum.name",
        ),
        (
            "METERS.x=accuracy",
            "METERS.x = 'accuracy'",
            "expected a mapping of parameters; a meter is named by METERS.x.name=accuracy",
        ),
        (
            "OPTIMIZER.scaler=${HOOKS}",
            "OPTIMIZER.scaler = {'console': {}, 'ledger': {}, 'metrics': {}, 'numerics': ...",
            "names no scaler; set",
        ),
        (
            "METERS.x.name=null",
            "METERS.x.name = null",
            "names no meter; set METERS.x.name. Known: accuracy, loss",
        ),
        ("METERS.x=3", "METERS.x = 3", "expected a mapping of parameters. Known: accuracy, loss"),
        (
            "OPTIMIZER.SCHEDULES.lrr=cosine",
            "OPTIMIZER.SCHEDULES.lrr",
            "'sgd' has no option 'lrr'; did you mean 'lr'?",
        ),
        (
            "LOSS.name=no.such.Loss",
            "LOSS.name = 'no.such.Loss'",
            "module 'no.such' cannot be imported",
        ),
        (
            "OPTIMIZER.params=[1]",
            "OPTIMIZER.params = [1]",
            "the program passes this one itself; leave it out",
        ),
    ],
)
def test_names_of_parts(slots: list[Slot], override: str, key: str, message: str) -> None:
    assert f"{key} (command line): {message}" in refused(slots, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("OPTIMIZER.lr=fast", "OPTIMIZER.lr = 'fast' (command line): expected float >= 0"),
        ("DATA.TEST.workers=-1", "DATA.TEST.workers = -1 (command line): expected int >= 0"),
        ("DATA.TRAIN.drop_last=1", "DATA.TRAIN.drop_last = 1 (command line): expected bool"),
        ("RUN.engine=trian", "RUN.engine = 'trian' (command line): expected 'train' or 'test' or"),
        ("RUN.imports=[{a: 1}]", "RUN.imports = [{'a': 1}] (command line): expected list of str"),
        ("RUN.imports=mine", "RUN.imports = 'mine' (command line): expected list of str"),
        ("MODEL.width=wide", "MODEL.width = 'wide' (command line): expected int"),
        ("MODEL.width=3.5", "MODEL.width = 3.5 (command line): expected int"),
        ("MODEL.width=true", "MODEL.width = true (command line): expected int"),
        ("MODEL.width=null", "MODEL.width = null (command line): expected int"),
        ("OPTIMIZER.SCHEDULES.lr.warmup=[1]", "expected float or str"),
        (
            "MODEL={name: mlp, hidden: [a]}",
            "MODEL.hidden = ['a'] (command line): expected list of int",
        ),
        (
            "DATA.TEST=3",
            "DATA.TEST = 3 (command line): expected keys below it: dataset, batch_size",
        ),
        ("DATA.TRAIN=null", "DATA.TRAIN = null (command line): expected keys below it"),
        ("RUN.seed={a: 1}", "RUN.seed = {'a': 1} (command line): expected int >= 0"),
        ("LOSS={name: 3}", "LOSS.name = 3 (command line): expected str"),
        ("OPTIMIZER.scaler=[1]", "OPTIMIZER.scaler = [1] (command line): expected str or mapping"),
    ],
)
def test_types(slots: list[Slot], override: str, message: str) -> None:
    assert message in refused(slots, override)


def test_a_split_without_a_data_set_is_a_slip(slots: list[Slot]) -> None:
    message = refused(slots, "DATA.TRIAN.batch_size=3")
    assert message.startswith(
        "DATA.TRIAN (command line): each upper-case key of DATA but TRAIN is a test split"
    )
    assert message.endswith("set DATA.TRIAN.dataset; did you mean 'TRAIN'?")


def test_free_parameters_go_into_one_mapping(slots: list[Slot]) -> None:
    message = refused(slots, "LOSS.name=Free", "LOSS.b=2")
    assert "It takes: a, and others in one mapping `params`" in message
    assert "LOSS.params = 3 (command line): expected a mapping" in refused(
        slots, "LOSS.name=Free", "LOSS.params=3"
    )


def test_required_parameters_may_be_missing(slots: list[Slot]) -> None:
    assert "classes" not in compose([]).config["MODEL"]
    check(compose([]), slots, SCHEMA)


def test_everything_is_listed_at_once_with_what_composition_found(slots: list[Slot]) -> None:
    message = refused(
        slots, "OPTIMIZER.lrr=1", "LOSS.name=focl", "A.b=1,2", "MODEL.width=a", "zzz=1"
    )
    assert message.splitlines()[0] == "5 problems in the config:"
    assert [line[:5] for line in message.splitlines()[1:]] == [
        "  1. ",
        "  2. ",
        "  3. ",
        "  4. ",
        "  5. ",
    ]


def test_a_problem_found_on_the_way_is_not_told_twice(slots: list[Slot]) -> None:
    assert "\n" not in refused(slots, "OPTIMIZER.lr=???")
    assert "\n" not in refused(slots, "MODEL.width=${no.such}")


def test_raise_all() -> None:
    raise_all([])
    with pytest.raises(ConfigError, match=r"^only$"):
        raise_all(["only", "only"])


def test_shown_is_yaml_and_short() -> None:
    assert (shown(None), shown(True), shown("a"), shown(1)) == ("null", "true", "'a'", "1")
    assert shown("x" * 100) == "'" + "x" * 56 + "..."


def test_imports_register_parts_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parts_of_mine.py").write_text("VALUE = 3\n")
    assert run_imports(["parts_of_mine"]) == []
    assert sys.modules.pop("parts_of_mine").VALUE == 3
    assert sys.path[-1] == str(tmp_path)


def test_each_broken_import_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_losses.py").write_text("x = 1\ny = 1 / 0\n")
    (tmp_path / "my_syntax.py").write_text("x = (\n")
    (tmp_path / "my_needs.py").write_text("import no_such_library\n")
    register = "from phasetrain.config.registry import Registry\nR = Registry('loss', 'LOSS')\n"
    (tmp_path / "my_twice.py").write_text(
        register + "@R.register('a')\ndef f(): ...\n@R.register('a')\ndef g(): ...\n"
    )
    found = run_imports(["my_losses", "my_syntax", "my_needs", "my_lossess", "my_twice"])
    assert (
        found[0]
        == f"RUN.imports: module 'my_losses' failed: ZeroDivisionError: division by zero ({tmp_path}/my_losses.py:2)"
    )
    assert found[1].startswith("RUN.imports: module 'my_syntax' failed: '(' was never closed")
    assert found[1].endswith("my_syntax.py:1)")
    assert "ModuleNotFoundError: No module named 'no_such_library'" in found[2]
    assert found[3] == (
        f"RUN.imports: there is no module 'my_lossess', neither installed nor in {tmp_path}; did you mean 'my_losses'?"
    )
    assert re.search(
        r"the loss name 'a' is defined twice: my_twice.f \(.*py:3\) and my_twice.g \(.*py:5\)",
        found[4],
    )


def test_a_stale_plugin_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "stale-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stale\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phasetrain]\nmine = stale_module_of_mine\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (warning,) = load_plugins()
    assert warning.startswith(
        "plugin 'mine' of stale is left out: there is no module 'stale_module_of_mine'"
    )


def test_composing_and_checking_is_fast(slots: list[Slot]) -> None:
    overrides = ["LOSS=label_smoothing", "OPTIMIZER.lr=0.2", "PHASES.epochs=3", "MODEL.width=16"]
    times = []
    for _ in range(3):
        start = time.process_time()
        check(compose(overrides), slots, SCHEMA)
        times.append(time.process_time() - start)
    assert min(times) < 0.12, "seconds of CPU"


@dataclass(frozen=True, kw_only=True)
class MeterKeys:
    output: str | None = key(None, "output to measure", resume="forbidden")


@dataclass(frozen=True, kw_only=True)
class LossKeys:
    weight: float = key(1.0, "factor", resume="forbidden")


class TestKeysBesideAPart:
    def slots(self, slots: list[Slot]) -> list[Slot]:
        places = [slot for slot in slots if slot.path not in ("METERS.*", "LOSS")]
        meters, losses = (
            next(slot.registry for slot in slots if slot.path == path)
            for path in ("METERS.*", "LOSS")
        )
        own = MeterKeys
        return [
            *places,
            Slot("LOSS", losses),
            Slot(
                "LOSS.of.*",
                losses,
                label_is_name=True,
                own=LossKeys,
                only=("LOSS.name", "focal"),
            ),
            Slot("METERS.*", meters, label_is_name=True, own=own),
        ]

    def test_they_are_taken(self, slots: list[Slot]) -> None:
        check(compose(["METERS.accuracy={output: head, top: 2}"]), self.slots(slots), SCHEMA)

    def test_their_types_and_slips(self, slots: list[Slot]) -> None:
        assert "METERS.accuracy.output = 3 (command line): expected str or null" in refused(
            self.slots(slots), "METERS.accuracy.output=3"
        )
        found = refused(self.slots(slots), "METERS.accuracy.outptu=head")
        assert "did you mean METERS.accuracy.output? It takes: top, output" in found

    def test_a_place_that_is_there_for_one_value_of_a_key_only(self, slots: list[Slot]) -> None:
        found = refused(self.slots(slots), "LOSS.name=focal", "LOSS.of={focal: {weight: a}}")
        assert "LOSS.of.focal.weight = 'a' (command line): expected float" in found
        other = refused(self.slots(slots), "LOSS.of={focal: {weight: a}}")
        assert "LOSS.of.focal" not in other
        assert "'cross_entropy' has no such parameter" in other
