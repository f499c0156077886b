"""One registry per kind of part: a mapping from a name in the config to the callable that makes the
part."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, Generic, TypeVar, get_type_hints

from phasetrain.config.addons import (
    explain_missing,
    find_service,
    import_module,
    import_object,
    list_bridges,
    list_parts,
)
from phasetrain.config.exports import find_public
from phasetrain.config.objects import find_object, is_object_name
from phasetrain.config.parts import REGISTRIES
from phasetrain.config.problems import raise_all
from phasetrain.config.trust import (
    is_library_part,
    is_library_path,
    is_trusted,
    make_trust_error,
)
from phasetrain.errors import ConfigError, Problem, did_you_mean, is_out_of_memory

T = TypeVar("T")
Factory = Callable[..., T]
Resolver = Callable[[str], Factory[T] | None]
"""Finds a part of another library by its name without the library's; returns None for a dotted
path."""

_OF_SAMPLE = (
    ", or let `facts` of the dataset return it; it is read from the first sample only if this has "
    "a tensor as its input, and DATA.TRAIN.collate is stack"
)

_OF_DATASET = MappingProxyType(
    {
        "channels": _OF_SAMPLE,
        "input_shape": _OF_SAMPLE,
        "classes": ', or give the dataset a method `def facts(self): return {"classes": 10}`',
        "target": "; a loss or a metric is a function of `output, target` in this order, and a "
        "metric also a phasetrain.meters.Meter, or a number logged by phasetrain.log",
    }
)
"""Parameter -> what else gives it a value."""

MISSING_PARAMETER = "config.missing_parameter"
"""Code of the error that a parameter has no value."""

IN_CONFIGS = (type(None), bool, int, float, str, list, tuple, Mapping)
"""Types of values that a config can hold."""


@dataclass(frozen=True)
class Bridge(Generic[T]):
    """How the parts of another library are found by name.

    Attributes:
        extra: the extra of this package that installs the library.
        resolve: finds a part; it is called once the library can be imported.
    """

    extra: str
    resolve: Resolver[T]


class UnknownNameError(Exception):
    """A library has no part of this name.

    Args:
        name: name of the part, without the library's.
        known: names that exist.
    """

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(name)
        self.name = name
        self.known = sorted(known)


def _write_in_python(where: str, key: str) -> str:
    # `phasetrain.fit` takes sections as mappings, where a dotted word is a syntax error.
    section, _, label = where.partition(".")
    if label.isidentifier():
        return f' (in Python: {section}={{"{label}": {{"{key}": ...}}}})'
    return ""


class Registry(Mapping[str, Factory[T]], Generic[T]):
    """Names of parts of one kind, and how to build them.

    Four spellings of a name are understood: a registered one (`focal`), the exact class name of the
    library behind the registry (`CrossEntropyLoss` from torch.nn), a name of a library that there
    is a bridge to (`timm.resnet18`), and a dotted path (`my.module.Thing`). The Python API writes a
    fifth one for objects, see `phasetrain.config.objects`.

    Args:
        kind: the word for one part in messages, such as `loss`; parts that are declared for this
            kind belong to the registry.
        section: the config section that names it, such as `LOSS`.
        library: returns the library's own parts by class name; called on the first look-up that
            needs it.

    Example:
        >>> LOSSES: Registry[torch.nn.Module] = Registry("loss", "LOSS")
        >>> @LOSSES.register("focal")
        ... class Focal(torch.nn.Module): ...
    """

    def __init__(
        self,
        kind: str,
        section: str,
        *,
        library: Callable[[], Mapping[str, Factory[T]]] | None = None,
    ) -> None:
        self.kind = kind
        self.section = section
        self._own: dict[str, Factory[T]] = {}
        self._bridges: dict[str, Bridge[T]] = {}
        # Called on first use, since listing the classes of a library imports it.
        self._library = lru_cache(maxsize=1)(library or dict)

    def register(self, name: str) -> Callable[[Factory[T]], Factory[T]]:
        """Return a decorator that files a class or function under `name`.

        Raises:
            ConfigError: the name is taken (both places are named), has upper case or a dot, or the
                callable takes `**kwargs`, which would swallow a mistyped parameter.
        """

        def decorate(factory: Factory[T]) -> Factory[T]:
            if name != name.lower() or "." in name or not name:
                raise ConfigError(
                    f"{self.kind} name {name!r} ({source_of(factory)}): registered names are "
                    "lower case without dots"
                )
            other = self._other_source(name, factory)
            if other:
                raise ConfigError(
                    f"the {self.kind} name {name!r} is defined twice: {other} and "
                    f"{source_of(factory)}; rename one of them"
                )
            # A misspelt parameter of a registered part must not be accepted silently.
            if free_parameters(factory):
                raise ConfigError(
                    f"{self.kind} {name!r} ({source_of(factory)}) takes **kwargs, so a misspelt "
                    "parameter would go unnoticed; name its parameters, and take all others as "
                    "one mapping `params`"
                )
            self._own[name] = factory
            return factory

        return decorate

    def bridge(self, library: str, extra: str) -> Callable[[Resolver[T]], Resolver[T]]:
        """Return a decorator that files how names that begin with `library.` are found.

        Args:
            library: the module, imported only when a config names one of its parts.
            extra: extra of this package, for the message if the library is not installed.

        The decorated function raises UnknownNameError for a name that the library does not have.
        """

        def decorate(resolve: Resolver[T]) -> Resolver[T]:
            self._bridges[library] = Bridge(extra, resolve)
            return resolve

        return decorate

    def find(self, name: str, key: str | None = None) -> Factory[T]:
        """Return the callable behind `name`.

        Args:
            name: a registered name, a library class name, a name behind a bridge or a dotted path.
            key: the config key with the name, for the message (`LOSS.name` by default).

        Raises:
            ConfigError: nothing has that name; lists a suggestion and the known names.
        """
        key = key or f"{self.section}.name"
        if is_object_name(name):
            return find_object(name, key)
        # Registered names come first, so that a new class of the library cannot change what a
        # config means.
        if name in self:
            return self[name]
        if "." in name:
            return self._find_dotted(name, key)
        library = self._library()
        if name in library:
            return library[name]
        near = did_you_mean(name, [*self, *library]) or "."
        raise ConfigError(
            f"{key} = {name!r}: no {self.kind} has this name{near} {self._list_known(library)}",
            code="config.unknown_part",
        )

    def names(self) -> list[str]:
        """Return the registered names in order, and then the class names of the library."""
        return list(dict.fromkeys([*self, *sorted(self._library())]))

    def name_of(self, factory: Factory[T]) -> str | None:
        """Return the shortest name under which `find` returns this class or function; None if it
        cannot be imported, such as a class that is defined in a function."""
        named = {**self._library(), **self._own}
        for name, candidate in named.items():
            if candidate is factory:
                return name
        module, _, name = f"{factory.__module__}.{factory.__qualname__}".rpartition(".")
        library = module.partition(".")[0]
        self._load_bridge(library)
        # The name that a bridge knows comes first: a bridge builds with parameters of its own.
        places = [library, module] if library in self._bridges else [module]
        for module_name in places:
            if module_name in sys.modules and vars(sys.modules[module_name]).get(name) is factory:
                return f"{module_name}.{name}"
        return None

    def build(
        self,
        name: str,
        params: Mapping[str, Any] | None = None,
        *,
        where: str | None = None,
        facts: Mapping[str, Any] | None = None,
        used: dict[str, Any] | None = None,
    ) -> T:
        """Make the part `name` from its config parameters and the facts that it asks for.

        Args:
            params: parameters in the config; a mapping `params` is spread if the callable takes
                `**kwargs`.
            where: the config path of the section, for messages.
            facts: values known only now (classes, train_samples, ...); passed by name to a callable
                that has such a parameter and whose config does not set it.
            used: filled with the facts that were passed.

        Raises:
            ConfigError: unknown name or parameter, a required parameter without a value, or the
                callable refused its parameters with a TypeError or ValueError.
        """
        where = where or self.section
        facts = facts or {}
        factory = self.find(name, f"{where}.name")
        arguments = dict(params or {})
        takes = parameters(factory)
        if free_parameters(factory):
            # A config passes parameters that no signature declares in `params`, since any other
            # unknown key is taken for a misspelling.
            arguments |= arguments.pop("params", None) or {}
        else:
            for key in arguments.keys() - takes.keys():
                # Without facts that no config can hold, such as a module.
                settable = [fact for fact in takes if isinstance(facts.get(fact), IN_CONFIGS)]
                raise ConfigError(
                    unknown_parameter(where, key, name, settable), code="config.unknown_parameter"
                )
        # A value of the config wins over a fact of the data.
        for key in takes.keys() & facts.keys() - arguments.keys():
            # The role of a split has no place in a custom dataset whose default is another value.
            if (
                key in ("split", "part")
                and takes[key].default not in (inspect.Parameter.empty, "train", "test")
                and not is_library_path(factory.__module__)
            ):
                continue
            arguments[key] = facts[key]
            if used is not None:
                used[f"{where}.{key}"] = arguments[key]
        known = ", ".join(sorted(n for n, v in facts.items() if isinstance(v, IN_CONFIGS)))
        missing = [
            Problem.from_message(
                f"{where}.{key}: {self.kind} {name!r} needs a value, and the run provides none"
                f"{known and f', only {known}'}; set {where}.{key}=..."
                f"{_write_in_python(where, key)}{_OF_DATASET.get(key, '')}",
                MISSING_PARAMETER,
            )
            for key in list_required(factory)
            if key not in arguments
        ]
        raise_all(missing)
        try:
            return factory(**arguments)
        # Its message names a more precise key already.
        except ConfigError:
            raise
        except (TypeError, ValueError, OSError) as error:
            if is_out_of_memory(error):
                raise
            own = name.rpartition(".")[2].lower()
            hint = ""
            if own in self and name not in self:
                hint = f"; phasetrain has its own {self.kind} of this name, {own!r}"
            raise ConfigError(
                f"{where} ({self.kind} {name!r}): {error}{hint}", code="config.rejected_by_part"
            ) from error

    def _list_known(self, library: Mapping[str, Factory[T]]) -> str:
        registered = ", ".join(self) or "none"
        by_class = f", and {len(library)} of the library by class name" if library else ""
        bridged = explain_missing() or "."
        libraries = sorted({*self._bridges, *list_bridges(self.kind)})
        if libraries:
            names = " or ".join(f"{library}." for library in libraries)
            bridged = f", and so does a name after {names}{explain_missing()}"
        return f"Known: {registered}{by_class}; a dotted path works too{bridged}"

    def _find_dotted(self, name: str, key: str) -> Factory[T]:
        """Return the part behind a name with a dot: a name behind a bridge, or a dotted path."""
        library, _, rest = name.partition(".")
        self._load_bridge(library)
        if library not in self._bridges:
            return import_part(name, key, self.kind)
        bridge = self._bridges[library]
        try:
            _import(library, name, key)
            part = _resolve(bridge, rest, name, key)
            if part is None:
                return import_part(name, key, self.kind)
            return part
        except UnknownNameError as error:
            near = did_you_mean(error.name, error.known) or f". It has {len(error.known)} others"
            raise ConfigError(
                f"{key} = {name!r}: {library} has no {self.kind} {error.name!r}{near}",
                code="config.unknown_part",
            ) from error
        except ConfigError as error:
            # The error of a torchvision whose compiled operators do not fit torch names only the
            # operator.
            if "torchvision::" in str(error):
                advice = (
                    "torchvision is installed for another build of torch: install the matching "
                    "one, or remove it"
                )
                raise ConfigError(f"{error}; {advice}", code=error.code) from error
            # An installed library that fails to import needs another remedy than a missing one.
            if find_spec(library) is None:
                advice = f"pip install 'phasetrain[{bridge.extra}]'"
                raise ConfigError(f"{error}; {advice}", code=error.code) from error
            raise

    def _load_bridge(self, library: str) -> None:
        """Import the bridge of a library that an add-on has, if there is one."""
        module = list_bridges(self.kind).get(library)
        if module is not None and library not in self._bridges:
            import_module(module)

    def _other_source(self, name: str, factory: Factory[T]) -> str:
        """Return where another part of this name comes from; empty if there is none."""
        if name in self._own:
            return source_of(self._own[name])
        module = list_parts(self.kind).get(name)
        # A package may register its parts in modules of its own.
        if module is None or f"{factory.__module__}.".startswith(f"{module}."):
            return ""
        return module

    def __getitem__(self, name: str) -> Factory[T]:
        if name not in self._own:
            module = list_parts(self.kind)[name]
            import_module(module)
            if name not in self._own:
                raise ConfigError(
                    f"the module {module!r} does not register the {self.kind} {name!r}, which is "
                    f"declared; update or uninstall the package of {module.partition('.')[0]!r}",
                    code="addon.failed",
                )
        return self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._own, *list_parts(self.kind)}))

    def __len__(self) -> int:
        return len({*self._own, *list_parts(self.kind)})

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in list_parts(self.kind)


def find_registry(kind: str) -> Registry[Any]:
    """Return the registry of a kind of parts."""
    registry: Registry[Any] = import_object(REGISTRIES[kind])
    return registry


@dataclass(frozen=True)
class Signature:
    """The parameters of a part.

    Attributes:
        names: their names, in order.
        types: name -> annotation; without annotations that cannot be resolved.
        optional: names of the parameters whose default is None.
        takes_any: whether the part takes any parameters, as a mapping `params`.
    """

    names: tuple[str, ...]
    types: Mapping[str, Any]
    optional: frozenset[str]
    takes_any: bool = False


def signature_of(factory: Callable[..., Any]) -> Signature:
    """Return the parameters of a callable."""
    takes = parameters(factory)
    optional = frozenset(name for name, parameter in takes.items() if parameter.default is None)
    return Signature(tuple(takes), parameter_types(factory), optional, free_parameters(factory))


def find_signature(kind: str, name: str, key: str) -> Signature:
    """Return the parameters of a part, without importing it if its source can be read.

    Args:
        kind: kind of the part.
        name: its name.
        key: the config key with the name, for messages.

    Raises:
        ConfigError: see `Registry.find`.
    """
    module = list_parts(kind).get(name)
    read = find_service("read_signature")
    if module is not None and module not in sys.modules and read is not None:
        signature: Signature | None = read(module, kind, name)
        if signature is not None:
            return signature
    return signature_of(find_registry(kind).find(name, key))


def list_names(kind: str) -> list[str]:
    """Return the registered and declared names of a kind, without importing its registry."""
    if REGISTRIES[kind].partition(":")[0] in sys.modules:
        return list(find_registry(kind))
    return sorted(list_parts(kind))  # nobody can have registered another one


def parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the named parameters of a callable in order, `self` and star parameters left out."""
    return _signature(factory)[0]


