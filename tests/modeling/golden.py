"""Golden checkpoints, loaded once, and how a result is held to a stored one.

Models from `golden_model` are shared by all tests of a process: look, do not touch. A test that trains, rewires or
saves takes `fresh_model`.
"""

import functools
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

import kimi_hf
from kimi_hf.modeling.sequence import MaskInfo, build_mask_info

from ..conftest import fixture_path

K3, K3_RELEASE, K3_PACKED, KIMI_LINEAR = "k3_text_tiny", "k3_release_tiny", "k3_mxfp4_tiny", "kimi_linear_tiny"
# One block, its stored input in, its stored output out. Right code is within 3e-6 in fp32.
BLOCK = 2e-5


@functools.cache
def golden(name: str) -> dict[str, Tensor]:
    """All tensors of a golden file, such as "k3_text_tiny/golden.safetensors"."""
    return load_file(fixture_path(name))


def fresh_model(case: str, **kwargs):
    """The text model of a golden checkpoint, in fp32 and eval mode unless told otherwise."""
    kwargs = {"dtype": torch.float32, "attn_implementation": "sdpa", **kwargs}
    model = kimi_hf.KimiLinearForCausalLM.from_pretrained(fixture_path(case), **kwargs).eval()
    # The released text config carries generation defaults that would end or warn in the middle of a comparison.
    model.generation_config = type(model.generation_config)(pad_token_id=0)
    return model


@functools.cache
def golden_model(case: str, attention: str = "sdpa"):
    """As `fresh_model`, but one instance for all."""
    return fresh_model(case, attn_implementation=attention).requires_grad_(False)


def masks_for(config, hidden: Tensor) -> MaskInfo:
    """What the decoder hands its mixers for unpadded rows of the length of `hidden` (B, T, D)."""
    return build_mask_info(config, hidden, None, None, None, {})


def assert_close(found: Tensor, stored: Tensor, bound: float, what: str = "") -> None:
    """Largest absolute difference at most `bound`."""
    assert found.shape == stored.shape, f"{what}: {tuple(found.shape)} against {tuple(stored.shape)}"
    off = (found.double() - stored.double()).abs().max().item() if found.numel() else 0.0
    assert off <= bound, f"{what} is off by {off:.2e}, allowed {bound:.0e}"


def assert_logits(found: Tensor, stored: Tensor, real: Tensor | None = None, *, mean: float, largest: float) -> None:
    """Mean and largest difference over real positions."""
    off = (found.double() - stored.double()).abs()
    off = off if real is None else off[real.bool()]
    assert off.mean() <= mean, f"mean difference {off.mean():.2e}, allowed {mean:.0e}"
    assert off.max() <= largest, f"largest difference {off.max():.2e}, allowed {largest:.0e}"


class Decoded(NamedTuple):
    """What `decode` saw: prefill logits (B, T, V), every step's choice (B, n), logits after each fed token (B, n, V)."""

    prefill: Tensor
    chosen: Tensor
    steps: Tensor
    cache: Any


@torch.no_grad()
def decode(model, ids: Tensor, mask: Tensor | None, tokens: Tensor) -> Decoded:
    """Prefill, then feed `tokens` (B, n) one by one through the cache."""
    out = model(ids, attention_mask=mask, use_cache=True)
    prefill, chosen, logits = out.logits, [out.logits[:, -1].argmax(-1)], []
    for step in range(tokens.shape[1]):
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        token = tokens[:, step : step + 1]
        out = model(token, attention_mask=mask, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[:, 0])
        chosen.append(out.logits[:, 0].argmax(-1))
    return Decoded(prefill, torch.stack(chosen[:-1], dim=1), torch.stack(logits, dim=1), out.past_key_values)


@functools.cache
def slow_model(case: str):
    """The weights of a golden checkpoint with a decay so slow that leaked state shows, wholly in float64.

    With the decay as it is, a leak fades below rounding after a few tokens.
    """
    expand = {"quantization_config": kimi_hf.KimiMxfp4Config(dequantize=True)} if case == K3_RELEASE else {}
    model = fresh_model(case, **expand).double()
    with torch.no_grad():
        for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
            if kind == "linear_attention":
                bounded = layer.self_attn.lower_bound is not None
                layer.self_attn.A_log.fill_(0.0 if bounded else -6.0)
                layer.self_attn.dt_bias.fill_(-8.0 if bounded else 0.0)
    return model
