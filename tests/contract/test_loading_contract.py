"""What survives a file: saving, loading, partial and odd checkpoints, dtypes, resizing, tying, parallel plans."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from kimi_hf import KimiHfError

from .tiny import HIDDEN, VOCAB

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def _load(cls, path, **kwargs):
    """The model in eval mode and its loading report, which must be clean."""
    model, report = cls.from_pretrained(path, output_loading_info=True, attn_implementation="eager", **kwargs)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], f"{kind}: {report[kind]}"
    return model.eval()


def _last_hidden(head, ids):
    return head.eval()(ids, output_hidden_states=True).hidden_states[-1]


def _same_state(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("base", [True, False], ids=["base", "head"])
def test_save_and_load_give_the_same_model(tiny, tmp_path, base):
    model, ids = tiny.build(base=base), tiny.ids()
    model.save_pretrained(tmp_path / "first")
    again = _load(type(model), tmp_path / "first")
    _same_state(model, again)
    torch.testing.assert_close(again(ids)[0], model(ids)[0], **CLOSE)
    assert type(AutoConfig.from_pretrained(tmp_path / "first")) is type(model.config)
    again.save_pretrained(tmp_path / "second")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_auto_classes_find_the_model(tiny, tmp_path):
    model = tiny.build()
    model.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is tiny.model_class
    assert isinstance(AutoModel.from_pretrained(tmp_path), (tiny.base_class, tiny.model_class))
    assert type(AutoModelForCausalLM.from_config(tiny.config())) is tiny.model_class


def test_sharded_files_hold_the_same_model(tiny, tmp_path):
    model = tiny.build()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _same_state(model, _load(tiny.model_class, tmp_path))


def test_a_file_has_one_tensor_per_expert_matrix_and_fused_names_load_too(tiny, tmp_path):
    model = tiny.build()
    model.save_pretrained(tmp_path / "released")
    released = load_file(tmp_path / "released" / "model.safetensors")
    experts = model.config.get_text_config().num_experts or 0
    sparse = model.config.get_text_config().mlp_layer_types.count("sparse")
    assert sum(".experts." in name for name in released) == 3 * experts * sparse
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in fused) is bool(sparse)
    _same_state(_load(tiny.model_class, tmp_path / "released"), _load(tiny.model_class, tmp_path / "fused"))


def test_load_state_dict_takes_fused_and_released_names(tiny, tmp_path):
    model, other = tiny.build(), tiny.build(seed=5)
    model.save_pretrained(tmp_path)
    for state in (model.state_dict(), load_file(tmp_path / "model.safetensors")):
        other = tiny.build(seed=5)
        other.load_state_dict(state)
        _same_state(model, other)


def test_head_loads_a_base_checkpoint_and_reports_what_was_missing(tiny, tmp_path):
    model, ids = tiny.build(base=True), tiny.ids()
    model.save_pretrained(tmp_path)
    head, report = tiny.model_class.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert len(report["missing_keys"]) == 1 and "lm_head" in next(iter(report["missing_keys"]))
    torch.testing.assert_close(_last_hidden(head, ids), model(ids).last_hidden_state, **CLOSE)
    assert torch.isfinite(head.get_output_embeddings().weight).all()


def test_base_loads_a_head_checkpoint(tiny, tmp_path):
    head, ids = tiny.build(), tiny.ids()
    head.save_pretrained(tmp_path)
    base, report = tiny.base_class.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"]
    torch.testing.assert_close(base.eval()(ids).last_hidden_state, _last_hidden(head, ids), **CLOSE)


def test_weights_that_no_file_has_are_initialised_as_from_scratch(tiny):
    fresh = tiny.model_class(tiny.config())
    model = tiny.model_class.from_pretrained(None, config=tiny.config(), state_dict={})
    for name, tensor in model.state_dict().items():
        assert tensor.device.type == "cpu" and torch.isfinite(tensor).all(), name
        wanted = fresh.state_dict()[name].float()
        if wanted.numel() == 1 or wanted.std() == 0:
            assert torch.equal(tensor.float(), wanted), name
        elif wanted.numel() > 100:
            assert 0.5 < tensor.float().std() / wanted.std() < 2, name


def test_meta_model_can_be_initialised(tiny):
    with torch.device("meta"):
        model = tiny.model_class(tiny.config())
    assert all(tensor.device.type == "meta" for tensor in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights()
    fresh = tiny.model_class(tiny.config())
    for (name, ours), theirs in zip(model.named_buffers(), fresh.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert torch.isfinite(model.eval()(tiny.ids()).logits).all()


def test_loading_under_a_meta_device_is_refused(tiny, tmp_path):
    tiny.build().save_pretrained(tmp_path)
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta device"):
        tiny.model_class.from_pretrained(tmp_path)


def test_mismatched_shapes_raise_unless_ignored(tiny, tmp_path):
    model = tiny.build()
    model.save_pretrained(tmp_path)
    wider = tiny.config(vocab_size=VOCAB + 11)
    with pytest.raises(KimiHfError, match="embed_tokens"):
        tiny.model_class.from_pretrained(tmp_path, config=wider)
    loaded = tiny.model_class.from_pretrained(tmp_path, config=wider, ignore_mismatched_sizes=True)
    assert loaded.get_input_embeddings().weight.shape == (VOCAB + 11, HIDDEN)
    ours, theirs = model.state_dict(), loaded.state_dict()
    same = [name for name in ours if ours[name].shape == theirs[name].shape]
    assert len(ours) - len(same) == 2
    assert all(torch.equal(ours[name], theirs[name]) for name in same)


def test_an_unknown_tensor_is_reported_not_loaded(tiny, tmp_path):
    model = tiny.build()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["something.else"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = tiny.model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["unexpected_keys"]) == {"something.else"}
    _same_state(model, loaded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_the_fp32_list(tiny, tmp_path, dtype):
    model = tiny.build()
    model.save_pretrained(tmp_path)
    half = _load(tiny.model_class, tmp_path, dtype=dtype)
    assert half.dtype == dtype
    full, kept = model.state_dict(), set()
    for name, tensor in half.state_dict().items():
        if tensor.dtype == torch.float32:
            kept.add(name.rsplit(".", 1)[-1] if "conv1d" not in name and "o_norm" not in name else name.split(".")[-2])
            assert torch.equal(tensor, full[name]), name
        else:
            assert tensor.dtype == dtype, name
    conv = {"q_conv1d", "k_conv1d", "v_conv1d"}
    full_precision = {"A_log", "dt_bias", "e_score_correction_bias", "o_norm"} | conv
    assert kept == {part for part in full_precision if any(part in name.split(".") for name in full)}
    logits = half(tiny.ids()).logits
    assert logits.dtype == dtype and torch.isfinite(logits).all()


def test_half_precision_survives_save_and_load(tiny, tmp_path):
    tiny.build().save_pretrained(tmp_path / "full")
    half = _load(tiny.model_class, tmp_path / "full", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "half")
    again = _load(tiny.model_class, tmp_path / "half", dtype="auto")
    assert again.dtype == torch.bfloat16
    _same_state(half, again)


@pytest.mark.parametrize("size", [VOCAB + 13, VOCAB - 20])
def test_embeddings_can_be_resized(tiny, tmp_path, size):
    model, ids = tiny.build(), tiny.ids() % (VOCAB - 20)
    before = model(ids).logits
    model.resize_token_embeddings(size)
    assert model.config.get_text_config().vocab_size == size
    assert model.get_input_embeddings().num_embeddings == size
    after = model(ids).logits
    assert after.shape[-1] == size
    shared = min(size, VOCAB)
    torch.testing.assert_close(after[..., :shared], before[..., :shared], **CLOSE)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(_load(tiny.model_class, tmp_path)(ids).logits, after, **CLOSE)


def _tied_config(tiny):
    config = tiny.config()
    text = config.get_text_config()
    config.tie_word_embeddings = text.tie_word_embeddings = True
    return config


def test_tied_embeddings_stay_one_tensor(tiny, tmp_path):
    model = tiny.model_class(_tied_config(tiny)).eval()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    assert not any("lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    again = _load(tiny.model_class, tmp_path)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    again.resize_token_embeddings(VOCAB + 5)
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert model.num_parameters() == tiny.model_class(tiny.config()).num_parameters() - VOCAB * HIDDEN


def test_untied_embeddings_stay_two_tensors(tiny, tmp_path):
    model = tiny.build()
    model.save_pretrained(tmp_path)
    again = _load(tiny.model_class, tmp_path)
    weights = again.get_output_embeddings().weight, again.get_input_embeddings().weight
    assert weights[0].data_ptr() != weights[1].data_ptr() and not torch.equal(*weights)


def _matches(pattern: str, name: str) -> bool:
    parts, names = pattern.split("."), name.split(".")
    return len(parts) <= len(names) and all(p in ("*", n) for p, n in zip(parts, names, strict=False))


@pytest.mark.parametrize("plan", ["tp_plan", "ep_plan"])
def test_parallel_plans_name_what_exists_and_shard_the_experts(tiny, plan):
    model = tiny.build()
    entries = dict(getattr(model, plan, None) or getattr(model, f"_{plan}"))
    assert entries or (plan == "ep_plan" and not model.config.get_text_config().num_experts)
    names = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    for pattern in entries:
        assert any(_matches(pattern, name) for name in names), f"{plan} entry {pattern} matches nothing"
    for name in names:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            assert any(_matches(pattern, name) for pattern in entries), f"{name} is not in the {plan}"


def test_layers_are_the_unit_of_sharding(tiny):
    model = tiny.build()
    unit = set(model._no_split_modules)
    layers = [module for module in model.modules() if type(module).__name__ in unit]
    assert len(layers) >= model.config.get_text_config().num_hidden_layers


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, {"": "disk"}], ids=str)
def test_device_maps_give_the_same_logits(tiny, tmp_path, device_map):
    model, ids = tiny.build(), tiny.ids()
    model.save_pretrained(tmp_path / "model")
    mapped = _load(tiny.model_class, tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload")
    torch.testing.assert_close(mapped(ids).logits, model(ids).logits, **CLOSE)
