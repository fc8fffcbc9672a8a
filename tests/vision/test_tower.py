import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kimi_hf.configuration.configuration_kimi_k3_vision import KimiK3VisionConfig
from kimi_hf.errors import MediaError, ShapeError
from kimi_hf.modeling.vision import KimiK3PatchMergerV2, KimiK3VisionModel, moonvit, read_layout
from kimi_hf.modeling.vision.norm import VISION_NORM_EPS, VisionRMSNorm

from .conftest import load_case

SIZES = {
    "patch_size": 4,
    "init_pos_emb_height": 5,
    "init_pos_emb_width": 6,
    "vt_hidden_size": 12,
    "mm_hidden_size": 12,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 16,
    "vt_intermediate_size": 10,
    "vt_num_hidden_layers": 2,
    "text_hidden_size": 10,
}
GRIDS = [(1, 2, 4), (2, 2, 2), (1, 4, 2), (1, 4, 2), (3, 2, 4)]


def small(**changes) -> KimiK3VisionModel:
    torch.manual_seed(1)
    return KimiK3VisionModel(KimiK3VisionConfig(**{**SIZES, "initializer_range": 0.3, **changes})).eval()


def pixels(grids, side=4, **kwargs):
    return torch.randn(sum(t * h * w for t, h, w in grids), 3, side, side, **kwargs), torch.tensor(grids).reshape(-1, 3)


def close(a, b, bound):
    assert a.shape == b.shape
    assert (a.float() - b.float()).abs().max() <= bound


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_every_stage_matches_the_golden(tiny, kind):
    tiny.tower.set_attn_implementation(kind)
    golden = tiny.golden
    with torch.no_grad():
        out = tiny.tower(golden["pixel_values"], golden["grid_thws"], output_hidden_states=True)
        projected = tiny.projector(out.pooler_output)
    close(out.hidden_states[0], golden["patch_embed"], 1e-5)
    for index in range(2):  # the last one is reported after the final norm
        close(out.hidden_states[index + 1], golden[f"vision.layer{index}"], 1e-5)
    close(out.hidden_states[3], tiny.detail["vision.final_norm"], 1e-5)
    close(out.last_hidden_state, tiny.detail["vision.final_norm"], 1e-5)
    for index in range(3):
        close(out.pooler_output[index].flatten(1), golden[f"merged.{index}"], 1e-5)
        close(projected[index], golden[f"projected.{index}"], 1e-5)


def test_each_block_alone_matches_the_golden(tiny):
    golden, encoder = tiny.golden, tiny.tower.encoder
    layout = tiny.tower.read_layout(golden["grid_thws"])
    cos, sin = moonvit.rotary_angles(layout, tiny.config.head_dim, torch.device("cpu"))
    entering = golden["patch_embed"]
    with torch.no_grad():
        for index, block in enumerate(encoder.blocks):
            close(block(entering, cos, sin, layout), golden[f"vision.layer{index}"], 5e-6)
            entering = golden[f"vision.layer{index}"]
        close(encoder.final_layernorm(entering), tiny.detail["vision.final_norm"], 5e-6)


