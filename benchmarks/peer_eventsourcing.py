"""The `eventsourcing` library on a SQLite file, at its defaults (WAL, `synchronous=FULL`).

python -m benchmarks.peer_eventsourcing save   RUNS   FOLDER   one save for each event
python -m benchmarks.peer_eventsourcing replay EVENTS FOLDER   one aggregate, again and again
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from uuid import UUID

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event

from benchmarks.harness import Sample, answer, fresh, latencies

REPLAYS = 5
DETAIL = '{"name":"customer","n":1}' * 8


class Journey(Aggregate):
    """A run with the eight events that one of ours has."""

    @event("Submitted")
    def __init__(self, play: str, params: str) -> None:
        self.play = play
        self.params = params
        self.status = "submitted"
        self.attempt = -1
        self.host = ""
        self.done = 0
        self.result = ""

    @event("LaunchStatePut")
    def put_launch_state(self, size: int) -> None:
        self.launch = size

    @event("CreateRequested")
    def request_create(self, instance: str, attempt: int) -> None:
        self.instance = instance
        self.attempt = attempt

    @event("Created")
    def create(self, instance: str, host: str) -> None:
        self.instance = instance
        self.host = host

    @event("Started")
    def start(self, instance: str) -> None:
        self.instance = instance
        self.status = "running"

    @event("Progressed")
    def advance(self, done: int) -> None:
        self.done = done

    @event("InstanceCompleted")
    def complete_instance(self, instance: str, result: str) -> None:
        self.instance = instance
        self.result = result

    @event("Completed")
    def complete(self, result: str) -> None:
        self.status = "completed"
        self.result = result


def application(folder: Path) -> Application[UUID]:
    """Returns an application on a fresh file."""
    path = fresh(folder) / "eventsourcing.db"
    return Application(
        env={"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(path)}
    )


def save(runs: int, folder: Path) -> Sample:
    """Measures events saved one at a time."""
    app = application(folder)
    waits: list[float] = []

    def keep(journey: Journey) -> None:
        since = time.perf_counter()
        app.save(journey)
        waits.append(time.perf_counter() - since)

    begun = time.perf_counter()
    for number in range(runs):
        journey = Journey("bench:noop", DETAIL)
        keep(journey)
        instance = f"run-{number}"
        journey.put_launch_state(200)
        keep(journey)
        journey.request_create(instance, 0)
        keep(journey)
        journey.create(instance, "host")
        keep(journey)
        journey.start(instance)
        keep(journey)
        journey.advance(1)
        keep(journey)
        journey.complete_instance(instance, DETAIL)
        keep(journey)
        journey.complete(DETAIL)
        keep(journey)
    return {"rate": len(waits) / (time.perf_counter() - begun), **latencies(waits)}


def replay(events: int, folder: Path) -> Sample:
    """Measures how fast one long aggregate is brought back."""
    app = application(folder)
    journey = Journey("bench:noop", DETAIL)
    for number in range(events - 1):
        journey.advance(number)
    app.save(journey)
    app.repository.get(journey.id)
    begun = time.perf_counter()
    for _ in range(REPLAYS):
        app.repository.get(journey.id)
    return {"rate": events * REPLAYS / (time.perf_counter() - begun)}


def main() -> None:
    what, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    match what:
        case "save":
            answer(save(count, folder / "eventsourcing"))
        case "replay":
            answer(replay(count, folder / "eventsourcing"))
        case _:
            raise SystemExit(f"no such side: {what}")


if __name__ == "__main__":
    main()
