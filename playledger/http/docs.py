"""The description of the HTTP face: OpenAPI, and a page that needs no script and no network."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

import orjson
from pydantic import BaseModel
from starlette.responses import HTMLResponse, Response

from ledger.errors import PlayledgerError
from playledger.http.door import Call, Door, Route, answer
from playledger.http.errors import status_of

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}td,th{text-align:left;padding:.2rem .8rem .2rem 0;vertical-align:top}
code{font:13px ui-monospace,monospace}@media(prefers-color-scheme:dark){body{background:#111;color:
#ddd}a{color:#8bf}}"""


def described(route: Route) -> dict[str, Any]:
    """Returns what OpenAPI says of a route beyond its path: access, query, body, answers."""
    shown: dict[str, Any] = {
        "x-access": route.access,
        "responses": {str(code): {"description": text} for code, text in route.answers.items()},
    }
    if route.access != "open":
        shown["security"] = [{"token": []}]
    parameters = []
    if "{run_id" in route.path:
        parameters.append(
            {"name": "run_id", "in": "path", "required": True, "schema": {"type": "string"}}
        )
    if route.query is not None:
        schema = route.query.model_json_schema()
        parameters += [
            {"name": name, "in": "query", "schema": field}
            for name, field in schema.get("properties", {}).items()
        ]
    if parameters:
        shown["parameters"] = parameters
    if route.body is not None:
        shown["requestBody"] = {"content": {"application/json": {"schema": _inline(route.body)}}}
    return shown


def _inline(model: type[BaseModel]) -> dict[str, Any]:
    """Returns a model's schema without references, which would point outside of the document."""
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            name = value.get("$ref", "").removeprefix("#/$defs/")
            return resolve(parts[name]) if name else {k: resolve(v) for k, v in value.items()}
        return [resolve(item) for item in value] if isinstance(value, list) else value

    result: dict[str, Any] = resolve(schema)
    return result


async def openapi(door: Door, call: Call) -> Response:
    """Returns the OpenAPI description."""
    del door
    return answer(orjson.dumps(_document(call)))


async def page(door: Door, call: Call) -> Response:
    """Shows every route, what it asks for and what it answers."""
    del door
    rows = []
    for path, methods in _document(call)["paths"].items():
        for method, operation in methods.items():
            answers = ", ".join(
                f"{code} {item['description']}" for code, item in operation["responses"].items()
            )
            rows.append(
                f"<tr><td><code>{method.upper()} {escape(path)}</code></td>"
                f"<td>{escape(operation.get('x-access', ''))}</td>"
                f"<td>{escape(operation.get('summary', ''))}<br><small>{escape(answers)}</small>"
                "</td></tr>"
            )
    return _html(
        "playledger over HTTP",
        "<p>The whole description: <a href='/openapi.json'>/openapi.json</a>. Every error code: "
        "<a href='/docs/errors'>/docs/errors</a>.</p><table><tr><th>resource</th><th>asks for</th>"
        f"<th></th></tr>{''.join(rows)}</table>",
    )


async def errors_page(door: Door, call: Call) -> Response:
    """Shows every kind of error, its usual code and status."""
    del door, call
    rows = [
        f"<tr id='{kind.code}'><td><code>{kind.code}</code></td><td>{status_of(kind(''))}</td>"
        f"<td>{escape((kind.__doc__ or '').splitlines()[0])}</td></tr>"
        for kind in sorted(set(_kinds(PlayledgerError)), key=lambda kind: kind.code)
    ]
    return _html("Errors", f"<table>{''.join(rows)}</table>")


def _kinds(kind: type[PlayledgerError]) -> Iterator[type[PlayledgerError]]:
    for below in kind.__subclasses__():
        if below.__module__.startswith(("ledger.", "playledger.http.")):
            yield below
        yield from _kinds(below)


def _document(call: Call) -> dict[str, Any]:
    app = call.request.app
    if app.openapi_schema is None:
        schema: dict[str, Any] = app.openapi()
        components = schema.setdefault("components", {})
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document: dict[str, Any] = app.openapi_schema
    return document


def _html(title: str, body: str) -> Response:
    return HTMLResponse(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>{body}"
    )
