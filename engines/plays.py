"""Plays: how a function becomes one, how it is named, loaded and checked.

A play is named `module:function` or `path.py:function`; its *play name* is that without the folder.
A file is loaded by its location under a private module name, so that two files of one name can live
side by side, and its folder comes behind ours on `sys.path`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar, get_type_hints, overload

from msgspec import Struct
from pydantic import TypeAdapter

from engines.values import adapter_for, read_value, write_value
from handlers.engine import PlayInfo
from ledger.canonical import Json
from ledger.errors import PlayNotFound, Refused
from ledger.ids import quote

F = TypeVar("F", bound=Callable[..., Any])
_MARK: Final = "__playledger_play__"
OURS: Final = ("ledger", "projections", "handlers", "engines", "playledger", "replay")
_MISSING: Final = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """What `@play(...)` says of a function."""

    name: str | None
    retries: int
    timeout: timedelta | None


@overload
def play(function: F, /) -> F: ...
@overload
def play(
    *, name: str | None = None, retries: int = 0, timeout: timedelta | None = None
) -> Callable[[F], F]: ...
def play(
    function: F | None = None,
    /,
    *,
    name: str | None = None,
    retries: int = 0,
    timeout: timedelta | None = None,
) -> F | Callable[[F], F]:
    """Marks a function as a play; it stays a function.

    `name` fixes the play name across refactorings, `retries` is how often `raise Retry` is granted,
    `timeout` ends an attempt that takes longer.
    """

    def mark(marked: F) -> F:
        setattr(marked, _MARK, PlayOptions(name=name, retries=retries, timeout=timeout))
        return marked

    return mark if function is None else mark(function)


class Origin(Struct, frozen=True):
    """Where a play's function stands, so that another process can load it too."""

    module: str
    file: str | None
    function: str

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.function}"


@dataclass(frozen=True)
class Play:
    """A loaded play: its function, and what its signature says of input and result."""

    name: str
    function: Callable[..., Any]
    options: PlayOptions
    origin: Origin | None = field(default=None, compare=False)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @cached_property
    def info(self) -> PlayInfo:
        """What a submit has to know."""
        timeout = self.options.timeout
        return PlayInfo(
            name=self.name,
            digest=self._digest,
            retries=self.options.retries,
            timeout_ms=None if timeout is None else round(timeout.total_seconds() * 1000),
            check=self.check_input,
        )

    @cached_property
    def signature(self) -> str:
        return f"{self.function.__name__}{inspect.signature(self.function)}"

    @cached_property
    def takes_input(self) -> bool:
        return self._input is not None

    def check_input(self, value: Json) -> None:
        """Raises InputInvalid if a value does not fit the play's input."""
        self.read_input(value)

    def read_input(self, value: Json) -> Any:
        """Returns a JSON value as the play's input type, or raises InputInvalid."""
        parameter = self._input
        if parameter is None:
            return None
        if parameter.default is not _MISSING and value is None:
            return parameter.default
        return read_value(
            self._input_type, value, f"input does not fit {self.name}", self.signature
        )

    def read_result(self, value: Json) -> Any:
        """Returns a JSON value as the play's result type."""
        return read_value(
            self._result_type, value, f"result of {self.name} does not fit", self.signature
        )

    def write_result(self, value: Any) -> bytes:
        """Returns a result as canonical JSON; raises JsonInvalid for what JSON cannot hold."""
        return write_value(value, self._result_type)

    @cached_property
    def _input(self) -> inspect.Parameter | None:
        parameters = list(inspect.signature(self.function).parameters.values())
        return parameters[1] if len(parameters) > 1 else None

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return get_type_hints(self.function)
        except (NameError, TypeError):
            return {}

    @cached_property
    def _input_type(self) -> TypeAdapter[Any] | None:
        return None if self._input is None else adapter_for(self._hints.get(self._input.name))

    @cached_property
    def _result_type(self) -> TypeAdapter[Any] | None:
        return adapter_for(self._hints.get("return"))

    @cached_property
    def _digest(self) -> str | None:
        """Names the code a run was submitted against; it decides nothing."""
        try:
            source = inspect.getsource(self.function)
        except (OSError, TypeError):
            return None
        return sha256(source.encode()).hexdigest()[:16]


class Plays(AbstractSet[str]):
    """The plays a process offers, and those that a trusted file starts beside them.

    As a set it is that of their names, always as they are now, from any thread.
    """

    def __init__(self, plays: Iterable[Play] = ()) -> None:
        self._plays: dict[str, Play] = {}
        for item in plays:
            self.add(item)

    def add(self, item: Play) -> None:
        """Offers a play; two functions of one name are refused."""
        known = self._plays.get(item.name)
        if known is not None and known.function is not item.function:
            raise Refused(
                f"two plays are named {quote(item.name)}: {known.origin} and {item.origin}",
                code="PLAY_NAME_TAKEN",
                hint='name one of them: @play(name="...")',
            )
        self._plays = {**self._plays, item.name: item}  # others may be looking through the old one

    def get(self, name: str) -> Play | None:
        return self._plays.get(name)

    def info(self, name: str) -> PlayInfo | None:
        """Returns what a submit has to know of a play, or None if it is not offered."""
        item = self._plays.get(name)
        return None if item is None else item.info

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._plays)

    def __contains__(self, name: object) -> bool:
        return name in self._plays

    def __iter__(self) -> Iterator[str]:
        return iter(self._plays)

    def __len__(self) -> int:
        return len(self._plays)


