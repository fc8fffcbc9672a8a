"""A released MXFP4 checkpoint, with experts resident in packed form and expanded on loading."""

import functools
import hashlib
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kimi_hf import KimiK3ForConditionalGeneration, KimiLinearForCausalLM, KimiMxfp4Config
from kimi_hf.errors import CheckpointError, ConfigError
from kimi_hf.modeling.moe import KimiExperts
from kimi_hf.quantization import KimiPackedExperts, dequantize, quantize

from ..conftest import fixture_path
from ..modeling.golden import K3, K3_PACKED, K3_RELEASE, assert_logits, decode, fresh_model, golden, golden_model

BOUNDS = {"mean": 1e-4, "largest": 5e-3}
EXPANDED = {"quantization_config": KimiMxfp4Config(dequantize=True)}


@functools.cache
def _expanded():
    return fresh_model(K3_PACKED, **EXPANDED).requires_grad_(False)


def _experts(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


@pytest.mark.parametrize("storage", ["resident", "expanded"])
def test_golden(storage):
    model = golden_model(K3_PACKED) if storage == "resident" else _expanded()
    kind = KimiPackedExperts if storage == "resident" else KimiExperts
    assert len(_experts(model, kind)) == 12
    stored, exact = golden("k3_mxfp4_tiny/golden.safetensors"), golden("k3_mxfp4_tiny/golden_exact.safetensors")
    ids, tokens = stored["plain.input_ids"], stored["plain.greedy_tokens"]
    logits, chosen, steps, _ = decode(model, ids, None, tokens)
    assert torch.equal(chosen, tokens)
    for reference in (stored, exact):
        assert_logits(logits, reference["plain.logits"], **BOUNDS)
        assert_logits(steps, reference["plain.greedy_logits"], **BOUNDS)


def test_expanded_weights_equal_the_stored_ones_bit_for_bit():
    experts = _expanded().model.layers[1].block_sparse_moe.experts
    stored, found = golden("k3_mxfp4_tiny/golden.safetensors"), 0
    for name, weight in stored.items():
        if not name.startswith("dequantised."):
            continue
        expert, which = name.split(".experts.")[1].split(".")[:2]
        both = experts.gate_up_proj[int(expert)].chunk(2)
        ours = {"w1": both[0], "w3": both[1], "w2": experts.down_proj[int(expert)]}[which]
        assert torch.equal(ours, weight), name
        found += 1
    assert found == 6


def test_resident_and_expanded_experts_agree():
    ids = golden("k3_mxfp4_tiny/golden.safetensors")["plain.input_ids"]
    torch.testing.assert_close(golden_model(K3_PACKED)(ids).logits, _expanded()(ids).logits, rtol=0, atol=2e-3)


def test_resident_experts_take_half_a_byte_a_weight_and_are_frozen():
    model = fresh_model(K3_PACKED).to(torch.bfloat16)
    for experts in _experts(model, KimiPackedExperts):
        held = list(experts.parameters())
        weights = 3 * experts.num_experts * experts.hidden_dim * experts.intermediate_dim
        assert sum(p.numel() * p.element_size() for p in held) <= 0.54 * weights
        assert all(p.dtype == torch.uint8 and not p.requires_grad for p in held)


def test_only_chosen_experts_are_read():
    """One token, with every expert it does not choose made NaN."""
    ids = torch.tensor([[7]])
    expected = golden_model(K3_PACKED)(ids).logits
    chosen = {}
    model = fresh_model(K3_PACKED).requires_grad_(False)
    for i, layer in enumerate(model.model.layers[1:], start=1):
        gate = layer.block_sparse_moe.gate
        gate.register_forward_hook(lambda _, __, out, i=i: chosen.__setitem__(i, out[2].flatten().tolist()))
    model(ids)
    for i, used in chosen.items():
        experts = model.model.layers[i].block_sparse_moe.experts
        spared = [e for e in range(experts.num_experts) if e not in used]
        assert len(spared) == experts.num_experts - model.config.num_experts_per_token
        experts.gate_up_proj_scale[spared] = experts.down_proj_scale[spared] = 255
    assert torch.equal(model(ids).logits, expected)


def _files(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("model*.safetensors")}


def test_resident_experts_are_saved_byte_for_byte(tmp_path):
    fresh_model(K3_PACKED).save_pretrained(tmp_path)
    assert _same_tensors(tmp_path, fixture_path(K3_PACKED)) > 500
    block = json.loads((fixture_path(K3_PACKED) / "config.json").read_text())["text_config"]["quantization_config"]
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.get("text_config", saved)["quantization_config"] == block


def _same_tensors(ours, theirs):
    """Every tensor of one folder equals the other's: name, dtype, shape and bytes. Returns how many there are."""
    stored = [
        {n: x for p in folder.glob("model*.safetensors") for n, x in load_file(p).items()} for folder in (ours, theirs)
    ]
    assert stored[0].keys() == stored[1].keys()
    for name, tensor in stored[0].items():
        other = stored[1][name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        assert tensor.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8)), name
    return len(stored[0])


