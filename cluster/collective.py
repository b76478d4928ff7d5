"""torch.distributed as a yardstick: the same tensors from one process to another, over gloo or NCCL."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
from torch import distributed

TIMEOUT: Final = timedelta(seconds=30)


class Collective:
    """One end of a pair: rank 0 receives, rank 1 sends. Rank 0 is made first; ``port`` is where rank 1 finds it."""

    def __init__(self, backend: str, host: str, interface: str, *, port: int = 0) -> None:
        self._backend = backend
        self._rank = 1 if port else 0
        self._device = torch.device("cuda", self._rank) if backend == "nccl" else torch.device("cpu")
        self._is_joined = False
        for library in ("GLOO", "NCCL"):
            os.environ[f"{library}_SOCKET_IFNAME"] = interface  # read when the group is made
        self._store = distributed.TCPStore(  # type: ignore[attr-defined]
            host, port, 2, is_master=not port, timeout=TIMEOUT, wait_for_workers=False
        )
        self.port: int = self._store.port
        self._word = torch.zeros(1, dtype=torch.uint8, device=self._device)

    def place(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors where this backend can take them from: as they are on a CPU, copies on a GPU."""
        return [tensor.to(self._device) for tensor in tensors]

    def join(self) -> None:
        """Make the group; waits for the other end. Raises RuntimeError."""
        if not self._is_joined:
            distributed.init_process_group(
                self._backend, store=self._store, rank=self._rank, world_size=2, timeout=TIMEOUT
            )
            self._is_joined = True

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Returns when the other end has them all and has said so. Raises RuntimeError."""
        self._finish([distributed.isend(tensor, 0) for tensor in tensors])
        distributed.recv(self._word, 0)
        self._settle()

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fills the tensors. Raises RuntimeError."""
        self._finish([distributed.irecv(tensor, 1) for tensor in tensors])
        self._settle()
        distributed.send(self._word, 1)

    def _finish(self, works: Sequence[distributed.Work | None]) -> None:
        for work in works:
            if work is not None:
                work.wait()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        if self._is_joined:
            distributed.destroy_process_group()
