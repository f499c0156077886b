"""Small custom parts as source code: 61 that hold state which no checkpoint contains, and 49 that do
not, although they hold values."""

from dataclasses import dataclass, replace
from textwrap import dedent, indent

HEAD = """
import collections, copy, functools, itertools, os, pathlib, random
import numpy as np
import torch
from torch import nn
from phasetrain.hooks import Hook, on
from phasetrain.tasks import Supervised

def scale(run, factor):
    with torch.no_grad():
        for parameter in run.task.model.parameters():
            parameter.mul_(factor)

def stack(samples):
    inputs = torch.stack([value for value, _ in samples])
    return inputs, torch.tensor([int(target) for _, target in samples])
"""

COUNT_IN_A_DICT = """
self.x["n"] += 1
if self.x["n"] == 15: scale(run, 0.5)
"""


@dataclass(frozen=True)
class Part:
    """A custom part.

    Attributes:
        name: what it holds.
        source: of its module.
        words: overrides that use it; `{module}` is the name of the module.
        is_restored: the state is hidden, and a resume restores it nevertheless.
        is_missed: the state is hidden, and the watch is known not to find it.
    """

    name: str
    source: str
    words: tuple[str, ...]
    is_restored: bool = False
    is_missed: bool = False


def _body(text: str, levels: int) -> str:
    return indent(dedent(text).strip() or "pass", "    " * levels)


def hook(
    name: str, init: str, update: str, more: str = "", *, before: str = "", **flags: bool
) -> Part:
    """Return a hook whose `on_update` runs `update`."""
    source = f"""{HEAD}
{dedent(before)}
class H(Hook):
    def __init__(self):
{_body(init, 2)}

    def on_update(self, run, phase):
{_body(update, 2)}

{_body(more, 1)}
"""
    return Part(f"hook: {name}", source, ("+HOOKS.planted.name={module}.H",), **flags)


def task(
    name: str, init: str, forward: str, more: str = "", *, before: str = "", **flags: bool
) -> Part:
    """Return a task; `forward` may change `out`."""
    source = f"""{HEAD}
{dedent(before)}
class T(Supervised):
    def __init__(self, parts):
        super().__init__(parts)
{_body(init, 2)}

    def forward(self, batch):
        out = super().forward(batch)
        if not self.model.training:
            return out
{_body(forward, 2)}
        return out

{_body(more, 1)}
"""
    return Part(f"task: {name}", source, ("TASK.name={module}.T",), **flags)


def model(
    name: str, init: str, forward: str, more: str = "", *, before: str = "", **flags: bool
) -> Part:
    """Return a linear model; `forward` may change `y`, and runs in training."""
    source = f"""{HEAD}
{dedent(before)}
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
{_body(init, 2)}

    def forward(self, x):
        y = self.layer(x.flatten(1))
        if self.training:
{_body(forward, 3)}
        return y

{_body(more, 1)}
"""
    words = ("~MODEL.width", "~MODEL.dropout", "MODEL.name={module}.M")
    return Part(f"model: {name}", source, words, **flags)


def loss(
    name: str, init: str, forward: str, more: str = "", *, before: str = "", **flags: bool
) -> Part:
    """Return a loss; `forward` may change `loss`."""
    source = f"""{HEAD}
{dedent(before)}
class L(nn.CrossEntropyLoss):
    def __init__(self):
        super().__init__()
{_body(init, 2)}

    def forward(self, output, target):
        loss = super().forward(output, target)
        if self.training:
{_body(forward, 3)}
        return loss

{_body(more, 1)}
"""
    return Part(f"loss: {name}", source, ("LOSS.name={module}.L",), **flags)


def code(name: str, source: str, *words: str, **flags: bool) -> Part:
    """Return any other part."""
    return Part(name, HEAD + dedent(source), words, **flags)


