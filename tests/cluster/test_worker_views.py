"""Among the few workers that a router looks at it must choose as among all of them, whatever happened before."""

import random

import pytest

from cluster.control import WorkerAddress
from cluster.selection import Promises, WorkerView, blocks_needed, pick_colocated, pick_decode, pick_prefill
from cluster.worker_views import FEW, WorkerViews


def address(index: int, role: str, total_blocks: int, block_size: int = 16) -> WorkerAddress:
    return WorkerAddress(
        worker_id=f"{role}-{index}",
        role=role,
        control_host="",
        control_port=index,
        kv_host="",
        kv_port=index,
        total_blocks=total_blocks,
        block_size=block_size,
        max_num_seqs=4,
        max_model_len=512,
        kv_bytes_per_token=1,
        fingerprint="",
    )


class Cluster:
    """Random workers, and random things that happen to them."""

    def __init__(self, seed: int, num_workers: int) -> None:
        self.rng = random.Random(seed)
        self.views = WorkerViews()
        self.requests = 0
        for index in range(num_workers):
            self.add(index)
        self.views.listed()

    def add(self, index: int) -> None:
        role = self.rng.choice(("prefill", "decode", "both"))
        size = self.rng.choice((16, 16, 32))
        view = WorkerView(address(index, role, self.rng.choice((30, 60, 61)), size))
        view.connected = self.rng.random() < 0.9
        self.views[view.worker_id] = view

    def happen(self) -> None:
        view = self.rng.choice(list(self.views.values()))
        what = self.rng.random()
        if what < 0.45:
            self.requests += 1
            tokens = self.rng.randint(1, 300)
            view.queued_prompt_tokens[f"r{self.requests}"] = tokens
            view.assigned_blocks[f"r{self.requests}"] = blocks_needed(tokens, 20, view.address)
            self.views.changed(view)
        elif what < 0.9:
            for promises in (view.queued_prompt_tokens, view.assigned_blocks):
                if promises:
                    promises.pop(self.rng.choice(list(promises)), None)
            self.views.changed(view)
        elif what < 0.95:
            view.connected = not view.connected
            if not view.connected:
                view.queued_prompt_tokens.clear()
                view.assigned_blocks.clear()
            self.views.changed(view)
        elif what < 0.98:
            view.set_draining(view.draining_since is None, 1.0)
            self.views.listed()
        else:
            del self.views[view.worker_id]
            self.add(1000 + self.requests)
            self.views.listed()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_workers", [1, FEW, FEW + 1, 60])
def test_a_choice_among_few_is_the_choice_among_all(seed: int, num_workers: int) -> None:
    cluster = Cluster(seed, num_workers)
    views, rng = cluster.views, cluster.rng
    for _ in range(400):
        cluster.happen()
        tokens, every = rng.randint(1, 500), views.values()
        exclude = tuple(rng.sample(list(views), min(len(views), rng.randint(0, 2))))
        assert pick_prefill(views.for_prefill(exclude), exclude) == pick_prefill(every, exclude)
        assert pick_decode(views.for_decode(tokens, 20, exclude), tokens, 20, exclude) == pick_decode(
            every, tokens, 20, exclude
        )
        assert pick_colocated(views.for_colocated(tokens, 20), tokens, 20) == pick_colocated(
            every, tokens, 20
        )


def test_many_changes_do_not_grow_without_bound() -> None:
    cluster = Cluster(1, 40)
    for _ in range(5000):
        cluster.happen()
        cluster.views.for_prefill()
        cluster.views.for_decode(10, 10)
    assert all(len(order._heap) <= 5 * 40 for order in cluster.views._orders)


def test_promises_know_their_sum() -> None:
    promises = Promises()
    promises["a"] = 3
    promises["b"] = 5
    promises["a"] = 4
    assert promises.total == 9
    assert (promises.pop("a", None), promises.pop("nobody", None), promises.total) == (4, None, 5)
    promises.clear()
    assert (promises.total, dict(promises)) == (0, {})
