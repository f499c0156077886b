import re
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasetrain.commands.setup import as_asked
from phasetrain.config.attrdict import AttrDict
from phasetrain.config.compose.composed import compose
from phasetrain.config.rules.derive import Derived, derive, nearest_divisors, overview
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError

SCHEMA = default_schema()
DEFAULT = compose([])


def derived(*overrides: str, processes: int = 1, **options) -> Derived:
    return derive(compose(overrides, **options), SCHEMA, device="cpu", processes=processes)


def refused(*overrides: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        derived(*overrides, **options)
    return str(caught.value)


def test_the_default_config_is_complete_and_frozen() -> None:
    found = derived()
    assert isinstance(found.config, AttrDict)
    assert found.config.RUN.name == "digits"
    assert re.fullmatch(r"runs/digits-[0-9a-f]{8}", found.config.RUN.dir)
    assert found.config.MACHINE.device == "cpu"
    assert "MACHINE.device: 'auto' -> 'cpu' (what this machine has)" in found.lines
    assert "RUN.name: null -> 'digits' (name of the experiment)" in found.lines


def test_what_was_apexs_is_torchs() -> None:
    found = derived("MACHINE.precision=apex", "DISTRIBUTED.sync_batch_norm=apex")
    assert (found.config.MACHINE.precision, found.config.DISTRIBUTED.sync_batch_norm) == (
        "fp16",
        "global",
    )
    assert (
        "MACHINE.precision: 'apex' -> 'fp16' (mixed precision of Apex is torch.amp today)"
        in found.lines
    )
    assert any(
        line.startswith("DISTRIBUTED.sync_batch_norm: 'apex' -> 'global'") for line in found.lines
    )


def test_tf32_is_for_cuda() -> None:
    assert "only CUDA devices have it" in refused("MACHINE.precision=tf32")


def test_the_composed_config_is_not_changed() -> None:
    composed = compose([])
    derive(composed, SCHEMA, device="cpu")
    assert composed.config["RUN"]["dir"] is None


def test_what_is_given_stays() -> None:
    found = derived(
        "RUN.name=mine",
        "RUN.dir=there",
        "MACHINE.device=cuda",
        "DATA.TEST=null",
        "OPTIMIZER.accumulate=4",
    )
    assert (found.config.RUN.name, found.config.RUN.dir, found.config.MACHINE.device) == (
        "mine",
        "there",
        "cuda",
    )
    assert found.lines == (
        "DATA.TRAIN.micro_batch_size: null -> 16 (batch_size 64 / OPTIMIZER.accumulate 4)",
    )


def test_the_folder_follows_what_shapes_the_run_and_nothing_else() -> None:
    folder = derived().config.RUN.dir
    assert derived("DATA.TRAIN.workers=2", "MACHINE.device=cuda").config.RUN.dir == folder
    assert derived("OPTIMIZER.accumulate=1").config.RUN.dir == folder, "the same as what is derived"
    assert derived("OPTIMIZER.accumulate=2").config.RUN.dir != folder
    assert derived("RUN.seed=1").config.RUN.dir != folder


def test_an_experiment_in_a_folder_and_none_at_all(user_dir) -> None:
    own = user_dir({"experiment/deep/mine.yaml": "PHASES: {epochs: 1}\n"})
    assert derived("experiment=deep/mine", config_dir=own).config.RUN.name == "deep-mine"
    assert derived("experiment=null", "PHASES.updates=3").config.RUN.name == "run"


def test_a_name_that_is_no_folder_is_refused() -> None:
    assert refused("RUN.name=a/b").startswith(
        "RUN.name = 'a/b' (command line): it becomes part of a folder's name"
    )


@pytest.mark.parametrize(
    ("overrides", "micro", "accumulate"),
    [
        ([], 64, 1),
        (["OPTIMIZER.accumulate=4"], 16, 4),
        (["DATA.TRAIN.micro_batch_size=8"], 8, 8),
        (["DATA.TRAIN.micro_batch_size=8", "OPTIMIZER.accumulate=8"], 8, 8),
        (["DATA.TRAIN.batch_size=96", "DATA.TRAIN.micro_batch_size=96"], 96, 1),
    ],
)
def test_micro_batches(overrides: list[str], micro: int, accumulate: int) -> None:
    config = derived(*overrides).config
    assert (config.DATA.TRAIN.micro_batch_size, config.OPTIMIZER.accumulate) == (micro, accumulate)


def test_micro_batches_that_do_not_divide() -> None:
    assert refused("OPTIMIZER.accumulate=3") == (
        "OPTIMIZER.accumulate = 3 (command line) does not divide DATA.TRAIN.batch_size = 64 (64 = 21 x 3 + 1); "
        "nearest that work: 2, 4"
    )
    assert "DATA.TRAIN.micro_batch_size = 100 (command line) does not divide" in refused(
        "DATA.TRAIN.micro_batch_size=100"
    )
    assert refused("DATA.TRAIN.micro_batch_size=8", "OPTIMIZER.accumulate=4") == (
        "DATA.TRAIN.micro_batch_size = 8 times OPTIMIZER.accumulate = 4 is 32, not DATA.TRAIN.batch_size = 64; "
        "set only one of the two"
    )
    assert "DATA.TEST.micro_batch_size = 3 (command line) does not divide" in refused(
        "DATA.TEST.micro_batch_size=3"
    )


class TestProcesses:
    """DATA.TRAIN.batch_size = micro_batch_size x processes x OPTIMIZER.accumulate."""

    @pytest.mark.parametrize(
        ("overrides", "processes", "micro", "accumulate"),
        [
            ([], 2, 32, 1),
            ([], 64, 1, 1),
            (["OPTIMIZER.accumulate=4"], 2, 8, 4),
            (["OPTIMIZER.accumulate=4"], 16, 1, 4),
            (["DATA.TRAIN.micro_batch_size=8"], 2, 8, 4),
            (["DATA.TRAIN.micro_batch_size=8"], 8, 8, 1),
            (["DATA.TRAIN.micro_batch_size=8", "OPTIMIZER.accumulate=4"], 2, 8, 4),
            (["DATA.TRAIN.batch_size=24"], 3, 8, 1),
            (["DISTRIBUTED.strategy=none"], 1, 64, 1),
            (["DISTRIBUTED.reduction=ordered"], 1, 8, 8),
            (["DISTRIBUTED.reduction=ordered"], 2, 8, 4),
            (["DISTRIBUTED.reduction=ordered", "DISTRIBUTED.virtual_shards=4"], 4, 16, 1),
        ],
    )
    def test_the_batch_stays(
        self, overrides: list[str], processes: int, micro: int, accumulate: int
    ) -> None:
        config = derived(*overrides, processes=processes).config
        assert (config.DATA.TRAIN.micro_batch_size, config.OPTIMIZER.accumulate) == (
            micro,
            accumulate,
        )
        assert config.DATA.TRAIN.batch_size == micro * accumulate * processes

    def test_what_follows_is_told(self) -> None:
        assert (
            "DATA.TRAIN.micro_batch_size: 64 -> 16 (batch_size 64 / accumulate 1 / 4 processes)"
            in (derived(processes=4).lines)
        )
        assert (
            "OPTIMIZER.accumulate: 8 -> 2 (batch_size 64 / micro_batch_size 8 / 4 processes)"
            in (derived("DATA.TRAIN.micro_batch_size=8", processes=4).lines)
        )

    @pytest.mark.parametrize(
        ("overrides", "processes", "message"),
        [
            (
                [],
                3,
                "DATA.TRAIN.batch_size = 64 / OPTIMIZER.accumulate 1 = 64, which 3 processes cannot share evenly; "
                "nearest numbers of processes that work: 2, 4; nearest batch sizes: 63, 66",
            ),
            (
                ["OPTIMIZER.accumulate=16"],
                8,
                "DATA.TRAIN.batch_size = 64 / OPTIMIZER.accumulate 16 = 4, which 8 processes cannot share evenly; "
                "nearest numbers of processes that work: 4; nearest batch sizes: 128",
            ),
            (
                ["DATA.TRAIN.micro_batch_size=16"],
                3,
                "DATA.TRAIN.batch_size = 64 = DATA.TRAIN.micro_batch_size 16 x 4, which 3 processes cannot share "
                "evenly; nearest numbers of processes that work: 2, 4; nearest batch sizes: 48, 96",
            ),
            (
                ["DATA.TRAIN.micro_batch_size=32"],
                8,
                "DATA.TRAIN.batch_size = 64 = DATA.TRAIN.micro_batch_size 32 x 2, which 8 processes cannot share "
                "evenly; nearest numbers of processes that work: 2; nearest batch sizes: 256; nearest "
                "DATA.TRAIN.micro_batch_size: 8",
            ),
            (
                ["DATA.TRAIN.micro_batch_size=16", "OPTIMIZER.accumulate=4"],
                2,
                "DATA.TRAIN.micro_batch_size = 16 times OPTIMIZER.accumulate = 4 times 2 processes is 128, not "
                "DATA.TRAIN.batch_size = 64; set only one of the two, and the other one follows from the number of "
                "processes",
            ),
            (
                ["DISTRIBUTED.strategy=none"],
                2,
                "DISTRIBUTED.strategy = 'none' and 2 processes: each would train for itself; take another strategy, "
                "such as DISTRIBUTED.strategy=ddp, or start one process",
            ),
            (
                ["DISTRIBUTED.reduction=ordered"],
                3,
                "DISTRIBUTED.virtual_shards = 8 and 3 processes: DISTRIBUTED.reduction = 'ordered' works on 1, 2, 4, "
                "... processes, up to 8; start as many, or take DISTRIBUTED.reduction=native",
            ),
        ],
    )
    def test_what_cannot_be_shared_is_refused(
        self, overrides: list[str], processes: int, message: str
    ) -> None:
        assert refused(*overrides, processes=processes) == message

    @settings(max_examples=40, deadline=None)
    @given(
        batch=st.integers(1, 48),
        part=st.integers(1, 12),
        kind=st.sampled_from(["micro_batch_size", "accumulate"]),
        processes=st.integers(2, 9),
    )
    def test_what_is_proposed_works_and_nothing_nearer_does(
        self, batch: int, part: int, kind: str, processes: int
    ) -> None:
        batch *= part

        def works(batch: int = batch, part: int = part, processes: int = processes) -> bool:
            config = deepcopy(DEFAULT.config)
            config["DATA"]["TRAIN"]["batch_size"] = batch
            (config["DATA"]["TRAIN"] if kind == "micro_batch_size" else config["OPTIMIZER"])[
                kind
            ] = part
            try:
                config = derive(
                    replace(DEFAULT, config=config), SCHEMA, device="cpu", processes=processes
                ).config
            except ConfigError as error:
                said.append(str(error))
                return False
            assert (
                config.DATA.TRAIN.micro_batch_size * config.OPTIMIZER.accumulate * processes
                == batch
            )
            return True

        said: list[str] = []
        if works():
            return
        told = {
            name: [int(number) for number in numbers.split(", ")]
            for name, numbers in re.findall(
                r"nearest ([\w. ]+?)(?: that work)?: (\d[\d, ]*)", said[0]
            )
        }
        assert {"numbers of processes", "batch sizes"} <= told.keys()
        for name, values in told.items():
            given_value = {"numbers of processes": processes, "batch sizes": batch}.get(name, part)
            word = {"numbers of processes": "processes", "batch sizes": "batch"}.get(name, "part")
            assert values
            assert all(works(**{word: value}) for value in values)
            low = max((value for value in values if value < given_value), default=0)
            high = min((value for value in values if value > given_value), default=given_value + 1)
            between = [value for value in range(low + 1, high) if value != given_value]
            assert not any(works(**{word: value}) for value in between)

    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["OPTIMIZER.accumulate=2"],
            ["DATA.TRAIN.micro_batch_size=4"],
            ["DISTRIBUTED.reduction=ordered"],
        ],
    )
    def test_neither_the_folder_nor_what_was_asked_for_depends_on_the_number(
        self, overrides: list[str]
    ) -> None:
        found = [
            (compose(overrides), derived(*overrides, processes=size).config)
            for size in (1, 2, 4, 8)
        ]
        assert len({config.RUN.dir for _, config in found}) == 1
        asked = [as_asked(config.plain(), composed.config) for composed, config in found]
        assert all(one == asked[0] for one in asked)

    @pytest.mark.parametrize(
        "overrides", [[], ["DATA.TRAIN.micro_batch_size=16", "OPTIMIZER.accumulate=2"]]
    )
    def test_a_test_takes_any_number(self, overrides: list[str]) -> None:
        assert (
            derived(*overrides, "RUN.engine=test", processes=3).config.DATA.TRAIN.batch_size == 64
        )


