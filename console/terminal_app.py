"""An app that ends well however it ends: by a signal, with its terminal gone, or by an error of its own."""

import asyncio
import contextlib
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from textual.app import App

from console.crash import describe_crash
from console.terminal import ConsoleDriver

EXIT_GONE: Final = 128 + signal.SIGHUP
SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class TerminalApp(App[None], inherit_bindings=False):
    """``crash`` is the line for the operator after an error; its traceback goes to ``crash_log``."""

    def __init__(self, crash_log: Path) -> None:
        # Textual turns colours into greys for NO_COLOR, unless they are the terminal's own: then it leaves them out.
        super().__init__(driver_class=ConsoleDriver, ansi_color=True if "NO_COLOR" in os.environ else None)
        self.crash = ""
        self._crash_log = crash_log

    @property
    def terminal_gone(self) -> bool:
        """The terminal that the app draws on was closed."""
        return isinstance(self._driver, ConsoleDriver) and self._driver.terminal_gone

    def end_on_signals(self) -> None:
        """``run_console`` takes the handlers away again."""
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in SIGNALS:
                loop.add_signal_handler(number, partial(self.exit, return_code=128 + number))

    def check_terminal(self) -> bool:
        """Whether there is a terminal to draw on; ends the app where there is none any more."""
        if self.terminal_gone:
            self.exit(return_code=EXIT_GONE)
            return False
        if isinstance(self._driver, ConsoleDriver) and self._driver.writer.take_recovered():
            self.screen.refresh(layout=True)
        return True

    def panic(self, *renderables: RenderableType) -> None:
        """Textual's reader of the terminal failed (it is gone), or an error that draws itself came up."""
        if self.terminal_gone:
            self.exit(return_code=EXIT_GONE)
        else:
            super().panic(*renderables)

    def _fatal_error(self) -> None:
        """One line for the operator; the traceback, without values of variables, goes to the run's logs."""
        if self._exception is not None:
            self.crash = describe_crash(self._exception, self._crash_log)
        self._close_messages_no_wait()

    def _print_error_renderables(self) -> None:
        """Textual's own way cuts the line to the terminal's width."""
        if self.crash and sys.__stderr__ is not None:
            with contextlib.suppress(OSError):
                print(self.crash, file=sys.__stderr__, flush=True)
            self.crash = ""
        super()._print_error_renderables()
