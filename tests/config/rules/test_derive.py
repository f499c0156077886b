import re
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasetrain.app.setup import without_derived
from phasetrain.config.attrdict import AttrDict
from phasetrain.config.compose.composed import compose
from phasetrain.config.rules.derive import Derived, derive, list_non_defaults
from phasetrain.config.rules.draft import nearest_divisors
from phasetrain.config.schema import default_schema
from phasetrain.errors import ConfigError, Problem

SCHEMA = default_schema()
DEFAULT = compose([])


def derived(*overrides: str, processes: int = 1, **options) -> Derived:
    return derive(compose(overrides, **options), SCHEMA, device=lambda: "cpu", processes=processes)


def find_problem(*overrides: str, **options) -> Problem:
    """Return the only problem that the rules report."""
    with pytest.raises(ConfigError) as caught:
        derived(*overrides, **options)
    (problem,) = caught.value.problems
    return problem


def is_conflict(problem: Problem, *keys: str) -> bool:
    """Return whether a problem is a conflict of keys, and names all of them."""
    named = all(key in problem.message for key in keys)
    return problem.code == "config.conflict" and problem.key in keys and named


def test_default_config_is_complete_and_frozen() -> None:
    found = derived()
    assert isinstance(found.config, AttrDict)
    assert found.config.RUN.name == "digits"
    assert re.fullmatch(r"runs/digits-[0-9a-f]{8}", found.config.RUN.dir)
    assert found.config.MACHINE.device == "cpu"
    assert "MACHINE.device: 'auto' -> 'cpu' (the best device of this machine)" in found.lines
    assert "RUN.name: null -> 'digits' (name of the experiment)" in found.lines


@pytest.mark.feature(
    "60",
    "Apex settings map to torch, with a note",
    "`MACHINE.precision=apex`, `DISTRIBUTED.sync_batch_norm=apex`",
)
def test_keys_of_apex_are_replaced_by_those_of_torch() -> None:
    found = derived("MACHINE.precision=apex", "DISTRIBUTED.sync_batch_norm=apex")
    assert (found.config.MACHINE.precision, found.config.DISTRIBUTED.sync_batch_norm) == (
        "fp16",
        "global",
    )
    assert (
        "MACHINE.precision: 'apex' -> 'fp16' (torch.amp replaces the mixed precision of Apex)"
        in found.lines
    )
    assert any(
        line.startswith("DISTRIBUTED.sync_batch_norm: 'apex' -> 'global'") for line in found.lines
    )


def test_tf32_needs_cuda() -> None:
    problem = find_problem("MACHINE.precision=tf32")
    assert is_conflict(problem, "MACHINE.precision", "MACHINE.device")


PAD = "DATA.TRAIN.collate={name: pad"


@pytest.mark.parametrize(
    ("words", "ignored"),
    [
        (["DATA.TRAIN.collate=pad"], -100),
        (["DATA.TEST.collate=pad", "LOSS.ignore_index=null"], -100),
        ([f"{PAD}, mask: null}}"], -100),
        ([], None),
        ([f"{PAD}, target_value: 0}}"], None),
        ([f"{PAD}, fields: [boxes]}}"], None),
        (["DATA.TRAIN.collate=pad", "LOSS.ignore_index=3"], 3),
        (["DATA.TRAIN.collate=pad", "LOSS=null", "LOSS.name=CrossEntropyLoss"], None),
        (["DATA.TRAIN.collate=pad", "TASK.name=sequence_to_sequence"], None),
    ],
)
def test_padding_of_targets_does_not_count(words: list[str], ignored: int | None) -> None:
    found = derived(*words)
    assert found.config.LOSS.get("ignore_index") == ignored
    lines = [line for line in found.lines if line.startswith("LOSS.ignore_index: null -> -100")]
    assert len(lines) == (ignored == -100)


def test_composed_config_is_not_changed() -> None:
    composed = compose([])
    derive(composed, SCHEMA, device=lambda: "cpu")
    assert composed.config["RUN"]["dir"] is None