def test_bfloat16_equals_the_release_bit_for_bit(goldens):
    case = load_case("k3_release_tiny", ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"])
    fp32 = load_file(goldens("k3_release_tiny/golden_fp32.safetensors"))
    bf16 = load_file(goldens("k3_release_tiny/golden_bf16.safetensors"))
    case.tower.set_attn_implementation("eager")
    inputs = fp32["media.pixel_values"], fp32["media.grid_thws"]
    with torch.no_grad():
        wide = case.projector.float()(case.tower.float()(*inputs).pooler_output)
        narrow = case.projector.bfloat16()(case.tower.bfloat16()(*inputs).pooler_output)
    for index in range(2):
        assert torch.equal(narrow[index], bf16[f"media.projected.{index}"])
    close(wide[0], fp32["media.projected.0"], 1e-5)
    # The second item has two frames, and the stored float32 run kept a time table that had been rounded to bfloat16.
    close(wide[1], fp32["media.projected.1"], 2e-3)


def test_two_frames_match_the_golden_with_its_rounded_time_table(goldens, monkeypatch):
    case = load_case("k3_release_tiny", ["model-00001-of-000002.safetensors", "model-00002-of-000002.safetensors"])
    fp32 = load_file(goldens("k3_release_tiny/golden_fp32.safetensors"))
    exact = moonvit.time_embedding
    monkeypatch.setattr(moonvit, "time_embedding", lambda *args: exact(*args).bfloat16().float())
    with torch.no_grad():
        merged = case.tower.float()(fp32["media.pixel_values"], fp32["media.grid_thws"]).pooler_output
        for index, rows in enumerate(case.projector.float()(merged)):
            close(rows, fp32[f"media.projected.{index}"], 1e-5)


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_an_image_is_the_same_alone_and_in_company(kind):
    model = small()
    model.set_attn_implementation(kind)
    x, grids = pixels(GRIDS)
    order = [3, 0, 4, 2, 1]
    parts = x.split([int(n) for n in grids.prod(1)])
    with torch.no_grad():
        together = model(x, grids).pooler_output
        shuffled = model(torch.cat([parts[i] for i in order]), grids[order]).pooler_output
        alone = [model(parts[i], grids[i : i + 1]).pooler_output[0] for i in range(len(parts))]
    for index, rows in enumerate(together):
        close(rows, alone[index], 2e-6)
        close(rows, shuffled[order.index(index)], 2e-6)


@pytest.mark.parametrize("frames", [2, 3, 4])
def test_clips_attend_over_their_frames_and_become_one_image(frames):
    """All frames of a clip attend jointly, know their time, and are averaged: as many rows as one frame gives."""
    model = small()
    x, grids = pixels([(frames, 2, 4), (1, 2, 2)])
    with torch.no_grad():
        out = model(x, grids)
        clip, still = out.pooler_output
        assert clip.shape == (2, 4, 12) and still.shape == (1, 4, 12)
        model.set_attn_implementation("eager")
        close(model(x[: 8 * frames], grids[:1]).pooler_output[0], clip, 2e-6)
        states = out.last_hidden_state[: 8 * frames].view(frames, 1, 2, 2, 2, 12).mean(0)
        close(states.transpose(1, 2).reshape(2, 4, 12), clip, 2e-6)
        turned = x.clone()
        turned[: 8 * frames] = x[: 8 * frames].view(frames, 8, 3, 4, 4).flip(0).flatten(0, 1)
        assert (model(turned, grids).pooler_output[0] - clip).abs().max() > 1e-3  # time runs one way
        later = x.clone()
        later[8 * (frames - 1)] += 1  # a patch of the last frame is seen by the first
        assert (model(later, grids).last_hidden_state[0] - out.last_hidden_state[0]).abs().max() > 1e-5


@pytest.mark.slow
def test_flex_attention_forward():
    model = small(vt_num_hidden_layers=1)
    inputs = pixels([(1, 4, 4)] * 2)
    with torch.no_grad():
        wanted = model(*inputs).last_hidden_state
        model.set_attn_implementation("flex_attention")
        close(model(*inputs).last_hidden_state, wanted, 2e-6)


def test_changing_one_image_leaves_the_others_bit_equal():
    model = small()
    x, grids = pixels(GRIDS)
    changed = x.clone()
    changed[8:16] += 1  # the second image
    with torch.no_grad():
        before, after = model(x, grids).pooler_output, model(changed, grids).pooler_output
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True, True, True]


def test_no_mask_and_no_call_over_all_patches(monkeypatch):
    calls = []
    real = F.scaled_dot_product_attention

    def recording(query, *args, **kwargs):
        calls.append((tuple(query.shape), kwargs.get("attn_mask"), kwargs.get("is_causal")))
        return real(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    monkeypatch.setattr(moonvit, "MAX_PATCHES_PER_CALL", 32)
    model = small(vt_num_hidden_layers=1)
    with torch.no_grad():
        model(*pixels([(1, 2, 4)] * 10 + [(1, 8, 8)]))
    assert calls == [((4, 2, 8, 8), None, False)] * 2 + [((2, 2, 8, 8), None, False), ((1, 2, 64, 8), None, False)]


def test_flash_attention_gets_boundaries_instead_of_calls(tiny, monkeypatch):
    """A stand-in with the interface of the packed flash call, since the library needs a GPU."""

    def packed(module, query, key, value, mask, **kwargs):
        assert mask is None and kwargs["is_causal"] is False and query.shape[0] == 1
        bounds = kwargs["cu_seq_lens_q"]
        assert bounds.dtype == torch.int32 and torch.equal(bounds, kwargs["cu_seq_lens_k"])
        sizes = bounds.diff().tolist()
        assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(sizes)
        pieces = zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True)
        rows = [F.scaled_dot_product_attention(q, k, v, scale=kwargs["scaling"]) for q, k, v in pieces]
        return torch.cat(rows, 2).transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "flash_attention_2", packed)
    tiny.tower.config._attn_implementation = "flash_attention_2"
    with torch.no_grad():
        out = tiny.tower(tiny.golden["pixel_values"], tiny.golden["grid_thws"])
    close(out.last_hidden_state, tiny.detail["vision.final_norm"], 1e-5)


