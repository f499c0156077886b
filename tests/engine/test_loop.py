"""The loop: the order of events, what hooks may replace, and how a run stops."""

import io
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import pytest
import torch
from raising import raises

from phasetrain.app.setup import resolve_config
from phasetrain.distributed import Consensus, World
from phasetrain.engine.batch import Batch, StepOutput
from phasetrain.engine.loop import PhaseEngine
from phasetrain.engine.position import RunState
from phasetrain.errors import ConfigError, ExitCallError
from phasetrain.hooks import Hook, Hooks, on
from phasetrain.models.digest import hash_model
from phasetrain.runtime.signals import SignalExit
from phasetrain.runtime.terminal import Terminal
from phasetrain.tasks import Builder

EVENTS = [name for name in vars(Hook) if name.startswith("on_")]
WORDS = (
    "DATA.TRAIN.dataset=synthetic", "DATA.TRAIN.samples=12", "DATA.TRAIN.batch_size=4", "DATA.TRAIN.drop_last=false",
    "DATA.TEST.dataset=synthetic", "DATA.TEST.samples=5", "DATA.TEST.batch_size=3", "METERS.accuracy={}",
    "MODEL.name=mlp", "MODEL.hidden=[4]", "MODEL.dropout=0.5", "PHASES.epochs=2", "DATA.TRAIN.transforms=[]",
)  # fmt: skip


def engine(
    hooks: Mapping[str, Hook] | None = None, *words: str, state: RunState | None = None
) -> PhaseEngine:
    """Return the engine of a small run: two epochs of three updates, each with a test of two
    steps."""
    setup = resolve_config([*WORDS, *words], terminal=Terminal(io.StringIO()))
    builder = Builder(setup.config, setup.machine, World())
    data = builder.data()
    plan = builder.plan(data)
    return PhaseEngine(
        builder.task(builder.parts(data, plan)), plan, state or RunState(), Hooks(hooks or {})
    )


class Recorder(Hook):
    """Writes down every event with its label and the position."""

    def __init__(self, label: str, events: list[str]) -> None:
        self.label, self.events = label, events

    def note(self, event: str, run: Any) -> None:
        state = run.state
        self.events.append(f"{self.label}.{event} {state.phase}.{state.step} {state.updates}")


def _event(name: str) -> Any:
    def heard(self: Recorder, run: Any, *known: Any) -> None:
        self.note(name.removeprefix("on_"), run)

    return heard


for _name in EVENTS:
    setattr(Recorder, _name, _event(_name))


def recorded(*labels: str) -> tuple[dict[str, Hook], list[str]]:
    events: list[str] = []
    return {label: Recorder(label, events) for label in labels}, events


class Noting:
    """A reader that notes each read."""

    def __init__(self, reader: Any, note: Callable[[], None]) -> None:
        self.reader, self.note = reader, note

    def __getitem__(self, draw: Any) -> Any:
        self.note()
        return self.reader[draw]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)


