"""Two workers' insides in one process: real engines, engine threads and KV sockets, without their control loops."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

from cluster.attempt import attempt_key
from cluster.control import (
    AbortRequest,
    AnyMessage,
    StartDecode,
    StartLocal,
    StartPrefill,
    TokenProduced,
    Tokens,
    WorkerSpec,
)
from cluster.decode_side import DecodeSide
from cluster.engine_thread import EngineThread
from cluster.events import Event
from cluster.prefill_side import PrefillSide
from cluster.profile import KVSection, Profile
from cluster.worker_kv import WorkerKV
from cluster.worker_outbox import WorkerOutbox
from cluster.worker_sides import WorkerSides
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_port import HostStaging, KVPorts
from engine.outputs import PrefillProgress, StepOutput
from engine.request import SamplingParams
from engine.weights import LoadedModel
from transport.messages import KVContract

Kind = TypeVar("Kind")
SECRET = "5e" * 32
PROFILE = Profile(kv=KVSection(stall_timeout_s=60.0))  # a stall ends when the test says so


class Said:
    """What a side told the router and the run log, in order; tests wait for a fact, never for a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.messages: list[AnyMessage] = []
        self.events: list[Event] = []

    def add(self, messages: list[AnyMessage], events: list[Event]) -> None:
        with self._changed:
            self.messages += messages
            self.events += events
            self._changed.notify_all()

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float = 30.0) -> None:
        with self._changed:
            assert self._changed.wait_for(is_true, timeout_s), (
                f"still waiting; said {self.messages} {self.events}"
            )

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [item for item in (*self.messages, *self.events) if isinstance(item, kind)]

    def wait_message(self, kind: type[Kind]) -> Kind:
        self.wait_for(lambda: bool(self.of(kind)))
        return self.of(kind)[0]

    def tokens(self, request_id: str = "r") -> list[TokenProduced]:
        return [
            token for tokens in self.of(Tokens) for token in tokens.tokens if token.request_id == request_id
        ]

    def finished_tokens(self, request_id: str = "r") -> list[int]:
        self.wait_for(lambda: any(token.finish_reason for token in self.tokens(request_id)))
        return [token.token_id for token in self.tokens(request_id)]


class Side:
    """One worker's engine, its thread, its KV sockets and both of its roles."""

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        config: EngineConfig,
        loop: asyncio.AbstractEventLoop,
        delivery: str,
        staged: bool,
    ) -> None:
        self.said = Said()
        self.engine = Engine(config, loaded)
        outbox = WorkerOutbox(loop, self.said.add)
        contract = KVContract(
            model_fingerprint=loaded.fingerprint,
            num_layers=loaded.config.num_layers,
            num_kv_heads=loaded.config.num_kv_heads,
            head_dim=loaded.config.head_dim,
            dtype="float32",
            block_size=config.block_size,
            layout="NHD",
        )
        self.thread = EngineThread(self.engine, self._stepped, self._died, self._layer_written)
        spec = WorkerSpec(worker_id=name, role=name, run="test", secret=SECRET, profile=PROFILE)
        self.kv = WorkerKV(spec, contract, self.thread, lambda peer, error: None)
        row_bytes = self.engine.cache.row_bytes
        self.staging = HostStaging(row_bytes) if staged else None
        ports = KVPorts(self.engine.cache, staging=self.staging)
        self.prefill = PrefillSide(
            name, self.engine, contract, outbox, self.kv.sender_to, delivery, self.kv.codec_selector, ports
        )
        self.decode = DecodeSide(name, self.engine, outbox, ports)
        self.sides = WorkerSides(self.prefill, self.decode, outbox)
        self.kv.connect(self.prefill, self.decode)
        self.error: BaseException | None = None
        self.thread.start()

    def _layer_written(self, prefilled: tuple[PrefillProgress, ...], layer: int) -> None:
        self.prefill.layer_written(prefilled, layer)

    def _stepped(self, output: StepOutput) -> None:
        self.sides.stepped(output, time.monotonic())

    def _died(self, error: BaseException) -> None:
        self.error = error

    def ask(self, call: Callable[[], Kind]) -> Kind:
        return self.thread.ask(call).result(30)

    def held_blocks(self) -> int:
        return self.ask(lambda: self.engine.stats().held_blocks)

    def wait_until_free(self) -> None:
        """Until no block is held: the engine's thread is asked again after each thing it did."""
        for _ in range(10_000):
            if self.held_blocks() == 0:
                return
        raise AssertionError(f"{self.held_blocks()} blocks are still held by {self.ask(self.engine.owners)}")

    def close(self) -> None:
        self.thread.close()
        self.kv.close()
        self.engine.check_integrity()
        assert self.error is None


class HandoffPair:
    """A prefill and a decode side whose outboxes run on a loop of their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        decode_config: EngineConfig | None = None,
        delivery: str = "stream",
        staged: bool = False,
    ) -> None:
        """``staged``: as on a device whose memory the wire cannot reach."""
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever)
        self._loop_thread.start()
        self.prefill = Side("prefill-0", loaded, config, self._loop, delivery, staged)
        self.decode = Side("decode-0", loaded, decode_config or config, self._loop, delivery, staged)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.prefill.close()
        self.decode.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()

    def start_decode(
        self, prompt: tuple[int, ...], sampling: SamplingParams, request_id: str = "r", attempt: int = 1
    ) -> None:
        message = StartDecode(
            request_id=request_id,
            attempt=attempt,
            prompt_token_ids=prompt,
            sampling=sampling,
            prefill_worker="prefill-0",
        )
        self.decode.thread.post(lambda: self.decode.sides.start(message))

    def start_prefill(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        request_id: str = "r",
        attempt: int = 1,
        codec: str = "raw",
        path: str = "v2",
    ) -> None:
        host, port = self.decode.kv.address
        message = StartPrefill(
            request_id=request_id,
            attempt=attempt,
            prompt_token_ids=prompt,
            sampling=sampling,
            decode_worker="decode-0",
            decode_kv_host=host,
            decode_kv_port=port,
            codec=codec,
            path=path,
        )
        self.prefill.thread.post(lambda: self.prefill.sides.start(message))

    def start_local(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        outputs: tuple[int, ...] = (),
        attempt: int = 1,
    ) -> None:
        message = StartLocal(
            request_id="r",
            attempt=attempt,
            prompt_token_ids=prompt,
            sampling=sampling,
            output_token_ids=outputs,
        )
        self.decode.thread.post(lambda: self.decode.sides.start(message))

    def abort(self, attempt: int = 1) -> None:
        message = AbortRequest(request_id="r", attempt=attempt, reason="test")
        self.prefill.thread.post(lambda: self.prefill.sides.abort(message))
        self.decode.thread.post(lambda: self.decode.sides.abort(message))


def kv_bytes(engine: Engine, request_id: str, num_tokens: int, attempt: int = 1) -> bytes:
    """All KV of a sequence as it lies in the cache, layer by layer."""
    table = engine.kv_blocks(attempt_key(request_id, attempt))
    cache = engine.cache
    return b"".join(
        bytes(view)
        for layer in range(cache.num_layers)
        for kv in (0, 1)
        for view in cache.block_bytes(layer, kv, table, 0, num_tokens)
    )
