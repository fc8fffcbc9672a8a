"""What each rung's rule says, on its mixer: linear attention is masked attention without softmax, the delta rule replaces."""

import torch
from torch.nn.functional import elu

from kimi_hf.modeling.mixers import DeltaNet, GatedDeltaNet, LinearAttention
from kimi_hf.ops.dispatch import use_backend

from .models import tiny_config


def test_linear_attention_masked_chunked_and_recurrent_are_one():
    mixer = LinearAttention(tiny_config(mixer="linear_attention", num_hidden_layers=1), 0).double()
    x = torch.randn(2, 70, 16, dtype=torch.float64)
    q, k, v = (proj(x).unflatten(-1, (2, 8)).transpose(1, 2) for proj in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    scores = torch.tril((elu(q) + 1) @ (elu(k) + 1).transpose(2, 3))
    masked = mixer.o_proj((scores / scores.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))
    for backend in ("reference", "eager"):
        with use_backend({"linear_attention": backend}):
            torch.testing.assert_close(mixer(x)[0], masked)


@torch.no_grad()
def _state_after(mixer, keys, values, strength):
    """The state after writing (T, H K) keys with (T, H V) values; a large logit writes fully."""
    from kimi_hf.modeling.cache import TokenInputs

    logits = torch.full((1, len(keys), 2), strength)
    extra = (torch.full_like(logits, -60.0),) if isinstance(mixer, GatedDeltaNet) else ()
    inputs = TokenInputs((keys[None], keys[None], values[None], logits, *extra))
    return mixer.advance(inputs, None, None, None, keep=True)[2][0]


def test_writing_a_key_again_replaces_what_it_held():
    key, values = torch.randn(1, 16), torch.randn(2, 16)
    plain = {"short_conv_kernel_size": 0, "output_norm": False, "output_gate": False}
    for cls, name in ((DeltaNet, "delta_net"), (GatedDeltaNet, "gated_delta_net")):
        mixer = cls(tiny_config(mixer=name, **plain), 0)
        if name == "gated_delta_net":
            mixer.A_log.data.zero_(), mixer.dt_bias.data.zero_()
        twice = _state_after(mixer, key.repeat(2, 1), values, 40.0)
        once = _state_after(mixer, key, values[1:], 40.0)
        torch.testing.assert_close(twice, once, rtol=1e-4, atol=1e-5)
        closed = _state_after(mixer, key, values[:1], -60.0)
        assert closed.abs().max() < 1e-6
