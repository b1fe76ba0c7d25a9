"""The stored vocabulary: complete, pinned, documented, and safe to read back for ever."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import orjson
import pytest
from msgspec.structs import fields

from ledger import events as e
from ledger.codec import decode, encode
from ledger.events import EVENT_TYPES, SCHEMA_VERSIONS, WIRE_NAMES, Event, Seal

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("golden") / "wire_names.json"
PAGE = (ROOT / "docs" / "events.md").read_text()
PARTS = (e.Seal, e.SecretRef, e.Lineage, e.Parent, e.Policy, e.SessionOffer)
ALL = sorted(EVENT_TYPES.items())
IDS = [name for name, _ in ALL]


def shape(kind: type[Any]) -> dict[str, str]:
    """Returns the wire names of a type's fields, and which of them may be absent."""
    return {f.encode_name: "required" if f.required else "optional" for f in fields(kind)}


def section(name: str) -> str:
    """Returns the part of docs/events.md about one type."""
    found = re.search(rf"^### `{re.escape(name)}`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/events.md has no section ### `{name}`"
    return found[1]


def example(name: str) -> bytes:
    """Returns the example leaf of one type."""
    found = re.search(r"```json\n(.*?)\n```", section(name), re.DOTALL)
    assert found is not None, f"docs/events.md shows no leaf of {name}"
    return found[1].encode()


def test_every_event_has_a_wire_name_and_a_schema_number() -> None:
    kinds = set(get_args(Event))
    assert set(WIRE_NAMES) == kinds == set(SCHEMA_VERSIONS)
    assert len(EVENT_TYPES) == len(WIRE_NAMES)
    assert all(version >= 1 for version in SCHEMA_VERSIONS.values())


@pytest.mark.parametrize("kind", list(WIRE_NAMES))
def test_a_class_is_the_camel_case_of_its_wire_name(kind: type[Event]) -> None:
    words = re.split(r"[._]", WIRE_NAMES[kind])
    assert kind.__name__ == "".join(word.capitalize() for word in words)


def test_wire_names_never_change() -> None:
    """Field names, types and schema numbers are the storage format: golden/wire_names.json.

    A new type or optional field is added to the file.  Anything else needs a new schema number and
    an upcaster, and is added as such.
    """
    golden = json.loads(GOLDEN.read_text())
    today: dict[str, Any] = {
        name: {"schema": SCHEMA_VERSIONS[kind], "fields": shape(kind)}
        for name, kind in EVENT_TYPES.items()
    }
    today |= {f"({kind.__name__})": {"fields": shape(kind)} for kind in PARTS}
    assert today == golden


@pytest.mark.parametrize("kind", [*WIRE_NAMES, *PARTS], ids=lambda kind: kind.__name__)
def test_an_optional_field_defaults_to_none(kind: type[Any]) -> None:
    """A default is not written, so any other would change what an old leaf says."""
    for field in fields(kind):
        if not field.required:
            assert field.default is None, (kind.__name__, field.name)
            assert type(None) in get_args(get_type_hints(kind)[field.name])


@pytest.mark.parametrize("kind", [*WIRE_NAMES, *PARTS], ids=lambda kind: kind.__name__)
def test_an_event_holds_no_free_keys_no_lists_and_no_floats(kind: type[Any]) -> None:
    """Every type is bounded: what is not is sealed, its count in clear (CONTRACTS A.3)."""
    for name, hint in get_type_hints(kind).items():
        if kind is Seal and name == "sd":
            continue  # one digest, in the form of selective disclosure
        for part in (hint, *get_args(hint)):
            assert part not in (float, dict, list), (kind.__name__, name)
            assert getattr(part, "__origin__", None) not in (dict, list, tuple)


@pytest.mark.parametrize("kind", [*WIRE_NAMES, *PARTS], ids=lambda kind: kind.__name__)
def test_times_end_in_at_and_lengths_in_ms(kind: type[Any]) -> None:
    for field in fields(kind):
        assert not re.search(r"(Seconds|Time|Date|Timestamp|_s)$", field.encode_name)
        if field.encode_name.endswith(("At", "Ms", "Bytes")):
            assert int in (get_type_hints(kind)[field.name], *get_args(field.type))


@pytest.mark.parametrize(("name", "kind"), ALL, ids=IDS)
def test_docs_describe_every_field(name: str, kind: type[Event]) -> None:
    """A stranger can read an export by docs/events.md alone."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section(name), re.MULTILINE)
    assert [field for field, _ in rows] == list(shape(kind))
    for field, what in rows:
        assert what.endswith(", optional") == (shape(kind)[field] == "optional")
        hint = get_type_hints(kind)[kind_field(kind, field)]
        assert what.startswith("sealed") == (Seal in (hint, *get_args(hint)))


def kind_field(kind: type[Event], wire: str) -> str:
    """Returns the name in Python of a field on the wire."""
    return next(f.name for f in fields(kind) if f.encode_name == wire)


@pytest.mark.parametrize(("name", "kind"), ALL, ids=IDS)
def test_the_example_leaf_of_every_type_is_one_we_would_write(name: str, kind: type[Event]) -> None:
    """It decodes, shows every field, and encodes to the same bytes."""
    leaf = example(name)
    recorded = decode(leaf)
    assert type(recorded.data) is kind
    assert set(orjson.loads(leaf)["data"]) == set(shape(kind))
    assert encode(recorded) == leaf


@pytest.mark.parametrize(("name", "kind"), ALL, ids=IDS)
def test_an_unknown_field_is_refused(name: str, kind: type[Event]) -> None:
    """What was written by somebody else must not be read as if it were ours."""
    data = orjson.loads(example(name))["data"] | {"surprise": 1}
    with pytest.raises(msgspec.ValidationError, match="unknown field `surprise`"):
        msgspec.convert(data, kind)


def test_docs_name_no_event_that_does_not_exist() -> None:
    assert set(re.findall(r"^### `(.+?)`$", PAGE, re.MULTILINE)) == set(EVENT_TYPES)


def test_docs_describe_every_attribute_of_the_envelope() -> None:
    attributes = orjson.loads(example("instance.created"))
    for attribute in attributes:
        assert f"| `{attribute}` |" in PAGE


def test_docs_name_every_error_class() -> None:
    for error_class in get_args(e.ErrorClass):
        assert f"`{error_class}`" in PAGE