def test_test_splits_go_in_one_piece_unless_told_otherwise() -> None:
    config = derived("DATA.VAL={dataset: digits, batch_size: 30, micro_batch_size: 10}").config
    assert (config.DATA.TEST.micro_batch_size, config.DATA.VAL.micro_batch_size) == (256, 10)


@pytest.mark.parametrize(
    ("whole", "part", "near"), [(64, 3, [2, 4]), (7, 3, [1, 7]), (64, 100, [64]), (6, 4, [3, 6])]
)
def test_nearest_divisors(whole: int, part: int, near: list[int]) -> None:
    assert nearest_divisors(whole, part) == near


def test_the_higher_layer_decides_the_length() -> None:
    found = derived("PHASES.updates=100")
    assert (found.config.PHASES.epochs, found.config.PHASES.updates) == (None, 100)
    assert found.lines[0] == (
        "PHASES.epochs: 12 -> null (PHASES.updates = 100 (command line) comes above experiment/digits.yaml)"
    )


def test_two_lengths_in_one_layer_or_none_are_refused(user_dir) -> None:
    assert refused("PHASES.updates=100", "PHASES.epochs=3") == (
        "PHASES.epochs = 3 and PHASES.updates = 100 are both set (command line); keep one of them"
    )
    own = user_dir(
        {
            "experiment/mine.yaml": "RUN: {seed: 1}\n",
            "experiment/two.yaml": "PHASES: {epochs: 1, samples: 2}\n",
        }
    )
    assert refused("experiment=mine", config_dir=own) == (
        "PHASES: one of epochs, updates, samples must be set, as in PHASES.epochs=10"
    )
    assert "are both set" in refused("experiment=two", config_dir=own)
    assert derived("experiment=two", "PHASES.updates=5", config_dir=own).config.PHASES.updates == 5


