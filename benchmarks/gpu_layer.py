"""Layers at the geometry of Kimi K3 with packed experts, and Kimi-Linear's beside transformers' native class."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import StaticCache

import kimi_hf
from benchmarks.gpu_measure import Bench
from kimi_hf.modeling.moe import KimiExperts
from kimi_hf.quantization import KimiPackedExperts

TINY = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 4, "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip


def k3_config(tiny: bool):
    """One KDA and one MLA layer, both with experts, as in Kimi K3 (toy dimensions when `tiny`)."""
    values = kimi_hf.preset("kimi-k3").get_text_config().to_dict()
    linear = values["linear_attn_config"] | {"kda_layers": [1], "full_attn_layers": [2]}
    values |= {"num_hidden_layers": 2, "first_k_dense_replace": 0, "vocab_size": 1024, "pad_token_id": 0,
               "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    if tiny:
        values |= TINY | {"q_lora_rank": 16, "routed_expert_hidden_size": 32}
        linear |= {"num_heads": 2, "head_dim": 16}
    return kimi_hf.KimiLinearConfig(**(values | {"linear_attn_config": linear}))


def packed_k3(tiny: bool, device: torch.device) -> nn.Module:
    """The model with random weights, experts packed from the start: dense ones of 896 experts would not fit."""
    config = k3_config(tiny)
    with torch.device("meta"):
        model = kimi_hf.KimiLinearModel._from_config(config, dtype=torch.float32 if tiny else torch.bfloat16)
        for name, module in list(model.named_modules()):
            if isinstance(module, KimiExperts):
                model.set_submodule(name, KimiPackedExperts.shaped_like(module, config))
    model = model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _fill(name, tensor)
    return model.eval()


def _fill(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.uint8:
        bounds = (118, 121) if name.endswith("scale") else (0, 256)
        tensor.random_(*bounds)
    elif "norm" in name:
        tensor.fill_(1.0)
    elif tensor.is_floating_point():
        tensor.normal_(0.0, 0.5 * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1)


def layer_rows(bench: Bench, tiny: bool, tokens: int) -> Iterator[dict]:
    """Prefill of `tokens`, then decoding 1, 8 and 64 rows after a short prompt: seconds and peak memory of both layers."""
    model = packed_k3(tiny, bench.device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    ids = torch.randint(3, 1024, (1, tokens), device=bench.device)

    def prefill() -> None:
        model(input_ids=ids, use_cache=False)

    with torch.no_grad():
        seconds = bench.time(prefill, runs=5)
        peak = bench.peak(prefill)
        yield {"name": f"two K3 layers, prefill {tokens}", "seconds": seconds, "peak": peak, "weights": weights}
        for rows in (1,) if tiny else (1, 8, 64):
            prompt = torch.randint(3, 1024, (rows, 16), device=bench.device)
            cache = model(input_ids=prompt, use_cache=True).past_key_values
            token = prompt[:, :1]
            seconds = bench.time(lambda c=cache, t=token: model(input_ids=t, past_key_values=c), runs=20)
            yield {"name": f"two K3 layers, decode {rows}", "seconds": seconds, "tokens_per_s": rows / seconds}
            yield _captured_step(bench, model, prompt, token)


def _captured_step(bench: Bench, model: nn.Module, prompt: torch.Tensor, token: torch.Tensor) -> dict:
    """A step over a static cache, captured once and replayed: seconds, and the replayed steps' error against plain ones."""
    rows, length = prompt.shape
    steps = 4 if bench.on_gpu else 2  # capturing takes the first three; the fourth is compared
    outputs = []
    for graph in (False, True):
        cache = StaticCache(config=model.config, max_cache_len=length + 64)
        model(input_ids=prompt, past_key_values=cache)
        hidden = torch.empty(rows, 1, model.config.hidden_size, dtype=model.dtype, device=bench.device)

        def step(cache=cache, hidden=hidden) -> None:
            hidden.copy_(model(input_ids=token, past_key_values=cache).last_hidden_state)

        replay = bench.graphed(step) if graph else step
        for _ in range(1 if graph and bench.on_gpu else steps):
            replay()
        outputs.append(hidden.float())
    difference = float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max())
    seconds = bench.time(replay, runs=20)
    name = f"two K3 layers, decode {rows}, captured"
    return {"name": name, "seconds": seconds, "tokens_per_s": rows / seconds, "replay_error": difference}


def native_rows(bench: Bench, tiny: bool, tokens: int) -> Iterator[dict]:
    """Four layers of Kimi-Linear's geometry (dense experts): ours and transformers' native class, prefill and decode.

    The native class takes fla's kernels where fla is installed and its own PyTorch fallback elsewhere.
    """
    from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearModel

    values = kimi_hf.preset("kimi-linear-48b-a3b").to_dict()
    linear = values["linear_attn_config"] | {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    values |= {"num_hidden_layers": 4, "vocab_size": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if tiny:
        values |= TINY
        linear |= {"num_heads": 2, "head_dim": 16}
    values["linear_attn_config"] = linear
    dtype = torch.float32 if tiny else torch.bfloat16
    classes = {
        "ours": (kimi_hf.KimiLinearConfig, kimi_hf.KimiLinearModel),
        "native": (KimiLinearConfig, KimiLinearModel),
    }
    for who, (config_class, model_class) in classes.items():
        kept = {
            k: v
            for k, v in values.items()
            if k not in ("model_type", "architectures", "layer_types", "mlp_layer_types")
        }
        if who == "native":
            kept["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
        with bench.device:
            model = model_class._from_config(config_class(**kept), dtype=dtype).eval()
        ids = torch.randint(3, 1024, (1, tokens), device=bench.device)
        with torch.no_grad():
            seconds = bench.time(lambda m=model, i=ids: m(input_ids=i, use_cache=False), runs=3)
            yield {"name": f"four Kimi-Linear layers, prefill {tokens}", "who": who, "seconds": seconds}
            cache = model(input_ids=ids[:, :16], use_cache=True).past_key_values
            seconds = bench.time(lambda m=model, c=cache, i=ids: m(input_ids=i[:, :1], past_key_values=c), runs=20)
            yield {"name": "four Kimi-Linear layers, decode 1", "who": who, "seconds": seconds}
        del model
        if bench.on_gpu:
            torch.cuda.empty_cache()
