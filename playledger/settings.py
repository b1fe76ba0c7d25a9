"""Settings: one model, and where each value came from (UX section 7).

Option > environment (`PLAYLEDGER_`, `.` as `__`) > `playledger.toml` > `[tool.playledger]` in
`pyproject.toml` > default.  The nearest file upward counts, alone; a `playledger.toml` hides the
other whole.  No user-wide file and no `.env`.  Secrets come from files or the environment: the
settings name where they lie and never hold one.

The `[policy]` table is what `run.submitted` freezes, under the same names; nothing outside it may
change what a run decides.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import Struct
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from ledger.errors import Refused
from ledger.ids import quote

if TYPE_CHECKING:
    from ledger.events import Policy

FILE: Final = "playledger.toml"
PROJECT: Final = "pyproject.toml"
PREFIX: Final = "PLAYLEDGER_"
_UNITS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SECRET: Final = re.compile(
    r"(?i)(^|_)(token|tokens|secret|password|passwd|credential|api_?key)s?$"
)
_URL_PASSWORD: Final = re.compile(r"(?i)^[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@")


class SettingInvalid(Refused):
    """Refuses a setting that is unknown, misplaced or unfit; the message says where it stands."""

    code = "SETTING_INVALID"


def duration(value: Any) -> Any:
    """Returns `30s`, `5m`, `2d`, `500ms` as a timedelta; anything else is left to be refused."""
    if isinstance(value, timedelta):
        return value
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError("a length is written 500ms, 30s, 5m, 2h or 2d")
    return timedelta(milliseconds=round(float(match[1]) * _UNITS[match[2]]))


def show_duration(value: timedelta) -> str:
    """Returns a timedelta as it is written in a setting."""
    ms = round(value.total_seconds() * 1000)
    for unit in ("d", "h", "m", "s"):
        if ms and ms % _UNITS[unit] == 0:
            return f"{ms // _UNITS[unit]}{unit}"
    return f"{ms}ms" if ms else "0s"


def _words(value: Any) -> Any:
    """A list in the environment is written with commas, or as JSON."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.strip("[] ").replace('"', "").split(",") if part.strip()]


Duration = Annotated[timedelta, BeforeValidator(duration), Field(ge=timedelta(0))]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServeSettings(_Table):
    host: str = "127.0.0.1"
    port: int = Field(default=7529, ge=0, le=65_535)
    grace: Duration = timedelta(seconds=10)


class EngineSettings(_Table):
    kind: Literal["local"] = "local"
    isolation: Literal["task", "process"] = "task"
    max_instances: int = Field(default=64, ge=1, le=10_000)


class PolicySettings(_Table):
    """What `run.submitted` freezes; what a play declares itself is not set here."""

    retry_limit: Count = 2
    lost_limit: Count = 2
    restart_limit: Count = 20
    backoff: Duration = timedelta(seconds=5)
    retry_ttl: Duration = timedelta(days=7)
    create_window: Duration = timedelta(minutes=10)
    cancel_grace: Duration = timedelta(seconds=10)
    externalize_after_bytes: int = Field(default=65_536, ge=1024, le=1 << 25)
    max_bytes: int = Field(default=1_048_576, ge=1024, le=1 << 25)


class WriteSettings(_Table):
    queue: int = Field(default=4096, ge=1, le=1_000_000)
    batch: int = Field(default=512, ge=1, le=4096)


class LogSettings(_Table):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] | None = None