def test_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/one")
    assert derived("RUN.dir='~/runs/a'").config.RUN.dir == "/home/one/runs/a"


def test_given_values_are_kept() -> None:
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


def test_run_folder_depends_on_the_trajectory_alone() -> None:
    folder = derived().config.RUN.dir
    assert derived("DATA.TRAIN.workers=2", "MACHINE.device=cuda").config.RUN.dir == folder
    assert derived("OPTIMIZER.accumulate=1").config.RUN.dir == folder, "the same as what is derived"
    assert derived("OPTIMIZER.accumulate=2").config.RUN.dir != folder
    assert derived("RUN.seed=1").config.RUN.dir != folder


def test_an_experiment_in_a_folder_and_none_at_all(user_dir) -> None:
    own = user_dir({"experiment/deep/mine.yaml": "PHASES: {epochs: 1}\n"})
    assert derived("experiment=deep/mine", config_dir=own).config.RUN.name == "deep-mine"
    assert derived("experiment=null", "PHASES.updates=3").config.RUN.name == "run"


def test_name_that_is_no_folder_is_rejected() -> None:
    problem = find_problem("RUN.name=a/b")
    assert (problem.code, problem.key) == ("config.wrong_value", "RUN.name")
    assert problem.given == "'a/b'"


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
def test_micro_batch_size_is_derived(overrides: list[str], micro: int, accumulate: int) -> None:
    config = derived(*overrides).config
    assert (config.DATA.TRAIN.micro_batch_size, config.OPTIMIZER.accumulate) == (micro, accumulate)


