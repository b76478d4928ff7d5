"""Drill files: the ones that ship, and what is said of a wrong one."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cluster.drill import DRILL_PROFILE
from cluster.drill_checks import MAX_REQUESTS
from cluster.drill_file import DrillError, builtin_drills, check_targets, drill_from_tree, load_drill
from cluster.profile import load_profile

GOOD = """
title = "t"
promise = "p"
[requests.long]
count = 2
[[faults]]
fault = "kill"
target = "prefill"
on = "prefill_progressed"
of = "long"
[expect]
finished = "all"
"""


LATE = {"fault": "kill", "target": "router", "at_s": 5.0}


def good() -> dict[str, Any]:
    return tomllib.loads(GOOD)


def said_of(tree: dict[str, Any]) -> str:
    with pytest.raises(DrillError) as refused:
        drill_from_tree(tree, "d", "drill d.toml")
    text = str(refused.value)
    assert text.startswith("drill d.toml: ")
    assert "\n" not in text
    return text.removeprefix("drill d.toml: ")


@pytest.mark.parametrize("name", builtin_drills())
def test_a_drill_that_ships_fits_its_own_cluster(name: str) -> None:
    drill = load_drill(name)
    profile = load_profile("10gbe", DRILL_PROFILE | drill.settings)
    workers = [f"prefill-{n}" for n in range(profile.cluster.prefill)]
    workers += [f"decode-{n}" for n in range(profile.cluster.decode)]
    check_targets(drill, workers)
    assert drill.promise
    assert drill.expect


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    drill = load_drill(str(path))
    assert (drill.name, drill.faults[0].fault, drill.expect[0].text) == ("mine", "kill", "all")


def test_unknown_drill_names_the_nearest() -> None:
    with pytest.raises(
        DrillError, match=r"drill 'kil-prefill' is unknown; allowed: .* did you mean kill-prefill?"
    ):
        load_drill("kil-prefill")


@pytest.mark.parametrize("content", [b"\xff\xfe", b"title = ", b"= 3"])
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "d.toml"
    path.write_bytes(content)
    with pytest.raises(DrillError, match=r"d\.toml: not valid TOML"):
        load_drill(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DrillError, match="cannot be read: No such file"):
        load_drill(str(tmp_path / "d.toml"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"titel": "x"}, "unknown key titel; allowed here: .*; did you mean title?"),
        ({"requests": {"a": {"cuont": 3}}}, r"unknown key requests\.a\.cuont; .*did you mean count?"),
        ({"requests": {"a": {"count": "3"}}}, r"requests\.a\.count: Expected `int`"),
        ({"requests": {"a": 3}}, "requests is .*; allowed are tables"),
        ({"requests": {}}, "it sends nothing"),
        ({"requests": {"a": {"count": 0}}}, r"requests\.a\.count is 0; allowed is 1 or more"),
        (
            {"requests": {"a": {"count": MAX_REQUESTS + 1}}},
            r"requests\.a\.count is 100001; allowed is 100000 or fewer",
        ),
        ({"requests": {"long": {"is_disturbance": True}}}, "every group is a disturbance"),
        ({"requests": {"a": {"streams": 1}}, "faults": []}, "streams go on until all else is over"),
        (
            {"requests": {"a": {"every_s": float("nan")}}},
            r"requests\.a\.every_s is nan; allowed is 0 or more",
        ),
        ({"requests": {"a\nb": {}}}, r"requests\.'a\\nb' is no name of a group; allowed: letters"),
        ({"timeout_s": 5, "faults": [LATE]}, r"faults\[0\]\.at_s is 5; allowed is below timeout_s \(5\)"),
        ({"timeout_s": 0}, "timeout_s is 0; allowed is 1 to 3600"),
        ({"faults": {"fault": "kill"}}, "faults is .*; allowed are tables"),
        ({"expect": {"finishd": 1}}, r"expect\.finishd is no figure; allowed: .*did you mean finished?"),
        ({"expect": {"finished": "most"}}, r"expect\.finished is 'most'; allowed: a number"),
        ({"expect": {"finished": True}}, r"expect\.finished is True; allowed: a number"),
        ({"expect": {"failed": -1}}, r"expect\.failed is -1; allowed is 0 or more"),
        (
            {"expect": {"finished.lng": 2}},
            r"expect\.finished\.lng names no group of this drill; .*did you mean long",
        ),
        (
            {"expect": {"noticed_s.hang": 2}},
            r"expect\.noticed_s\.hang names no fault of this drill; allowed: kill",
        ),
        (
            {"expect": {"orphans.x": 0}},
            r"expect\.orphans\.x is no figure; orphans takes nothing behind a dot",
        ),
        ({"expect": {"restarts.": 0}}, r"expect\.restarts\. is no figure; allowed: "),
        ({"profile": {"cluster": 2}}, "profile is .*; allowed are tables"),
        (
            {"profile": {"clutser": {"prefill": 2}}},
            r"\[profile\] clutser\.prefill: unknown key clutser; did you mean clu",
        ),
        (
            {"profile": {"cluster": {"prefil": 2}}},
            r"\[profile\] cluster\.prefil: unknown key cluster\.prefil; did you",
        ),
        (
            {"profile": {"cluster": {"prefill": -2}}},
            r"\[profile\] cluster\.prefill is -2; allowed is 0 or more",
        ),
        ({"title": 3}, "title: Expected `str`, got `int`"),
    ],
)
def test_a_wrong_key_or_value_is_named(change: dict[str, Any], said: str) -> None:
    assert re.match(said, said_of(good() | change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fault": "kil"}, "fault: 'kil' is not a fault; allowed: .*did you mean kill?"),
        ({"on": "prefil_progressed"}, "on is 'prefil_progressed'; .*did you mean prefill_progressed?"),
        ({"of": "lng"}, "of is 'lng'; allowed: long; did you mean long?"),
        ({"of": ""}, "of is missing"),
        ({"at_s": 1.0}, "at_s is 1 beside on"),
        ({"at_s": -1.0}, "at_s is -1.0; allowed is 0 or more"),
        ({"target": ""}, "target is ''; kill needs a worker or 'router'"),
        ({"target": "link"}, "target is 'link'; kill needs a worker"),
        ({"fault": "corrupt", "target": "router"}, "target is 'router'; corrupt needs a worker"),
        ({"fault": "leave"}, "target is 'prefill'; leave happens to the request"),
        ({"seconds": 3.0}, "seconds is 3; kill does not last"),
        ({"fault": "stall"}, "seconds is missing; stall needs its length"),
        ({"fault": "slow", "target": "link", "seconds": 1.0}, "bandwidth is ''; it belongs to slow"),
        (
            {"fault": "slow", "target": "link", "seconds": 1.0, "bandwidth": "fast"},
            "bandwidth is 'fast' is not a rate",
        ),
        ({"bandwidth": "1mbit"}, "bandwidth is '1mbit'; it belongs to slow"),
        ({"on": "", "of": ""}, "on is ''; which prefill is meant"),
        ({"on": "worker_ready", "of": ""}, "worker is missing"),
        ({"worker": "prefill-0"}, "worker is 'prefill-0' without one of worker_ready"),
        ({"times": 0}, "times is 0; allowed is 1 or more"),
        ({"on": "", "of": "", "target": "router", "times": 2}, "times is 2; it needs on"),
        ({"position": 3}, "position is 3; it goes with on = 'tokens_delivered'"),
        ({"traget": "x"}, r"unknown key faults\[0\]\.traget; .*did you mean target"),
    ],
)
def test_a_wrong_fault_is_named(change: dict[str, Any], said: str) -> None:
    tree = good()
    tree["faults"][0] |= change
    assert re.search(said, said_of(tree))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"target": "prefill-3"},
            r"faults\[0\]\.target is 'prefill-3'; allowed: .*; did you mean prefill-0?",
        ),
        (
            {"on": "worker_ready", "of": "", "worker": "decode-7", "target": "router"},
            r"faults\[0\]\.worker is 'decode-7'; .*did you mean decode-0?",
        ),
    ],
)
def test_a_process_that_the_cluster_has_not_is_named(change: dict[str, Any], said: str) -> None:
    tree = good()
    tree["faults"][0] |= change
    drill = drill_from_tree(tree, "d", "d")
    with pytest.raises(DrillError, match=said):
        check_targets(drill, ["prefill-0", "decode-0"])
