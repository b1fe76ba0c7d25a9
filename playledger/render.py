"""How answers look: marks, tables, times, lengths, and text that cannot act on a terminal.

A pipe changes the clothes, not the content: no colour, tabs, nothing cut, RFC 3339 (UX section 3).
Text that comes from runs goes through `visible`, or through `json_text`, and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import orjson
from msgspec import Struct

CELL_MAX: Final = 48
MARKS: Final = {
    "submitted": "◌",
    "running": "●",
    "cancelling": "●",
    "completed": "✓",
    "failed": "✗",
    "cancelled": "–",
    "warning": "!",
}
_ASCII_MARKS: Final = {
    "◌": "o",
    "●": "*",
    "✓": "+",
    "✗": "x",
    "–": "-",
    "!": "!",
    "█": "#",
    "░": ".",
}
_COLOURS: Final = {"✓": "32", "●": "36", "◌": "2", "✗": "31", "–": "2", "!": "33"}
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# What JSON leaves as it is, and a terminal would obey or show in another order.
_JSON_UNSAFE: Final = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)


class Look(Struct, frozen=True):
    """What one stream takes: a terminal or a pipe, colour, marks beyond ASCII, columns."""

    terminal: bool = False
    colour: bool = False
    ascii: bool = False
    width: int = 80

    def mark(self, status: str, *, waits: bool = False) -> str:
        """Returns the mark of a status, in its colour."""
        mark = MARKS[status]
        colour = "33" if waits and mark == "●" else _COLOURS[mark]
        return self._in(self.plain(mark), colour)

    def bold(self, text: str) -> str:
        return self._in(text, "1")

    def dim(self, text: str) -> str:
        return self._in(text, "2")

    def red(self, text: str) -> str:
        return self._in(text, "31")

    def plain(self, text: str) -> str:
        """Returns our own marks in ASCII, where nothing else is taken."""
        return "".join(_ASCII_MARKS.get(c, c) for c in text) if self.ascii else text

    def _in(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text else text


def look_of(stream: TextIO, *, ascii_only: bool, environ: Mapping[str, str]) -> Look:
    """Says how to write to a stream: NO_COLOR, FORCE_COLOR, its encoding, its width."""
    terminal = stream.isatty()
    if environ.get("NO_COLOR"):
        colour = False
    elif environ.get("FORCE_COLOR"):
        colour = True
    else:
        colour = terminal and environ.get("TERM") != "dumb"
    encoding = (stream.encoding or "ascii").lower().replace("-", "")
    width = shutil.get_terminal_size((80, 24)).columns if terminal else 80
    return Look(
        terminal=terminal,
        colour=colour,
        ascii=ascii_only or not encoding.startswith("utf"),
        width=max(40, width),
    )


def visible(text: str) -> str:
    """Returns text on one line, with everything invisible shown as an escape, not sent."""
    if text.isascii() and text.isprintable():
        return text
    out = []
    for character in text:
        category = unicodedata.category(character)
        if character in _NAMED:
            out.append(_NAMED[character])
        elif category[0] == "C" or (category[0] == "Z" and character != " "):
            code = ord(character)
            out.append(
                f"\\x{code:02x}"
                if code < 0x100
                else f"\\u{code:04x}"
                if code < 0x10000
                else f"\\U{code:08x}"
            )
        else:
            out.append(character)
    return "".join(out)


def json_text(value: Any, *, indent: bool = False) -> str:
    """Returns JSON in which also C1 and direction-changing characters are escaped."""
    option = orjson.OPT_INDENT_2 if indent else 0
    return safe_json(orjson.dumps(value, option=option).decode())


def safe_json(text: str) -> str:
    """Returns the same JSON value without a character that a terminal would obey."""
    if text.isascii():
        return text.replace("\x7f", "\\u007f")
    return _JSON_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def clip(text: str, width: int) -> str:
    """Returns text that fits `width`, cut at its end."""
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


def columns(rows: Sequence[Sequence[str]], look: Look, *, right: Iterable[int] = ()) -> list[str]:
    """Returns rows as aligned lines; piped, as fields between tabs, whole."""
    if not look.terminal:
        return ["\t".join(row) for row in rows]
    if not rows:
        return []
    short = [[clip(cell, CELL_MAX) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in short) for i in range(len(short[0]))]
    ends = frozenset(right)
    return [
        "  ".join(
            cell.rjust(width) if i in ends else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in short
    ]


def flat_table(value: Any, look: Look) -> list[str] | None:
    """Returns a list of flat objects as a table, or None if it is something else."""
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        return None
    found = list(dict.fromkeys(name for item in value for name in item))
    # JSON in the log has its keys sorted: what names a row comes first, its figures behind.
    names = sorted(found, key=lambda name: all(_number(item.get(name)) for item in value))
    cells = [[item.get(name) for name in names] for item in value]
    if not names or any(isinstance(cell, dict | list) for row in cells for cell in row):
        return None
    digits = [_digits([row[i] for row in cells]) for i in range(len(names))]
    rows = [[_cell(cell, digits[i]) for i, cell in enumerate(row)] for row in cells]
    right = [i for i in range(len(names)) if all(_number(row[i]) for row in cells)]
    return columns([[visible(name) for name in names], *rows], look, right=right)


def _number(cell: Any) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def _digits(cells: Sequence[Any]) -> int:
    """One column shows one number of decimals: the most that any of its numbers has."""
    floats = [c for c in cells if isinstance(c, float)]
    return max((len(str(c).partition(".")[2]) for c in floats if "e" not in str(c)), default=0)


def _cell(cell: Any, digits: int) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return visible(cell)
    if isinstance(cell, float) and "e" not in str(cell):
        return f"{cell:.{digits}f}"
    return json_text(cell)


# --- times and lengths ------------------------------------------------------------------------


def rfc3339(at: int) -> str:
    """Returns ms since 1970 as `2026-12-01T08:00:00.004Z`."""
    moment = datetime.fromtimestamp(at // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{at % 1000:03d}Z"


def clock(at: int) -> str:
    """Returns ms since 1970 as people read it: `00:41:07.120Z`."""
    return rfc3339(at)[11:]


def moment(at: int) -> str:
    """Returns ms since 1970 as `2026-12-03 00:37:51Z`."""
    return f"{datetime.fromtimestamp(at // 1000, UTC):%Y-%m-%d %H:%M:%S}Z"


def length(ms: int) -> str:
    """Returns a length in its two largest units: `324 ms`, `8.4 s`, `14 m 21 s`, `2 d 3 h`."""
    ms = max(0, ms)
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    seconds = ms // 1000
    if seconds < 3600:
        large, small, names = seconds // 60, seconds % 60, "ms"
    elif seconds < 86_400:
        large, small, names = seconds // 3600, seconds % 3600 // 60, "hm"
    else:
        large, small, names = seconds // 86_400, seconds % 86_400 // 3600, "dh"
    return f"{large} {names[0]}" + (f" {small} {names[1]}" if small else "")


def age(ms: int) -> str:
    """Returns a length in its largest unit: `14 m`."""
    for size, name in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s")):
        if ms >= size:
            return f"{ms // size} {name}"
    return f"{max(0, ms)} ms"


def byte_size(count: int) -> str:
    """Returns a size as `124 bytes` or `1.2 MiB`."""
    if count < 10_240:
        return f"{count} byte{'' if count == 1 else 's'}"
    return f"{count / 1024:.1f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.1f} MiB"


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """Returns `1 child`, `4 children`, `no retry`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number or 'no'} {noun if not number else plural or noun + 's'}"


def environment() -> Mapping[str, str]:
    """Returns the environment, as a value for `look_of`."""
    return os.environ