class TestOrder:
    @pytest.mark.feature(
        "29-33",
        "events for run, phase, step, batch, forward, backward, update, and before the data of a "
        "step",
        "`phasetrain.hooks.Hook`",
    )
    def test_all_events_of_a_run_are_in_order(self) -> None:
        hooks, events = recorded("a")
        made = engine(
            hooks,
            "PHASES.updates=2",
            "PHASES.epochs=null",
            "OPTIMIZER.accumulate=2",
            "PHASES.limit.test=1",
        )
        made.run()
        assert events == [
            "a.start 0.0 0",
            "a.phase_start 0.0 0",
            "a.step_start 0.0 0",
            "a.batch 0.0 0", "a.output 0.0 0", "a.forward 0.0 0", "a.backward 0.0 0",
            "a.batch 0.0 0", "a.output 0.0 0", "a.forward 0.0 0", "a.backward 0.0 0",
            "a.update 0.0 0",
            "a.step 0.1 1",
            "a.step_start 0.1 1",
            "a.batch 0.1 1", "a.output 0.1 1", "a.forward 0.1 1", "a.backward 0.1 1",
            "a.batch 0.1 1", "a.output 0.1 1", "a.forward 0.1 1", "a.backward 0.1 1",
            "a.update 0.1 1",
            "a.step 0.2 2",
            "a.metrics 1.0 2",
            "a.phase_end 1.0 2",
            "a.phase_start 1.0 2",
            "a.step_start 1.0 2",
            "a.batch 1.0 2", "a.output 1.0 2", "a.forward 1.0 2",
            "a.step 1.1 2",
            "a.metrics 2.0 2",
            "a.phase_end 2.0 2",
            "a.end 2.0 2",
        ]  # fmt: skip

    @pytest.mark.feature(
        "37", "hooks run in the order of keys, closing events in reverse", "`HOOKS`"
    )
    def test_opening_events_run_forward_and_closing_events_backward(self) -> None:
        hooks, events = recorded("a", "b")
        engine(hooks, "PHASES.updates=1", "PHASES.epochs=null", "PHASES.limit.test=1").run()
        labels = {event: [] for event in EVENTS}
        for line in events:
            label, _, event = line.partition(" ")[0].partition(".")
            labels[f"on_{event}"].append(label)
        opening = {"on_start", "on_phase_start", "on_step_start", "on_batch"}
        for event in ("on_start", "on_phase_start", "on_step_start", "on_batch", "on_forward", "on_backward", "on_update", "on_step",
                      "on_phase_end", "on_end"):  # fmt: skip
            assert labels[event][:2] == (["a", "b"] if event in opening else ["b", "a"]), event

    def test_load_follows_start(self) -> None:
        hooks, events = recorded("a")
        made = engine(hooks, state=RunState(phase=4, finished="completed"))
        made.resumed_from = "somewhere"
        made.run()
        assert events == ["a.start 4.0 0", "a.load 4.0 0", "a.end 4.0 0"]

    @pytest.mark.feature("38", "hooks on all ranks or on rank 0", "`Hook.main_only`")
    def test_main_only_hooks_run_on_rank_0_only(self) -> None:
        class Everywhere(Hook):
            main_only = False

        assert list(Hooks({"a": Hook(), "b": Everywhere()}, World(1, 2)).by_label) == ["b"]
        assert list(Hooks({"a": Hook(), "b": Everywhere()}, World(0, 2)).by_label) == ["a", "b"]