@lru_cache(maxsize=4096)
def as_play(function: Callable[..., Any], *, trusted: bool = False) -> Play:
    """Returns a function as a play; with `trusted`, also one without the mark."""
    options = getattr(function, _MARK, None)
    if options is None:
        if not trusted:
            raise PlayNotFound(
                f"{function.__name__} is not marked @play", hint="put @play above it"
            )
        options = PlayOptions(name=None, retries=0, timeout=None)
    module = sys.modules.get(function.__module__)
    file: str | None = getattr(module, "__file__", None)
    stem = getattr(module, _STEM, None) or function.__module__
    if stem == "__main__" and file is not None:
        stem = Path(file).stem
    return Play(
        name=options.name or f"{stem}:{function.__name__}",
        function=function,
        options=options,
        origin=Origin(module=function.__module__, file=file, function=function.__qualname__),
    )


def is_play(value: object) -> bool:
    """Says whether a value is a function marked as a play."""
    return callable(value) and hasattr(value, _MARK)


def plays_beside(item: Play) -> Plays:
    """Returns a play with the marked ones of its file, which it may start by their names."""
    plays = Plays([item])
    module = sys.modules.get(item.function.__module__)
    for value in list(vars(module).values()) if module is not None else ():
        other = as_play(value) if is_play(value) else item
        if other.name not in plays:
            plays.add(other)
    return plays


def load_origin(origin: Origin, name: str) -> Play:
    """Returns the play whose function stands there, under the name its run has."""
    if "<" in origin.function:
        raise PlayNotFound(
            f"{origin} stands inside a function, where no other process finds it",
            hint="put it at the top of its module",
        )
    found: Any = _module_at(origin)
    for part in origin.function.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise PlayNotFound(f"{origin} is no function", hint="put it at the top of its module")
    return replace(as_play(found, trusted=True), name=name)


def _module_at(origin: Origin) -> ModuleType:
    private = origin.module == "__main__" or origin.module.startswith(_PRIVATE)
    if not private:
        try:
            return importlib.import_module(origin.module)
        except ImportError:
            if origin.file is None:
                raise
    if origin.file is None:
        raise PlayNotFound(f"{origin} stands in no file", hint="put the play into a file")
    return load_module(origin.file)


def plays_in(reference: str) -> list[Play]:
    """Returns every marked play of a file or module."""
    module = load_module(reference)
    found = [
        as_play(value)
        for value in vars(module).values()
        if callable(value)
        and hasattr(value, _MARK)
        and getattr(value, "__module__", None) == module.__name__
    ]
    if not found:
        raise PlayNotFound(f"{reference} has no play", hint="mark its functions with @play")
    return found


def find_play(reference: str) -> Play:
    """Returns the play that `module:function` or `path.py:function` names; its file is trusted."""
    where, _, name = reference.rpartition(":")
    if not where or not name:
        raise PlayNotFound(
            f"{quote(reference)} names no play",
            hint="FILE.py:FUNCTION or MODULE:FUNCTION",
        )
    module = load_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(
            key for key, value in vars(module).items() if callable(value) and hasattr(value, _MARK)
        )
        raise PlayNotFound(
            f"{where} has no play {quote(name)}",
            hint=f"it has: {', '.join(known)}" if known else "mark its functions with @play",
        )
    return as_play(function, trusted=True)


_STEM: Final = "__playledger_stem__"
_PRIVATE: Final = "_plays_"


def load_module(reference: str) -> ModuleType:
    """Returns a module by name, or a file by location; raises PlayNotFound if there is none."""
    if not reference.endswith(".py"):
        try:
            return importlib.import_module(reference)
        except ModuleNotFoundError as error:
            raise PlayNotFound(
                f"no module {quote(reference)}: {error}", hint="FILE.py:FUNCTION names a file"
            ) from error
    path = Path(reference).resolve()
    if not path.is_file():
        raise PlayNotFound(f"{reference} does not exist", hint="check the path")
    name = f"{_PRIVATE}{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    _check_clash(path)
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PlayNotFound(f"{reference} cannot be loaded", hint="check the path")
    module = importlib.util.module_from_spec(spec)
    setattr(module, _STEM, path.stem)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _check_clash(path: Path) -> None:
    """Refuses a folder that holds one of our top-level names (a known limit, in the README)."""
    own = Path(__file__).resolve().parent.parent
    if path.parent == own:
        return
    for name in OURS:
        for found in (path.parent / name, path.parent / f"{name}.py"):
            if found.exists() and (found.is_file() or any(found.glob("*.py"))):
                raise PlayNotFound(
                    f"{path.parent} holds {found.name}, a name of playledger's own",
                    code="PLAY_FOLDER_CLASH",
                    hint="rename it, or put the plays into another folder",
                )
