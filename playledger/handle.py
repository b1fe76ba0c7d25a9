"""A handle of one run: what the library gives back from a submit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from handlers.execute import Answer
from ledger.codec import Recorded
from ledger.errors import RunCancelled, RunFailed
from ledger.events import Event
from ledger.ids import run_stream
from projections.load import RunView

if TYPE_CHECKING:
    from playledger.embed import Ledger

T = TypeVar("T")


class RunHandle(Generic[T]):
    """One run; `position` is that of its submit, to read one's own write by."""

    def __init__(
        self, ledger: Ledger, run_id: str, position: int = 0, answer: Answer | None = None
    ) -> None:
        self._ledger = ledger
        self.id = run_id
        self.position = position
        self.answer = answer

    async def result(self, timeout: timedelta | None = None) -> T:
        """Returns the run's result; raises RunFailed, RunCancelled or TimeoutError."""
        run = await self._ledger.wait_for_end(self.id, timeout)
        if run.status == "failed":
            raise RunFailed(
                f"{run.run_id} failed: {run.code}",
                hint=f"playledger why {run.run_id}",
                runId=run.run_id,
                errorClass=run.error_class,
                runCode=run.code,
            )
        if run.status == "cancelled":
            raise RunCancelled(f"{run.run_id} was cancelled", runId=run.run_id)
        return cast("T", await self._ledger.reveal(run.result))

    async def status(self, *, min_position: int | None = None) -> RunView:
        """Returns the run as it is."""
        return await self._ledger.status(self.id, min_position=min_position)

    async def signal(self, key: str, data: Any = None) -> Answer:
        """Sends the run a signal."""
        return await self._ledger.signal(self.id, key, data)

    async def cancel(self, reason: str = "") -> Answer:
        """Asks the run to end."""
        return await self._ledger.cancel(self.id, reason)

    def events(self, *, follow: bool = False) -> AsyncIterator[Recorded[Event]]:
        """Yields the run's events."""
        return self._ledger.events(stream=run_stream(self.id), follow=follow)
