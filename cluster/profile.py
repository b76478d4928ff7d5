"""One frozen Profile holds every choice of a run; it is passed down whole, nothing else configures a process.

A profile is a TOML file laid over the defaults below. An unknown key is an error that names the file, the key
and the nearest valid one. Values are checked on loading, once, so that nothing further in has to.
"""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from cluster.profile_checks import parse_kv_cache, problem_in
from cluster.targets import LinkGoal, link_goal
from cluster.units import parse_bits_per_s

PROFILE_DIR: Final = Path(__file__).resolve().parent.parent / "profiles"


class ProfileError(Exception):
    """A profile or an option cannot be used; the message is one line for the user (exit code 2)."""


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ClusterSection(_Section, frozen=True, kw_only=True):
    mode: str = "disagg"  # disagg | colocated
    prefill: int = 1  # workers whose home role is prefill
    decode: int = 1
    handoff: str = "always"  # always | auto | never: does a prompt go to a prefill worker
    fallback: str = "on"  # on | off: off lets failures reach the client
    pin: bool = True  # cores of its own for every worker where there are enough
    cores_per_worker: int = 1  # and as many threads
    max_attempts: int = 5


class ModelSection(_Section, frozen=True, kw_only=True):
    id: str = "tiny"  # tiny | synthetic:<preset> | a directory
    dtype: str = "auto"
    device: str = "cpu"


class EngineSection(_Section, frozen=True, kw_only=True):
    block_size: int = 16
    kv_cache: str = "512MiB"  # each worker's KV pool, or "auto": a share of the free memory
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512  # of one step, all sequences together
    prefill_chunk_tokens: int = 0  # of one prompt in one step; 0 = the whole of max_num_batched_tokens
    prefix_caching: bool = True


class KVSection(_Section, frozen=True, kw_only=True):
    codec: str = "raw"  # raw | int8 | lossless | auto
    allow_lossy: bool = False  # auto may choose int8
    path: str = "v2"  # v1 | v2
    delivery: str = "stream"  # stream | bulk: does KV leave while the prompt is computed; v1 is bulk always
    accept_timeout_s: float = 5.0
    stall_timeout_s: float = 5.0


class LinkSection(_Section, frozen=True, kw_only=True):
    backend: str = "auto"  # auto | netns | pacing | none
    bandwidth: str = "10gbit"  # or "unlimited"
    delay_ms: float = 0.0  # one way
    jitter_ms: float = 0.0
    loss: float = 0.0  # share of packets, netem only
    probe: bool = True
    rho: float = 0.0  # above 0: once the prefill rate is measured, the bandwidth becomes rho x B*
    target: str = ""  # NAME or NAME@LINK of profiles/targets: rho is that system's


