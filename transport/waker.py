"""Wakes a thread that waits for a socket, and lets it wait with less than a millisecond of slack."""

import os
import select
import time

POLL_IN = select.POLLIN
POLL_OUT = select.POLLOUT


class Waker:
    """``wake`` may be called from any thread, the rest from the one that waits. ``close`` it at the end."""

    def __init__(self) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, POLL_IN)
        self._watched: tuple[int, int] | None = None

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def watch(self, fd: int | None, mask: int) -> None:
        """Which file descriptor also ends a wait, and for what. Call with None before that one is closed."""
        wanted = None if fd is None else (fd, mask)
        if wanted == self._watched:
            return
        if self._watched is not None:
            self._poll.unregister(self._watched[0])
        if wanted is not None:
            self._poll.register(*wanted)
        self._watched = wanted

    def wait(self, timeout_s: float | None) -> None:
        """Returns when what is watched is ready, ``wake`` was called, or the time is over.

        poll counts whole milliseconds, so the rest of a wait is slept: nothing interrupts that, but it is short.
        """
        whole_ms = None if timeout_s is None else int(timeout_s * 1000)
        ready = self._poll.poll(whole_ms)
        if not ready and timeout_s is not None and whole_ms == 0:
            time.sleep(timeout_s)
        if any(fd == self._wake_fd for fd, _ in ready):
            os.eventfd_read(self._wake_fd)

    def close(self) -> None:
        os.close(self._wake_fd)
