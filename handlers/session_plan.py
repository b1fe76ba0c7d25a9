"""Which database sessions a run needs: least privilege, read off its pipeline (SPEC 1.15, 7.16).

Pure.  One requirement for each table, whatever steps use it: their operations together, the
strictest of their limits, in the order in which the tables first appear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from ledger.canonical import Json
from ledger.errors import InputInvalid

REQUIREMENTS_MAX: Final = 64
DEPTH_MAX: Final = 64
OPERATIONS: Final = frozenset({"select", "insert", "update", "upsert", "delete"})


class Requirement(Struct, frozen=True):
    """One table that a run works on; limits are name and number, sorted by name."""

    table_namespace: str
    logical_table: str
    operations: tuple[str, ...]
    limits: tuple[tuple[str, int], ...] = ()

    @property
    def table(self) -> str:
        """Returns the name by which a play asks for the session: `namespace.table`."""
        return f"{self.table_namespace}.{self.logical_table}"


def plan(static_pipeline: Json) -> tuple[Requirement, ...]:
    """Returns what a pipeline needs; none for a run without one.

    A pipeline is searched for objects with `tableNamespace`, `logicalTable` and `operations`, so
    that a new kind of step needs no new rule.  Raises InputInvalid for one that names a table but
    not what it does there, or more than 64 tables.
    """
    found: dict[tuple[str, str], Requirement] = {}
    for step in _steps(static_pipeline, 0):
        need = _requirement(step)
        key = (need.table_namespace, need.logical_table)
        found[key] = _united(found[key], need) if key in found else need
    if len(found) > REQUIREMENTS_MAX:
        raise InputInvalid(
            f"the pipeline works on {len(found)} tables, the limit is {REQUIREMENTS_MAX}",
            code="SESSION_PLAN_INVALID",
            hint="split it into children",
        )
    return tuple(found.values())


def plan_of_play(sessions: Mapping[str, Sequence[str]]) -> tuple[Requirement, ...]:
    """Returns what `@play(sessions={"crm.leads": ["select"]})` asks for."""
    steps: list[Json] = []
    for table, operations in sessions.items():
        namespace, _, logical = table.rpartition(".")
        if not namespace or not logical:
            raise InputInvalid(
                f'session "{table}" names no table',
                code="SESSION_PLAN_INVALID",
                hint="write namespace.table",
            )
        steps.append(
            {
                "logicalTable": logical,
                "operations": list(operations),
                "tableNamespace": namespace,
            }
        )
    return plan(steps)


def _steps(value: Json, depth: int) -> Iterator[Mapping[str, Json]]:
    if depth > DEPTH_MAX:
        raise InputInvalid(
            f"the pipeline is nested over {DEPTH_MAX} levels", code="SESSION_PLAN_INVALID"
        )
    if isinstance(value, Mapping):
        if "tableNamespace" in value or "logicalTable" in value:
            yield value
        for inner in value.values():
            yield from _steps(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _steps(inner, depth + 1)


def _requirement(step: Mapping[str, Json]) -> Requirement:
    namespace, table = step.get("tableNamespace"), step.get("logicalTable")
    operations = step.get("operations")
    if not (isinstance(namespace, str) and namespace and isinstance(table, str) and table):
        raise _unfit("a step names a table without tableNamespace and logicalTable")
    if not isinstance(operations, list) or not operations:
        raise _unfit(f"a step on {namespace}.{table} names no operations")
    names = [name for name in operations if isinstance(name, str) and name in OPERATIONS]
    if len(names) != len(operations):
        allowed = ", ".join(sorted(OPERATIONS))
        raise _unfit(f"a step on {namespace}.{table} has other operations than {allowed}")
    limits = step.get("limits") or {}
    if not isinstance(limits, Mapping):
        raise _unfit(f"the limits of a step on {namespace}.{table} are no object")
    numbers = []
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _unfit(f"limit {name} of {namespace}.{table} is no whole number from 0 on")
        numbers.append((name, value))
    return Requirement(namespace, table, tuple(sorted(set(names))), tuple(sorted(numbers)))


def _united(one: Requirement, other: Requirement) -> Requirement:
    limits = dict(one.limits)
    for name, value in other.limits:
        limits[name] = min(value, limits.get(name, value))
    return Requirement(
        one.table_namespace,
        one.logical_table,
        tuple(sorted({*one.operations, *other.operations})),
        tuple(sorted(limits.items())),
    )


def _unfit(why: str) -> InputInvalid:
    return InputInvalid(why, code="SESSION_PLAN_INVALID", hint="mend staticPipeline")
