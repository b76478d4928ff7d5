"""Runs the console to its end and gives the terminal back, whatever ends it."""

import asyncio

from console.app import ConsoleApp
from console.terminal_app import EXIT_GONE, SIGNALS


async def run_console_async(app: ConsoleApp) -> int:
    """Run the app in this event loop; returns its exit code with the terminal restored.

    SIGINT, SIGTERM and SIGHUP end the app (128 + n). Their handlers are taken away at the end: a caller that goes
    on in the same loop installs its own then.
    """
    try:
        await app.run_async()
    except OSError:
        if not app.terminal_gone:
            raise
        return EXIT_GONE
    finally:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    return app.return_code or 0


def run_console(app: ConsoleApp) -> int:
    """:func:`run_console_async` in an event loop of its own."""
    return asyncio.run(run_console_async(app))