@pytest.mark.feature(
    "6",
    "global batch size; wrong sizes get the nearest valid ones",
    "`DATA.TRAIN.micro_batch_size`, `OPTIMIZER.accumulate`",
)
@pytest.mark.parametrize(
    ("overrides", "key", "numbers"),
    [
        (["OPTIMIZER.accumulate=3"], "OPTIMIZER.accumulate", "nearest that work: 2, 4"),
        (
            ["DATA.TRAIN.micro_batch_size=100"],
            "DATA.TRAIN.micro_batch_size",
            "nearest that work: 64",
        ),
        (
            ["DATA.TRAIN.micro_batch_size=8", "OPTIMIZER.accumulate=4"],
            "DATA.TRAIN.micro_batch_size",
            "is 32, not DATA.TRAIN.batch_size = 64",
        ),
        (
            ["DATA.TEST.micro_batch_size=3"],
            "DATA.TEST.micro_batch_size",
            "nearest that work: 2, 4",
        ),
    ],
)
def test_indivisible_micro_batches_are_rejected(
    overrides: list[str], key: str, numbers: str
) -> None:
    problem = find_problem(*overrides)
    assert (problem.code, problem.key) == ("config.indivisible", key)
    assert numbers in problem.message


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
    def test_global_batch_does_not_depend_on_the_world_size(
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
        ("overrides", "processes", "key", "numbers"),
        [
            ([], 3, "DATA.TRAIN.batch_size", "work: 2, 4; nearest batch sizes: 63, 66"),
            (
                ["OPTIMIZER.accumulate=16"],
                8,
                "DATA.TRAIN.batch_size",
                "work: 4; nearest batch sizes: 128",
            ),
            (
                ["DATA.TRAIN.micro_batch_size=16"],
                3,
                "DATA.TRAIN.batch_size",
                "work: 2, 4; nearest batch sizes: 48, 96",
            ),
            (
                ["DATA.TRAIN.micro_batch_size=32"],
                8,
                "DATA.TRAIN.batch_size",
                "work: 2; nearest batch sizes: 256; nearest DATA.TRAIN.micro_batch_size: 8",
            ),
            (
                ["DATA.TRAIN.micro_batch_size=16", "OPTIMIZER.accumulate=4"],
                2,
                "DATA.TRAIN.micro_batch_size",
                "times 2 processes is 128, not DATA.TRAIN.batch_size = 64",
            ),
        ],
    )
    def test_batch_that_ranks_cannot_share(
        self, overrides: list[str], processes: int, key: str, numbers: str
    ) -> None:
        problem = find_problem(*overrides, processes=processes)
        assert (problem.code, problem.key) == ("config.indivisible", key)
        assert numbers in problem.message

    @pytest.mark.parametrize(
        ("override", "processes", "key"),
        [
            ("DISTRIBUTED.strategy=none", 2, "DISTRIBUTED.strategy"),
            ("DISTRIBUTED.reduction=ordered", 3, "DISTRIBUTED.virtual_shards"),
        ],
    )
    def test_world_size_that_does_not_fit(self, override: str, processes: int, key: str) -> None:
        problem = find_problem(override, processes=processes)
        assert is_conflict(problem, key)
        assert f"{processes} processes" in problem.message

    @pytest.mark.parametrize(
        ("shards", "code"), [(6, "config.wrong_value"), (128, "config.indivisible")]
    )
    def test_virtual_shards_are_a_power_of_two_that_divides_the_batch(
        self, shards: int, code: str
    ) -> None:
        override = f"DISTRIBUTED.virtual_shards={shards}"
        problem = find_problem("DISTRIBUTED.reduction=ordered", override)
        assert (problem.code, problem.key) == (code, "DISTRIBUTED.virtual_shards")

    @pytest.mark.feature("6")
    @settings(max_examples=40, deadline=None)
    @given(
        batch=st.integers(1, 48),
        part=st.integers(1, 12),
        kind=st.sampled_from(["micro_batch_size", "accumulate"]),
        processes=st.integers(2, 9),
    )
    def test_suggested_sizes_are_the_nearest_valid_ones(
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
                    replace(DEFAULT, config=config),
                    SCHEMA,
                    device=lambda: "cpu",
                    processes=processes,
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
    def test_folder_and_request_do_not_depend_on_the_world_size(self, overrides: list[str]) -> None:
        found = [
            (compose(overrides), derived(*overrides, processes=size).config)
            for size in (1, 2, 4, 8)
        ]
        assert len({config.RUN.dir for _, config in found}) == 1
        asked = [without_derived(config.plain(), composed.config) for composed, config in found]
        assert all(one == asked[0] for one in asked)

    @pytest.mark.parametrize(
        "overrides", [[], ["DATA.TRAIN.micro_batch_size=16", "OPTIMIZER.accumulate=2"]]
    )
    def test_test_accepts_any_world_size(self, overrides: list[str]) -> None:
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


def test_length_of_the_higher_layer_wins() -> None:
    found = derived("PHASES.updates=100")
    assert (found.config.PHASES.epochs, found.config.PHASES.updates) == (None, 100)
    assert found.lines[0] == (
        "PHASES.epochs: 12 -> null (PHASES.updates = 100 (command line) takes precedence over experiment/digits.yaml)"
    )


def test_two_lengths_in_one_layer_are_rejected(user_dir) -> None:
    problem = find_problem("PHASES.updates=100", "PHASES.epochs=3")
    assert is_conflict(problem, "PHASES.epochs", "PHASES.updates")
    own = user_dir({"experiment/two.yaml": "PHASES: {epochs: 1, samples: 2}\n"})
    problem = find_problem("experiment=two", config_dir=own)
    assert is_conflict(problem, "PHASES.epochs", "PHASES.samples")
    assert derived("experiment=two", "PHASES.updates=5", config_dir=own).config.PHASES.updates == 5


def test_training_needs_a_length(user_dir) -> None:
    own = user_dir({"experiment/mine.yaml": "RUN: {seed: 1}\n"})
    problem = find_problem("experiment=mine", config_dir=own)
    assert (problem.code, problem.key) == ("config.missing_value", "PHASES")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        derived("PHASES.epochs=null", "OPTIMIZER.accumulate=3", "RUN.name=a/b")
    assert [one.key for one in caught.value.problems] == [
        "PHASES",
        "OPTIMIZER.accumulate",
        "RUN.name",
    ]


def test_overview_lists_changed_values_with_their_layer() -> None:
    found = list_non_defaults(
        compose(["OPTIMIZER.lr=0.1", "RUN.seed=4", "LOSS=label_smoothing"]), SCHEMA
    )
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
    def test_short_form_is_expanded(self, words: list[str], expected: tuple) -> None:
        found = derived(*words).config.MACHINE.compile
        assert (found.backend, found.mode, found.fullgraph, found.options) == expected

    def test_short_and_long_form_give_the_same_run(self) -> None:
        short, long = (
            derived("MACHINE.compile=eager"),
            derived("MACHINE.compile={backend: eager, mode: null}"),
        )
        assert short.config.RUN.dir == long.config.RUN.dir != derived().config.RUN.dir

    @pytest.mark.parametrize(
        ("words", "keys"),
        [
            (["MACHINE.compile={mode: default, options: {a: 1}}"], ["MACHINE.compile.mode"]),
            (
                ["MACHINE.compile={mode: max-autotune}"],
                ["MACHINE.compile.mode", "MACHINE.deterministic"],
            ),
            (["MACHINE.compile=eager", "DATA.TRAIN.drop_last=false"], ["DATA.TRAIN.drop_last"]),
            (
                ["MACHINE.compile=eager", "DATA.TRAIN.on_bad_sample=drop"],
                ["DATA.TRAIN.on_bad_sample"],
            ),
            (
                ["MACHINE.compile=eager", "DISTRIBUTED.bucket_cap_mb=0.5"],
                ["DISTRIBUTED.bucket_cap_mb"],
            ),
        ],
    )
    def test_conflicts_with_other_keys_are_rejected(
        self, words: list[str], keys: list[str]
    ) -> None:
        assert is_conflict(find_problem(*words), *keys)


class TestSharing:
    def derived(self, *words: str, processes: int, device: str = "cpu") -> Derived:
        return derive(compose(words), SCHEMA, device=lambda: device, processes=processes)

    @pytest.mark.parametrize(
        "word", ["DISTRIBUTED.communication=bf16", "DISTRIBUTED.sync_batch_norm=true"]
    )
    def test_strategies_for_cuda_are_rejected_without_it(self, word: str) -> None:
        problem = find_problem(word, processes=2)
        assert is_conflict(problem, word.partition("=")[0], "MACHINE.device")
        self.derived(word, processes=1)
        self.derived(word, processes=2, device="cuda")

    @pytest.mark.parametrize(
        "word", ["DISTRIBUTED.communication=fp16", "DISTRIBUTED.sync_batch_norm=true"]
    )
    def test_settings_that_break_ordered_reduction_are_rejected(self, word: str) -> None:
        with pytest.raises(ConfigError) as caught:
            self.derived(word, "DISTRIBUTED.reduction=ordered", processes=2, device="cuda")
        (problem,) = caught.value.problems
        assert is_conflict(problem, word.partition("=")[0], "DISTRIBUTED.reduction")

    @pytest.mark.parametrize("method", ["powersgd", "fp8"])
    def test_unsupported_communication_is_rejected(self, method: str) -> None:
        problem = find_problem(f"DISTRIBUTED.communication={method}")
        assert (problem.code, problem.given) == ("config.wrong_value", repr(method))

    def test_fsdp_with_channels_last_is_rejected_on_several_ranks_only(self) -> None:
        words = ("MACHINE.channels_last=true", "DISTRIBUTED.strategy=fsdp")
        problem = find_problem(*words, processes=2)
        assert is_conflict(problem, "MACHINE.channels_last", "DISTRIBUTED.strategy")
        self.derived(*words, processes=1)

    def test_fairscale_with_compilation_is_rejected(self) -> None:
        words = ("MACHINE.compile=eager", "DISTRIBUTED.strategy=sharded_ddp")
        problem = find_problem(*words, processes=2)
        assert is_conflict(problem, "MACHINE.compile", "DISTRIBUTED.strategy")


def test_run_without_training_data_tests_first() -> None:
    found = derived("DATA.TRAIN=null", "PHASES.updates=0").config
    assert (found.PHASES.updates, found.PHASES.test_first) == (0, True)
    assert not derived("PHASES.updates=0").config.PHASES.test_first
