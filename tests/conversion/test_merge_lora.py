"""LoRA adapters merged by file: against W + s B A by hand, and against PEFT on small modules."""

import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from kimi_hf.checkpoint.geometry import is_packed, load_config
from kimi_hf.conversion import merge_lora as module
from kimi_hf.conversion.convert import convert
from kimi_hf.conversion.merge_lora import merge_lora
from kimi_hf.errors import CheckpointError, ConfigError
from kimi_hf.ops import mxfp4

from .helpers import command, hashes, read_all

ROOT = "base_model.model."


def write_adapter(folder, tensors, **config):
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_rslora": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def pair(name, rows, cols, rank=4):
    return {f"{name}.lora_A.weight": torch.randn(rank, cols), f"{name}.lora_B.weight": torch.randn(rows, rank)}


@pytest.fixture
def linear(goldens):
    return goldens("kimi_linear_tiny/config.json").parent


@pytest.fixture
def release(goldens):
    return goldens("k3_release_tiny/config.json").parent


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}])
def test_linear_layer(linear, tmp_path, options):
    name = "model.layers.0.self_attn.q_proj"
    factors = pair(ROOT + name, 64, 64)
    source, before = read_all(linear), hashes(linear)
    out = read_all(merge_lora(linear, write_adapter(tmp_path / "a", factors, **options), tmp_path / "out"))
    alpha = options.get("alpha_pattern", {}).get("q_proj", 8)
    scale = alpha / (math.sqrt(4) if options.get("use_rslora") else 4)
    a, b = factors.values()
    torch.testing.assert_close(out[f"{name}.weight"], source[f"{name}.weight"] + scale * b @ a, atol=1e-5, rtol=0)
    assert {key for key in source if not torch.equal(source[key], out[key])} == {f"{name}.weight"}
    assert hashes(linear) == before


def test_rounded_once_to_bf16(release, tmp_path):
    name = "language_model.model.layers.3.self_attn.kv_b_proj"
    source = read_all(release)[f"{name}.weight"]
    factors = pair(ROOT + name, *source.shape)
    merged = read_all(merge_lora(release, write_adapter(tmp_path / "a", factors), tmp_path / "out"))
    a, b = factors.values()
    expected = (source.float() + 2.0 * (b @ a)).to(torch.bfloat16)
    assert merged[f"{name}.weight"].dtype == torch.bfloat16
    torch.testing.assert_close(merged[f"{name}.weight"], expected, atol=0, rtol=2**-7)
    assert (merged[f"{name}.weight"] != expected).float().mean() < 0.01, "only ties of the matmul's own rounding"


class Experts(nn.Module):
    def __init__(self, count, inter, width):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inter, width))
        self.down_proj = nn.Parameter(torch.randn(count, width, inter))

    def forward(self, x):
        return x


class Toy(nn.Module):
    """The released module paths around one experts module and one linear layer."""

    def __init__(self, count, inter, width):
        super().__init__()
        layer = nn.Module()
        layer.block_sparse_moe = nn.Module()
        layer.block_sparse_moe.experts = Experts(count, inter, width)
        layer.block_sparse_moe.gate = nn.Linear(width, count, bias=False)
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Identity(), layer])

    def forward(self, x):
        return x