class RouterSection(_Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8765  # 0 = any free
    max_queue: int = 256  # requests waiting for a worker; beyond it 429
    queue_timeout_s: float = 120.0  # a request no worker could take for so long gets 503
    max_body: str = "8MiB"
    client_timeout_s: float = (
        30.0  # to send a request whole, and to take what was written; then it is dropped
    )
    log_text: bool = False  # prompts and answers go into the run log too; it is readable by its owner only


class SupervisorSection(_Section, frozen=True, kw_only=True):
    heartbeat_timeout_s: float = 2.0
    start_timeout_s: float = 60.0
    step_timeout_s: float = 120.0  # an engine step that takes longer is a hang too, however alive its process
    stop_grace_s: float = 3.0
    backoff_first_s: float = 0.1
    backoff_max_s: float = 30.0
    backoff_reset_s: float = 10.0
    crash_loop_exits: int = 5
    crash_loop_window_s: float = 30.0


class LoadSection(_Section, frozen=True, kw_only=True):
    """One kind of request, by Poisson arrivals or in ``streams``; with ``burst_every_s`` the profile's burst too."""

    rate_per_s: float = 2.0
    streams: int = 0  # above 0: so many at a time, each next one when one is answered, whatever the rate
    prompt_tokens: int = 128
    max_tokens: int = 64
    max_in_flight: int = 64
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    burst_every_s: float = 0.0  # 0 = no bursts; the first after half of it, none while one is unanswered


def default_loads() -> dict[str, LoadSection]:
    """The loads every profile has unless it changes them."""
    streams = LoadSection(streams=4, prompt_tokens=64, max_tokens=200, burst_every_s=2.0)
    return {"steady": LoadSection(), "mixed": streams}


class BurstSection(_Section, frozen=True, kw_only=True):
    prompts: int = 2
    prompt_tokens: int = 8000
    max_tokens: int = 16


class Profile(_Section, frozen=True, kw_only=True):
    name: str = "default"
    description: str = ""
    cluster: ClusterSection = ClusterSection()
    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    kv: KVSection = KVSection()
    link: LinkSection = LinkSection()
    router: RouterSection = RouterSection()
    supervisor: SupervisorSection = SupervisorSection()
    load: dict[str, LoadSection] = msgspec.field(default_factory=default_loads)
    burst: BurstSection = BurstSection()

    @property
    def link_bits_per_s(self) -> float:
        """0.0 = unlimited."""
        return parse_bits_per_s(self.link.bandwidth)

    @property
    def link_goal(self) -> LinkGoal | None:
        """The ratio the link is to have; None: it keeps its bandwidth."""
        return link_goal(self.link.target, self.link.rho, self.link_bits_per_s)

    @property
    def kv_cache_bytes(self) -> int:
        """Of each worker; 0 = auto."""
        return parse_kv_cache(self.engine.kv_cache)


def builtin_profiles() -> dict[str, Path]:
    """Name -> file of every profile that ships."""
    return {path.stem: path for path in sorted(PROFILE_DIR.glob("*.toml"))}


def load_profile(name_or_file: str, overrides: dict[str, Any] | None = None) -> Profile:
    """Read a shipped profile by name or a TOML file by path; lay ``overrides`` (dotted key -> value) over it.

    Raises ProfileError naming the file, the key, the value and what is allowed.
    """
    shipped = builtin_profiles()
    path = shipped.get(name_or_file)
    if path is None:
        path = Path(name_or_file)
        if path.suffix != ".toml" and not path.is_file():
            near = difflib.get_close_matches(name_or_file, shipped, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ProfileError(
                f"profile {name_or_file!r} is unknown; allowed: {', '.join(shipped)}, or a .toml file{hint}"
            )
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"profile {path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"profile {path}: not valid TOML: {error}") from error
    tree.setdefault("name", path.stem)
    _check_keys(tree, Profile, str(path), "")
    for key, value in (overrides or {}).items():
        _set_key(tree, key, value)
        _check_keys(tree, Profile, f"--set {key}", "")
    loads = tree.setdefault("load", {})
    if isinstance(loads, dict):
        for (
            name,
            load,
        ) in default_loads().items():  # a profile that adds a load, or changes a key, keeps the rest
            given = loads.setdefault(name, {})
            if isinstance(given, dict):
                loads[name] = msgspec.to_builtins(load) | given
    given = dict.fromkeys(overrides or {}, given_on(name_or_file))
    return profile_from_tree(tree, str(path), given)


def given_on(profile: str) -> str:
    """Whom an error blames for a key that was laid over ``profile``."""
    return f"given on top of profile {profile}"


def profile_from_tree(tree: dict[str, Any], where: str, given: Mapping[str, str] | None = None) -> Profile:
    """Check types and ranges. ``given``: where a key comes from (dotted key -> words) that is not from ``where``.

    Raises ProfileError that says which of them is to blame.
    """
    try:
        profile = msgspec.convert(tree, Profile)
    except msgspec.ValidationError as error:
        wrong_type = _readable(str(error))
        raise ProfileError(f"{_to_blame(wrong_type, where, given)}: {wrong_type}") from error
    problem = problem_in(msgspec.to_builtins(profile))
    if problem:
        raise ProfileError(f"{_to_blame(problem, where, given)}: {problem}")
    return profile


def parse_setting(text: str) -> tuple[str, Any]:
    """``"engine.max_num_seqs=8"`` -> (key, value); the value is read as TOML, else taken as text.

    Raises ProfileError for text without ``=`` or an unknown key (naming the nearest valid one).
    """
    key, sign, raw = text.partition("=")
    key = key.strip()
    if not sign or not key:
        raise ProfileError(f"--set {text!r}: allowed is key=value, e.g. engine.max_num_seqs=8")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()
    tree: dict[str, Any] = {}
    _set_key(tree, key, value)
    _check_keys(tree, Profile, "--set", "")
    return key, value


def _set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        child = tree.setdefault(section, {})
        if not isinstance(child, dict):
            raise ProfileError(f"--set {key}: {section} is a value, not a section")
        tree = child
    tree[last] = value


def _check_keys(tree: dict[str, Any], struct: type[msgspec.Struct], where: str, prefix: str) -> None:
    fields = {field.name: field for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.4)
            hint = f"did you mean {prefix}{near[0]}? " if near else ""
            raise ProfileError(
                f"{where}: unknown key {prefix}{key}; {hint}allowed here: {', '.join(sorted(fields))}"
            )
        kind = fields[key].type
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if not isinstance(value, dict):
                raise ProfileError(f"{where}: {prefix}{key} is {value!r}; allowed is a section of keys")
            _check_keys(value, kind, where, f"{prefix}{key}.")
        elif key == "load" and isinstance(value, dict):
            for name, load in value.items():
                if isinstance(load, dict):
                    _check_keys(load, LoadSection, where, f"load.{name}.")


def _to_blame(problem: str, where: str, given: Mapping[str, str] | None) -> str:
    """A problem names the keys it is about; one that was given counts before what the file says."""
    keys = re.findall(r"[\w.-]+", problem)
    return next((words for key, words in (given or {}).items() if key in keys), where)


def _readable(error: str) -> str:
    """msgspec says "Expected `int`, got `str` - at `$.engine.block_size`"; put the key first."""
    what, _, at = error.partition(" - at `$.")
    return f"{at.rstrip('`')}: {what}" if at else what
