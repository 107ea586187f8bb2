"""Connections of spikeopd-serve that end if nothing moves on them, so that idle clients cannot keep others out."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

SECONDS = 10.0


class Impatient(AutoHTTPProtocol):  # type: ignore[misc, valid-type] # one of two classes, chosen when uvicorn starts
    """uvicorn waits for ever for the head of a request, and for a client that does not read its answer."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._before: tuple[Any, int] = (None, 0)
        self._timer = self.loop.call_later(SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Twice the same request, or none, and the same bytes waiting for the client: nobody is there."""
        idle = self.cycle is None or self.cycle.response_complete or self.flow.write_paused
        now = (self.cycle, self.transport.get_write_buffer_size())
        if idle and now == self._before:
            self.transport.abort()
            return
        self._before = now
        self._timer = self.loop.call_later(SECONDS, self._look)