def free_parameters(factory: Callable[..., Any]) -> bool:
    """Return whether a callable takes `**kwargs`."""
    return _signature(factory)[1]


def list_required(factory: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters without a default."""
    return [
        name
        for name, parameter in parameters(factory).items()
        if parameter.default is parameter.empty
    ]


def parameter_types(factory: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotated type of each parameter; one that cannot be resolved is left out."""
    target = factory.__init__ if inspect.isclass(factory) else factory
    try:
        # Fails for annotations under TYPE_CHECKING, which do not exist at run time.
        hints = get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        return {}
    return {name: hint for name, hint in hints.items() if name != "return"}


def unknown_parameter(path: str, key: str, name: str, known: Iterable[str]) -> str:
    """Return the message about a parameter that the part does not have."""
    listed = list(known)
    takes = ", ".join(listed) or "no parameters"
    near = did_you_mean(key, listed) or "."
    return f"{path}.{key}: {name!r} has no such parameter{near} It takes: {takes}."


def source_of(thing: Callable[..., Any]) -> str:
    """Return `module.name (file:line)` of a callable, or only the name."""
    unwrapped = inspect.unwrap(thing)
    name = f"{unwrapped.__module__}.{unwrapped.__qualname__}"
    try:
        return f"{name} ({inspect.getsourcefile(unwrapped)}:{inspect.getsourcelines(unwrapped)[1]})"
    # Built-in callables and code typed into a prompt have no source.
    except (OSError, TypeError):
        return name


@lru_cache(maxsize=512)
def _signature(factory: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    try:
        declared = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables written in C have none
        return {}, True
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: p for name, p in declared.items() if p.kind not in stars}
    if inspect.isclass(factory) and "__init__" not in vars(factory) and not named:
        # It inherits an __init__ for subclasses, such as torch.nn.Module's: no parameters.
        return {}, False
    return named, any(p.kind is p.VAR_KEYWORD for p in declared.values())


def import_part(path: str, key: str, kind: str) -> Factory[Any]:
    """Return the callable at a dotted path.

    Args:
        path: module and name in it.
        key: the config key with the path, for messages.
        kind: kind of part, which decides which modules `trust_only` may import.

    Raises:
        ConfigError: there is no such callable, or it is not trusted.
    """
    trusted = is_trusted(path)
    if not trusted and not is_library_path(path):
        raise make_trust_error(path, key)
    module_name, _, attribute = path.rpartition(".")
    module = _import(module_name, path, key)
    # Not getattr: the `__getattr__` of a module may import further modules and raise anything.
    value = find_public(module, attribute)
    if not trusted and not is_library_part(value, kind):
        raise make_trust_error(path, key)
    if not callable(value):
        near = did_you_mean(attribute, [n for n in dir(module) if callable(find_public(module, n))])
        raise ConfigError(
            f"{key} = {path!r}: module {module_name!r} "
            f"({getattr(module, '__file__', 'part of Python')}) has no callable {attribute!r}"
            f"{near}{explain_missing()}",
            code="config.unknown_part",
        )
    return value


def _resolve(bridge: Bridge[T], rest: str, name: str, key: str) -> Factory[T] | None:
    try:
        return bridge.resolve(rest)
    except (UnknownNameError, ConfigError):
        raise
    # Libraries import more of themselves, and of others, when a part is asked for.
    except Exception as error:
        causes: list[str] = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(f"{type(cause).__name__}: {' '.join(str(cause).split())}")
            cause = cause.__cause__
        raise ConfigError(
            f"{key} = {name!r}: it cannot be loaded ({'; '.join(dict.fromkeys(causes))})",
            code="config.import_failed",
        ) from error


def _import(module_name: str, path: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    # A user's module may raise anything, even end the process.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{key} = {path!r}: module {module_name!r} cannot be imported ({reason})",
            code="config.import_failed",
        ) from error