def test_expanded_experts_are_saved_as_plain_experts(tmp_path):
    _expanded().save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight" in names
    assert not any("packed" in name or "gate_up_proj" in name for name in names)
    again = fresh_model(tmp_path)
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, _expanded().state_dict()[name]), name


@pytest.mark.parametrize("case", [K3_PACKED, K3_RELEASE])
def test_a_model_built_from_the_configuration_of_packed_experts_is_saved_as_it_is(case, tmp_path):
    """Nobody packs the experts of a model that is trained from scratch with the released configuration."""
    cls = KimiLinearForCausalLM if case == K3_PACKED else KimiK3ForConditionalGeneration
    model = cls(cls.config_class.from_pretrained(fixture_path(case))).requires_grad_(False)
    model.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in {**config, **config.get("text_config", {})}
    again = cls.from_pretrained(tmp_path / "plain", dtype=model.dtype)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in again.state_dict().items())
    quantize(model).save_pretrained(tmp_path / "packed")
    again = cls.from_pretrained(tmp_path / "packed", dtype=model.dtype)
    assert _experts(again, KimiPackedExperts)
    ids = torch.arange(4, 12)[None]
    torch.testing.assert_close(again.eval()(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-5)


def test_expanded_experts_pack_to_the_same_values(tmp_path):
    """Weights on the grid survive packing exactly; a second packing gives the same bytes."""
    model = quantize(fresh_model(K3_PACKED, **EXPANDED))
    assert len(_experts(model, KimiPackedExperts)) == 12
    model.save_pretrained(tmp_path)
    again = fresh_model(tmp_path)
    assert again.config.quantization_config is not None
    for one, other in zip(_experts(model, KimiPackedExperts), _experts(again, KimiPackedExperts), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))
    back = dequantize(again)
    for one, other in zip(_experts(back, KimiExperts), _experts(_expanded(), KimiExperts), strict=True):
        assert torch.equal(one.gate_up_proj, other.gate_up_proj) and torch.equal(one.down_proj, other.down_proj)


def test_gradients_reach_inputs_through_packed_experts():
    found = []
    for model in (golden_model(K3_PACKED), _expanded()):
        hidden = model.model.embed_tokens(torch.arange(5, 25)[None]).detach().requires_grad_()
        model(inputs_embeds=hidden, labels=torch.arange(5, 25)[None]).loss.backward()
        found.append(hidden.grad)
    assert (found[0] - found[1]).abs().max() <= 1e-4 * found[1].abs().max()


def test_lora_over_packed_experts_equals_lora_over_expanded_ones():
    """Adapter gradients to 1e-4; packed bytes do not change; experts stay at half a byte a weight."""
    peft = pytest.importorskip("peft")
    found = []
    for kwargs in ({}, EXPANDED):
        torch.manual_seed(0)
        model = fresh_model(K3_PACKED, **kwargs)
        before = {n: p.clone() for n, p in model.named_parameters() if p.dtype == torch.uint8}
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "o_proj", "routed_expert_down_proj"], init_lora_weights=False
        )
        adapted = peft.get_peft_model(model, config).train()
        ids = torch.arange(5, 25)[None]
        adapted(ids, labels=ids).loss.backward()
        gradients = {n: p.grad for n, p in adapted.named_parameters() if p.requires_grad}
        assert all("lora_" in n and g.abs().sum() > 0 for n, g in gradients.items())
        with torch.no_grad():
            for p in adapted.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
        after = {n.removeprefix("base_model.model."): p for n, p in adapted.named_parameters()}
        assert all(torch.equal(after[n], p) for n, p in before.items())
        found.append(gradients)
    for name, gradient in found[0].items():
        assert (gradient - found[1][name]).abs().max() <= 1e-4 * found[1][name].abs().max() + 1e-9, name


