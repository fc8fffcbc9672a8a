"""GPT-2 between Hugging Face's layout and nanoGPT's, against the goldens of both."""

import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import kimi_hf  # noqa: F401
from kimi_hf.checkpoint.geometry import load_config
from kimi_hf.conversion import convert as convert_module
from kimi_hf.conversion.gpt2 import convert, gpt2_to_nanogpt, nanogpt_to_gpt2, read_gpt2, read_nanogpt
from kimi_hf.conversion.verify import compare
from kimi_hf.errors import CheckpointError, ConfigError

from .helpers import command, edit_config, write_raw


@pytest.mark.parametrize("case", ["nanogpt_tiny", "nanogpt_bias_tiny"])
def test_nanogpt_logits(goldens, tmp_path, case):
    """transformers' own GPT-2 on the converted folder gives nanoGPT's logits (1e-4, the fixtures' bound)."""
    out = convert(goldens(f"{case}/ckpt.pt"), tmp_path / "hf", "gpt2")
    model = GPT2LMHeadModel.from_pretrained(out, attn_implementation="eager").eval()
    golden = load_file(goldens(f"{case}/golden.safetensors"))
    with torch.no_grad():
        logits = model(golden["input_ids"].long()).logits
    assert (logits - golden["logits"]).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["nanogpt_tiny", "nanogpt_bias_tiny"])
def test_nanogpt_round_trip(goldens, tmp_path, case):
    source = goldens(f"{case}/ckpt.pt")
    hf = convert(source, tmp_path / "hf", "gpt2")
    back = convert(hf, tmp_path / "back", "nanogpt")
    before, after = torch.load(source, weights_only=True), torch.load(back / "ckpt.pt", weights_only=True)
    plain = {name.removeprefix("_orig_mod."): tensor for name, tensor in before["model"].items()}
    assert plain.keys() == after["model"].keys()
    assert all(torch.equal(plain[name], after["model"][name]) for name in plain)
    assert before["model_args"] == after["model_args"]
    assert not compare(source, back).count and not compare(hf, back).count


def test_padded_vocabulary_can_be_cut(goldens, tmp_path):
    source = goldens("nanogpt_bias_tiny/ckpt.pt")
    state, args = read_nanogpt(source)
    real = int(load_file(goldens("nanogpt_bias_tiny/golden.safetensors"))["real_vocab_size"])
    cut, config = read_gpt2(convert(source, tmp_path / "out", "gpt2", vocab_size=real))
    assert config["vocab_size"] == real < args["vocab_size"]
    assert torch.equal(cut["transformer.wte.weight"], state["transformer.wte.weight"][:real])
    with pytest.raises(ConfigError, match="there are 64 embedding rows"):
        convert(source, tmp_path / "more", "gpt2", vocab_size=65)


