"""Python's collector of cycles, by a clock: left alone, it stops the console for a tenth of a second at a time."""

import gc
from typing import Final

COLLECT_S: Final = 5.0
COLLECTIONS_PER_WHOLE_ONE: Final = 120
"""Every ten minutes: what was kept and has become garbage since, such as the pages that were left."""


class Collector:
    """Collects what is new, and then leaves alone what has stayed.

    A full collection walks the whole view state, most of a million objects after an hour, to find the few thousand
    that drawing leaves in cycles. What survives one is therefore frozen, so that the next one costs as much as there
    is new. Nothing else in the process may freeze. Between ``start`` and ``stop`` Python begins no full collection.
    """

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        self._collections = 0

    def start(self) -> None:
        self._thresholds = young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, 1_000_000_000)

    def collect(self) -> None:
        """To be called every COLLECT_S."""
        if self._collections % COLLECTIONS_PER_WHOLE_ONE == 0:
            gc.unfreeze()
        self._collections += 1
        gc.collect()
        gc.freeze()

    def stop(self) -> None:
        gc.unfreeze()
        gc.set_threshold(*self._thresholds)