class Settings(BaseSettings):
    """Every setting; `None` means that there is none, or that the place decides."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
    )

    db: str = "playledger.db"
    tokens_file: str | None = None
    token_file: str | None = None
    plays: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)] = ()
    serve: ServeSettings = ServeSettings()
    engine: EngineSettings = EngineSettings()
    policy: PolicySettings = PolicySettings()
    write: WriteSettings = WriteSettings()
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leaves the layers to `load`, which has to know where each value came from."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    def run_policy(self) -> Policy:
        """Returns the policy that a submit freezes."""
        from ledger.events import Policy

        table = self.policy
        return Policy(
            retry_limit=table.retry_limit,
            lost_limit=table.lost_limit,
            restart_limit=table.restart_limit,
            play_retries=0,
            backoff_ms=_ms(table.backoff),
            retry_ttl_ms=_ms(table.retry_ttl),
            create_window_ms=_ms(table.create_window),
            cancel_grace_ms=_ms(table.cancel_grace),
            externalize_after_bytes=table.externalize_after_bytes,
            max_bytes=table.max_bytes,
            on_parent_end="cancel",
        )


class Setting(Struct, frozen=True):
    """One setting as `config` shows it; `origin` is an option, a variable, a file's line or ''."""

    key: str
    value: Any
    default: Any
    origin: str

    @property
    def changed(self) -> bool:
        return self.origin != ""


class Loaded(Struct, frozen=True):
    """The settings of a process, and where each came from."""

    values: Settings
    origins: Mapping[str, str]
    file: Path | None = None

    def rows(self) -> list[Setting]:
        """Returns every setting in the order of the model."""
        defaults = dict(_leaves(Settings()))
        return [
            Setting(key, value, defaults[key], self.origins.get(key, ""))
            for key, value in _leaves(self.values)
        ]


def load(
    options: Mapping[str, tuple[str, Any]] | None = None,
    *,
    config: Path | None = None,
    folder: Path | None = None,
) -> Loaded:
    """Returns the settings; `options` gives a key the option it came by and its value.

    Raises SettingInvalid, naming the place, for an unknown key, an unfit value or a secret.
    """
    known = tuple(key for key, _ in _leaves(Settings()))
    found: dict[str, tuple[str, Any]] = {}
    file = config if config is not None else _nearest(folder or Path.cwd())
    if file is not None:
        found |= _from_file(file, known, given=config is not None)
    found |= _from_environment(known)
    for key, (option, value) in (options or {}).items():
        if value is not None:
            found[key] = (option, value)
    nested: dict[str, Any] = {}
    for key, (_, value) in found.items():
        table, _, name = key.rpartition(".")
        (nested.setdefault(table, {}) if table else nested)[name] = value
    try:
        values = Settings(**nested)
    except ValidationError as error:
        raise _unfit(error, found) from None
    return Loaded(values, {key: origin for key, (origin, _) in found.items()}, file)


def show(value: Any) -> str:
    """Returns a setting's value as it would be written."""
    if value is None:
        return "-"
    if isinstance(value, timedelta):
        return show_duration(value)
    if isinstance(value, tuple):
        return ", ".join(value) or "[]"
    return str(value)


# --- the layers -----------------------------------------------------------------------------------


def _nearest(folder: Path) -> Path | None:
    for place in (folder, *folder.parents):
        own = place / FILE
        if own.is_file():
            return own
        project = place / PROJECT
        if project.is_file() and b"tool.playledger" in project.read_bytes():
            return project
    return None


def _from_file(path: Path, known: tuple[str, ...], *, given: bool) -> dict[str, tuple[str, Any]]:
    text = read_text(path, "--config" if given else "settings")
    try:
        table: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingInvalid(f"{path} is not TOML: {error}", hint="mend that line") from None
    head = ""
    if path.name == PROJECT:
        table = table.get("tool", {}).get("playledger", {})
        head = "tool.playledger"
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    found = {}
    for raw, value in _flatten(table):
        line = _line_of(text, head, raw)
        origin = f"{shown}:{line}" if line else shown
        key = _snake(raw)
        _check_key(key, known, raw, origin)
        if key not in known and _SECRET.search(key.rpartition(".")[2]):
            raise SettingInvalid(
                f"{origin} holds {quote(raw)}: no secret belongs in a settings file",
                hint="put it into a file of its own: PLAYLEDGER_TOKEN_FILE=FILE",
            )
        if isinstance(value, str) and _URL_PASSWORD.match(value):
            raise SettingInvalid(
                f"{origin} holds a password in {quote(raw)}: no secret belongs in a settings file",
                hint="set it in the environment",
            )
        found[key] = (origin, _beside(path, key, value))
    return found