def test_all_problems_are_told_at_once() -> None:
    message = refused("PHASES.epochs=null", "OPTIMIZER.accumulate=3", "RUN.name=a/b")
    assert message.startswith("3 problems in the config:")


def test_overview_lists_what_is_no_default_with_its_layer() -> None:
    found = overview(compose(["OPTIMIZER.lr=0.1", "RUN.seed=4", "LOSS=label_smoothing"]), SCHEMA)
    assert ("RUN.seed", 4, "command line") in found
    assert ("LOSS.label_smoothing", 0.1, "LOSS/label_smoothing.yaml") in found
    assert ("MODEL.width", 32, "MODEL/small_cnn.yaml") in found
    assert "OPTIMIZER.lr" not in [path for path, _, _ in found]


class TestCompile:
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["MACHINE.compile=inductor"], ("inductor", None, False, {})),
            (
                ["MACHINE.compile={mode: reduce-overhead}"],
                ("inductor", "reduce-overhead", False, {}),
            ),
            (
                ["MACHINE.compile.backend=eager", "MACHINE.compile.fullgraph=true"],
                ("eager", None, True, {}),
            ),
        ],
    )
    def test_it_is_spelled_out(self, words: list[str], expected: tuple) -> None:
        found = derived(*words).config.MACHINE.compile
        assert (found.backend, found.mode, found.fullgraph, found.options) == expected

    def test_the_short_and_the_long_form_are_one_run(self) -> None:
        short, long = (
            derived("MACHINE.compile=eager"),
            derived("MACHINE.compile={backend: eager, mode: null}"),
        )
        assert short.config.RUN.dir == long.config.RUN.dir != derived().config.RUN.dir

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (
                ["MACHINE.compile={bakend: x}"],
                "MACHINE.compile.bakend: no such key; did you mean 'backend'? It takes:",
            ),
            (["MACHINE.compile={mode: 3}"], "MACHINE.compile.mode = 3: expected a name or null"),
            (
                ["MACHINE.compile={fullgraph: 1}"],
                "MACHINE.compile.fullgraph = 1: expected true or false",
            ),
            (
                ["MACHINE.compile={mode: default, options: {a: 1}}"],
                "MACHINE.compile.mode = 'default' and options are both set; torch.compile takes one of the two",
            ),
            (
                ["MACHINE.compile={mode: max-autotune}"],
                "MACHINE.compile.mode = 'max-autotune' and MACHINE.deterministic = true: it takes the kernels that are",
            ),
            (
                ["MACHINE.compile=eager", "DATA.TRAIN.drop_last=false"],
                "MACHINE.compile and DATA.TRAIN.drop_last = false: the model is compiled for one size of batches",
            ),
            (
                ["MACHINE.compile=eager", "DATA.TRAIN.on_bad_sample=drop"],
                "MACHINE.compile and DATA.TRAIN.on_bad_sample = 'drop': the model is compiled for one size of batches",
            ),
            (
                ["MACHINE.compile=eager", "DISTRIBUTED.bucket_cap_mb=0.5"],
                "MACHINE.compile and DISTRIBUTED.bucket_cap_mb = 0.5: torch.compile expects buckets of at least 1 MiB",
            ),
        ],
    )
    def test_what_is_refused(self, words: list[str], message: str) -> None:
        assert refused(*words).startswith(message)


