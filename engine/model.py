"""The transformer: token ids and positions in, logits out. Knows no requests, no scheduling and no sampling.

All tokens of a step, of any number of sequences, go through every layer as the rows of one matrix; only attention
looks at sequences one by one.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.config import ModelConfig
from engine.forward_batch import ForwardBatch, logit_chunks
from engine.kv_cache import PagedKVCache
from engine.layer_weights import ModelWeights
from engine.operations import Operations


class LlamaModel:
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU. No state but the weights.

    ``cos`` and ``sin`` are ``(max_model_len, head_dim / 2)``.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.cos, self.sin = rope_tables(config, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        batch: ForwardBatch,
        cache: PagedKVCache,
        operations: Operations,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Write the rows' KV to the cache and return logits ``(m, vocab)`` of ``batch.logit_rows``.

        The logits are valid until the next call in the same thread. ``on_layer(layer)`` is called when all rows of a
        layer are in the cache, before the next layer begins.
        """
        weights, chunks = self.weights, batch.chunks
        operations.begin(batch, cache)
        hidden = F.embedding(batch.token_ids, weights.embedding)
        normed = operations.norm(hidden, weights.layers[0].input_norm)
        following = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
            queries = operations.rotate_and_write(index, layer, layer.qkv(normed))
            if on_layer is not None:
                on_layer(index)
            if index == self.config.num_layers - 1:  # from here on, only what becomes logits
                chunks = logit_chunks(chunks)
                if not chunks:
                    return torch.empty((0, self.config.vocab_size), dtype=self.dtype, device=self.device)
                hidden, queries = hidden[batch.logit_rows], queries[batch.logit_rows]
            attended = layer.out(operations.attend(index, queries, chunks))
            gate_up = layer.gate_up(operations.add_norm(hidden, attended, layer.mlp_norm))
            normed = operations.add_norm(hidden, layer.down(operations.silu_multiply(gate_up)), next_norm)
        return weights.head(normed)


def rope_tables(
    config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``(max_model_len, head_dim / 2)`` of every position, computed in float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inverse_frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_freq_factors:
        inverse_frequencies = inverse_frequencies / torch.tensor(config.rope_freq_factors)
    angles = torch.arange(config.max_model_len).float().unsqueeze(1) * inverse_frequencies
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)
