"""Runs with adapters: small checkpoints, exact resumes, a base that is known by its digest, merged
exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import (
    SMALL,
    KillAfter,
    SaveEachStep,
    differences_of_runs,
    newest,
    run_until_killed,
    save_start_weights,
    train,
)
from processes import Launcher
from raising import raises
from safetensors.torch import load_file, save_file
from test_processes import ONE

import phasetrain
from phasetrain.errors import ChangedError, ConfigError
from phasetrain.models import SmallCNN

LORA = "MODEL.adapters={match: 'features.*', rank: 2, dropout: 0.1, train: [head]}"
SHARDED = [
    pytest.param(strategy, marks=pytest.mark.addon("sharding"))
    for strategy in ("zero", "sharded_ddp", "fsdp")
]
SHORT = ("PHASES.epochs=1", "PHASES.limit.test=1", "HOOKS.report=null")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_start_weights(tmp_path / "base.safetensors")


def words(base: Path) -> tuple[str, ...]:
    return (LORA, f"MODEL.weights={base}")


@pytest.mark.feature(
    "model.adapters",
    "adapters (LoRA) on a frozen base that is known by its digest; merged exports, format of PEFT",
    "`MODEL.adapters`, `phasetrain export --format peft`",
)
def test_killed_run_resumes_exactly_with_adapters_alone_in_its_checkpoints(
    tmp_path: Path, base: Path
) -> None:
    train(tmp_path / "whole", *words(base), *SHORT)
    killed = {"save": SaveEachStep(), "kill": KillAfter(3)}
    run_until_killed(tmp_path / "run", *words(base), *SHORT, hooks=killed)
    saved = newest(tmp_path / "run").state["task"]["model"]
    assert sorted(saved) == [
        *(f"features.{layer}.adapter.{factor}" for layer in (0, 3, 6) for factor in "ab"),
        *("head.bias", "head.weight"),
    ]
    train(tmp_path / "run", *words(base), *SHORT)
    assert differences_of_runs(tmp_path / "whole", tmp_path / "run") == []


@pytest.mark.feature("model.adapters")
def test_changed_base_is_rejected(tmp_path: Path, base: Path) -> None:
    killed = {"save": SaveEachStep(), "kill": KillAfter(2)}
    run_until_killed(tmp_path / "run", *words(base), *SHORT, hooks=killed)
    state = load_file(base)
    state["features.0.weight"].view(torch.int32)[0, 0, 0, 0] ^= 1
    save_file(state, base)
    with raises(ChangedError, code="checkpoint.excluded_differ"):
        train(tmp_path / "run", *words(base), *SHORT)


@pytest.mark.feature("model.adapters")
@pytest.mark.addon("deploy")
def test_export_merges_the_adapters(tmp_path: Path, base: Path) -> None:
    from phasetrain.addons.deploy.export import export

    train(tmp_path / "run", *words(base), *SHORT, "OPTIMIZER.lr=0.5")
    task: Any = phasetrain.load(tmp_path / "run")
    export(str(tmp_path / "run"), str(tmp_path / "merged.safetensors"))
    model = SmallCNN(10, width=4).eval()
    merged = load_file(tmp_path / "merged.safetensors")
    model.load_state_dict(merged)
    images = torch.rand(4, 1, 8, 8)
    expected = task.model.eval()(images)
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    difference = merged["features.0.weight"] - load_file(base)["features.0.weight"]
    assert float(difference.abs().max()) > 1e-3


@pytest.mark.feature("model.adapters")
@pytest.mark.addon("deploy")
def test_run_with_adapters_is_a_source_of_weights_with_its_adapters_merged(
    tmp_path: Path, base: Path
) -> None:
    from phasetrain.addons.deploy.export import export

    train(tmp_path / "tuned", *words(base), *SHORT, "OPTIMIZER.lr=0.5")
    export(str(tmp_path / "tuned"), str(tmp_path / "merged.safetensors"))
    again = (LORA, *SHORT)
    train(tmp_path / "file", f"MODEL.weights={tmp_path}/merged.safetensors", *again)
    train(tmp_path / "run", f"MODEL.weights={tmp_path}/tuned", *again)
    one, other = (newest(tmp_path / name).state["task"]["model"] for name in ("file", "run"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    # The adapters of the second run are in addition to those of the first one.
    task: Any = phasetrain.load(tmp_path / "run")
    merged = load_file(tmp_path / "merged.safetensors")
    assert torch.equal(task.model.features[0].weight, merged["features.0.weight"])
    assert not torch.equal(merged["features.0.weight"], load_file(base)["features.0.weight"])


@pytest.mark.slow
def test_source_with_adapters_needs_its_base(tmp_path: Path, base: Path) -> None:
    train(tmp_path / "tuned", *words(base), *SHORT)
    base.unlink()
    with raises(ConfigError, code="weights.incomplete_run", key="MODEL.weights.path"):
        train(tmp_path / "run", f"MODEL.weights={tmp_path}/tuned", *SHORT)


@pytest.mark.slow
def test_source_that_leaves_out_frozen_weights_is_completed(tmp_path: Path, base: Path) -> None:
    frozen = ("MODEL.freeze=[features]", "CHECKPOINT.exclude=['features.*']")
    train(tmp_path / "frozen", f"MODEL.weights={base}", *frozen, *SHORT)
    train(tmp_path / "one", f"MODEL.weights={tmp_path}/frozen", *SHORT)
    moved = base.rename(tmp_path / "moved.safetensors")
    train(tmp_path / "two", f"MODEL.weights=[{moved},{tmp_path}/frozen]", *SHORT)
    one, two = (newest(tmp_path / name).state["task"]["model"] for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    with raises(ConfigError, code="weights.missing_tensors"):
        train(tmp_path / "three", f"MODEL.weights={tmp_path}/frozen", *SHORT)


@pytest.mark.slow
class TestWhole:
    @pytest.mark.parametrize("save_base", ["true", "false"])
    def test_base_from_the_seed_and_every_moment(self, tmp_path: Path, save_base: str) -> None:
        own = (LORA, f"MODEL.adapters.save_base={save_base}", "OPTIMIZER.accumulate=2")
        train(tmp_path / "whole", *own)
        for step in (4, 7, 16):
            folder = tmp_path / str(step)
            hooks = {"save": SaveEachStep(), "kill": KillAfter(step)}
            run_until_killed(folder, *own, hooks=hooks)
            assert ("features.0.weight" in newest(folder).state["task"]["model"]) is (
                save_base == "true"
            )
            train(folder, *own)
            assert differences_of_runs(tmp_path / "whole", folder) == []

    @pytest.mark.addon("deploy")
    def test_average_is_exported_with_its_adapters_merged(self, tmp_path: Path, base: Path) -> None:
        from phasetrain.addons.deploy.export import export

        train(tmp_path / "run", *words(base), *SHORT, "MODEL.ema={decay: 0.5}")
        export(str(tmp_path / "run"), str(tmp_path / "ema.safetensors"), source={"which": "ema"})
        export(str(tmp_path / "run"), str(tmp_path / "model.safetensors"))
        one, other = (load_file(tmp_path / f"{name}.safetensors") for name in ("ema", "model"))
        assert one.keys() == other.keys() == SmallCNN(10, width=4).state_dict().keys()
        assert not torch.equal(one["features.0.weight"], other["features.0.weight"])

    @pytest.mark.addon("deploy")
    def test_computation_is_exported_without_adapters(self, tmp_path: Path, base: Path) -> None:
        from phasetrain.addons.deploy.export import export

        train(tmp_path / "run", *words(base), *SHORT)
        export(str(tmp_path / "run"), str(tmp_path / "model.pt2"))
        program = torch.export.load(tmp_path / "model.pt2")
        assert program.state_dict.keys() == SmallCNN(10, width=4).state_dict().keys()

    @pytest.mark.parametrize("strategy", ["ddp", *SHARDED])
    def test_two_ranks_resume_exactly(
        self, launcher: Launcher, tmp_path: Path, base: Path, strategy: str
    ) -> None:
        own = (*SMALL, ONE, *words(base), "RUN.imports=[process_parts]")
        own = (*own, f"DISTRIBUTED.strategy={strategy}")
        unbroken = launcher.run(tmp_path / "unbroken", 2, *own)
        assert unbroken.codes == [0, 0], unbroken.outputs
        own = (*own, "CHECKPOINT.every_updates=2")
        strike = "HOOKS.strike={rank: 1, update: 8}"
        assert launcher.run(tmp_path / "run", 2, *own, strike).codes[1] == -9
        ended = launcher.run(tmp_path / "run", 2, *own)
        assert ended.codes == [0, 0], ended.outputs
        one, other = (
            phasetrain.load(tmp_path / name).model.state_dict() for name in ("unbroken", "run")
        )
        assert all(torch.equal(one[name], other[name]) for name in one)

    @pytest.mark.addon("deploy")
    def test_source_with_adapters_is_read_by_rank_0(
        self, launcher: Launcher, tmp_path: Path, base: Path
    ) -> None:
        from phasetrain.addons.deploy.export import export

        train(tmp_path / "tuned", *words(base), *SHORT, "OPTIMIZER.lr=0.5")
        export(str(tmp_path / "tuned"), str(tmp_path / "merged.safetensors"))
        own = (*SMALL, ONE, LORA, "RUN.imports=[process_parts]", "PHASES.epochs=1")
        for name, source in (("run", "tuned"), ("file", "merged.safetensors")):
            ended = launcher.run(tmp_path / name, 2, *own, f"MODEL.weights={tmp_path / source}")
            assert ended.codes == [0, 0], ended.outputs
        one, other = (newest(tmp_path / name).state["task"]["model"] for name in ("run", "file"))
        assert all(torch.equal(one[name], other[name]) for name in one)

    @pytest.mark.addon("deploy")
    def test_format_of_peft_needs_adapters(self, tmp_path: Path) -> None:
        from phasetrain.addons.deploy.export import export

        train(tmp_path / "run", *SHORT)
        with raises(ConfigError, code="export.unsupported_model"):
            export(str(tmp_path / "run"), str(tmp_path / "out"), "peft")


@pytest.mark.slow
class TestPeft:
    @pytest.mark.addon("deploy")
    def test_exported_folder_gives_the_same_outputs_in_peft(
        self, tmp_path: Path, base: Path
    ) -> None:
        from phasetrain.addons.deploy.export import export

        peft = pytest.importorskip("peft")
        train(tmp_path / "run", *words(base), *SHORT, "OPTIMIZER.lr=0.5")
        task: Any = phasetrain.load(tmp_path / "run")
        made = export(str(tmp_path / "run"), str(tmp_path / "adapter"), "peft")
        assert made.size == sum(path.stat().st_size for path in (tmp_path / "adapter").iterdir())
        model = SmallCNN(10, width=4)
        model.load_state_dict(load_file(base))
        loaded = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).eval()
        images = torch.rand(4, 1, 8, 8)
        torch.testing.assert_close(loaded(images), task.model(images), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(loaded(images), SmallCNN(10, width=4).eval()(images), atol=1e-3)
