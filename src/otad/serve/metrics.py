"""What Prometheus reads from the service."""

from __future__ import annotations

import os
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # where workers share their numbers, if it is set
ROWS = tuple(2**k for k in range(11))
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The numbers of one application; those of all workers together if they share a folder."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self._registry}
        self.requests = Counter("otad_requests", "Requests.", ("path", "status"), **own)
        self.seconds = Histogram(
            "otad_request_seconds",
            "Seconds from the first byte of a request to the last of its answer.",
            ("path",),
            buckets=SECONDS,
            **own,
        )
        self.rows = Counter("otad_rows", "Rows of answered inference requests.", **own)
        text = "Rows that were computed at once."
        self.batch = Histogram("otad_batch_rows", text, buckets=ROWS, **own)
        self.queue = Gauge(
            "otad_queue_length",
            "Pieces of work that wait for the compute thread.",
            multiprocess_mode="livesum",
            **own,
        )

    def text(self) -> bytes:
        """Return all numbers in the text format of Prometheus."""
        registry = self._registry
        if SHARED_FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


def forget_process(pid: int) -> None:
    """Leave out what a dead worker said about its present state; its counts remain."""
    if SHARED_FOLDER in os.environ:
        mark_process_dead(pid)  # type: ignore[no-untyped-call]