def peft_adapter(folder, count=16, inter=24, width=64):
    """An adapter that PEFT itself wrote for experts and router, and PEFT's own updates."""
    torch.manual_seed(1)
    toy = Toy(count, inter, width)
    config = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=["gate"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    model = get_peft_model(toy, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    before = {k: v.clone() for k, v in model.state_dict().items() if "lora" not in k}
    merged = model.merge_and_unload()
    after = merged.model.layers[1].block_sparse_moe
    return before, after


def test_expert_parameters_as_peft_merges_them(linear, tmp_path):
    before, after = peft_adapter(tmp_path / "adapter")
    old = {name.rpartition(".")[2]: tensor for name, tensor in before.items() if "experts" in name}
    gate_up = after.experts.gate_up_proj.detach() - old["gate_up_proj"]
    down = after.experts.down_proj.detach() - old["down_proj"]
    source = read_all(linear)
    out = read_all(merge_lora(linear, tmp_path / "adapter", tmp_path / "out"))
    stem = "model.layers.1.block_sparse_moe."
    for e in range(16):
        for which, delta in (("w1", gate_up[e, :24]), ("w3", gate_up[e, 24:]), ("w2", down[e])):
            name = f"{stem}experts.{e}.{which}.weight"
            torch.testing.assert_close(out[name] - source[name], delta, atol=1e-5, rtol=0)
    changed = {key for key in source if not torch.equal(source[key], out[key])}
    assert changed == {f"{stem}experts.{e}.{w}.weight" for e in range(16) for w in ("w1", "w2", "w3")} | {
        f"{stem}gate.weight"
    }
    fused = convert(linear, tmp_path / "fused", "fused")
    again = read_all(merge_lora(fused, tmp_path / "adapter", tmp_path / "out-fused"))
    assert torch.equal(again[f"{stem}experts.down_proj"][5], out[f"{stem}experts.5.w2.weight"])


def expert_adapter(folder, layer=2, count=8, rows=96, cols=32):
    """down_proj of one layer; only expert 3's factors are not zero."""
    a, b = torch.randn(2 * count, cols), torch.zeros(rows, 2, count)
    b[:, :, 3] = torch.randn(rows, 2)
    name = f"{ROOT}language_model.model.layers.{layer}.block_sparse_moe.experts"
    return write_adapter(folder, {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b.reshape(rows, -1)})


def test_packed_experts(release, tmp_path):
    adapter = expert_adapter(tmp_path / "a")
    with pytest.raises(ConfigError, match="choose --experts requantise"):
        merge_lora(release, adapter, tmp_path / "out")
    source = read_all(release)
    stem = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"
    dense_folder = merge_lora(release, adapter, tmp_path / "dense", experts="bf16")
    dense = read_all(dense_folder)
    assert not is_packed(load_config(dense_folder)) and dense[stem].dtype == torch.bfloat16
    out = read_all(merge_lora(release, adapter, tmp_path / "packed", experts="requantise"))
    assert {key for key in source if not torch.equal(source[key], out[key])} <= {f"{stem}_packed", f"{stem}_scale"}
    close = mxfp4.unpack(out[f"{stem}_packed"], out[f"{stem}_scale"], torch.float32)
    assert (close - dense[stem].float()).abs().max() < dense[stem].abs().max() / 4


def test_embeddings_head_and_saved_modules(linear, tmp_path):
    source = read_all(linear)
    embedding = f"{ROOT}model.embed_tokens"
    a, b = torch.randn(4, 150), torch.randn(64, 4)
    head = torch.randn(150, 64)
    tensors = {
        f"{embedding}.lora_embedding_A": a,
        f"{embedding}.lora_embedding_B": b,
        f"{ROOT}lm_head.weight": head,
        f"{ROOT}model.norm.weight": torch.full((64,), 2.0),
    }
    out = read_all(merge_lora(linear, write_adapter(tmp_path / "a", tensors), tmp_path / "out"))
    expected = source["model.embed_tokens.weight"] + 2.0 * (b @ a).t()
    torch.testing.assert_close(out["model.embed_tokens.weight"], expected, atol=1e-5, rtol=0)
    assert torch.equal(out["lm_head.weight"], head) and bool((out["model.norm.weight"] == 2).all())


def test_an_embedding_that_peft_saved_beside_its_adapter(linear, tmp_path):
    """PEFT adds `base_layer.weight` of a targeted embedding on its own; the update goes on top of it."""
    embedding = f"{ROOT}model.embed_tokens"
    a, b, saved = torch.randn(4, 150), torch.randn(64, 4), torch.randn(150, 64)
    tensors = {
        f"{embedding}.base_layer.weight": saved,
        f"{embedding}.lora_embedding_A": a,
        f"{embedding}.lora_embedding_B": b,
    }
    out = read_all(merge_lora(linear, write_adapter(tmp_path / "a", tensors), tmp_path / "out"))
    torch.testing.assert_close(out["model.embed_tokens.weight"], saved + 2.0 * (b @ a).t(), atol=1e-5, rtol=0)


def test_adapter_of_the_text_model_on_a_composite_checkpoint(release, tmp_path):
    """Trained on KimiLinearForCausalLM, merged into the whole repository: files keep their distribution."""
    name = "model.layers.0.mlp.down_proj"
    source = read_all(release)
    factors = pair(ROOT + name, 64, 80)
    folder = merge_lora(release, write_adapter(tmp_path / "a", factors), tmp_path / "out")
    out = read_all(folder)
    assert not torch.equal(out[f"language_model.{name}.weight"], source[f"language_model.{name}.weight"])
    assert {path.name for path in folder.glob("*.safetensors")} == {path.name for path in release.glob("model-*")}


def test_what_does_not_fit(linear, tmp_path):
    name = f"{ROOT}model.layers.0.self_attn.q_proj"

    def refuse(message, tensors, at=[0], **config):  # noqa: B006
        at[0] += 1
        adapter = write_adapter(tmp_path / f"a{at[0]}", tensors, **config)
        with pytest.raises(CheckpointError, match=message):
            merge_lora(linear, adapter, tmp_path / "out")

    refuse("peft_type is 'IA3'", pair(name, 64, 64), peft_type="IA3")
    refuse("use_dora", pair(name, 64, 64), use_dora=True)
    refuse("bias is 'all'", pair(name, 64, 64), bias="all")
    refuse("only one of lora_A", {f"{name}.lora_A.weight": torch.ones(4, 64)})
    refuse(r"lora_A \[4, 63\].*another model", pair(name, 64, 63))
    refuse("no tensor model.layers.99", pair(name.replace(".0.", ".99."), 64, 64))
    experts = f"{ROOT}model.layers.1.block_sparse_moe.experts"
    refuse("fit neither gate_up_proj", pair(experts, 64, 64, rank=16))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="expected a PEFT folder"):
        merge_lora(linear, tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command(linear, tmp_path):
    adapter = write_adapter(tmp_path / "a", pair(f"{ROOT}model.layers.3.self_attn.o_proj", 64, 64))
    assert command(module, linear, adapter, tmp_path / "out") == 0
    assert (tmp_path / "out" / "config.json").exists()
