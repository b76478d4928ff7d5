"""Any object as nested plain values, so that two folds can be compared whatever they are made of."""

import array
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


def plain(value: Any) -> Any:
    """Equal for two objects that hold the same, in the same order."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case msgspec.Struct():
            return [
                type(value).__name__,
                [(name, plain(getattr(value, name))) for name in value.__struct_fields__],
            ]
        case Mapping():
            return [(plain(key), plain(item)) for key, item in value.items()]
        case list() | tuple() | deque() | array.array():
            return [plain(item) for item in value]
        case set() | frozenset():
            return sorted(map(repr, value))
        case _:
            return [
                type(value).__name__,
                [(name, plain(getattr(value, name))) for name in sorted(_names(value))],
            ]


def _names(value: Any) -> Iterator[str]:
    yield from getattr(value, "__dict__", ())
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        yield from (name for name in ([slots] if isinstance(slots, str) else slots) if hasattr(value, name))