class TestWatching:
    def test_event_that_no_hook_overrides_has_no_calls(self) -> None:
        class Steps(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None: ...

        hooks = Hooks({"plain": Hook(), "steps": Steps()}, World())
        assert len(hooks.calls) == len(EVENTS)
        assert {name for name, calls in hooks.calls.items() if calls} == {"on_step"}

    @pytest.mark.feature("40", "hooks may replace batches and outputs", "`on_batch`, `on_forward`")
    def test_hook_can_replace_the_batch(self) -> None:
        class Blank(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Batch) -> Batch:
                return Batch(torch.zeros_like(batch.input), batch.target, batch.ids, batch.size)

        seen: list[float] = []

        class Look(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Batch) -> None:
                seen.append(float(batch.input.abs().sum()))

        engine({"blank": Blank(), "look": Look()}).run()
        assert seen == [0.0] * 10
        engine({"look": Look(), "blank": Blank()}).run()
        assert all(found > 0 for found in seen[10:])

    def test_hook_can_replace_the_output(self) -> None:
        class Nothing(Hook):
            def on_forward(self, run: Any, phase: Any, out: StepOutput) -> StepOutput:
                return StepOutput(
                    out.loss * 0,
                    out.weight,
                    out.samples,
                    out.output,
                    out.target,
                    logs={"nothing": 1.0},
                )

        seen: list[tuple[float, dict[str, float]]] = []

        class Look(Hook):
            def on_step(self, run: Any, phase: Any, out: StepOutput) -> None:
                seen.append((float(out.loss), out.logs))
                assert (out.output, out.target, out.loss.requires_grad) == (None, None, False)

        made = engine({"nothing": Nothing(), "look": Look()})
        before = hash_model(made.task.model)
        made.run()
        assert seen == [(0.0, {"nothing": 1.0})] * 10
        assert hash_model(made.task.model) == before

    def test_replaced_batch_of_another_size_keeps_the_weight_of_the_loss(
        self,
    ) -> None:
        class Half(Hook):
            def on_batch(self, run: Any, phase: Any, batch: Batch) -> Batch:
                return Batch(batch.input[:2], batch.target[:2], batch.ids[:2], 2)

        gradients: list[list[torch.Tensor]] = []

        class Look(Hook):
            def on_backward(self, run: Any, phase: Any, out: StepOutput) -> None:
                gradients.append([p.grad.clone() for p in run.task.model.parameters()])
                loss = run.task.loss(run.task.model.eval()(self.batch.input), self.batch.target)
                self.expected = torch.autograd.grad(loss, list(run.task.model.parameters()))
                run.stop("enough")

            def on_batch(self, run: Any, phase: Any, batch: Batch) -> None:
                self.batch = batch

        look = Look()
        engine({"half": Half(), "look": look}, "MODEL.dropout=0.0").run()
        for one, other in zip(gradients[0], look.expected, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.feature("39", "functions as hooks", '`@on("step", every=100)`')
    def test_on_makes_a_hook_from_a_function(self) -> None:
        seen: list[int] = []

        @on("step", every=2)
        def look(run: Any, phase: Any, out: Any) -> None:
            """Look now and then."""
            if phase.is_train:
                seen.append(run.state.updates)

        assert (type(look).__name__, type(look).__doc__) == ("look", "Look now and then.")
        engine({"look": look}).run()
        assert seen == [2, 4, 6]

    @pytest.mark.parametrize(
        ("event", "every"), [("stepp", 1), ("step", 0), ("close", 1), ("on_step", 1)]
    )
    def test_on_rejects_unknown_events_and_intervals(self, event: str, every: int) -> None:
        with pytest.raises(ValueError, match=rf"^on\('{event}', every={every}\): "):
            on(event, every=every)


class TestStepStart:
    @pytest.mark.feature("29-33")
    def test_it_comes_before_the_data_of_the_step_is_read(self) -> None:
        order: list[str] = []

        class Look(Hook):
            def on_step_start(self, run: Any, phase: Any) -> None:
                order.append(f"start {phase.split} {run.state.step}")

        made = engine({"look": Look()}, "PHASES.epochs=1", "PHASES.limit={train: 2, test: 1}")
        for split, loader in made.task.parts.loaders.items():
            reader = loader.reader
            loader.reader = Noting(reader, lambda name=split: order.append(f"read {name}"))
        made.run()
        assert order == [
            *("start train 0", "read train", "start train 1", "read train"),
            *("start test 0", "read test"),
        ]


class TestAddedHooks:
    class Adds(Hook):
        """Adds a hook after some updates, and again after a resume."""

        def __init__(self, hook: Hook, updates: int = 2) -> None:
            self.hook = hook
            self.updates = updates

        def on_start(self, run: Any) -> None:
            if run.state.updates >= self.updates:
                run.hooks.add("added", self.hook)

        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == self.updates and "added" not in run.hooks.by_label:
                run.hooks.add("added", self.hook)

    class Counter(Hook):
        def __init__(self) -> None:
            self.steps = 0

        def on_step(self, run: Any, phase: Any, out: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = state["steps"]

    def test_added_hook_gets_its_start_and_the_events_that_follow(self) -> None:
        hooks, events = recorded("added")
        added = hooks["added"]
        engine({"adds": self.Adds(added)}, "PHASES.epochs=1", "PHASES.limit.test=1").run()
        assert events[:4] == [
            "added.start 0.2 2", "added.step_start 0.2 2", "added.batch 0.2 2", "added.output 0.2 2",
        ]  # fmt: skip
        assert events[-1] == "added.end 2.0 3"

    @pytest.mark.feature(
        "hooks.added", "hooks added while a run is going, with their state", "`run.hooks.add`"
    )
    def test_state_is_saved_and_restored_when_the_hook_is_added_again(self) -> None:
        counter = self.Counter()
        first = engine({"adds": self.Adds(counter)}, "PHASES.epochs=1")
        first.run()
        saved = first.hooks.state_dict()
        assert saved["added"] == {"steps": counter.steps}
        again = self.Counter()
        second = engine({"adds": self.Adds(again, 0)}, "PHASES.epochs=1", state=RunState(2, 0, 3))
        second.hooks.load_state_dict(saved)
        second.run()
        assert again.steps == counter.steps

    def test_hook_that_is_not_added_again_is_reported_and_keeps_its_state(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = engine({"adds": self.Adds(self.Counter())}, "PHASES.epochs=1")
        first.run()
        second = engine({}, "PHASES.epochs=1")
        second.hooks.load_state_dict(first.hooks.state_dict())
        second.run()
        assert [record.args for record in caplog.records] == [("added",)]
        assert second.hooks.state_dict() == first.hooks.state_dict()

    def test_label_of_another_hook_is_rejected(self) -> None:
        hooks = Hooks({"a": Hook()})
        with raises(ConfigError, code="config.conflict"):
            hooks.add("a", Hook())

    def test_state_that_cannot_be_saved_is_rejected_at_once(self) -> None:
        class Odd(Hook):
            def state_dict(self) -> dict[str, Any]:
                return {"value": object()}

        with raises(ConfigError, code="checkpoint.not_encodable"):
            Hooks().add("odd", Odd())


class TestStopping:
    @pytest.mark.parametrize(
        ("updates", "position"), [(2, (0, 2, 2)), (3, (0, 3, 3)), (4, (2, 1, 4))]
    )
    def test_stop_in_a_train_phase_ends_the_run(
        self, updates: int, position: tuple[int, int, int]
    ) -> None:
        @on("step")
        def stop(run: Any, phase: Any, out: Any) -> None:
            if run.state.updates == updates:
                run.stop("enough")
                run.stop("another reason")

        state = engine({"stop": stop}).run()
        assert (state.phase, state.step, state.updates) == position
        assert state.finished == "enough"

    def test_stop_in_a_test_phase_ends_the_run(self) -> None:
        @on("step")
        def stop(run: Any, phase: Any, out: Any) -> None:
            if not phase.is_train:
                run.stop("enough")

        state = engine({"stop": stop}).run()
        assert (state.phase, state.step, state.updates) == (1, 1, 3)

    def test_interrupted_run_is_not_finished(self) -> None:
        @on("phase_end")
        def stop(run: Any, phase: Any, metrics: Any) -> None:
            run.stop("SIGTERM", interrupted=True)

        made = engine({"stop": stop})
        state = made.run()
        assert (state.phase, state.step, state.finished) == (1, 0, "")
        assert (made.stopping, made.consensus.interrupted) == ("SIGTERM", True)

    def test_stop_of_another_rank_at_the_end_of_a_phase_takes_effect_there(self) -> None:
        class AskedElsewhere(Consensus):
            def agree(self, *, wait: bool = False, pause: str = "") -> bool:
                if wait:  # without waiting, the request is received one step later
                    self.stopping = "enough"
                return bool(self.stopping)

        made = engine()
        made.consensus = AskedElsewhere(World())
        state = made.run()
        assert (state.phase, state.step, state.finished) == (1, 0, "enough")

    def test_run_to_the_end_is_completed(self) -> None:
        state = engine().run()
        assert state == RunState(phase=4, step=0, updates=6, samples=24, finished="completed")

    @pytest.mark.parametrize("split", ["train", "test"])
    def test_phase_that_ends_early_is_rejected(self, split: str) -> None:
        made = engine()
        whole = made.task.batches

        def end_early(phase: Any, start: int) -> Any:
            return islice(whole(phase, start), phase.steps - (phase.split == split))

        made.task.batches = end_early
        with raises(ConfigError, code="task.wrong_steps", key="TASK.name"):
            made.run()
        assert not made.state.finished

    def test_run_of_0_epochs_is_completed(self) -> None:
        hooks, events = recorded("a")
        state = engine(hooks, "PHASES.epochs=0").run()
        assert (state.finished, events) == ("completed", ["a.start 0.0 0", "a.end 0.0 0"])


class TestErrors:
    @pytest.mark.feature(
        "36", "all hooks see an exception; the first cause is raised", "`on_exception`, `close`"
    )
    def test_every_hook_gets_the_exception_and_the_first_error_is_raised(self) -> None:
        hooks, events = recorded("a")

        class Failing(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                raise RuntimeError("first")

            def on_exception(self, run: Any, error: BaseException) -> None:
                raise ValueError("second")

        with pytest.raises(RuntimeError, match=r"^first\n") as caught:
            engine({**hooks, "failing": Failing()}).run()
        assert events[-1] == "a.exception 0.1 1"
        assert vars(caught.value)["__notes__"] == ["while hooks handled it, ValueError: second"]

    @pytest.mark.parametrize(
        ("raised", "expected"), [(SystemExit, ExitCallError), (SignalExit, SignalExit)]
    )
    def test_exit_reaches_hooks_as_an_error_unless_a_signal_asked_for_it(
        self, raised: type[SystemExit], expected: type[BaseException]
    ) -> None:
        seen: list[type[BaseException]] = []

        class Leaving(Hook):
            def on_step(self, run: Any, phase: Any, out: Any) -> None:
                raise raised(0)

            def on_exception(self, run: Any, error: BaseException) -> None:
                seen.append(type(error))

        with pytest.raises(expected):
            engine({"leaving": Leaving()}).run()
        assert seen == [expected]

    @pytest.mark.parametrize("error", [None, KeyboardInterrupt, ZeroDivisionError])
    def test_close_is_always_called_in_reverse_order(
        self, error: type[BaseException] | None
    ) -> None:
        closed: list[str] = []

        class Closing(Hook):
            def __init__(self, label: str) -> None:
                self.label = label

            def on_phase_start(self, run: Any, phase: Any) -> None:
                if error is not None:
                    raise error

            def close(self) -> None:
                closed.append(self.label)

        made = engine({"a": Closing("a"), "b": Closing("b")})
        made.task.close = lambda: closed.append("task")  # type: ignore[method-assign]
        if error is None:
            made.run()
        else:
            with pytest.raises(error):
                made.run()
        assert closed == ["b", "a", "task"]

    def test_other_hooks_are_closed_when_one_fails_to_close(self) -> None:
        closed: list[str] = []

        class Closing(Hook):
            def __init__(self, label: str) -> None:
                self.label = label

            def close(self) -> None:
                closed.append(self.label)
                if self.label == "b":
                    raise OSError("no space")

        made = engine({label: Closing(label) for label in "abc"})
        made.task.close = lambda: closed.append("task")  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no space"):
            made.run()
        assert closed == ["c", "b", "a", "task"]


class TestCustomLoop:
    def test_custom_loop_is_bit_identical_with_the_same_events(self) -> None:
        hooks, events = recorded("a")
        (ours := engine(hooks)).run()
        others, heard = recorded("a")
        own = engine(others)
        for batches in own.steps():
            own.finish(own.task.train_step(batches, own.position(), own.events()))
        assert hash_model(own.task.model) == hash_model(ours.task.model)
        assert heard == events
        assert own.state == ours.state

    def test_step_without_finish_is_rejected(self) -> None:
        with pytest.raises(RuntimeError, match=r"step 1: call engine\.finish\(out\)"):
            for _ in engine().steps():
                pass

    def test_leaving_the_loop_closes_hooks(self) -> None:
        closed: list[str] = []

        class Closing(Hook):
            def close(self) -> None:
                closed.append("hook")

        steps = engine({"a": Closing()}).steps()
        next(steps)
        steps.close()
        assert closed == ["hook"]

    def test_leaving_the_loop_after_a_step_counts_the_step(self) -> None:
        hooks, events = recorded("a")
        own = engine(hooks)
        for batches in own.steps():
            own.finish(own.task.train_step(batches, own.position(), own.events()))
            break
        assert own.state == RunState(step=1, updates=1, samples=4)
        assert (own.stopping, own.consensus.interrupted) == ("the loop was left", True)
        assert events[-2:] == ["a.step 0.1 1", "a.end 0.1 1"]

    @pytest.mark.parametrize("computed", [False, True])
    def test_leaving_the_loop_within_a_step_is_an_exception_for_hooks(self, computed: bool) -> None:
        hooks, events = recorded("a")
        own = engine(hooks)
        for number, batches in enumerate(own.steps()):
            if number == 1 and not computed:
                break
            out = own.task.train_step(batches, own.position(), own.events())
            if number == 1:
                break
            own.finish(out)
        assert own.state == RunState(step=1, updates=1, samples=4)
        assert events[-1] == "a.exception 0.1 1"

    def test_closing_the_engine_ends_an_open_loop(self) -> None:
        hooks, events = recorded("a")
        own = engine(hooks)
        steps = own.steps()
        next(steps)
        own.close()
        assert events[-1] == "a.exception 0.0 0"
        assert list(steps) == []
        engine().close()


def test_position_of_each_step() -> None:
    seen: list[tuple[Any, ...]] = []

    @on("batch")
    def look(run: Any, phase: Any, batch: Batch) -> None:
        seen.append(tuple(run.position()))

    engine({"look": look}).run()
    assert seen[:6] == [
        ("train", 0, 0, 0.0, 4, 0, 0.0, (0.0, 0.0)),
        ("train", 1, 1, 1 / 6, 4, 0, 1 / 6, (0.0, 0.0)),
        ("train", 2, 2, 2 / 6, 4, 0, 2 / 6, (0.0, 0.0)),
        ("test", 3, 0, 0.5, 3, 0, 0.5, None),
        ("test", 3, 1, 0.5, 2, 0, 0.5, None),
        ("train", 3, 0, 0.5, 4, 0, 0.5, (0.5, 0.5)),
    ]


@pytest.mark.parametrize(
    ("state", "begun"),
    [
        (RunState(), [0, 1]),
        (RunState(phase=0, step=1, updates=1, samples=4), [1]),
        (RunState(phase=2, step=0, updates=2, samples=8), [1]),
        (RunState(phase=3, step=0, updates=3, samples=12), [1]),
    ],
)
def test_epoch_that_has_begun_does_not_begin_again_in_a_resume(
    state: RunState, begun: list[int]
) -> None:
    made = engine(None, "PHASES.test_every={epochs: null, updates: 2}", state=state)
    seen: list[int] = []
    made.task.begin_epoch = lambda phase: seen.append(phase.epoch)  # type: ignore[method-assign]
    made.run()
    assert seen == begun


def test_resume_from_a_position_reads_the_same_batches() -> None:
    def ids(made: PhaseEngine) -> list[list[int]]:
        found: list[list[int]] = []

        @on("batch")
        def look(run: Any, phase: Any, batch: Batch) -> None:
            found.append(batch.ids.tolist())

        made.hooks = Hooks({"look": look}, World())
        made.run()
        return found

    whole = ids(engine())
    assert len(whole) == 10
    assert ids(engine(state=RunState(phase=0, step=2, updates=2, samples=8))) == whole[2:]
    assert ids(engine(state=RunState(phase=1, step=1, updates=3, samples=12))) == whole[4:]
    assert ids(engine(state=RunState(phase=0, step=3, updates=3, samples=12))) == whole[3:]
