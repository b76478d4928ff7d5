import json
from typing import get_args

import msgspec
import pytest

from cluster import events
from cluster.events import SCHEMA, Event, EventBase, RunStarted, TokensDelivered, decode_event, encode_event
from tests.cluster.histories import handed_off, run_started, run_stopped

KINDS = get_args(Event)


def example(kind: type[EventBase]) -> EventBase:
    """An event of this kind with a value of the right type in every required field."""
    plain: dict[str, object] = {"type": kind.__struct_config__.tag}
    for field in msgspec.structs.fields(kind):
        if field.required:
            plain[field.name] = {float: 1.5, int: 7, str: "x"}.get(field.type, (1.0, 2.5))
    return msgspec.convert(plain, kind)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_survives_the_log(kind: type[EventBase]) -> None:
    event = example(kind)
    assert decode_event(encode_event(event)) == event  # type: ignore[arg-type]


def test_union_holds_every_event_of_the_module() -> None:
    defined = {
        kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, EventBase)
    }
    assert defined - {EventBase} == set(KINDS)


def test_tags_are_unlike_each_other() -> None:
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)


def test_first_line_of_a_log_says_its_schema() -> None:
    line = json.loads(encode_event(run_started()[0]))
    assert line["type"] == "run_started"
    assert line["schema"] == SCHEMA


def test_defaults_are_left_out_of_lines() -> None:
    assert json.loads(encode_event(events.RunStopped(at=1.0))) == {"type": "run_stopped", "at": 1.0}


def test_token_times_come_back_exact() -> None:
    event = TokensDelivered(
        at=1.0, request_id="a", first_position=0, token_at=(0.1 + 0.2, 1e-9, 12345.678901234567)
    )
    assert decode_event(encode_event(event)) == event


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'{"type":"no_such_event","at":1}',
        b'{"type":"run_ready","at":1}',
        b'{"type":"note_added"',
        b"\xff",
    ],
)
def test_what_is_not_one_known_event_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_event(line)


def test_events_cannot_be_changed() -> None:
    started = run_started()[0]
    assert isinstance(started, RunStarted)
    with pytest.raises(AttributeError):
        started.run = "other"  # type: ignore[misc]


def test_histories_of_these_tests_survive_the_log() -> None:
    for event in (*run_started(), *handed_off(), *run_stopped(20.0)):
        assert decode_event(encode_event(event)) == event
