"""A small GPT over characters, and its sharding with FSDP2."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model.

    Attributes:
        alphabet: number of different characters.
        context: number of characters that a prediction can see.
        width: features per character; a multiple of ``heads`` and of 2.
        heads: attention heads.
        layers: transformer blocks.
    """

    alphabet: int = 128
    context: int = 64
    width: int = 208
    heads: int = 4
    layers: int = 2


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a normalisation and beside a skip.

    Both see half of their features from one character earlier (RWKV's token shift). That costs no
    parameters and lets so small a model learn from word parts within the first hundred steps.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, context, width) to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(_shift(self.norm1(x))).view(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = self.narrow(F.gelu(self.widen(_shift(self.norm2(x)))))
        return x + hidden


def _shift(x: Tensor) -> Tensor:
    """Half of the features from the character before (zeros at the start), the rest as they are."""
    half = x.shape[-1] // 2
    return torch.cat([F.pad(x[..., :half], (0, 0, 1, -1)), x[..., half:]], dim=-1)


class GPT(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.characters = nn.Embedding(config.alphabet, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.alphabet, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                onto_skip = name.endswith(("mix.weight", "narrow.weight"))
                scale = 1 / math.sqrt(2 * config.layers) if onto_skip else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross entropy in nats of the characters ``y`` that follow ``x``.

        Both of shape (batch, length), int64, length at most the context. Returns shape (batch,):
        the mean over each row.
        """
        hidden = self.characters(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        return losses.view(y.shape).mean(dim=1)


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """FSDP2 over all ranks: each block is one unit, the embeddings and the head are another.

    Masters stay fp32; weights are gathered in bf16 and gradients reduced in fp32.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def units(model: GPT) -> list[FSDPModule]:
    """The FSDP units of a sharded model, the root last."""
    return [module for module in (*model.blocks, model) if isinstance(module, FSDPModule)]


@contextlib.contextmanager
def gathered(model: GPT) -> Iterator[None]:
    """Gather every unit once and keep it for any number of forward passes without gradients."""
    blocks = units(model)[:-1]
    for block in blocks:
        block.set_reshard_after_forward(False)
    try:
        with torch.no_grad():
            yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True)
        # Weights left gathered would be used as they are after the next optimizer step.
        for unit in units(model):
            unit.reshard()
