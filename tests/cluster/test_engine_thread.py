"""The engine's thread: what is posted runs in it, in order, and nobody waits for ever when it ends."""

import threading

import pytest

from cluster.engine_thread import EngineThread
from engine.config import EngineConfig
from engine.engine import Engine
from engine.outputs import StepOutput
from engine.request import Request, SamplingParams
from engine.weights import load_model


def make_thread(steps: list[StepOutput], errors: list[BaseException]) -> EngineThread:
    engine = Engine(EngineConfig(num_blocks=8, dtype="float32"), load_model("synthetic:nano", "float32"))
    return EngineThread(engine, steps.append, errors.append)


def test_posted_calls_run_in_the_thread_in_order() -> None:
    thread = make_thread([], [])
    thread.start()
    seen: list[object] = []
    for number in range(5):
        thread.post(lambda number=number: seen.append(number))  # type: ignore[misc]
    assert thread.ask(threading.current_thread).result(10) is not threading.current_thread()
    assert seen == [0, 1, 2, 3, 4]
    thread.close()


def test_work_is_stepped_until_done() -> None:
    steps: list[StepOutput] = []
    thread = make_thread(steps, [])
    thread.engine.add(Request("r", (1, 2, 3), SamplingParams(max_tokens=4, ignore_eos=True)))
    thread.start()
    while thread.ask(thread.engine.has_work).result(10):
        pass
    thread.close()
    assert len([token for step in steps for token in step.new_tokens]) == 4


def test_asking_a_closed_thread_still_answers() -> None:
    thread = make_thread([], [])
    thread.start()
    gate = threading.Event()
    thread.post(lambda: gate.wait(10) and None)
    waiting = thread.ask(lambda: "before")
    closing = threading.Thread(target=thread.close)
    closing.start()
    gate.set()
    closing.join(10)
    assert waiting.result(10) == "before"
    assert thread.ask(lambda: "after").result(10) == "after"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_ends_the_thread_and_is_reported() -> None:
    errors: list[BaseException] = []
    thread = make_thread([], errors)
    thread.start()
    failed = thread.ask(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    thread.close()
    assert isinstance(errors[0], ZeroDivisionError)


def test_the_idle_moment_comes_after_the_last_step_and_after_each_call() -> None:
    seen: list[bool] = []
    idle = threading.Event()
    engine = Engine(EngineConfig(num_blocks=8, dtype="float32"), load_model("synthetic:nano", "float32"))

    def on_idle() -> None:
        seen.append(engine.has_work())
        idle.set()

    thread = EngineThread(engine, lambda output: None, lambda error: None, on_idle=on_idle)
    thread.start()
    assert idle.wait(30.0)
    idle.clear()
    request = Request("a", (1, 2, 3), SamplingParams(max_tokens=3, ignore_eos=True))
    thread.post(lambda: engine.add(request))
    assert idle.wait(30.0)
    thread.close()
    assert seen
    assert not any(seen)
    assert engine.stats().held_blocks == 0
