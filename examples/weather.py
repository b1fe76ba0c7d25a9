"""Four years of Seattle weather: one child run a year, joined by their parent.

playledger run examples/weather.py:yearly_report --input @examples/data/seattle-weather.csv
"""

from asyncio import gather

from pydantic import BaseModel

from playledger import Run, play


class Year(BaseModel):
    year: str
    days: int
    rain_mm: float


@play
async def one_year(run: Run, year: str) -> Year:
    """Reads the file that its parent was given: a child sees its parent's files."""
    days = [row for row in run.csv() if row["date"].startswith(year)]
    run.log("read the year", days=len(days))
    rain_mm = sum(float(day["precipitation"]) for day in days)
    return Year(year=year, days=len(days), rain_mm=round(rain_mm, 1))


@play
async def yearly_report(run: Run) -> list[Year]:
    """Starts every year at once; after a restart the finished ones are found, not repeated."""
    years = sorted({row["date"][:4] for row in run.csv()})
    return await gather(*(run.child(one_year, year, key=year) for year in years))
