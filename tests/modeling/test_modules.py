"""Single modules against what the release computes for them: the place where an epsilon or a cast shows."""

import pytest
import torch
from torch import nn

from kimi_hf import KimiLinearConfig
from kimi_hf.modeling.feed_forward import SituGate, gated_activation
from kimi_hf.modeling.mixers import MultiHeadLatentAttention
from kimi_hf.modeling.mixers.short_convolution import ShortConvolution
from kimi_hf.modeling.moe import KimiRouter
from kimi_hf.modeling.norms import KimiGatedRMSNorm, KimiRMSNorm
from kimi_hf.modeling.residual import DepthQuery, Stream
from kimi_hf.ops.depth_attention import inverse_rms

from .golden import assert_close, golden, masks_for

GOLDEN = "module_ops/golden.safetensors"


def _text_config(**fields) -> KimiLinearConfig:
    base = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    return KimiLinearConfig(**{**base, **fields})


@pytest.mark.parametrize("eps", ["1e-05", "1e-06"])
def test_rms_norm_on_tiny_and_large_rows(eps):
    stored = golden(GOLDEN)
    norm = KimiRMSNorm(32, float(eps))
    norm.weight.data = stored["rms_norm.weight"]
    out, expected = norm(stored["rms_norm.x"]), stored[f"rms_norm.eps_{eps}"]
    assert_close(out / expected.abs().amax(-1, keepdim=True), expected / expected.abs().amax(-1, keepdim=True), 1e-6)


def test_rms_norm_rounds_before_the_weight_in_bf16():
    norm = KimiRMSNorm(64, 1e-5).bfloat16()
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(200, 64).bfloat16()
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(norm(x), exact.bfloat16() * norm.weight)


@pytest.mark.parametrize(("dtype", "blocks"), [(torch.float32, 1), (torch.float32, 4), (torch.bfloat16, 4)])
def test_depth_query(dtype, blocks):
    stored = golden(GOLDEN)
    query = DepthQuery(32, 1e-5)
    query.weight.data = stored["depth_mix.proj_weight"].to(dtype)
    sealed = [x[None].to(dtype) for x in stored["depth_mix.blocks"][:, :blocks].unbind(1)]
    stream = Stream(stored["depth_mix.prefix_sum"][None].to(dtype))
    stats = torch.stack([inverse_rms(x, 1e-5) for x in sealed])
    out = query(stored["depth_mix.norm_weight"].to(dtype), stream._replace(bank=(stats, *sealed)))[0]
    if blocks == 1:
        assert_close(out, stored["depth_mix.out_one_block"], 2e-6)
    elif dtype == torch.float32:
        assert_close(out, stored["depth_mix.out"], 2e-6)
    else:
        assert torch.equal(out, stored["depth_mix.out_bfloat16"])


def test_depth_query_over_nothing_is_the_open_block():
    prefix = torch.randn(1, 5, 32)
    assert torch.equal(DepthQuery(32, 1e-5)(torch.ones(32), Stream(prefix)), prefix)


ROUTERS = {
    "plain": {},
    "scaled": {"routed_scaling_factor": 2.446},
    "raw": {"moe_renormalize": False},
    "groups": {"num_expert_group": 4, "topk_group": 2},
    "softmax": {"moe_router_activation_func": "softmax"},
    "top1": {"num_experts_per_token": 1},
}


