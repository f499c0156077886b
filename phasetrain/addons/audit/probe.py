"""Records the steps of a training script, from within its process.

The file is loaded by path (`site/sitecustomize.py`), in an environment that may have nothing but
torch. So it imports the standard library only, and torch once the script has imported it. It draws
no random numbers, changes no tensor and runs no kernel on a device that the script does not use.

Each process writes one JSON object per line to `trace-PID.jsonl`:

- `start`: version of torch, rank.
- `update`: one optimizer step, with the samples, losses, options and digests of the state.
- `epoch`: an iterator over a DataLoader is made; until the first update, with the digest of torch's
  generator.
- `save`, `load`, `file`: a checkpoint was written or read, or another file was written or renamed.
- `read`: a file that may be a checkpoint was opened before the first update.
- `stride`: how often the state is digested.
- `failed`: the recording itself has failed, and ended.
- `restore`: `load_state_dict` of a module, optimizer, schedule or scaler was called.
"""

import json
import math
import os
import random
import signal
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

FOLDER = "PHASETRAIN_AUDIT_FOLDER"
OPTIONS = "PHASETRAIN_AUDIT_OPTIONS"

LEADER = "leader"
"""File with the process group of the command."""

MEASURED = 8
"""Number of first updates whose cost decides how often the state is digested."""

SHARE = 0.03
"""Largest share of a step that the probe may take."""

SEEN = 512
"""Maximum number of values of a sample that are digested, spread over all of it."""

PATIENCE = 20.0
"""Seconds for which a rank waits for the others before a kill."""

REACHED = "reached-"
"""Beginning of the names of files by which ranks tell that they are to be killed."""

LISTED_LEAVES = 4000
"""Maximum number of values of a checkpoint that are recorded."""

FRAMEWORKS = (
    "phasetrain",
    "lightning",
    "pytorch_lightning",
    "ignite",
    "mmengine",
    "torchtitan",
    "transformers.trainer",
    "accelerate",
)
"""Modules whose import tells which framework trains; the first one counts. Others import the last
ones: MMEngine imports accelerate if it is installed."""

MODEL_FILES = (
    ".bin",
    ".ckpt",
    ".distcp",
    ".h5",
    ".npy",
    ".npz",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".safetensors",
    ".tar",
)
"""Endings of files that may be checkpoints."""