class TestSharing:
    def derived(self, *words: str, processes: int, device: str = "cpu") -> Derived:
        return derive(compose(words), SCHEMA, device=device, processes=processes)

    @pytest.mark.parametrize(
        "word", ["DISTRIBUTED.communication=bf16", "DISTRIBUTED.sync_batch_norm=true"]
    )
    def test_what_needs_cuda_is_refused_for_several_processes_without(self, word: str) -> None:
        with pytest.raises(ConfigError, match=r"and MACHINE\.device = 'cpu': "):
            self.derived(word, processes=2)
        self.derived(word, processes=1)
        self.derived(word, processes=2, device="cuda")

    @pytest.mark.parametrize(
        "word", ["DISTRIBUTED.communication=fp16", "DISTRIBUTED.sync_batch_norm=true"]
    )
    def test_what_would_break_the_promise_of_ordered(self, word: str) -> None:
        with pytest.raises(
            ConfigError, match=r"and DISTRIBUTED\.reduction = 'ordered': bits would depend on"
        ):
            self.derived(word, "DISTRIBUTED.reduction=ordered", processes=2, device="cuda")

    @pytest.mark.parametrize(
        ("word", "message"),
        [
            (
                "DISTRIBUTED.communication=powersgd",
                "no checkpoint holds, so no resume would be exact; take fp16 or bf16",
            ),
            ("DISTRIBUTED.communication=fp8", "'fp8' (command line): expected none, fp16 or bf16"),
        ],
    )
    def test_no_such_communication(self, word: str, message: str) -> None:
        assert refused(word).endswith(message)

    def test_fairscale_and_compilation(self) -> None:
        with pytest.raises(ConfigError, match=r"fairscale knows nothing of torch\.compile"):
            self.derived("MACHINE.compile=eager", "DISTRIBUTED.strategy=sharded_ddp", processes=2)
