"""What a layer does between its matrix products: the choice between compiled code and plain torch."""

import torch

from engine.compiled_operations import CompiledOperations, supports
from engine.config import ModelConfig
from engine.torch_operations import TorchOperations

Operations = TorchOperations | CompiledOperations


def choose_operations(
    config: ModelConfig, cos: torch.Tensor, sin: torch.Tensor, block_size: int, kernels: str = "auto"
) -> Operations:
    """Compiled operations unless ``kernels`` is "torch".

    On other devices and for shapes that do not fill vectors, torch's are taken anyway.
    """
    if kernels == "auto" and supports(config, cos.device):
        return CompiledOperations(config, cos, sin, block_size)
    return TorchOperations(config, cos, sin)