def test_recorded_outputs():
    model = small()
    model.set_attn_implementation("eager")
    out = model(*pixels(GRIDS), output_hidden_states=True, output_attentions=True)
    assert [h.shape for h in out.hidden_states] == [(56, 12)] * 3
    assert len(out.attentions) == 2
    assert [tuple(w.shape) for w in out.attentions[0]] == [(2, n, n) for n in (8, 8, 8, 8, 24)]
    assert all(torch.allclose(w.sum(-1), torch.ones(())) for w in out.attentions[1])
    as_tuple = model(*pixels(GRIDS), return_dict=False)
    assert as_tuple[0].shape == (56, 12) and len(as_tuple[1]) == 5


def test_no_image():
    out = small()(torch.zeros(0, 3, 4, 4), torch.zeros(0, 3, dtype=torch.long))
    assert out.last_hidden_state.shape == (0, 12) and out.pooler_output == ()


def gradients(model, x, grids):
    model.zero_grad()
    sum(rows.sin().sum() for rows in model(x, grids).pooler_output).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_eager_and_sdpa_have_the_same_gradients_and_float64_is_float64():
    model = small().double()
    x, grids = pixels(GRIDS, dtype=torch.float64)
    assert model(x, grids).last_hidden_state.dtype == torch.float64
    fused = gradients(model, x, grids)
    model.set_attn_implementation("eager")
    for name, grad in gradients(model, x, grids).items():
        assert grad.abs().max() > 0, name
        assert (grad - fused[name]).abs().max() < 1e-10, name


