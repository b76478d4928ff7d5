"""For every test: no property has a deadline (how long an example takes says only how busy the machine is), and the
garbage collector leaves alone what was imported and collected before the first test: it stays to the end."""

import gc
import os
import signal
from pathlib import Path

from hypothesis import settings

settings.register_profile("pdconsole", deadline=None)
settings.load_profile("pdconsole")

# A shell starts what runs in its background with Ctrl+C ignored, and what is started from here would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()
_ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
"""The program's processes import nothing from their working directory; some tests put a program of their own among
them."""


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()
