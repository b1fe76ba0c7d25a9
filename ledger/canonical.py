from __future__ import annotations

import orjson

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def canonical(value: Json) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