STATE = """
def state_dict(self):
    return {"x": self.x}

def load_state_dict(self, state):
    self.x = state["x"]
"""
EXTRA = """
def get_extra_state(self):
    return torch.tensor(self.x)

def set_extra_state(self, state):
    self.x = int(state)
"""
TARGET = (
    "self.target = copy.deepcopy(self.model).eval(); self.n = torch.zeros((), dtype=torch.long)"
)
COUNTED = 'self.register_buffer("count", torch.zeros((), dtype=torch.long))'
FUNCTION = ("LOSS.name={module}.f",)
COLLATE = ("+DATA.TRAIN.collate={{name: {module}.C}}",)
CROSS = "nn.functional.cross_entropy(output, target)"

SCALED = """
class L(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = 1.0

    def forward(self, output, target):
        return self.weight * nn.functional.cross_entropy(output, target)
"""

MEMORY = """
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def add(self, value):
        self.mean.lerp_(value.detach().float().mean(), 0.1)
        return self.mean
"""

HIDDEN = (
    # Hooks do not take part in the rehearsal.
    hook(
        "a counter halves the weights at update 15",
        "self.n = 0",
        """
        self.n += 1
        if self.n == 15: scale(run, 0.5)""",
    ),
    hook(
        "a list of losses",
        "self.x = []",
        """
        self.x.append(run.state.updates)
        if len(self.x) == 15: scale(run, 0.5)""",
    ),
    hook(
        "a dict of counts",
        "self.x = collections.defaultdict(int)",
        COUNT_IN_A_DICT,
    ),
    hook(
        "a NumPy generator seeded late",
        "self.rng = None",
        """
        if run.state.updates == 9: self.rng = np.random.default_rng(0)
        if self.rng is not None: scale(run, self.rng.uniform(0.99, 1))""",
    ),
    hook(
        "a generator of torch",
        "self.g = torch.Generator().manual_seed(0)",
        """
        scale(run, 1 - 0.01 * float(torch.rand((), generator=self.g)))""",
    ),
    hook(
        "a copy of the model made at update 15",
        "self.old = None",
        """
        if run.state.updates == 15: self.old = copy.deepcopy(run.task.model)
        if run.state.updates == 27:
            run.task.model.load_state_dict(self.old.state_dict())""",
    ),
    hook(
        "an average of the weights",
        "self.x = None",
        """
        weight = next(run.task.model.parameters()).detach()
        self.x = weight.clone() if self.x is None else self.x.lerp(weight, 0.1)
        if run.state.updates == 27: next(run.task.model.parameters()).data.copy_(self.x)""",
    ),
    hook("an iterator", "self.x = itertools.cycle([1, 0.99, 0.98])", "scale(run, next(self.x))"),
    hook(
        "a Python generator",
        "self.x = (0.9 + 0.001 * n for n in range(99))",
        "scale(run, next(self.x))",
    ),
    hook(
        "an object with a counter",
        "self.x = Tracker()",
        """
        self.x.n += 1
        if self.x.n == 15: scale(run, 0.5)""",
        before="class Tracker:\n    def __init__(self): self.n = 0",
    ),
    hook(
        "a class attribute",
        "pass",
        """
        H.n += 1
        if H.n == 15: scale(run, 0.5)""",
        "n = 0",
    ),
    code(
        "hook: a variable of a closure",
        """
        def make():
            n = 0
            class H(Hook):
                def on_update(self, run, phase):
                    nonlocal n
                    n += 1
                    if n == 15: scale(run, 0.5)
            return H
        H = make()
        """,
        "+HOOKS.planted.name={module}.H",
    ),
    hook(
        "weights frozen at update 15",
        "pass",
        """
        if run.state.updates == 15: next(run.task.model.parameters()).requires_grad_(False)""",
        is_restored=True,
    ),
    hook(
        "eval mode left on at update 15",
        "pass",
        """
        if run.state.updates == 14: run.task.model.eval()""",
        is_restored=True,
    ),
    hook(
        "a forward hook registered at update 15",
        "pass",
        """
        if run.state.updates == 15:
            run.task.model.register_forward_hook(lambda module, inputs, out: out * 0.5)""",
    ),
    hook(
        "an option of a dropout changed at update 15",
        "pass",
        """
        for module in run.task.model.modules():
            if isinstance(module, nn.Dropout) and run.state.updates == 15: module.p = 0.5""",
    ),
    task(
        "a target network synced every 30 updates",
        TARGET,
        """
        self.n += 1
        if self.n % 30 == 0: self.target.load_state_dict(self.model.state_dict())
        out.loss = out.loss + 0.1 * (self.target(batch.input) - out.output).square().mean()""",
        'def stateful(self):\n    return super().stateful() | {"n": N(self)}',
        before="""
            class N:
                def __init__(self, task): self.task = task
                def state_dict(self): return {"n": self.task.n.clone()}
                def load_state_dict(self, state): self.task.n.copy_(state["n"])
            """,
    ),
    task(
        "a target network synced through `.data`",
        TARGET,
        """
        self.n += 1
        if self.n % 15 == 0:
            for mine, other in zip(self.target.parameters(), self.model.parameters()):
                mine.data.copy_(other.data)
        out.loss = out.loss + 0.1 * (self.target(batch.input) - out.output).square().mean()""",
    ),
    task(
        "a counter acts at update 15",
        "self.n = 0",
        """
        self.n += 1
        if self.n >= 15: out.loss = out.loss * 0.5""",
    ),
    task(
        "a replay buffer",
        "self.x = []",
        """
        self.x.append(batch.input[:1])
        if len(self.x) > 15: out.loss = out.loss + self.model(self.x[-15]).square().mean()""",
    ),
    task(
        "an optimizer of a private weight",
        """
        self.w = torch.zeros((), requires_grad=True)
        self.opt = torch.optim.Adam([self.w], 0.1)""",
        """
        self.opt.zero_grad(); (self.w - out.loss.detach()).square().backward(); self.opt.step()
        out.loss = out.loss * (1 + 0.01 * self.w.detach())""",
    ),
    task(
        "an array that is filled slowly",
        "self.x = np.zeros(50000)",
        """
        n = int(np.count_nonzero(self.x))
        self.x[n] = float(out.loss.detach())
        if n > 15: out.loss = out.loss * (1 + self.x[n - 15])""",
    ),
    task(
        "the previous loss",
        "self.x = 0.0",
        """
        now = out.loss.detach()
        out.loss = out.loss * (1 + 0.1 * (now > self.x))
        self.x = now""",
    ),
    task(
        "the best loss",
        "self.x = 100.0",
        """
        self.x = min(self.x, float(out.loss.detach()))
        if self.x < 0.5: out.loss = out.loss * 0.5""",
    ),
    model(
        "a counter",
        "self.n = 0",
        """
        self.n += 1
        y = y * (1 + (self.n > 15))""",
    ),
    model(
        "a buffer with persistent=False",
        'self.register_buffer("m", torch.zeros(10), persistent=False)',
        """
        self.m.lerp_(y.detach().mean(0), 0.1)
        y = y - self.m""",
    ),
    model(
        "a private generator",
        "self.g = torch.Generator().manual_seed(0)",
        "y = y + torch.rand(y.shape, generator=self.g)",
    ),
    model(
        "a flag set late, by a saved count",
        f"self.late = False; {COUNTED}",
        """
        self.count += 1
        if self.count == 15: self.late = True
        if self.late: y = y * 2""",
    ),
    model(
        "a queue of tensors",
        "self.x = []",
        """
        self.x = [*self.x[-20:], y.detach().mean()]
        y = y * (1 + 0.01 * len(self.x))""",
    ),
    loss(
        "a module global",
        "pass",
        """
        global N
        N += 1
        if N > 15: loss = loss * 2""",
        before="N = 0",
    ),
    loss("an iterator", "self.x = iter([1.0] * 15 + [2.0] * 500)", "loss = loss * next(self.x)"),
    loss(
        "what lru_cache has kept",
        "pass",
        """
        LAST[0] = float(loss.detach())
        loss = loss * (1 + kept())""",
        before="""
            LAST = [0.0]
            @functools.lru_cache
            def kept(): return LAST[0]
            """,
    ),
    code(
        "loss: a default argument",
        f"""
        def f(output, target, state={{"n": 0}}):
            state["n"] += 1
            return {CROSS} * (1 + (state["n"] > 15))
        """,
        *FUNCTION,
        "~METERS",
    ),
    code(
        "loss: an attribute of the function",
        f"""
        def f(output, target):
            f.n += 1
            return {CROSS} * (1 + (f.n > 15))
        f.n = 0
        """,
        *FUNCTION,
    ),
    code(
        "optimizer: a count of its steps",
        """
        class O(torch.optim.SGD):
            def __init__(self, params, lr):
                super().__init__(params, lr=lr)
                self.t = 0
            def step(self, closure=None):
                self.t += 1
                if self.t > 15:
                    for group in self.param_groups: group["lr"] *= 0.5
                return super().step(closure)
        """,
        "OPTIMIZER={{name: {module}.O, lr: 0.1}}",
    ),
    code(
        "collate: a count of its calls",
        """
        class C:
            def __init__(self): self.n = 0
            def __call__(self, samples):
                self.n += 1
                if self.n > 40: samples = samples[::-1]
                return stack(samples)
        """,
        *COLLATE,
    ),
    hook(
        "a file",
        "pass",
        """
        path = pathlib.Path(run.folder.path) / "n"
        path.write_text(str(int(path.read_text() if path.exists() else 0) + 1))
        if path.read_text() == "15": scale(run, 0.5)""",
        is_missed=True,
    ),
    hook(
        "an environment variable",
        "pass",
        """
        n = os.environ["N_PLANTED"] = str(int(os.environ.get("N_PLANTED", 0)) + 1)
        if n == "15": scale(run, 0.5)""",
        is_missed=True,
    ),
    hook(
        "a counter of a hook that claims to observe",
        "self.n = 0",
        """
        self.n += 1
        if self.n == 15: scale(run, 0.5)""",
        "observe_only = True",
        is_missed=True,
    ),
    hook(
        "a dict that only grows",
        "self.x = {}",
        """
        self.x[run.state.updates] = 1
        if len(self.x) == 15: scale(run, 0.5)""",
        is_missed=True,
    ),
    replace(
        hook(
            "an attribute of the loss that is set after each update",
            "pass",
            "run.task.loss.weight = 1 / (1 + run.state.updates)",
            before=SCALED,
        ),
        words=("+HOOKS.planted.name={module}.H", "LOSS.name={module}.L"),
    ),
    hook(
        "an option of the default loss changed at the end of a phase",
        "pass",
        "pass",
        """
        def on_phase_end(self, run, phase, metrics):
            if phase.index == 0: run.task.loss.label_smoothing = 0.5""",
    ),
    replace(
        hook(
            "an option of a subclass of a loss of torch set after each update",
            "pass",
            "run.task.loss.label_smoothing = 1 / (2 + run.state.updates)",
            before="class L(nn.CrossEntropyLoss): pass",
        ),
        words=("+HOOKS.planted.name={module}.H", "LOSS.name={module}.L"),
    ),
    hook(
        "a counter on the default task",
        "pass",
        """
        run.task.planted += 1
        if run.task.planted == 15: scale(run, 0.5)""",
        "def on_start(self, run): run.task.planted = 0",
    ),
    hook(
        "a list with a local name",
        "self.x = []",
        """
        x = self.x
        x.append(1)
        if len(x) == 15: scale(run, 0.5)""",
    ),
    hook(
        "a dict with a local name",
        'self.x = {"n": 0}',
        """
        x = self.x
        x["n"] += 1
        if x["n"] == 15: scale(run, 0.5)""",
    ),
    hook(
        "a list that a function extends",
        "self.x = []",
        """
        push(self.x, 1)
        if len(self.x) == 15: scale(run, 0.5)""",
        before="def push(values, value): values.append(value)",
    ),
    hook(
        "a list that gets shorter",
        "self.x = [1] * 99",
        """
        self.x.pop()
        if len(self.x) == 84: scale(run, 0.5)""",
    ),
    hook(
        "a subclass of dict",
        "self.x = Counts(n=0)",
        COUNT_IN_A_DICT,
        before="class Counts(dict): pass",
    ),
    hook(
        "a bytearray",
        "self.x = bytearray(1)",
        """
        self.x[0] += 1
        if self.x[0] == 15: scale(run, 0.5)""",
    ),
    hook(
        "an attribute by its name in a text",
        "self.n = 0",
        """
        setattr(self, "n", getattr(self, "n") + 1)
        if getattr(self, "n") == 15: scale(run, 0.5)""",
        is_missed=True,
    ),
    hook(
        "another `forward` of the model at update 15",
        "pass",
        """
        if run.state.updates == 15:
            forward = run.task.model.forward
            run.task.model.forward = lambda x: forward(x) * 0.5""",
    ),
    replace(
        hook(
            "an attribute that is set at the start of one phase",
            "pass",
            "pass",
            """
            def on_phase_start(self, run, phase):
                if phase.index == 0: run.task.loss.weight = 0.5""",
            before=SCALED,
        ),
        words=("+HOOKS.planted.name={module}.H", "LOSS.name={module}.L"),
    ),
    # Modules whose buffers are persistent, in no `state_dict` that a checkpoint contains.
    task(
        "a module with a buffer",
        "self.memory = Memory()",
        "out.loss = out.loss * (1 + self.memory.add(out.output))",
        before=MEMORY,
    ),
    task(
        "a module whose buffer is assigned",
        "self.memory = Memory()",
        """
        self.memory.mean = 0.9 * self.memory.mean + 0.1 * out.output.detach().mean()
        out.loss = out.loss * (1 + self.memory.mean)""",
        before=MEMORY,
    ),
    task(
        "a target network of a custom class",
        "self.target = Net()",
        """
        with torch.no_grad():
            for mine, other in zip(self.target.parameters(), self.model.parameters()):
                mine.lerp_(other.mean(), 0.1)
        out.loss = out.loss + 0.1 * (self.target(batch.input) - out.output).square().mean()""",
        before="""
            class Net(nn.Sequential):
                def __init__(self): super().__init__(nn.Flatten(), nn.Linear(64, 10))
            """,
    ),
    hook(
        "a module with a buffer",
        "self.memory = Memory()",
        "scale(run, 1 - 0.01 * self.memory.add(next(run.task.model.parameters())))",
        before=MEMORY,
    ),
    loss(
        "a module in a list",
        "self.memories = [Memory()]",
        "loss = loss * (1 + self.memories[0].add(output))",
        before=MEMORY,
    ),
    code(
        "loss: a module as a global variable",
        f"""
        {indent(MEMORY, " " * 8).strip()}

        MEMORY = Memory()
        def f(output, target):
            return {CROSS} * (1 + MEMORY.add(output))
        """,
        *FUNCTION,
    ),
    code(
        "meter: a module in a list",
        f"""
        {indent(MEMORY, " " * 8).strip()}
        from phasetrain.meters import Meter

        class M(Meter):
            def __init__(self):
                super().__init__()
                self.memories = [Memory()]
                self.add_sum("total")
            def update(self, out):
                self.total += out.output.mean() + self.memories[0].add(out.output)
            def compute(self):
                return {{"shift": float(self.total)}}
        """,
        "METERS={{own: {{name: {module}.M}}}}",
    ),
    code(
        "collate: a module with a buffer",
        f"""
        {indent(MEMORY, " " * 8).strip()}

        class C:
            def __init__(self): self.memory = Memory()
            def __call__(self, samples):
                inputs, targets = stack(samples)
                return inputs + self.memory.add(inputs), targets
        """,
        *COLLATE,
    ),
)

