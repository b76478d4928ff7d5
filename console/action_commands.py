"""The commands that keys of the action table send as they are: each decided from what the log says now."""

from typing import Final

from cluster.control import AddWorker, Command, InjectBurst, SetCodec, SetHandoff, SetLoad, SetMode
from console.view_state import ViewState

LONG_PROMPT_TOKENS: Final = 8000
STEADY: Final = "steady"
CODECS: Final = ("raw", "int8", "lossless")
"""In the order in which the key goes through them."""
HANDOFFS: Final = ("always", "auto", "never")


def burst(state: ViewState, prompts: int = 2, prompt_tokens: int = LONG_PROMPT_TOKENS) -> InjectBurst:
    """Long prompts, shortened where the model cannot take them."""
    plain = InjectBurst()
    longest = (
        state.described.max_model_len - plain.max_tokens if state.described is not None else prompt_tokens
    )
    return InjectBurst(prompts=prompts, prompt_tokens=min(prompt_tokens, longest), cause="operator, key b")


def next_codec(state: ViewState) -> Command:
    """In turn; the profile's own is among them, so that the key comes back to it."""
    codecs = CODECS if state.own_codec in ("", *CODECS) else (*CODECS, state.own_codec)
    place = codecs.index(state.codec) if state.codec in codecs else -1
    return SetCodec(codec=codecs[(place + 1) % len(codecs)], cause="operator, key i")


def auto_codec(state: ViewState) -> Command:
    return SetCodec(codec="auto", cause="operator, palette")


def next_handoff(state: ViewState) -> Command:
    place = HANDOFFS.index(state.handoff) if state.handoff in HANDOFFS else -1
    return SetHandoff(handoff=HANDOFFS[(place + 1) % len(HANDOFFS)], cause="operator, palette")


def other_mode(state: ViewState) -> Command:
    return SetMode(mode="disagg" if state.mode == "colocated" else "colocated", cause="operator, key m")


def toggle_load(state: ViewState) -> Command:
    """The load that ran last, else ``steady``; "" stops."""
    return SetLoad(name="" if state.loads else state.last_load or STEADY, cause="operator, key s")


def add_prefill(state: ViewState) -> Command:
    return AddWorker(role="prefill", cause="operator, palette")


def add_decode(state: ViewState) -> Command:
    return AddWorker(role="decode", cause="operator, palette")