@pytest.mark.parametrize("case", ["nanogpt_tiny", "nanogpt_bias_tiny", "gpt2_tiny"])
def test_ladder_logits_and_the_way_back(goldens, tmp_path, case):
    """The ladder's GPT-2 gives the golden logits; going back restores every tensor, and HF's file to the byte."""
    source = goldens(f"{case}/{'config.json' if case == 'gpt2_tiny' else 'ckpt.pt'}").parent
    ladder = convert(source, tmp_path / "ladder", "ladder")
    model, loading = AutoModelForCausalLM.from_pretrained(ladder, output_loading_info=True)
    assert not any(loading.values())
    golden = load_file(goldens(f"{case}/golden.safetensors"))
    run = "plain." if case == "gpt2_tiny" else ""
    with torch.no_grad():
        logits = model.eval()(golden[f"{run}input_ids"].long()).logits
    assert (logits - golden[f"{run}logits"]).abs().max() < 1e-4
    assert load_config(ladder)["bias"] is (case != "nanogpt_tiny")
    back = convert(ladder, tmp_path / "back", "gpt2" if case == "gpt2_tiny" else "nanogpt")
    assert not compare(source, back).count and not compare(ladder, source).count
    if case == "gpt2_tiny":
        assert (back / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_only_the_gpt2_rung_goes_back(goldens, tmp_path):
    ladder = convert(goldens("gpt2_tiny/config.json").parent, tmp_path / "ladder", "ladder")
    edit_config(ladder, lambda config: config.update(mixer="delta_net"))
    with pytest.raises(ConfigError, match="mixer is 'delta_net'"):
        convert(ladder, tmp_path / "out", "gpt2")
    edit_config(ladder, lambda config: config.update(mixer=["softmax_attention"] * 2))
    convert(ladder, tmp_path / "out", "gpt2")
    edit_config(ladder, lambda config: config.update(num_hidden_layers=4))
    with pytest.raises(CheckpointError, match="lacks model.layers.3.input_layernorm.bias"):
        convert(ladder, tmp_path / "more", "gpt2")


def test_hugging_face_round_trip(goldens, caplog):
    """GPT-2's tanh GELU is not nanoGPT's: said, but the weights go over unchanged."""
    state, config = read_gpt2(goldens("gpt2_tiny/config.json").parent)
    nano, args = gpt2_to_nanogpt(state, config)
    assert "gelu_new" in caplog.text and args["bias"] is True and "lm_head.weight" in nano
    nano.pop("lm_head.weight")
    back, again = nanogpt_to_gpt2(nano, args)
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    assert (again["n_layer"], again["n_head"], again["n_positions"]) == (3, 4, 96)


def test_folder_without_the_transformer_prefix(tmp_path):
    """OpenAI's own upload has names without `transformer.` and causal masks as buffers."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
    model.save_pretrained(tmp_path / "hf")
    expected, _ = read_gpt2(tmp_path / "hf")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in expected.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    write_raw(tmp_path / "hf" / "model.safetensors", bare)
    found, _ = read_gpt2(tmp_path / "hf")
    assert found.keys() == expected.keys()


def test_trained_bias_is_kept(goldens):
    """A nanoGPT without biases whose converted copy was trained has biases on the way back."""
    state, config = nanogpt_to_gpt2(*read_nanogpt(goldens("nanogpt_tiny/ckpt.pt")))
    state["transformer.ln_f.bias"] += 1
    nano, args = gpt2_to_nanogpt(state, config)
    assert args["bias"] is True and bool(nano["transformer.ln_f.bias"].all())


@pytest.mark.parametrize(
    ("field", "value"), [("n_inner", 100), ("layer_norm_epsilon", 1e-6), ("scale_attn_by_inverse_layer_idx", True)]
)
def test_what_nanogpt_cannot_express(goldens, field, value):
    state, config = read_gpt2(goldens("gpt2_tiny/config.json").parent)
    with pytest.raises(ConfigError, match=field):
        gpt2_to_nanogpt(state, {**config, field: value})


def test_damaged_checkpoints(goldens, tmp_path):
    content = torch.load(goldens("nanogpt_tiny/ckpt.pt"), weights_only=True)
    path = tmp_path / "ckpt.pt"

    def refuse(message, change):
        changed = {key: dict(value) if isinstance(value, dict) else value for key, value in content.items()}
        change(changed)
        torch.save(changed, path)
        with pytest.raises(CheckpointError, match=message):
            read_nanogpt(path)

    refuse("lacks transformer.h.1.ln_1.weight", lambda c: c["model"].pop("_orig_mod.transformer.h.1.ln_1.weight"))
    refuse("holds transformer.extra", lambda c: c["model"].update({"transformer.extra": torch.ones(1)}))
    refuse("lm_head.weight differs", lambda c: c["model"].update({"_orig_mod.lm_head.weight": torch.ones(128, 48)}))
    refuse("model_args lacks n_layer", lambda c: c["model_args"].pop("n_layer"))
    refuse("not a nanoGPT checkpoint", lambda c: c.pop("model"))
    path.write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="not a nanoGPT checkpoint"):
        read_nanogpt(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_nanogpt(tmp_path / "absent.pt")


def test_another_model_type(goldens):
    with pytest.raises(CheckpointError, match="model_type is 'kimi_linear'"):
        read_gpt2(goldens("kimi_linear_tiny/config.json").parent)


def test_command(goldens, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copyfile(goldens("nanogpt_tiny/ckpt.pt"), folder / "ckpt.pt")
    assert command(convert_module, folder, tmp_path / "hf", "--to", "gpt2") == 0
    assert command(convert_module, tmp_path / "hf", tmp_path / "back", "--to", "nanogpt") == 0
    with pytest.raises(CheckpointError, match="exists"):
        convert(tmp_path / "hf", tmp_path / "back", "nanogpt")
