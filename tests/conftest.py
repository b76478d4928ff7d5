"""For every test: no property has a deadline (how long an example takes says only how busy the machine is), and the
garbage collector leaves alone what was imported and collected before the first test: it stays to the end."""

import gc

from hypothesis import settings

settings.register_profile("pdconsole", deadline=None)
settings.load_profile("pdconsole")
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()