def start() -> None:
    """Begin to record, if this process was started by an audit.

    Processes of `multiprocessing` as well: a rank may be one. Records without updates are ignored.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    probe = Probe(folder, json.loads(os.environ.get(OPTIONS, "{}")))
    os.register_at_fork(after_in_child=probe.disable)
    after = {
        "torch": probe.install,
        "safetensors.torch": probe.wrap_safetensors,
        "torchdata.stateful_dataloader.stateful_dataloader": probe.wrap_stateful_loader,
        "torch.distributed.checkpoint.state_dict": probe.ignore_empty_step,
    }
    sys.meta_path.insert(0, _AfterImport(after))


class Probe:
    """Records one process.

    Args:
        folder: folder for the trace.
        options: `kill_at` and `stop_at` (numbers of updates), `kill_in_save` (number of a call of
            torch.save), `workers` (number of workers of each DataLoader), `every` (updates between
            two digests of the state).
    """

    def __init__(self, folder: str, options: Mapping[str, int]) -> None:
        self.folder = folder
        self.path = os.path.join(folder, f"trace-{os.getpid()}.jsonl")  # noqa: PTH118
        self.options = options
        self.every = options.get("every", 0)
        self.is_on = True
        self.updates = 0
        self.saves = 0
        self.depth = 0
        self.batches: deque[dict[str, Any]] = deque()
        self.used: list[dict[str, Any]] = []
        self.losses: list[list[Any]] = []
        self.generators: dict[str, int] | None = None
        self.roots: list[Any] = []
        self.optimizers: list[Any] = []
        self.scalers: list[Any] = []
        self.schedules: list[Any] = []
        self.is_stale = True  # the state has been loaded, or the process has just begun
        self.before: dict[int, dict[str, Any]] = {}  # by the number of an optimizer
        self.begins: dict[int, dict[str, Any]] = {}  # before the first step of a later optimizer
        self.stepped: set[int] = set()
        self.buffers: list[tuple[Any, int]] = []  # before each call until the first loss
        self._own = 0.0  # seconds of recording since the last update
        self._digests = 0.0
        self._ended = time.perf_counter()  # of the last update, or when the process began
        self._costs: list[tuple[float, float, float]] = []
        self._torch: Any = None
        self._descriptor = -1

    def disable(self) -> None:
        """Record nothing more: this is a forked child, such as a worker of a DataLoader."""
        self.is_on = False

    def write(self, kind: str, **content: Any) -> None:
        """Append an event; it survives a kill of the process."""
        if not self.is_on:
            return
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        line = json.dumps({"kind": kind, "after": self.updates, **content}, default=str)
        os.write(self._descriptor, line.encode() + b"\n")

    def record(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of the recording; an error ends the recording, not the script."""
        if not self.is_on:
            return
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - of any kind of tensor or file
            self.write("failed", error=f"{type(error).__name__}: {error}")
            self.is_on = False

    # Installation

    def install(self, torch: Any) -> None:
        """Wrap the functions of torch that a training calls."""
        if not self.is_on:
            return
        self._torch = torch
        self.write(
            "start",
            torch=torch.__version__,
            rank=os.environ.get("RANK", "0"),
            every=self.every,
        )
        from torch.optim import optimizer as optimizers

        optimizers.register_optimizer_step_pre_hook(
            lambda optimizer, args, kwargs: self.record(self._before_step, optimizer)
        )
        optimizers.register_optimizer_step_post_hook(
            lambda optimizer, args, kwargs: self.record(self._after_step, optimizer)
        )
        dataloader = torch.utils.data.dataloader
        self._wrap_loader(dataloader.DataLoader, dataloader._BaseDataLoaderIter)
        self._wrap_modules(torch.nn.Module)
        self._wrap_backward(torch)
        self._wrap_zero_grad(torch.optim.Optimizer)
        self._wrap_zero_grad(torch.nn.Module)
        self._wrap_restores(torch)
        self._wrap_files(torch)
        sys.addaudithook(self._on_audit_event)

    def wrap_stateful_loader(self, module: Any) -> None:
        """Record the loader of torchdata, which has its own iterators."""
        self._wrap_loader(module.StatefulDataLoader, module._StatefulBaseDataLoaderIter)

    def ignore_empty_step(self, module: Any) -> None:
        """Do not record the step without gradients and with a learning rate of 0 by which torch
        gives a new optimizer a state, before a distributed checkpoint is loaded."""
        make_state = module._init_optim_state

        def make_unrecorded(*args: Any, **kwargs: Any) -> Any:
            was_on, self.is_on = self.is_on, False
            try:
                return make_state(*args, **kwargs)
            finally:
                self.is_on = was_on

        module._init_optim_state = make_unrecorded

    def _wrap_loader(self, loader: Any, iterator: Any) -> None:
        next_index, next_batch, reset = iterator._next_index, iterator.__next__, iterator._reset
        make, make_iterator = loader.__init__, loader.__iter__

        def record_index(this: Any) -> Any:
            index = next_index(this)
            if self.is_on:
                this.__dict__.setdefault("_audit_indices", deque()).append(index)
            return index

        def record_batch(this: Any) -> Any:
            batch = next_batch(this)
            self.record(self._on_batch, this, batch)
            return batch

        def forget_indices(this: Any, *args: Any, **kwargs: Any) -> None:
            # Persistent workers: those of an epoch that was left early were read ahead.
            this.__dict__.pop("_audit_indices", None)
            reset(this, *args, **kwargs)

        def record_epoch(this: Any) -> Any:
            self.record(self._on_epoch, this, _place())
            return make_iterator(this)

        def change_workers(this: Any, *args: Any, **kwargs: Any) -> None:
            # DataLoader(dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, ...)
            if "workers" in self.options and len(args) < 6:
                _set_workers(kwargs, self.options["workers"])
            make(this, *args, **kwargs)

        iterator._next_index, iterator.__next__ = record_index, record_batch
        iterator._reset = forget_indices
        loader.__init__, loader.__iter__ = change_workers, record_epoch

    def _wrap_modules(self, module_class: Any) -> None:
        call = module_class.__call__

        def record_call(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self.depth or not self.is_on:
                return call(this, *args, **kwargs)
            self.depth = 1
            try:
                self.record(self._on_forward, this, args, kwargs)
                return call(this, *args, **kwargs)
            finally:
                self.depth = 0

        module_class.__call__ = record_call

    def _wrap_backward(self, torch: Any) -> None:
        backward = torch.Tensor.backward

        def record_backward(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.record(self._on_backward, this)
            return backward(this, *args, **kwargs)

        torch.Tensor.backward = record_backward

    def _wrap_zero_grad(self, owner: Any) -> None:
        zero_grad = owner.zero_grad

        def record_zero_grad(this: Any, *args: Any, **kwargs: Any) -> Any:
            result = zero_grad(this, *args, **kwargs)
            if self.losses:
                self.record(self._forget_passes)
            return result

        owner.zero_grad = record_zero_grad

    def _wrap_restores(self, torch: Any) -> None:
        scheduler = torch.optim.lr_scheduler.LRScheduler
        for name, owner in {
            "module": torch.nn.Module,
            "optimizer": torch.optim.Optimizer,
            "schedule": scheduler,
            "scaler": torch.amp.GradScaler,
        }.items():
            self._wrap_restore(name, owner)
        step = torch.amp.GradScaler.step
        make = scheduler.__init__
        make_optimizer = torch.optim.Optimizer.__init__

        def record_scaler(this: Any, *args: Any, **kwargs: Any) -> Any:
            _add(self.scalers, this)
            return step(this, *args, **kwargs)

        def record_schedule(this: Any, *args: Any, **kwargs: Any) -> None:
            _add(self.schedules, this)
            make(this, *args, **kwargs)

        def record_optimizer(this: Any, *args: Any, **kwargs: Any) -> None:
            _add(self.optimizers, this)
            make_optimizer(this, *args, **kwargs)

        torch.amp.GradScaler.step = record_scaler
        torch.optim.Optimizer.__init__ = record_optimizer
        scheduler.__init__ = record_schedule

    def _wrap_restore(self, name: str, owner: Any) -> None:
        load = owner.load_state_dict

        def record(this: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                self.is_stale = self.updates == 0
                self.write("restore", what=name, place=_place())
            return load(this, *args, **kwargs)

        owner.load_state_dict = record

    def _wrap_files(self, torch: Any) -> None:
        save, load = torch.save, torch.load
        storages = (torch.UntypedStorage, torch.storage.TypedStorage)

        def record_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            result = save(obj, f, *args, **kwargs)
            # pickle.dump of a tensor saves its storage this way, for example to send it to a rank.
            if not isinstance(obj, storages):
                self.record(self._on_save, f, obj)
            return result

        def record_load(f: Any, *args: Any, **kwargs: Any) -> Any:
            result = load(f, *args, **kwargs)
            if self.is_on:
                self.write("load", path=_path_of(f), place=_place())
            return result

        torch.save, torch.load = record_save, record_load
        torch.serialization.save, torch.serialization.load = record_save, record_load

    def wrap_safetensors(self, module: Any) -> None:
        """Record the files of safetensors."""
        save, load = module.save_file, module.load_file

        def record_save(tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> Any:
            result = save(tensors, filename, *args, **kwargs)
            self.record(self._on_save, filename, tensors)
            return result

        def record_load(filename: Any, *args: Any, **kwargs: Any) -> Any:
            result = load(filename, *args, **kwargs)
            if self.is_on:
                self.write("load", path=_path_of(filename), place=_place())
            return result

        module.save_file, module.load_file = record_save, record_load

    # Events

    def _on_epoch(self, loader: Any, place: str) -> None:
        # Before the iterator draws its seed, from torch's generator unless the loader has its own.
        generator = None
        if not self.updates:
            generator = _digest([self._torch.default_generator.get_state()])
        self.write("epoch", workers=loader.num_workers, place=place, generator=generator)

    def _on_batch(self, iterator: Any, batch: Any) -> None:
        began = time.perf_counter()
        indices = iterator.__dict__.get("_audit_indices")
        index = indices.popleft() if indices else None
        leaves = list(_tensors(batch))
        is_map = getattr(iterator, "_dataset_kind", None) == 0
        entry = {
            "index": _plain(index) if is_map else None,
            "content": _row_digests(leaves),
            "grad": self._torch.is_grad_enabled(),
            "place": _place(),
            "pointers": {leaf.data_ptr() for leaf in leaves},
        }
        # Tests run with grad disabled; a loop that enters `no_grad` within has none of its batches
        # in a backward pass, and they are dropped with the next update.
        if entry["grad"]:
            self.batches.append(entry)
        self._own += time.perf_counter() - began

    def _on_forward(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._torch.is_grad_enabled():
            return
        began = time.perf_counter()
        if not any(module is root for root in self.roots):
            self.roots.append(module)
        if self.generators is None:
            self.generators = self._digest_generators()
        # Not in the first step: the forward passes before it move the statistics of batch norm.
        # Again until the first backward pass: others come before a checkpoint is loaded.
        if self.is_stale:
            self.before = dict(enumerate(map(self._digest_state, self.optimizers)))
            self.buffers.append((module, _digest(module.buffers())))
        if self.batches:
            self._match(args, kwargs)
        self._own += time.perf_counter() - began

    def _match(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record which of the batches read so far is trained now: frameworks read ahead."""
        pointers = {leaf.data_ptr() for leaf in _tensors((args, dict(kwargs)))} - {0}
        # The newest first: the memory of an older one, which was skipped, may be in use again.
        for number in reversed(range(len(self.batches))):
            if pointers & self.batches[number]["pointers"]:
                for _ in range(number):
                    self.batches.popleft()  # read, and skipped on a resume
                self.used.append(self.batches.popleft())
                return

    def _on_backward(self, loss: Any) -> None:
        began = time.perf_counter()
        self.is_stale = False
        if not self.used:  # changed on its way to the model: all that were read since
            self.used.extend(self.batches)
            self.batches.clear()
        if loss.numel() == 1:
            value = loss.detach()
            self.losses.append([_digest([value]), float(value)])
        self._own += time.perf_counter() - began

    def _forget_passes(self) -> None:
        """Forget backward passes whose gradients were dropped before a step, such as a dry run.

        In every update, because closures and optimizers such as SAM do this in each of them.
        """
        if _have_gradients(self.optimizers):
            return
        self.batches.extendleft(reversed(self.used))
        self.used, self.losses, self.generators = [], [], None

    def _before_step(self, optimizer: Any) -> None:
        began = time.perf_counter()
        _add(self.optimizers, optimizer)
        index = self._index_of(optimizer)
        if index not in self.stepped:
            self.stepped.add(index)
            if self.updates:
                self.begins[index] = self._digest_state(optimizer)
            elif not self.before:  # no module was called
                self.before[index] = self._digest_state(optimizer)
        self._own += time.perf_counter() - began

    def _after_step(self, optimizer: Any) -> None:
        # Not the step of an optimizer that only carries a schedule, for example to tabulate it.
        if not _have_gradients([optimizer]):
            return
        began = time.perf_counter()
        seconds = began - self._ended - self._own
        self.updates += 1
        digests = None
        if self._is_digested():
            digests = self._digest_state(optimizer)
            self._digests += time.perf_counter() - began
        index = self._index_of(optimizer)
        content = {
            "optimizer": index,
            "seconds": round(seconds, 6),
            "samples": [entry["index"] for entry in self.used],
            "content": [entry["content"] for entry in self.used],
            "losses": self.losses,
            "options": self._options(optimizer),
            "generators": self.generators or {},
            "state": digests,
        }
        before = self.before.pop(index, None)
        if before is not None:
            content["before"] = {**before, "buffers": _by_class(self.buffers)}
        if index in self.begins:
            content["begins"] = {**self.begins.pop(index), "buffers": {}}
        if self.used:
            content["place"] = self.used[0]["place"]
        if self.updates == 1:
            content["frameworks"] = [name for name in FRAMEWORKS if name in sys.modules]
            content["rank"] = self._rank()
            content["world"] = self._world_size()
        self.write("update", **content, step_place=_place())
        self.roots = []
        self.used, self.losses, self.generators = [], [], None
        self._own += time.perf_counter() - began
        self._choose_stride()
        self._end_if_due()

    def _is_digested(self) -> bool:
        return self.updates <= MEASURED or bool(self.every and self.updates % self.every == 0)

    def _choose_stride(self) -> None:
        """Digest the state at a stride that costs little; all runs of an audit use the same one."""
        now = time.perf_counter()
        if self.updates > 1 and not self.every:
            self._costs.append((now - self._ended, self._own, self._digests))
        self._ended, self._own, self._digests = now, 0.0, 0.0
        if self.updates != MEASURED or self.every:
            return
        # Medians: a step may be long because other programs had the processor.
        columns = zip(*self._costs, strict=True)
        took, own, digests = (sorted(column)[len(column) // 2] for column in columns)
        rest = max(took - own, 1e-6)
        budget = max(SHARE - (own - digests) / rest, SHARE / 3)
        self.every = max(1, math.ceil(digests / rest / budget))
        self.write("stride", every=self.every, share=own / rest)

    def _on_save(self, target: Any, content: Any) -> None:
        self.saves += 1
        leaves: dict[str, Any] = {}
        for path, leaf in _walk(content):
            if len(leaves) == LISTED_LEAVES:
                break
            leaves[path] = leaf
        path = _path_of(target)
        self.write("save", path=path, leaves=leaves, place=_place())
        # The first rank: its saves were counted, and others may make more or fewer.
        is_last = self.saves == self.options.get("kill_in_save") and self._rank() == "0"
        if path and is_last:
            # As if the process had been killed in the middle: what a file in place would look like.
            with open(path, "r+b") as file:
                file.truncate(os.path.getsize(path) // 2)  # noqa: PTH202
            self._kill()

    def _kill(self) -> None:
        """Kill the command with all that it has started, as the loss of its machine would."""
        try:
            with open(os.path.join(self.folder, LEADER)) as file:  # noqa: PTH118
                os.killpg(int(file.read()), signal.SIGKILL)
        except (OSError, ValueError):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    def _end_if_due(self) -> None:
        """End this process if it has made its last update."""
        kill_at, stop_at = self.options.get("kill_at"), self.options.get("stop_at")
        if self.updates in (kill_at, stop_at):
            self._wait_for_ranks()
        if self.updates == kill_at:
            self._kill()
        if self.updates == stop_at:
            os._exit(0)

    def _wait_for_ranks(self) -> None:
        """Wait until all ranks have made this update, so that the record of each ends with it.

        The collective operations of an update are complete before its optimizer steps.
        """
        size = self._world_size()
        if size == 1:
            return
        own = os.path.join(self.folder, f"{REACHED}{self._rank()}")  # noqa: PTH118
        with open(own, "w"):
            pass
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            names = os.listdir(self.folder)  # noqa: PTH208
            if sum(name.startswith(REACHED) for name in names) >= size:
                return
            time.sleep(0.01)

    def _is_distributed(self) -> bool:
        distributed = self._torch.distributed
        return bool(distributed.is_available() and distributed.is_initialized())

    def _rank(self) -> str:
        if self._is_distributed():
            return str(self._torch.distributed.get_rank())
        return os.environ.get("RANK", "0")

    def _world_size(self) -> int:
        return int(self._torch.distributed.get_world_size()) if self._is_distributed() else 1

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on or event not in ("open", "os.rename"):
            return
        path = args[0] if event == "open" else args[1]
        if not isinstance(path, str | bytes | os.PathLike):
            return
        name = os.fsdecode(path)
        if event == "open":
            mode = args[1]
            flags = args[2] if isinstance(args[2], int) else 0
            writes = mode is not None and any(letter in mode for letter in "wax+")
            writes = writes or (mode is None and bool(flags & (os.O_WRONLY | os.O_RDWR)))
            if name == self.path or (self.updates and not writes):
                return
            content = {"kind": "file" if writes else "read"}
        else:
            content = {"kind": "file", "source": _path_of(args[0])}
        if name.endswith(MODEL_FILES):
            self.write(**content, path=os.path.abspath(name))  # noqa: PTH100

    # State

    def _index_of(self, optimizer: Any) -> int:
        return next(n for n, other in enumerate(self.optimizers) if other is optimizer)

    def _options(self, optimizer: Any) -> dict[str, Any]:
        """Return the options of parameter groups, and the positions of schedules and scalers."""
        options: dict[str, Any] = {}
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params" and _is_number(value):
                    options[f"{index}.{name}"] = _plain(value)
        for number, schedule in enumerate(self.schedules):
            if getattr(schedule, "optimizer", None) is optimizer:
                options[f"schedule.{number}"] = getattr(schedule, "last_epoch", None)
        for number, scaler in enumerate(self.scalers):
            options[f"scaler.{number}"] = float(scaler.get_scale())
        return options

    def _digest_generators(self) -> dict[str, int]:
        torch = self._torch
        digests = {"torch": _digest([torch.default_generator.get_state()])}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            digests["cuda"] = _digest(torch.cuda.get_rng_state_all())
        digests["python"] = hash(random.getstate()[1])
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            state = numpy.random.get_state(legacy=False)
            inner = state["state"]
            digests["numpy"] = zlib.crc32(inner["key"].tobytes()) ^ int(inner["pos"])
        return digests

    def _digest_state(self, optimizer: Any) -> dict[str, Any]:
        """Return a digest for each part of the state that an optimizer steps, and one of the
        buffers of each module that was called; the others may belong to a rehearsal."""
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        digests: dict[str, Any] = {
            "weights": _digest(parameters),
            "buffers": _by_class((root, _digest(root.buffers())) for root in self.roots),
        }
        by_key: dict[str, list[Any]] = {}
        for parameter in parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                by_key.setdefault(f"{type(optimizer).__name__}.{key}", []).append(value)
        for key, values in by_key.items():
            digests[f"optimizer.{key}"] = _digest(values)
        return digests


class _AfterImport(MetaPathFinder):
    """Calls a function with a module once it has been imported."""

    def __init__(self, after: Mapping[str, Callable[[Any], None]]) -> None:
        self.after = dict(after)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.after:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Wrapped(spec.loader, self.after.pop(fullname))
        return spec


class _Wrapped(Loader):
    def __init__(self, loader: Loader, after: Callable[[Any], None]) -> None:
        self.loader, self.after = loader, after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.after(module)


def _add(objects: list[Any], new: Any) -> None:
    if not any(member is new for member in objects):
        objects.append(new)


def _have_gradients(optimizers: Iterable[Any]) -> bool:
    """Return whether a parameter of one of the optimizers has a gradient."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return any(weight.grad is not None for group in groups for weight in group["params"])


def _by_class(digests: Iterable[tuple[Any, int]]) -> dict[str, list[int]]:
    """Return the digests of modules by their class."""
    by_class: dict[str, list[int]] = {}
    for module, digest in digests:
        by_class.setdefault(type(module).__name__, []).append(digest)
    return {name: sorted(own) for name, own in by_class.items()}


def _set_workers(arguments: dict[str, Any], workers: int) -> None:
    """Change the number of workers among the arguments of a DataLoader."""
    arguments["num_workers"] = workers
    if not workers:  # it rejects options of workers that it does not have
        for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"):
            arguments.pop(name, None)


def _tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the tensors of nested containers."""
    if hasattr(value, "data_ptr"):
        yield value
    elif depth > 6:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth + 1)
    elif hasattr(value, "__dict__") and not callable(value):
        for item in vars(value).values():
            yield from _tensors(item, depth + 1)


def _digest(values: Iterable[Any]) -> int:
    """Return the CRC-32 of the bytes of tensors and of the text of other values."""
    checksum = 0
    for value in values:
        if hasattr(value, "data_ptr"):
            checksum = zlib.crc32(_bytes(value), checksum)
        elif isinstance(value, list | tuple):  # the history of LBFGS
            checksum = zlib.crc32(_digest(value).to_bytes(4, "big"), checksum)
        else:
            checksum = zlib.crc32(repr(value).encode(), checksum)
    return checksum


def _bytes(value: Any) -> Any:
    torch = sys.modules["torch"]
    whole = value.detach()
    if hasattr(whole, "to_local"):  # a DTensor: this rank's part
        whole = whole.to_local()
    if whole.layout != torch.strided:
        whole = whole.to_dense()
    flat = whole.contiguous().reshape(-1).cpu()
    return flat.view(torch.uint8).numpy().data


def _spread(leaf: Any) -> Any:
    """Return some values of each row of a tensor, or all of them if they are few."""
    width = leaf.numel() // max(1, leaf.shape[0])
    if width <= SEEN or leaf.layout != sys.modules["torch"].strided:
        return leaf
    return leaf.detach().reshape(leaf.shape[0], -1)[:, :: math.ceil(width / SEEN)]


def _row_digests(leaves: Sequence[Any]) -> list[int]:
    """Return a digest for each sample of a batch: the first dimension of its tensors."""
    sizes = [leaf.shape[0] for leaf in leaves if leaf.dim()]
    if not sizes:
        return []
    size = max(set(sizes), key=sizes.count)
    rows = [0] * size
    for leaf in leaves:
        if leaf.dim() and leaf.shape[0] == size:
            content = bytes(_bytes(_spread(leaf)))
            width = len(content) // size
            for row in range(size):
                rows[row] = zlib.crc32(content[row * width : (row + 1) * width], rows[row])
    return rows


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and a digest of each leaf of a checkpoint."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _walk(item, f"{path}.{number}" if path else str(number))
    elif hasattr(value, "data_ptr"):
        yield path, _digest([value])
    elif isinstance(value, int | float | str | bool) or value is None:
        yield path, value
    elif hasattr(value, "state_dict"):
        yield from _walk(value.state_dict(), path)


def _plain(value: Any) -> Any:
    """Return an index or a number as JSON data."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value if isinstance(value, int | float | bool | str) or value is None else str(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_number, value))
    return isinstance(value, int | float) or getattr(value, "ndim", 1) == 0


def _path_of(file: Any) -> str:
    if isinstance(file, str | os.PathLike):
        return os.path.abspath(os.fspath(file))  # noqa: PTH100
    name = getattr(file, "name", "")
    return os.path.abspath(name) if isinstance(name, str) and name else ""  # noqa: PTH100


def _place() -> str:
    """Return `file:line` of the innermost frame that belongs to the user."""
    frame: FrameType | None = sys._getframe(1)
    own = __file__
    outside = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name != own and not name.startswith("<"):
            line = f"{name}:{frame.f_lineno}"
            if "site-packages" not in name and "/lib/python" not in name:
                return line
            outside = outside or line
        frame = frame.f_back
    return outside
