"""Workers without a model and without imports of the library, which start in a moment."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection, wait

REFUSED = 3


def answer(listening: socket.socket, parent: Connection) -> None:
    """Say the own process number to everyone who connects, until the parent ends."""
    parent.send(None)
    listening.setblocking(False)
    while parent not in wait([listening, parent]):
        try:
            link, _ = listening.accept()
        except BlockingIOError:
            continue  # another worker was faster
        with link:
            link.sendall(str(os.getpid()).encode())


def refuse(listening: socket.socket, parent: Connection) -> None:
    sys.exit(REFUSED)