def _from_environment(known: tuple[str, ...]) -> dict[str, tuple[str, Any]]:
    try:
        table = EnvSettingsSource(Settings)()
    except SettingsError as error:
        raise SettingInvalid(f"the environment cannot be read: {error}", hint="unset it") from None
    found = {}
    for key, value in _flatten(table):
        name = PREFIX + key.replace(".", "__").upper()
        _check_key(_snake(key), known, name, "the environment")
        found[_snake(key)] = (name, value)
    names = {PREFIX + key.replace(".", "__").upper() for key in known}
    for name in os.environ:
        # Other programs may share the prefix; what is one slip away from ours is a slip.
        near = difflib.get_close_matches(name, names, 1, 0.93)
        if name.startswith(PREFIX) and name not in names and near:
            raise SettingInvalid(
                f"the environment sets {quote(name)}, which is no setting",
                hint=f"did you mean {near[0]}?",
            )
    return found


def _check_key(key: str, known: tuple[str, ...], raw: str, origin: str) -> None:
    if key in known or _SECRET.search(key.rpartition(".")[2]):
        return
    near = difflib.get_close_matches(key, known, 1, 0.4)
    raise SettingInvalid(
        f"{origin}: {quote(raw)} is no setting",
        hint=(f"did you mean {quote(near[0])}? " if near else "") + "all: playledger config",
        key=raw,
    )


def _unfit(error: ValidationError, found: Mapping[str, tuple[str, Any]]) -> SettingInvalid:
    first = error.errors(include_url=False)[0]
    parts = [str(part) for part in first["loc"]]
    key = next((k for n in (2, 1) if (k := ".".join(parts[:n])) in found), ".".join(parts))
    origin, value = found.get(key, ("", first["input"]))
    reason = first["msg"].removeprefix("Value error, ")
    return SettingInvalid(
        f"{origin}: {key}: {reason[0].lower()}{reason[1:]}, got {quote(str(value))}",
        hint=f"its default: {show(dict(_leaves(Settings())).get(key))}",
        key=key,
    )


def _leaves(model: BaseModel, head: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{head}{name}.")
        else:
            yield head + name, value


def _flatten(table: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{head}{name}.")
        else:
            yield head + name, value


def _snake(key: str) -> str:
    """`policy.retryLimit`, the name in the log, is `policy.retry_limit`."""
    return re.sub(r"(?<=[a-z])([A-Z])", lambda match: "_" + match[1].lower(), key)


def _beside(path: Path, key: str, value: Any) -> Any:
    """A path in a settings file is meant from its folder."""
    folder = path.resolve().parent
    if folder == Path.cwd():
        return value
    if key in ("db", "tokens_file", "token_file") and isinstance(value, str) and "://" not in value:
        return str(folder / value)
    if key == "plays" and isinstance(value, list):
        return [str(folder / v) if str(v).endswith(".py") else v for v in value]
    return value


def _line_of(text: str, head: str, key: str) -> int | None:
    """Finds the line that sets a key, for the reader; only plainly written ones."""
    wanted = f"{head}.{key}" if head else key
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        opened = re.match(r"\s*\[([^\[\]]+)\]", line)
        if opened:
            table = opened[1].strip() + "."
        name = re.match(r"\s*([A-Za-z0-9_.-]+)\s*=", line)
        if name and f"{table}{name[1]}" == wanted:
            return number
    return None


def read_text(path: Path, what: str) -> str:
    """Returns the text of a file that a setting names; raises SettingInvalid."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingInvalid(
            f"{what}: {path} cannot be read: {reason}", hint="check the path and its permissions"
        ) from None


def _ms(value: timedelta) -> int:
    return round(value.total_seconds() * 1000)
