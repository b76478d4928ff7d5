"""The router's workers by id, and a short list of them for each choice. Pure.

``selection`` chooses; with a thousand workers it must not look at all of them for every request. What it is given here
are the few among which the choice lies, so that it chooses the same: the two best by its own order, and those that
drain, since its reason names them. The orders are heaps whose entries are looked at when they come up: one that no
longer says what is true of its worker is dropped.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from cluster.control import WorkerAddress
from cluster.selection import WorkerView, blocks_needed

FEW: Final = 16
"""So many workers are simply looked at all."""

_STALE: Final = 4
"""A heap with so many entries a worker is made anew."""

Entry = tuple[int, int, str]
"""Two numbers, the smaller the better, and the worker."""


class WorkerViews(dict[str, WorkerView]):
    """Call ``listed`` after views came or went or got another address, role or drain; ``changed`` after a view's
    promises or its connection changed."""

    def __init__(self) -> None:
        super().__init__()
        self.draining: tuple[WorkerView, ...] = ()
        self._shapes: dict[bool, tuple[WorkerAddress, ...]] = {True: (), False: ()}
        self._orders = (_Order(self, _prefill_entry), _Order(self, _decode_entry), _Order(self, _any_entry))

    def listed(self) -> None:
        """The list of workers is another one."""
        self.draining = tuple(view for view in self.values() if view.draining_since is not None)
        self._shapes = {
            is_colocated: _distinct(
                view.address for view in self.values() if is_colocated or view.is_decode()
            )
            for is_colocated in (True, False)
        }
        for order in self._orders:
            order.clear()

    def changed(self, view: WorkerView) -> None:
        if len(self) > FEW:
            for order in self._orders:
                order.add(view)

    def shapes(self, is_colocated: bool) -> tuple[WorkerAddress, ...]:
        """An address of every kind of worker that decodes: they may hold different numbers of tokens."""
        return self._shapes[is_colocated]

    def for_prefill(self, exclude: Sequence[str] = ()) -> Iterable[WorkerView]:
        if len(self) <= FEW:
            return self.values()
        return [*self._orders[0].best(lambda view: view.worker_id not in exclude), *self.draining]

    def for_decode(
        self, num_prompt_tokens: int, max_tokens: int, exclude: Sequence[str] = ()
    ) -> Iterable[WorkerView]:
        if len(self) <= FEW:
            return self.values()
        least = min(
            (blocks_needed(num_prompt_tokens, max_tokens, shape) for shape in self.shapes(False)), default=0
        )
        best = self._orders[1].best(
            lambda view: view.worker_id not in exclude and _has_room(view, num_prompt_tokens, max_tokens),
            is_end=lambda view: view.free_blocks < least,
        )
        return [*best, *self.draining]

    def for_colocated(self, num_prompt_tokens: int, max_tokens: int) -> Iterable[WorkerView]:
        if len(self) <= FEW:
            return self.values()
        best = self._orders[2].best(lambda view: _has_room(view, num_prompt_tokens, max_tokens))
        return [*best, *self.draining]


class _Order:
    """``entry_of``: where a view belongs now; None: nowhere."""

    def __init__(self, views: WorkerViews, entry_of: Callable[[WorkerView], Entry | None]) -> None:
        self._views = views
        self._entry_of = entry_of
        self._heap: list[Entry] = []
        self._is_made = False

    def clear(self) -> None:
        self._heap, self._is_made = [], False

    def add(self, view: WorkerView) -> None:
        if not self._is_made:
            return
        if len(self._heap) > _STALE * len(self._views):
            self.clear()
            return
        entry = self._entry_of(view)
        if entry is not None:
            heapq.heappush(self._heap, entry)

    def best(
        self, is_able: Callable[[WorkerView], bool], is_end: Callable[[WorkerView], bool] = lambda _: False
    ) -> list[WorkerView]:
        """The first two that are able, in order; none behind one for which ``is_end`` holds."""
        if not self._is_made:
            entries = map(self._entry_of, self._views.values())
            self._heap = [entry for entry in entries if entry is not None]
            heapq.heapify(self._heap)
            self._is_made = True
        heap = self._heap
        found: list[WorkerView] = []
        seen: dict[str, Entry] = {}
        while heap and len(found) < 2:
            entry = heap[0]
            view = self._views.get(entry[2])
            is_true = view is not None and self._entry_of(view) == entry and entry[2] not in seen
            if view is not None and is_true:
                if is_end(view):
                    break
                seen[entry[2]] = entry
                if is_able(view):
                    found.append(view)
            heapq.heappop(heap)
        for entry in seen.values():
            heapq.heappush(heap, entry)
        return found


def _prefill_entry(view: WorkerView) -> Entry | None:
    if not (view.is_available and view.is_prefill()):
        return None
    return view.num_queued_prompt_tokens, 0, view.worker_id


def _decode_entry(view: WorkerView) -> Entry | None:
    if not (view.is_available and view.is_decode() and view.can_take(0)):
        return None
    return -view.free_blocks, view.num_assigned, view.worker_id


def _any_entry(view: WorkerView) -> Entry | None:
    if not (view.is_available and view.can_take(0)):
        return None
    return view.num_queued_prompt_tokens, view.num_assigned, view.worker_id


def _has_room(view: WorkerView, num_prompt_tokens: int, max_tokens: int) -> bool:
    return view.can_take(blocks_needed(num_prompt_tokens, max_tokens, view.address))


def _distinct(addresses: Iterable[WorkerAddress]) -> tuple[WorkerAddress, ...]:
    """One of each size."""
    return tuple(
        {
            (address.total_blocks, address.block_size, address.max_model_len): address
            for address in addresses
        }.values()
    )
