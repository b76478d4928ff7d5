"""What a worker says of its own speed: a prompt's engine time, and a decode step's."""

import pytest

from cluster.control import PrefillDone, StartLocal
from cluster.decode_side import DecodeSide
from cluster.prefill_side import PrefillSide
from cluster.step_meter import StepMeter
from cluster.worker_sides import WorkerSides
from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv_port import KVPorts
from engine.outputs import PrefillProgress, StepOutput
from engine.request import SamplingParams
from engine.weights import load_model

STEP_S = 0.02


class Outbox:
    """Keeps what is said to the router."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def say(self, message: object) -> None:
        self.said.append(message)

    def say_tokens(self, tokens: object) -> None:
        """Not looked at."""

    def emit(self, event: object) -> None:
        """Not looked at."""


def step(*prefilled: PrefillProgress, decodes: int = 0, duration_s: float = STEP_S) -> StepOutput:
    num_prefill = sum(each.num_tokens - each.num_cached for each in prefilled)
    return StepOutput((), prefilled, (), (), num_prefill + decodes, num_prefill, duration_s)


def chunk(
    start: int, num_tokens: int, *, name: str = "r#1", cached: int = 0, done: bool = False
) -> PrefillProgress:
    return PrefillProgress(name, start, num_tokens, cached, done)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(num_blocks=64, dtype="float32"), load_model("synthetic:nano", "float32"))


@pytest.fixture
def sides(engine: Engine) -> tuple[WorkerSides, Outbox]:
    outbox = Outbox()
    ports = KVPorts(engine.cache)
    contract, selector = None, None  # a local prefill needs neither
    prefill = PrefillSide("w", engine, contract, outbox, None, "bulk", selector, ports)  # type: ignore[arg-type]
    made = WorkerSides(prefill, DecodeSide("w", engine, outbox, ports), outbox)  # type: ignore[arg-type]
    message = StartLocal(
        request_id="r", attempt=1, prompt_token_ids=tuple(range(100)), sampling=SamplingParams(max_tokens=2)
    )
    made.start(message)
    (name,) = made.decode.jobs
    assert name == "r#1"
    return made, outbox


def compute_s(outbox: Outbox) -> float:
    (done,) = [said for said in outbox.said if isinstance(said, PrefillDone)]
    return done.compute_s


def test_steps_of_one_prompt_add_up(sides: tuple[WorkerSides, Outbox], engine: Engine) -> None:
    made, outbox = sides
    made.stepped(step(chunk(0, 60)), 1.0)
    made.stepped(step(chunk(60, 40, done=True)), 2.0)
    assert compute_s(outbox) == pytest.approx(2 * STEP_S)
    engine.abort("r#1")


def test_a_decode_step_within_is_not_the_prompts(sides: tuple[WorkerSides, Outbox], engine: Engine) -> None:
    made, outbox = sides
    made.stepped(step(chunk(0, 100, done=True), decodes=4), 1.0, 0.005)
    assert compute_s(outbox) == pytest.approx(STEP_S - 0.005)
    engine.abort("r#1")


def test_a_step_shared_with_another_prompt_says_nothing(
    sides: tuple[WorkerSides, Outbox], engine: Engine
) -> None:
    made, outbox = sides
    made.stepped(step(chunk(0, 60), chunk(0, 200, name="other#1")), 1.0)
    made.stepped(step(chunk(60, 40, done=True)), 2.0)
    assert compute_s(outbox) == 0.0
    engine.abort("r#1")


def test_neither_does_a_prompt_that_was_partly_cached(
    sides: tuple[WorkerSides, Outbox], engine: Engine
) -> None:
    made, outbox = sides
    made.stepped(step(chunk(0, 100, cached=32, done=True)), 1.0)
    assert compute_s(outbox) == 0.0
    engine.abort("r#1")


def test_a_decode_step_is_measured_without_prompts() -> None:
    meter = StepMeter()
    assert meter.decode_step_s == 0.0
    meter.add(step(chunk(0, 100), decodes=4, duration_s=1.0))
    assert meter.decode_step_s == 0.0
    meter.add(step(decodes=4, duration_s=0.002))
    assert meter.decode_step_s == pytest.approx(0.002)
    meter.add(step(duration_s=9.0))  # nothing was computed
    assert meter.decode_step_s == pytest.approx(0.002)