WEIGHTS = """
def make():
    factor = 1.5
    def f(output, target):
        return factor * nn.functional.cross_entropy(output, target)
    return f
f = make()
"""

CLEAN = (
    replace(
        hook(
            "an attribute of the loss that is set before each step",
            "pass",
            "self.shown = run.task.loss.weight",
            """
            def on_step_start(self, run, phase):
                run.task.loss.weight = 1 / (1 + run.state.updates)""",
            before=SCALED,
        ),
        words=("+HOOKS.planted.name={module}.H", "LOSS.name={module}.L"),
    ),
    replace(
        hook(
            "an attribute of the loss that is set at the start of all later phases",
            "pass",
            "pass",
            """
            def on_phase_start(self, run, phase):
                if phase.index >= 1: run.task.loss.weight = 0.5""",
            before=SCALED,
        ),
        words=("+HOOKS.planted.name={module}.H", "LOSS.name={module}.L"),
    ),
    hook(
        "a value that is set at the start of each train phase",
        "self.x = 1",
        "scale(run, 1 - 1e-5 * self.x)",
        """
        def on_phase_start(self, run, phase):
            if phase.is_train: self.x = phase.index""",
    ),
    hook(
        "an option set before each step",
        "pass",
        "pass",
        """
        def on_step_start(self, run, phase):
            run.task.loss.label_smoothing = 1 / (2 + run.state.updates)""",
    ),
    hook(
        "an option set at the start of each phase",
        "pass",
        "pass",
        """
        def on_phase_start(self, run, phase):
            run.task.loss.label_smoothing = 1 / (2 + phase.index)""",
    ),
    hook(
        "entries with a local name",
        "self.x = {}",
        """
        x = self.x
        x["n"] = run.state.updates
        scale(run, 1 - 1e-5 * self.x["n"])""",
    ),
    hook(
        "random numbers outside of steps",
        "pass",
        "pass",
        """
        def on_phase_end(self, run, phase, metrics):
            scale(run, 1 - 0.1 * random.random())""",
    ),
    # Hooks that keep their state, in all the ways that there are.
    hook(
        "a saved counter",
        "self.x = 0",
        """
        self.x += 1
        if self.x == 15: scale(run, 0.5)""",
        STATE,
    ),
    hook(
        "a saved list",
        "self.x = []",
        """
        self.x.append(run.state.updates)
        if len(self.x) == 15: scale(run, 0.5)""",
        STATE,
    ),
    hook(
        "a saved dict",
        'self.x = {"n": 0}',
        COUNT_IN_A_DICT,
        STATE,
    ),
    hook(
        "a saved deque",
        "self.x = collections.deque(maxlen=5)",
        """
        self.x.append(run.state.updates)
        scale(run, 1 - 0.001 * len(self.x))""",
        """
        def state_dict(self):
            return {"x": list(self.x)}
        def load_state_dict(self, state):
            self.x.extend(state["x"])""",
    ),
    hook(
        "a saved tensor",
        "self.x = torch.zeros(())",
        """
        self.x += 1
        scale(run, 1 - 0.0001 * float(self.x))""",
        STATE,
    ),
    hook(
        "a saved array",
        "self.x = np.zeros(3)",
        """
        self.x += 1
        scale(run, 1 - 0.0001 * float(self.x[0]))""",
        """
        def state_dict(self):
            return {"x": self.x.tolist()}
        def load_state_dict(self, state):
            self.x = np.array(state["x"])""",
    ),
    hook(
        "a saved object",
        "self.t = Tracker()",
        """
        self.t.n += 1
        if self.t.n == 15: scale(run, 0.5)""",
        """
        def state_dict(self):
            return {"n": self.t.n}
        def load_state_dict(self, state):
            self.t.n = state["n"]""",
        before="class Tracker:\n    def __init__(self): self.n = 0",
    ),
    hook(
        "a saved generator of torch",
        "self.g = torch.Generator().manual_seed(0)",
        "scale(run, 1 - 0.01 * float(torch.rand((), generator=self.g)))",
        """
        def state_dict(self):
            return {"g": self.g.get_state()}
        def load_state_dict(self, state):
            self.g.set_state(state["g"])""",
    ),
    hook(
        "a saved copy of the model",
        "self.old = None",
        """
        if self.old is None: self.old = copy.deepcopy(run.task.model)
        for mine, other in zip(self.old.parameters(), run.task.model.parameters()):
            mine.data.lerp_(other.data, 0.1)""",
        """
        def state_dict(self):
            return {} if self.old is None else {"old": self.old.state_dict()}
        def on_start(self, run):
            self.old = copy.deepcopy(run.task.model)
            if self.saved: self.old.load_state_dict(self.saved)
            self.saved = None
        saved = None
        def load_state_dict(self, state):
            self.saved = state.get("old")""",
    ),
    hook(
        "what depends on the position",
        "self.where = 0",
        """
        self.where = run.state.updates
        scale(run, 1 - 1e-5 * self.where)""",
    ),
    hook(
        "the time of the start",
        "pass",
        "scale(run, 1)",
        """
        def on_start(self, run):
            import time
            self.began = time.time()
        def on_end(self, run):
            self.seconds = self.began""",
    ),
    hook(
        "the phase",
        "pass",
        "scale(run, 1 - 1e-5 * self.phase)",
        """
        def on_phase_start(self, run, phase):
            self.phase = phase.index""",
    ),
    hook("a counter that nothing reads", "self.n = 0", "self.n += 1"),
    hook("a list that nothing reads", "self.x = []", "self.x.append(run.state.updates)"),
    hook(
        "a counter of a hook that observes",
        "self.n = 0",
        """
        self.n += 1
        if self.n == 15: print(self.n)""",
        "observe_only = True",
    ),
    hook(
        "a list that a resume computes again",
        "self.x = []",
        """
        self.x = list(range(run.state.updates)) + self.x[:0]
        scale(run, 1 - 1e-5 * len(self.x))""",
        'recomputed = ("x",)',
    ),
    hook(
        "modules frozen at each start of a phase",
        "pass",
        "pass",
        """
        def on_phase_start(self, run, phase):
            if phase.index >= 2: next(run.task.model.parameters()).requires_grad_(False)""",
    ),
    hook(
        "eval mode for the time of a call",
        "pass",
        """
        run.task.model.eval()
        run.task.model.train()""",
    ),
    hook(
        "the learning rate",
        "pass",
        """
        for group in run.task.updater.optimizer.param_groups: group["weight_decay"] = 1e-3""",
    ),
    # Tasks.
    task(
        "a target network in stateful()",
        "self.target = copy.deepcopy(self.model)",
        """
        for mine, other in zip(self.target.parameters(), self.model.parameters()):
            mine.data.lerp_(other.data, 0.1)
        out.loss = out.loss + 0.1 * (self.target(batch.input) - out.output).square().mean()""",
        'def stateful(self): return super().stateful() | {"target": self.target}',
    ),
    task(
        "a counter in stateful()",
        "self.c = C()",
        """
        self.c.n += 1
        if self.c.n > 15: out.loss = out.loss * 0.5""",
        'def stateful(self): return super().stateful() | {"c": self.c}',
        before="""
            class C:
                def __init__(self): self.n = 0
                def state_dict(self): return {"n": self.n}
                def load_state_dict(self, state): self.n = state["n"]""",
    ),
    task(
        "a frozen teacher",
        "self.teacher = copy.deepcopy(self.model).eval()",
        """
        out.loss = out.loss + 0.1 * (self.teacher(batch.input) - out.output).square().mean()""",
    ),
    task(
        "the last output",
        "self.last = None",
        """
        self.last = out.output
        out.loss = out.loss + self.penalty()""",
        "def penalty(self): return 1e-4 * self.last.square().mean()",
    ),
    task(
        "terms of the loss in a dict",
        "self.terms = {}",
        """
        self.terms["main"] = out.loss.detach()
        out.loss = out.loss + 0 * sum(self.terms.values())""",
    ),
    task(
        "aliases of the model",
        "self.net = self.model; self.weights = list(self.model.parameters())",
        "out.loss = out.loss + 1e-4 * self.weights[0].square().sum() + 0 * self.net.training",
    ),
    task(
        "a cache that grows",
        "self.masks = {}",
        """
        n = len(out.output)
        if n not in self.masks: self.masks[n] = torch.ones(n, 1)
        out.output = out.output * self.masks[n]""",
    ),
    task(
        "a module that an object saves",
        "self.memory = Memory(); self.keeper = Keeper(self.memory)",
        "out.loss = out.loss * (1 + self.memory.add(out.output))",
        'def stateful(self): return super().stateful() | {"keeper": self.keeper}',
        before=f"""
            {indent(MEMORY, " " * 12).strip()}

            class Keeper:
                def __init__(self, memory): self.kept = memory
                def state_dict(self): return {{"kept": self.kept.state_dict()}}
                def load_state_dict(self, state): self.kept.load_state_dict(state["kept"])""",
    ),
    task(
        "a module with a buffer that is computed again",
        "self.memory = Memory()",
        "out.loss = out.loss * (1 + 1e-9 * self.memory.add(out.output))",
        before=f"""
            {indent(MEMORY, " " * 12).strip()}
            Memory.recomputed = ("mean",)""",
    ),
    # Models.
    model(
        "a saved counter",
        "self.x = 0",
        """
        self.x += 1
        y = y * (1 + 0.01 * self.x)""",
        EXTRA,
    ),
    model(
        "a buffer",
        COUNTED,
        """
        self.count += 1
        y = y * (1 + 0.01 * self.count)""",
    ),
    model("batch norm", "self.norm = nn.BatchNorm1d(10)", "y = self.norm(y)"),
    model("spectral norm", "nn.utils.parametrizations.spectral_norm(self.layer)", "pass"),
    model(
        "a mask that is made when the size changes",
        "self.mask = None",
        """
        if self.mask is None or len(self.mask) != len(y): self.mask = torch.ones(len(y), 1)
        y = y * self.mask""",
    ),
    model(
        "a constant with persistent=False",
        'self.register_buffer("m", torch.ones(10), persistent=False)',
        "y = y * self.m",
    ),
    model(
        "a counter within a call",
        "self.n = 0",
        """
        self.n = 0
        for _ in range(len(x)): self.n += 1
        y = y * (1 + 1e-4 * self.n)""",
    ),
    model(
        "the last features",
        "self.features = None",
        """
        self.features = y.detach()
        y = y + 0 * self.mean()""",
        "def mean(self): return self.features.mean()",
    ),
    # Losses.
    loss(
        "a cached function",
        "pass",
        "loss = loss * factor() * power(len(target))",
        before="""
            @functools.lru_cache
            def factor(): return 1.5
            @functools.lru_cache
            def power(n): return 1.0 + n / 100""",
    ),
    loss(
        "a global cache",
        "pass",
        """
        if len(target) not in CACHE: CACHE[len(target)] = 1.5
        loss = loss * CACHE[len(target)]""",
        before="CACHE = {}",
    ),
    loss("a global constant", "self.w = TABLE", "loss = loss * self.w[1]", before="TABLE = [1, 2]"),
    code("loss: a closure over a constant", WEIGHTS, *FUNCTION),
    code(
        "optimizer: state of a parameter",
        """
        class O(torch.optim.SGD):
            def __init__(self, params, lr): super().__init__(params, lr=lr)
            def step(self, closure=None):
                for group in self.param_groups:
                    for weight in group["params"]:
                        state = self.state[weight]
                        state["n"] = state.get("n", 0) + 1
                return super().step(closure)
        """,
        "OPTIMIZER={{name: {module}.O, lr: 0.1}}",
    ),
    code(
        "collate: options",
        """
        class C:
            def __init__(self): self.scale = 1.0
            def __call__(self, samples):
                inputs, targets = stack(samples)
                return inputs * self.scale, targets
        """,
        *COLLATE,
    ),
)
