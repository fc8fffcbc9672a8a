"""The rungs against stored numbers: GPT-2 as transformers and nanoGPT compute it, and the mixers' operators."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kimi_hf.conversion.gpt2 import convert
from kimi_hf.modeling.cache import TokenInputs
from kimi_hf.modeling.mixers import DeltaNet, GatedDeltaNet, LinearAttention

from .models import tiny_config


def _load(goldens, tmp_path, case, **kwargs):
    folder = convert(goldens(case), tmp_path / "ladder", "ladder")
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval(), load_file(
        goldens(f"{case}/golden.safetensors")
    )


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpt2(goldens, tmp_path, attention):
    model, golden = _load(goldens, tmp_path, "gpt2_tiny", attn_implementation=attention)
    ids = golden["plain.input_ids"]
    out = model(ids, labels=ids)
    assert (out.logits - golden["plain.logits"]).abs().max() < 1e-4
    assert (out.loss - golden["plain.loss"]).abs() < 1e-5
    options = {"do_sample": False, "pad_token_id": 2}
    for name, found in {
        "plain.greedy_tokens": model.generate(ids, max_new_tokens=12, **options)[:, 29:],
        "plain.beam4_tokens": model.generate(ids, max_new_tokens=8, num_beams=4, **options)[:, 29:],
        "leftpad.greedy_tokens": model.generate(
            golden["leftpad.input_ids"], attention_mask=golden["leftpad.attention_mask"], max_new_tokens=10, **options
        )[:, 17:],
    }.items():
        assert torch.equal(found, golden[name]), name


@torch.no_grad()
@pytest.mark.parametrize("case", ["nanogpt_tiny", "nanogpt_bias_tiny"])
def test_nanogpt(goldens, tmp_path, case):
    model, golden = _load(goldens, tmp_path, case)
    assert model.config.bias is (case == "nanogpt_bias_tiny")
    logits = model(golden["input_ids"]).logits
    assert (logits - golden["logits"]).abs().max() < 1e-4
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), golden["targets"].flatten(), ignore_index=-1)
    assert (loss - golden["loss"]).abs() < 1e-5
    if "prompt" in golden:
        ids = golden["prompt"]
        found = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[:, ids.shape[1] :]
        assert torch.equal(found, golden["greedy_tokens"])


GIVEN = {
    "linear_attention": (LinearAttention, ("q", "k", "v")),
    "delta_net": (DeltaNet, ("q", "k", "v", "beta")),
    "gated_delta_net": (GatedDeltaNet, ("q", "k", "v", "beta", "a")),
}


@pytest.mark.parametrize("length", [1, 7, 64, 130])
@pytest.mark.parametrize("case", GIVEN)
def test_mixers_compute_what_their_papers_define(goldens, case, length):
    """Without convolution, norm and gate, a mixer's `advance` is the operator: values, state and gradients."""
    golden = load_file(goldens("ladder_ops/golden.safetensors"))
    golden = {name.split(".")[2]: x for name, x in golden.items() if name.startswith(f"{case}.T{length}.")}
    cls, names = GIVEN[case]
    plain = (
        {} if case == "linear_attention" else {"short_conv_kernel_size": 0, "output_norm": False, "output_gate": False}
    )
    mixer = cls(tiny_config(mixer=case, linear_head_dim=16, linear_value_head_dim=12, **plain), 0)
    with torch.no_grad():
        for name in ("A_log", "dt_bias"):
            if name in golden:
                getattr(mixer, name).copy_(golden[name])
    given = {name: golden[name].flatten(2).requires_grad_() for name in names}
    state = golden["initial_state"]
    if case == "linear_attention":
        state = torch.cat([state, golden["initial_normalizer"][..., None]], dim=-1)
    state.requires_grad_()
    o, _, final = mixer.advance(TokenInputs(tuple(given.values())), None, state, None, keep=True)
    o.backward(golden["grad_o"].flatten(2))
    found = {"o": o.detach().unflatten(2, (2, 12)), "final_state": final.detach()[..., :12]}
    if case == "linear_attention":
        found["final_normalizer"] = final.detach()[..., 12]
    for name, x in found.items():
        assert (x - golden[name]).abs().max() <= 1e-5 * golden[name].abs().max(), name
    gradients = {f"d_{name}": x.grad.view(golden[name].shape) for name, x in given.items()}
    gradients["d_initial_state"] = state.grad[..., :12]
    for name in ("A_log", "dt_bias"):
        if name in golden:
            gradients[f"d_{name}"] = getattr(mixer, name).grad
    for name, x in gradients.items():
        assert (x - golden[name]).abs().max() <= 1e-4 * golden[name].abs().max() + 1e-7, name
