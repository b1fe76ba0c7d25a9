"""Values of plays: between what Python holds and the JSON that is stored."""

from __future__ import annotations

from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from ledger.canonical import Json, canonical
from ledger.errors import InputInvalid
from ledger.ids import quote


def read_value(
    adapter: TypeAdapter[Any] | None, value: Json, what: str, signature: str = ""
) -> Any:
    """Returns a JSON value as a type has it, or raises InputInvalid with the first misfit."""
    if adapter is None:
        return value
    try:
        return adapter.validate_json(canonical(value))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "$" + "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
        )
        given = quote(str(first["input"]))
        raise InputInvalid(
            f"{what}: {path} {first['msg'][0].lower()}{first['msg'][1:]}, got {given}",
            hint=f"its signature: {signature}" if signature else "",
            path=path,
        ) from error


def write_value(value: Any, adapter: TypeAdapter[Any] | None = None) -> bytes:
    """Returns any value a play may give as canonical JSON; raises InputInvalid if it has none."""
    try:
        if adapter is not None:
            return canonical(adapter.dump_python(value, mode="json", warnings=False))
        return canonical(to_jsonable_python(value))
    except (PydanticSerializationError, TypeError, RecursionError) as error:
        raise InputInvalid(
            f"{type(value).__name__} has no JSON form: {error}",
            code="NOT_JSON",
            hint="return what json.dumps takes, or a pydantic model",
        ) from error


def adapter_for(annotation: Any) -> TypeAdapter[Any] | None:
    """Returns what checks values of a type, or None for one that pydantic cannot check."""
    if annotation is None or annotation is Any:
        return None
    try:
        return TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, RecursionError):  # an alias that names itself
        return None