def _copy_with(folder, target, change_config=None, change_tensors=None):
    """A copy of a fixture of one file, with its config and tensors passed through functions that change them."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    if change_config:
        change_config(config)
    if change_tensors:
        change_tensors(tensors)
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.3.w2"


def test_a_nan_scale_is_refused_by_name(tmp_path):
    def damage(tensors):
        tensors[f"{EXPERT}.weight_scale"][3, 0] = 255

    folder = _copy_with(fixture_path(K3_PACKED), tmp_path, change_tensors=damage)
    for kwargs in ({}, EXPANDED):
        with pytest.raises(CheckpointError, match=rf"{EXPERT}\.weight_scale in model\.safetensors: .*row 3, group 0"):
            fresh_model(folder, **kwargs)


def test_config_says_packed_but_experts_are_plain(tmp_path):
    block = json.loads((fixture_path(K3_PACKED) / "config.json").read_text())["text_config"]["quantization_config"]
    folder = _copy_with(
        fixture_path(K3), tmp_path, lambda config: config["text_config"].update(quantization_config=block)
    )
    with pytest.raises(CheckpointError, match=r"experts.*model\.safetensors is stored as a plain expert.*quantization"):
        fresh_model(folder)


def test_experts_are_packed_but_config_does_not_say_so(tmp_path):
    folder = _copy_with(
        fixture_path(K3_PACKED), tmp_path, lambda config: config["text_config"].pop("quantization_config")
    )
    with pytest.raises(
        CheckpointError, match=r"experts.*model\.safetensors is stored as a packed expert.*quantization"
    ):
        fresh_model(folder)


def test_mixed_experts_are_refused(tmp_path):
    def unpack_one(tensors):
        tensors[f"{EXPERT}.weight"] = torch.zeros(32, 32)
        del tensors[f"{EXPERT}.weight_packed"], tensors[f"{EXPERT}.weight_scale"]

    folder = _copy_with(fixture_path(K3_PACKED), tmp_path, change_tensors=unpack_one)
    with pytest.raises(CheckpointError, match="mixes experts stored as packed and plain"):
        fresh_model(folder)


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale"])
def test_half_an_expert_is_refused(tmp_path, part):
    folder = _copy_with(
        fixture_path(K3_PACKED), tmp_path, change_tensors=lambda tensors: tensors.pop(f"{EXPERT}.{part}")
    )
    with pytest.raises(CheckpointError, match=rf"experts\.3\.w2\.{part}"):
        fresh_model(folder)


FOREIGN = {
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    "int4": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4},
    "gpt-oss": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize("scheme", FOREIGN)
def test_another_four_bit_scheme_is_refused(tmp_path, scheme):
    def swap(config):
        config["text_config"]["quantization_config"] = FOREIGN[scheme]

    folder = _copy_with(fixture_path(K3_PACKED), tmp_path, swap)
    with pytest.raises((CheckpointError, ConfigError), match="quant_method|quantization_config"):
        fresh_model(folder)


def test_mxfp4_with_other_groups_is_refused(tmp_path):
    def swap(config):
        config["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16

    folder = _copy_with(fixture_path(K3_PACKED), tmp_path, swap)
    with pytest.raises((CheckpointError, ConfigError), match=r"config_groups\.group_0\.weights"):
        fresh_model(folder)


def test_packing_a_plain_checkpoint_on_the_way_in_is_refused_with_the_way_out():
    with pytest.raises((CheckpointError, ConfigError), match="quantize"):
        fresh_model(K3, quantization_config=KimiMxfp4Config())


def test_released_shards_keep_their_bytes_when_saved(tmp_path):
    """bf16 with fp32 and uint8 tensors, two shards in, any sharding out."""
    fresh_model(K3_RELEASE, dtype="auto").save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(_files(tmp_path)) > 2 and (tmp_path / "model.safetensors.index.json").exists()
    text_only = {n: x for p in tmp_path.glob("model*.safetensors") for n, x in load_file(p).items()}
    for path in fixture_path(K3_RELEASE).glob("model*.safetensors"):
        for name, tensor in load_file(path).items():
            if name.startswith("language_model."):
                saved = text_only.pop(name)
                assert saved.dtype == tensor.dtype and saved.view(torch.uint8).equal(tensor.view(torch.uint8)), name
    assert not text_only
