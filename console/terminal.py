"""Writing to the terminal without ever being held up by it.

Textual writes from a thread behind a short queue. A terminal that takes nothing (a stalled ssh session) would fill
that queue and stop the event loop; one that is gone would end the thread and do the same. Here both only lose what
is drawn, and the screen is drawn anew when the terminal takes text again.
"""

import errno
import os
import select
import sys
from typing import Any, Final, cast

from textual.drivers.linux_driver import LinuxDriver

STALL_MS: Final = 2000
_CANCEL: Final = b"\x18"
"""Ends an escape sequence that was cut in the middle."""


class TerminalWriter:
    """A text file over the terminal's own, non-blocking open file; what it cannot write soon is dropped."""

    def __init__(self, fd: int, stall_ms: int = STALL_MS) -> None:
        self._fd = _open_nonblocking(fd)
        self._stall_ms = stall_ms
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self.gone = False
        self._stalled = False
        self._recovered = False

    def fileno(self) -> int:
        return self._fd

    def flush(self) -> None:
        """Nothing is kept back."""

    def write(self, text: str) -> int:
        """Write or drop ``text``; never raises."""
        rest = memoryview(text.encode("utf-8", "replace"))
        while rest and not self.gone:
            if not self._writable():
                break
            try:
                if self._stalled:
                    os.write(self._fd, _CANCEL)
                    self._stalled, self._recovered = False, True
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                continue
            except OSError:
                self.gone = True
        return len(text)

    def take_recovered(self) -> bool:
        """True once after text was dropped and the terminal takes text again: draw everything anew."""
        recovered, self._recovered = self._recovered, False
        return recovered

    def _writable(self) -> bool:
        events = self._poll.poll(0 if self._stalled else self._stall_ms)
        if any(mask & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, mask in events):
            self.gone = True
            return False
        self._stalled = self._stalled or not events
        return bool(events)


class ConsoleDriver(LinuxDriver):
    """Textual's driver over a :class:`TerminalWriter`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.writer = TerminalWriter(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
        self._file = cast(Any, self.writer)  # all that its writer thread calls is write and flush

    @property
    def terminal_gone(self) -> bool:
        """Hung up: nobody will ever read or type here again."""
        return self.writer.gone or not os.isatty(self.fileno)


def _open_nonblocking(fd: int) -> int:
    """A new open file of the same terminal, so that O_NONBLOCK does not change the one shared with the shell."""
    try:
        return os.open(os.ttyname(fd), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.ENOENT, errno.EACCES, errno.ENXIO, errno.ENODEV):
            return os.dup(fd)
        raise
