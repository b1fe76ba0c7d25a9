"""Plays for the tests of the command line."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from playledger import Run, play

HOSTILE = Path(__file__).parent / "cases" / "hostile_log_lines.json"


class Order(BaseModel):
    item: str
    amount: int


@play
async def hello(run: Run, name: str) -> str:
    run.log("greeting", to=name)
    return f"hello, {name}"


@play
async def pay(run: Run, order: Order) -> str:
    return f"{run.id} paid {order.amount}"


@play
async def echo(run: Run, value: Any = None) -> Any:
    del run
    print("a play that prints")
    return value


@play
async def approve(run: Run) -> Any:
    return await run.signal("approval", timeout=timedelta(days=2))


@play
async def boom(run: Run) -> None:
    del run
    raise ValueError("it broke")


@play
async def files(run: Run, value: Any = None) -> Any:
    names = sorted(item.name for item in [run.file("a.txt"), run.file("b.txt")])
    return {"value": value, "names": names, "size": len(run.file("a.txt").read_bytes())}


@play
async def hostile(run: Run) -> str:
    """Says everything that a terminal should not be told."""
    for line in json.loads(HOSTILE.read_text(encoding="utf-8"))["lines"]:
        text = line.get("text", line.get("repeat", "")[:1] * min(line.get("times", 0), 70_000))
        run.log(text, field=text[:200])
    run.progress(1, 2, "note \u202egnp.exe")
    await asyncio.sleep(0)
    raise ValueError("\x1b[2J\x9b31m\u202eevil\r\n" + "x" * 10)


@play
async def slow_year(run: Run, year: str) -> dict[str, Any]:
    """One year of the demo, slow enough to be killed in the middle."""
    days = [row for row in run.csv() if row["date"].startswith(year)]
    await asyncio.sleep(0.15 * (int(year) - 2011))
    rain = sum(float(day["precipitation"]) for day in days)
    return {"year": year, "days": len(days), "rain_mm": round(rain, 1)}


@play
async def slow_report(run: Run) -> list[dict[str, Any]]:
    years = sorted({row["date"][:4] for row in run.csv()})
    return list(await asyncio.gather(*(run.child(slow_year, year, key=year) for year in years)))


@play
async def spawner(run: Run, count: int) -> list[str]:
    """Starts children that wait, and waits for them."""
    print("spawning", file=sys.stderr)
    return list(await asyncio.gather(*(run.child(approve, key=str(n)) for n in range(count))))