@pytest.mark.parametrize("case", ROUTERS)
def test_router_chooses_and_weighs_as_released(case):
    stored = golden(GOLDEN)
    fields = {"num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 8, **ROUTERS[case]}
    router = KimiRouter(_text_config(hidden_size=24, **fields))
    router.weight.data = stored["router.weight"]
    router.e_score_correction_bias = stored["router.correction_bias"]
    logits, weights, experts = router(stored["router.hidden"][0])
    experts, order = experts.sort(dim=1)
    assert torch.equal(experts, stored[f"router.{case}.experts"])
    assert_close(weights.gather(1, order), stored[f"router.{case}.weights"], 1e-6, case)
    assert logits.dtype == weights.dtype == torch.float32


def test_the_router_bias_chooses_in_fp32_and_never_weighs():
    config = _text_config(hidden_size=4, num_experts=4, num_experts_per_token=1, moe_intermediate_size=8)
    router = KimiRouter(config)
    scores = torch.tensor([0.50, 0.51, 0.30, 0.20])
    router.weight.data = torch.diag(torch.logit(scores))
    router.e_score_correction_bias = torch.tensor([7.004, 6.990, 6.0, 6.0])
    for dtype in (torch.float32, torch.bfloat16):
        _, weights, experts = router(torch.ones(1, 4, dtype=dtype))
        assert experts.tolist() == [[0]]
        # One chosen expert is not renormalised: its weight is its own score, without the bias.
        assert weights.item() == pytest.approx(0.5, abs=1e-6)


def test_renormalised_weights_sum_to_the_scaling_factor():
    fields = {"num_experts": 16, "num_experts_per_token": 4, "moe_intermediate_size": 8}
    router = KimiRouter(_text_config(hidden_size=24, routed_scaling_factor=2.446, **fields))
    nn.init.normal_(router.weight)
    weights = router(torch.randn(50, 24))[1]
    assert_close(weights.sum(1), torch.full((50,), 2.446), 1e-5)


@pytest.mark.parametrize(
    ("case", "beta", "linear_beta"), [("1_none", None, None), ("4_none", 4.0, None), ("4_25", 4.0, 25.0)]
)
def test_situ_of_the_configuration(case, beta, linear_beta):
    stored = golden(GOLDEN)
    config = _text_config(hidden_act="situ", activation_situ_beta=beta, activation_situ_linear_beta=linear_beta)
    gate, up = stored["situ.gate_up"].chunk(2, dim=-1)
    assert_close(gated_activation(config)(gate, up), stored[f"situ.{case}"], 1e-4, case)
    if case == "4_25":
        assert torch.equal(gated_activation(config)(gate.bfloat16(), up.bfloat16()), stored["situ.4_25_bfloat16"])


def test_situ_known_values_rounded_once():
    act = SituGate(4.0, 25.0)
    gate, up = torch.tensor([3.0, -6.0]), torch.tensor([40.0, -60.0])
    assert_close(act(gate, up), torch.tensor([55.763386, 0.220155]), 1e-5)
    assert torch.equal(act(gate.bfloat16(), up.bfloat16()), act(gate, up).bfloat16())


def test_gated_norm():
    stored = golden(GOLDEN)
    norm = KimiGatedRMSNorm(32, 1e-5)
    norm.weight.data = stored["gated_norm.weight"]
    assert_close(norm(stored["gated_norm.x"], stored["gated_norm.gate"]), stored["gated_norm.out"], 2e-6)


def test_short_convolution_from_nothing_continued_and_shorter_than_its_window():
    stored = golden(GOLDEN)
    conv = ShortConvolution(6, 4)
    conv.weight.data = stored["short_conv.weight"]
    y, window = conv(stored["short_conv.x"], None, None, True)
    assert_close(y, stored["short_conv.y"], 1e-6)
    assert torch.equal(window, stored["short_conv.state"])
    y, window = conv(stored["short_conv.next_x"], window, None, True)
    assert_close(y, stored["short_conv.next_y"], 1e-6)
    assert torch.equal(window, stored["short_conv.next_state"])
    y, window = conv(stored["short_conv.x"][:, :2], None, None, True)
    assert_close(y, stored["short_conv.two_tokens_y"], 1e-6)
    assert torch.equal(window, stored["short_conv.two_tokens_state"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_latent_norms_use_their_own_epsilon(attention):
    """The config says rms_norm_eps 1e-5; the two inner norms use 1e-6 all the same, which moves this case by 0.65."""
    stored = golden(GOLDEN)
    config = _text_config(
        rms_norm_eps=1e-5,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        mla_use_output_gate=True,
        linear_attn_config={"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16},
    )
    config._attn_implementation = attention
    mixer = MultiHeadLatentAttention(config, 1).eval()
    weights = {
        name.removeprefix("mla_small."): x
        for name, x in stored.items()
        if name.startswith("mla_small.") and name.endswith(".weight")
    }
    mixer.load_state_dict(weights)
    hidden = stored["mla_small.hidden_states"]
    mask_info = masks_for(config, hidden)
    assert_close(mixer(hidden, mask_info)[0], stored["mla_small.out"], 1e-5)
