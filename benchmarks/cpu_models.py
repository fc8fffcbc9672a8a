"""Whole models side by side: the rows of `python -m benchmarks.cpu` that run a model, and what each must cost.

The same random Kimi-Linear model (8 layers, hidden 1024, 8 heads of 128, latent 512, 32 experts top-4 of 512,
vocabulary 8192) built with transformers' native class and with ours, from the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig as NativeConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM as NativeModel

import kimi_hf

LAYERS, HIDDEN, HEADS, DIM, EXPERTS, TOP_K, VOCAB = 8, 1024, 8, 128, 32, 4, 8192
KDA_LAYERS = LAYERS - LAYERS // 4
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 4096,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 512,
    "rms_norm_eps": 1e-5,
}


def build_ours() -> kimi_hf.KimiLinearForCausalLM:
    torch.manual_seed(0)
    config = kimi_hf.KimiLinearConfig(
        num_experts=EXPERTS,
        num_experts_per_token=TOP_K,
        num_shared_experts=1,
        first_k_dense_replace=1,
        linear_attn_config={"num_heads": HEADS, "head_dim": DIM, "short_conv_kernel_size": 4},
        **SIZES,
    )
    return kimi_hf.KimiLinearForCausalLM(config).eval()


def build_native(ours: kimi_hf.KimiLinearForCausalLM) -> NativeModel:
    """The native class with the weights of `ours`."""
    config = NativeConfig(
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        routed_scaling_factor=1.0,
        linear_head_dim=DIM,
        linear_num_heads=HEADS,
        layer_types=ours.config.layer_types,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SIZES,
    )
    config._attn_implementation = "sdpa"
    model = NativeModel(config).eval()
    state, convs = {}, {}
    for name, tensor in ours.state_dict().items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        for part in ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        if "_conv1d" in name:
            stem, which = name.split("_conv1d")[0][:-1], name.split("_conv1d")[0][-1]
            convs.setdefault(stem, {})[which] = tensor
            continue
        state[name] = tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor
    for stem, parts in convs.items():
        state[f"{stem}conv1d.weight"] = torch.cat([parts[which] for which in "qkv"])
    model.load_state_dict(state)
    return model


def ids(length: int, batch: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


def prefill(model, length: int) -> Callable[[], Tensor]:
    tokens = ids(length)

    @torch.no_grad()
    def run():
        return model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits

    return run


def decode(model, context: int) -> Callable[[], Tensor]:
    """One token after `context` tokens; the cache is filled once and grows by the tokens timed."""
    with torch.no_grad():
        cache = model(input_ids=ids(context), use_cache=True, logits_to_keep=1).past_key_values
    token = ids(1)

    @torch.no_grad()
    def run():
        return model(input_ids=token, past_key_values=cache, use_cache=True).logits

    return run


def train(model, length: int) -> Callable[[], Tensor]:
    tokens = ids(length)

    def run():
        model.train()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        model.eval()
        return loss.detach()

    return run


def moe(model, tokens: int, implementation: str) -> Callable[[], Tensor]:
    block = model.model.layers[1].block_sparse_moe
    torch.manual_seed(tokens)
    hidden = torch.randn(1, tokens, HIDDEN)

    @torch.no_grad()
    def run():
        model.set_experts_implementation(implementation)
        return block(hidden)

    return run


def train_words(words: int, chunked: bool) -> Callable[[], Tensor]:
    """A training pass of 1,024 tokens through a small model with a head of `words` words."""
    torch.manual_seed(0)
    config = kimi_hf.preset("kimi-linear-tiny")
    config.vocab_size = words
    model = kimi_hf.KimiLinearForCausalLM(config)
    model.set_chunked_loss(128 if chunked else None)
    tokens = ids(1024)

    def run():
        model.train()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    return run


@dataclass(frozen=True)
class Row:
    """One comparison: how its variants are made from (ours, native), what it must compute and read at least.

    timed: False for rows that only show peak memory. variants: those whose memory is measured.
    """

    make: Callable[[kimi_hf.KimiLinearForCausalLM, NativeModel], dict[str, Callable[[], Tensor]]]
    flops: float = 0.0
    bytes: float = 0.0
    timed: bool = True
    variants: tuple[str, ...] = ("ours", "native")


def _activated() -> int:
    """Parameters that one token multiplies with: without the embedding table, with the head."""
    with torch.device("meta"):
        config = build_ours().config
    return kimi_hf.census(config).activated - VOCAB * HIDDEN


def prefill_flops(length: int) -> float:
    """Matrix products of a forward over `length` tokens, logits of one position."""
    kda = KDA_LAYERS * HEADS * (6 * DIM * DIM + 8 * 64 * DIM)
    attention = (LAYERS - KDA_LAYERS) * HEADS * (192 + 128) * length  # half of the square, two flops a product
    return length * (2 * (_activated() - VOCAB * HIDDEN) + kda + attention) + 2 * VOCAB * HIDDEN


def train_flops(length: int) -> float:
    """Forward and backward: three times the forward, with the logits of every position."""
    return 3 * (prefill_flops(length) + 2 * (length - 1) * VOCAB * HIDDEN)


def decode_bytes(context: int) -> float:
    """fp32 bytes one token reads (weights it meets, states, latents) and writes (states)."""
    states = KDA_LAYERS * HEADS * DIM * DIM * 2
    latents = (LAYERS - KDA_LAYERS) * context * (512 + 64)
    return 4.0 * (_activated() + states + latents)


def moe_row(tokens: int) -> Row:
    peers = ("eager", "batched_mm", "grouped_mm") if tokens <= 64 else ("eager", "grouped_mm")
    weights = 3 * HIDDEN * 512
    hit = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)  # expected number of experts with a token
    return Row(
        lambda o, n: {"ours": moe(o, tokens, "kimi"), **{name: moe(o, tokens, name) for name in peers}},
        flops=2.0 * tokens * ((TOP_K + 1) * weights + HIDDEN * EXPERTS),
        bytes=4.0 * ((hit + 1) * weights + HIDDEN * EXPERTS),
    )


def both(work: Callable, size: int, **cost: float) -> Row:
    return Row(lambda o, n: {"ours": work(o, size), "native": work(n, size)}, **cost)


def rows() -> dict[str, Row]:
    """Every row by name; floors are counted when it is called."""
    return {
        **{f"prefill_{t}": both(prefill, t, flops=prefill_flops(t)) for t in (1024, 4096)},
        **{f"decode_{t}": both(decode, t, bytes=decode_bytes(t)) for t in (128, 4096, 16384)},
        **{f"train_{t}": both(train, t, flops=train_flops(t)) for t in (512, 1024)},
        **{f"moe_{t}": moe_row(t) for t in (1, 64, 2048)},
        "bf16_prefill_1024": Row(
            lambda o, n: {"ours": prefill(build_ours().to(torch.bfloat16), 1024), "ours in fp32": prefill(o, 1024)},
            variants=("ours", "ours in fp32"),
        ),
        "prefill_16384": Row(lambda o, n: {"ours": prefill(o, 16384)}, timed=False, variants=("ours",)),
        "loss_163840_words": Row(
            lambda o, n: {"ours": train_words(163840, True), "all logits at once": train_words(163840, False)},
            timed=False,
            variants=("ours", "all logits at once"),
        ),
    }
