"""Which values a drill may hold. Pure; keys and types were checked before."""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Final

from cluster.drill import (
    HEALED,
    LINK_TARGET,
    PROCESS_TRIGGERS,
    ROLES,
    ROUTER,
    TRIGGERS,
    Drill,
    FaultRule,
    RequestGroup,
)
from cluster.drill_expectation import Expectation
from cluster.drill_figures import FAULT, GROUP, KEYS
from cluster.fault_kinds import CLIENT, LINK, PROCESS, FaultKind, UnknownFault
from cluster.units import parse_bits_per_s

MAX_REQUESTS: Final = 100_000

_GROUP_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,40}")


def problem_in(drill: Drill) -> str:
    """The first value that is not allowed, as "key is value; allowed is ..."; "" when all are."""
    if not drill.requests:
        return "it sends nothing; allowed is one or more of [requests.NAME]"
    if not 1 <= drill.timeout_s <= 3600:
        return f"timeout_s is {drill.timeout_s:g}; allowed is 1 to 3600"
    for name, group in drill.requests.items():
        if not _GROUP_NAME.fullmatch(name):
            return f"requests.{name!r} is no name of a group; allowed: letters, digits, - and _"
        if problem := _group_problem(group):
            return f"requests.{name}.{problem}"
    if all(group.is_disturbance for group in drill.requests.values()):
        return "every group is a disturbance; one at least must be disturbed by it"
    if not any(not group.streams for group in drill.requests.values()) and not drill.faults:
        return "streams go on until all else is over, and there is nothing else"
    for expectation in drill.expect:
        if problem := _key_problem(expectation, list(drill.requests), [rule.fault for rule in drill.faults]):
            return f"expect.{expectation.name} {problem}"
    for number, rule in enumerate(drill.faults):
        try:
            problem = _fault_problem(rule, drill.requests)
        except UnknownFault as error:
            problem = f"fault: {error}"
        if problem:
            return f"faults[{number}].{problem}"
        if rule.at_s >= drill.timeout_s:
            return f"faults[{number}].at_s is {rule.at_s:g}; allowed is below timeout_s ({drill.timeout_s:g})"
    return ""


def _key_problem(expectation: Expectation, groups: list[str], faults: list[str]) -> str:
    key, kind = expectation.key, KEYS.get(expectation.figure)
    if not key:
        return ""
    if kind is None:
        return f"is no figure; {expectation.figure} takes nothing behind a dot"
    allowed = {GROUP: groups, FAULT: faults}.get(kind)
    if allowed is not None and key not in allowed:
        return f"names no {kind} of this drill; allowed: {', '.join(dict.fromkeys(allowed))}{nearest(key, allowed)}"
    return ""


def _group_problem(group: RequestGroup) -> str:
    low = {"count": 1, "prompt_tokens": 1, "max_tokens": 1, "streams": 0, "prompts": 0}
    for key, least in low.items():
        if getattr(group, key) < least:
            return f"{key} is {getattr(group, key)}; allowed is {least} or more"
    for key in ("at_s", "every_s", "temperature"):
        if not 0 <= getattr(group, key) < math.inf:
            return f"{key} is {getattr(group, key)}; allowed is 0 or more"
    if group.count > MAX_REQUESTS:
        return f"count is {group.count}; allowed is {MAX_REQUESTS} or fewer"
    return ""


def _fault_problem(rule: FaultRule, groups: Iterable[str]) -> str:
    kind = rule.kind
    for key in ("at_s", "after_s", "seconds", "delay_ms"):
        if not 0 <= getattr(rule, key) < math.inf:
            return f"{key} is {getattr(rule, key)}; allowed is 0 or more"
    for key in ("requests", "times"):
        if getattr(rule, key) < 1:
            return f"{key} is {getattr(rule, key)}; allowed is 1 or more"
    return _target_problem(rule, kind) or _trigger_problem(rule, kind, list(groups)) or _size_problem(rule)


def _target_problem(rule: FaultRule, kind: FaultKind) -> str:
    if kind.hits == CLIENT:
        return (
            f"target is {rule.target!r}; {kind.name} happens to the request, so none" if rule.target else ""
        )
    if kind.hits == LINK:
        return "" if rule.target == LINK_TARGET else f"target is {rule.target!r}; {kind.name} needs 'link'"
    if not rule.target or rule.target == LINK_TARGET:
        return f"target is {rule.target!r}; {kind.name} needs a worker" + (
            " or 'router'" if kind.hits == PROCESS else ""
        )
    if kind.hits != PROCESS and rule.target == ROUTER:
        return f"target is 'router'; {kind.name} needs a worker"
    return ""


def _trigger_problem(rule: FaultRule, kind: FaultKind, groups: list[str]) -> str:
    allowed = [*TRIGGERS, HEALED]
    if rule.on and rule.on not in allowed:
        return f"on is {rule.on!r}; allowed: {', '.join(allowed)}{nearest(rule.on, allowed)}"
    if rule.on and rule.at_s:
        return f"at_s is {rule.at_s:g} beside on {rule.on!r}; allowed is one of the two"
    is_request = bool(rule.on) and rule.on not in (*PROCESS_TRIGGERS, HEALED)
    if rule.of and (not is_request or rule.of not in groups):
        what = (
            f"; allowed: {', '.join(groups)}{nearest(rule.of, groups)}"
            if is_request
            else " without a request"
        )
        return f"of is {rule.of!r}{what}"
    if is_request and not rule.of:
        return f"of is missing; it names the group of requests whose {rule.on} counts"
    if rule.on in PROCESS_TRIGGERS and not rule.worker:
        return f"worker is missing; it names the process whose {rule.on} counts"
    if rule.worker and rule.on not in PROCESS_TRIGGERS:
        return f"worker is {rule.worker!r} without one of {', '.join(PROCESS_TRIGGERS)}"
    if (rule.target in ROLES or kind.hits == CLIENT) and not is_request:
        return f"on is {rule.on!r}; which {rule.target or 'client'} is meant says only a request's event"
    if rule.times > 1 and rule.on in ("", HEALED):
        return f"times is {rule.times}; it needs on, with an event"
    if rule.position and rule.on != "tokens_delivered":
        return f"position is {rule.position}; it goes with on = 'tokens_delivered'"
    return ""


def _size_problem(rule: FaultRule) -> str:
    kind = rule.kind
    if rule.seconds and not kind.takes_seconds:
        return f"seconds is {rule.seconds:g}; {kind.name} does not last"
    if kind.needs_seconds and not rule.seconds:
        return f"seconds is missing; {kind.name} needs its length"
    if bool(rule.bandwidth) != (kind.name == "slow"):
        return f"bandwidth is {rule.bandwidth!r}; it belongs to slow"
    if rule.bandwidth:
        try:
            parse_bits_per_s(rule.bandwidth)
        except ValueError as error:
            return f"bandwidth is {error}"
    return ""


def nearest(name: str, allowed: Iterable[str]) -> str:
    """ "; did you mean NAME?", or nothing."""
    near = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""