def test_gradients_against_differences():
    model = small(vt_num_hidden_layers=1, init_pos_emb_height=2, init_pos_emb_width=2).double()
    x, grids = pixels([(2, 2, 2), (1, 4, 2)], dtype=torch.float64)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    slope = sum((gradients(model, x, grids)[name] * d).sum() for name, d in direction.items())
    step, values = 1e-6, []
    for sign in (1, -2):  # from 0 to +step, then to -step
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += sign * step * direction[name]
            values.append(sum(rows.sin().sum() for rows in model(x, grids).pooler_output))
    assert abs((values[0] - values[1]) / (2 * step) - slope) < 1e-6 * abs(slope) + 1e-6


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant):
    model = small()
    x, grids = pixels(GRIDS)
    model.train()
    plain = gradients(model, x, grids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for name, grad in gradients(model, x, grids).items():
        assert torch.equal(grad, plain[name]), name


def test_rotary_is_complex_rotation_column_first():
    layout = read_layout(torch.tensor([[2, 2, 4]]), max_frames=4, merge_kernel_size=(2, 2))
    cos, sin = moonvit.rotary_angles(layout, 8, torch.device("cpu"))
    x = torch.randn(16, 3, 8)
    turned = moonvit.rotate_pairs(x, cos, sin)
    for patch in range(16):
        row, column = patch % 8 // 4, patch % 4  # both frames alike
        angle = torch.tensor([column * 1.0, row * 1.0, column * 0.01, row * 0.01])  # 10000^(-4/8) = 0.01
        wanted = torch.view_as_complex(x[patch].reshape(3, 4, 2)) * torch.polar(torch.ones(4), angle)
        close(turned[patch], torch.view_as_real(wanted).flatten(1), 1e-6)
    assert moonvit.rotate_pairs(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_positions_at_native_size_resized_and_over_time():
    positions = small().patch_embed.pos_emb
    grid = torch.tensor([[1, 5, 6], [1, 10, 3], [2, 5, 6]])
    layout = read_layout(grid, max_frames=4, merge_kernel_size=(1, 1))
    still, resized, clip = positions(layout).split([30, 30, 60])
    assert torch.equal(still, positions.weight.flatten(0, 1))
    # Half-pixel centres, no antialiasing: row r of 10 reads source row (r + 0.5) / 2 - 0.5.
    for r, c in ((0, 0), (3, 1), (9, 2)):
        y, x = min(max((r + 0.5) / 2 - 0.5, 0.0), 4.0), min(max((c + 0.5) * 2 - 0.5, 0.0), 5.0)
        y0, x0 = int(y), int(x)
        y1, x1, fy, fx = min(y0 + 1, 4), min(x0 + 1, 5), y - int(y), x - int(x)
        w = positions.weight
        wanted = (1 - fy) * ((1 - fx) * w[y0, x0] + fx * w[y0, x1]) + fy * ((1 - fx) * w[y1, x0] + fx * w[y1, x1])
        close(resized[r * 3 + c], wanted, 1e-6)
    time = moonvit.time_embedding(2, 12, torch.device("cpu"))
    assert torch.equal(time[0], torch.tensor([0.0] * 6 + [1.0] * 6))
    close(clip, torch.cat([still + time[0], still + time[1]]), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_torch_rms_norm_without_eps(dtype):
    norm, theirs = VisionRMSNorm(64).to(dtype), nn.RMSNorm(64).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
        theirs.weight.copy_(norm.weight)
    for scale in (1.0, 3e-4):  # at the small scale the eps decides
        x = (torch.randn(32, 64) * scale).to(dtype)
        bound = 1e-6 if dtype == torch.float32 else 0.0
        assert (norm(x).float() - theirs(x).float()).abs().max() <= bound * theirs(x).float().abs().max()
    assert VISION_NORM_EPS == torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    "grids, error, words",
    [
        ([(1, 2, 2), (1, 3, 2)], MediaError, "image 2 of 2 .*cannot be merged 2 x 2.*multiple of 2"),
        ([(5, 2, 2)], MediaError, "image 1 of 1 .*5 frames.*at most 4"),
        ([(1, 2, 2), (1, 2, 514)], MediaError, "image 2 of 2 .*at most 512"),
        ([(1, 2, 2), (1, 0, 2)], MediaError, "image 2 of 2 .*empty"),
        ([(1, 2, 2, 1)], ShapeError, r"\(images, 3\)"),
    ],
)
def test_bad_grids_name_the_image(grids, error, words):
    grids = torch.tensor(grids)
    with pytest.raises(error, match=words):
        small()(torch.zeros(8, 3, 4, 4), grids)


def test_bad_pixels():
    model = small()
    with pytest.raises(ShapeError, match="holds 7 patches, but grid_thws asks for 8"):
        model(torch.zeros(7, 3, 4, 4), torch.tensor([[1, 2, 2], [1, 2, 2]]))
    with pytest.raises(ShapeError, match=r"\(patches, 3, 4, 4\), got \(7, 3, 5, 4\)"):
        model(torch.zeros(7, 3, 5, 4), torch.tensor([[1, 2, 2]]))
    with pytest.raises(ShapeError, match="integer"):
        model(torch.zeros(4, 3, 4, 4), torch.tensor([[1.0, 2.0, 2.0]]))


def test_biases_and_other_kernels_are_honoured():
    model = small(attn_bias=True, linear_bias=True, patch_embed_proj_bias=True, merge_kernel_size=[1, 2])
    names = set(dict(model.named_parameters()))
    block = "encoder.blocks.0."
    assert {block + n for n in ("wqkv.bias", "wo.bias", "mlp.fc0.bias", "mlp.fc1.bias")} <= names
    assert "patch_embed.proj.bias" in names
    assert [tuple(m.shape) for m in model(*pixels([(1, 3, 2)])).pooler_output] == [(3, 2, 12)]


def test_tower_is_taken_out_of_a_full_repository_and_saved_alone(goldens, tmp_path, tiny):
    folder = goldens("k3_multimodal_tiny/model.safetensors").parent
    model, info = KimiK3VisionModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert not model._keys_to_ignore_on_load_unexpected  # a composite model would inherit it
    model.save_pretrained(tmp_path)
    again = KimiK3VisionModel.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in tiny.tower.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_fresh_weights_follow_the_init_range():
    model = KimiK3VisionModel(KimiK3VisionConfig(**SIZES))
    for name, p in model.named_parameters():
        if "norm" in name:
            assert torch.equal(p, torch.ones_like(p))
        else:
            assert 0.01 < p.std() < 0.03, name


def test_released_size():
    with torch.device("meta"):
        tower = KimiK3VisionModel(KimiK3VisionConfig())
        projector = KimiK3PatchMergerV2(KimiK3VisionConfig())
    assert sum(p.numel() for p in tower.parameters()) == 401_214_464
    assert sum(p.numel() for p in projector.parameters()) == 46_144_512
    shapes = {name: tuple(p.shape) for name, p in tower.named_parameters()}
    assert shapes["patch_embed.proj.weight"] == (1024, 3, 14, 14)
    assert shapes["patch_embed.pos_emb.weight"] == (64, 64, 1024)
    assert shapes["encoder.blocks.26.wqkv.weight"] == (4608, 1024)
    assert shapes["encoder.blocks.26.wo.weight"] == (1024, 1536)
