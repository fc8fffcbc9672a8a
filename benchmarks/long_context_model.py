"""A small hybrid decoder whose latent-attention layer looks up one token among a million, with weights set by hand.

Every filler token is a pair (key, value). Near the beginning one pair with a key of its own is planted; the last token
asks for that key, and the answer is its value. Three KDA layers with random weights run over the same stream and write
beside it, so their states see all tokens and nothing of the lookup depends on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hf import KimiLinearConfig, KimiLinearForCausalLM

CODES = 8
PAIRS = 7 * CODES
VOCABULARY = CODES + PAIRS  # tokens 0..7 ask for key i; 8 + 8 key + value are pairs
PLANTED = 6  # the key that only the planted pair has
# Channels of the stream: key, value and question codes, the answer, and what the KDA layers write.
KEY, VALUE, QUESTION, ANSWER, SCRATCH = (slice(8 * i, 8 * i + 8) for i in range(5))
WIDTH = 48
SHARPNESS = 60.0


def codes() -> Tensor:
    """Eight orthogonal rows of signs."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    return torch.kron(torch.kron(two, two), two)


def config() -> KimiLinearConfig:
    return KimiLinearConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=1,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_experts=None,
        tie_word_embeddings=False,
        linear_attn_config={
            "kda_layers": [1, 2, 3],
            "full_attn_layers": [4],
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
    )


@torch.no_grad()
def build(dtype: torch.dtype) -> KimiLinearForCausalLM:
    """The model in eval mode; parameters that stay fp32 in released checkpoints stay fp32 here."""
    torch.manual_seed(0)
    model = KimiLinearForCausalLM._from_config(config(), attn_implementation="sdpa").eval()
    table = torch.zeros(VOCABULARY, WIDTH)
    table[:CODES, QUESTION] = codes()
    for key in range(7):
        for value in range(CODES):
            table[CODES + CODES * key + value, KEY] = codes()[key]
            table[CODES + CODES * key + value, VALUE] = codes()[value]
    model.model.embed_tokens.weight.copy_(table)
    *recurrent, lookup = model.model.layers
    for layer in recurrent:
        _write_only(layer.self_attn.o_proj, SCRATCH)
        _write_only(layer.mlp.down_proj, SCRATCH)
        layer.self_attn.A_log.zero_()
        # From forgetting within tens of tokens to hardly ever.
        layer.self_attn.dt_bias.copy_(torch.linspace(-9.0, -3.0, layer.self_attn.dt_bias.numel()))
    _write_only(lookup.mlp.down_proj, SCRATCH)
    _set_lookup(lookup.self_attn)
    head = torch.zeros(VOCABULARY, WIDTH)
    head[CODES : 2 * CODES, ANSWER] = codes()
    model.lm_head.weight.copy_(head)
    kept = {name: x.clone() for name, x in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    model.to(dtype)
    for name, x in model.named_parameters():
        if name in kept:
            x.data = kept[name]
    return model


def _write_only(projection: torch.nn.Linear, channels: slice) -> None:
    kept = projection.weight[channels].clone()
    projection.weight.zero_()
    projection.weight[channels] = kept


def _set_lookup(mixer: torch.nn.Module) -> None:
    """Latent = [key | value]; the query is the question's code; the value goes to the answer's channels."""
    eye = torch.eye(8)
    for projection in (mixer.q_proj, mixer.kv_a_proj_with_mqa, mixer.kv_b_proj, mixer.o_proj):
        projection.weight.zero_()
    mixer.q_proj.weight[:8, QUESTION] = SHARPNESS * eye / 8
    mixer.kv_a_proj_with_mqa.weight[:8, KEY] = eye
    mixer.kv_a_proj_with_mqa.weight[8:16, VALUE] = eye
    mixer.kv_b_proj.weight[:8, :8] = eye
    mixer.kv_b_proj.weight[8:16, 8:] = eye
    mixer.o_proj.weight[ANSWER] = eye


def text(tokens: int, planted_at: int, value: int) -> Tensor:
    """(1, tokens): pairs with six common keys, the planted pair, and the question as the last token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(CODES, CODES + 6 * CODES, (1, tokens), generator=generator)
    ids[0, planted_at] = CODES + CODES * PLANTED + value
    ids[0, -1] = PLANTED
    return ids


def answer(logits: Tensor) -> int:
    """The value that the logits (V,) of the last token name."""
    return int(logits[CODES : 2 * CODES].argmax())
