"""`kimi-hf chat`: turns, the cache between them, and the terminal, with scripted models and a small real one."""

import argparse
import io
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.modeling_outputs import ModelOutput

from kimi_hf import KimiK3Config, KimiK3VisionConfig, KimiLinearConfig, chat
from kimi_hf.errors import ChatError
from kimi_hf.processing import TikTokenTokenizer, build_segments
from kimi_hf.processing.chat_encoding import render
from kimi_hf.processing.chat_session import ChatSession, ChatSettings, TemplateSession, open_chat

from .vocabulary import write_folder

TEXT = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    mla_use_nope=True,
    mla_use_output_gate=True,
    hidden_act="situ",
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    num_experts=4,
    num_experts_per_token=2,
    moe_intermediate_size=16,
    routed_expert_hidden_size=16,
    latent_moe_use_norm=True,
    first_k_dense_replace=1,
    attn_res_block_size=3,
    linear_attn_config={
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 2,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
)


@pytest.fixture(scope="module")
def text_model(tokenizer):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(KimiLinearConfig(vocab_size=len(tokenizer), **TEXT)).eval()


class ScriptedModel:
    """Writes given messages, one per call of `generate`, and records what it was given."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.calls = tokenizer, list(script), []

    def get_input_embeddings(self):
        return torch.nn.Embedding(len(self.tokenizer), 1)

    def generate(self, input_ids, past_key_values=None, streamer=None, **kwargs):
        self.calls.append({"ids": input_ids[0].tolist(), "cache": past_key_values, **kwargs})
        written = self.script.pop(0)
        if written is KeyboardInterrupt:
            raise KeyboardInterrupt
        if isinstance(written, dict):
            segments, mine = render([{"role": "assistant", **written}], add_generation_prompt=False)
            written = self.tokenizer.encode_segments([s for s, m in zip(segments, mine, strict=True) if m])
        streamer.put(input_ids)
        for token in written:
            streamer.put(torch.tensor([token]))
        streamer.end()
        sequences = torch.cat([input_ids, torch.tensor([written])], dim=1)
        return ModelOutput(sequences=sequences, past_key_values=f"cache of call {len(self.calls)}")


def user(text):
    return {"role": "user", "content": text}


def test_turns_continue_the_ids_the_model_wrote(tokenizer):
    # The answer is cut into single bytes, as no encoder would cut it: rendered anew it would be other tokens.
    bytewise = list(b"The fox") + tokenizer.encode_special(
        "<|close|>think<|sep|><|open|>response<|sep|>ok<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    model = ScriptedModel(tokenizer, [bytewise, {"content": "two"}])
    session = ChatSession(model, tokenizer, settings=ChatSettings(system="be brief", thinking_effort="low"))
    shown = []
    first = session.turn([user("one")], shown.extend)
    assert first == {"role": "assistant", "content": "ok", "reasoning_content": "The fox"}
    assert "".join(delta.get("reasoning_content", "") for delta in shown) == "The fox"
    chat_start = [{"role": "system", "content": "be brief"}, user("one")]
    prompt = tokenizer.encode_segments(build_segments(chat_start, thinking_effort="low"))
    assert model.calls[0]["ids"] == prompt and model.calls[0]["cache"] is None
    session.turn([user("more <|open|>")], shown.extend)
    added = tokenizer.encode_segments(build_segments([user("more <|open|>")]))
    assert model.calls[1]["ids"] == prompt + bytewise + added and model.calls[1]["cache"] == "cache of call 1"
    assert len(session.messages) == 4


def test_what_cannot_be_continued_is_read_anew(tokenizer):
    cut = tokenizer.encode_special("half a thou")
    script = [cut, {"content": "a"}, {"content": "b"}, KeyboardInterrupt, {"content": "c"}]
    model = ScriptedModel(tokenizer, script)
    session = ChatSession(model, tokenizer)
    assert session.turn([user("1")], lambda deltas: None)["reasoning_content"] == "half a thou"
    session.turn([user("2")], lambda deltas: None)
    session.settings.thinking_effort = "low"
    session.turn([user("3")], lambda deltas: None)
    assert session.turn([user("4")], lambda deltas: None) == {"role": "assistant", "content": ""}
    session.turn([user("5")], lambda deltas: None)
    assert [call["cache"] for call in model.calls] == [None, None, None, "cache of call 3", None]
    whole = build_segments(session.messages[:-1], thinking_effort="low")
    assert model.calls[4]["ids"] == tokenizer.encode_segments(whole)
    with pytest.raises(ChatError, match="preprocessor_config"):
        session.turn([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], lambda deltas: None)
    assert session.messages[-1]["role"] == "assistant"  # a turn that could not begin leaves nothing behind


def test_model_and_tokenizer_must_belong_together(tokenizer, text_model):
    model = ScriptedModel(tokenizer, [])
    model.get_input_embeddings = lambda: torch.nn.Embedding(700, 1)
    with pytest.raises(ChatError, match="700 entries, the tokenizer 712"):
        ChatSession(model, tokenizer)
    model.get_input_embeddings = lambda: torch.nn.Embedding(714, 1)
    assert ChatSession(model, tokenizer).unknown == [712, 713]


def test_cache_across_turns_gives_the_tokens_of_a_fresh_start(tokenizer, text_model, monkeypatch):
    generation = {"max_new_tokens": 6, "do_sample": False, "forced_eos_token_id": 458}
    session = ChatSession(text_model, tokenizer, settings=ChatSettings(thinking_effort=None), generation=generation)
    lengths = []
    forward = type(text_model).forward
    monkeypatch.setattr(
        type(text_model),
        "forward",
        lambda self, *args, **kwargs: lengths.append(kwargs["input_ids"].shape[1]) or forward(self, *args, **kwargs),
    )
    session.turn([user("hi")], lambda deltas: None)
    first = list(session._ids)
    session.turn([user("and now?")], lambda deltas: None)
    added = len(tokenizer.encode_segments(build_segments([user("and now?")])))
    assert lengths == [len(first) - 6, 1, 1, 1, 1, 1, added + 1, 1, 1, 1, 1, 1]
    prompt = torch.tensor([session._ids[:-6]])
    fresh = text_model.generate(prompt, eos_token_id=[458, 457], pad_token_id=711, **generation)
    assert fresh[0].tolist() == session._ids


def test_other_chat_formats_go_through_their_template(tmp_path, monkeypatch):
    named = {"456": {"content": "[BOS]"}, "457": {"content": "[EOS]"}, "458": {"content": "<|im_end|>"}}
    config = dict(added_tokens_decoder=named, additional_special_tokens=["<|im_end|>"])
    folder = write_folder(tmp_path, **config)
    with pytest.raises(ChatError, match="continues text"):
        open_chat(None, TikTokenTokenizer.from_pretrained(folder))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = TikTokenTokenizer.from_pretrained(folder)
    script = [
        tokenizer.encode_special("漢字 yes<|im_end|>"),
        list(b"fox") + [458],
        tokenizer.encode_special("end<|im_end|>"),
    ]
    model = ScriptedModel(tokenizer, script)
    model.generation_config = GenerationConfig(eos_token_id=[458])
    session = open_chat(model, tokenizer)
    assert type(session) is TemplateSession
    text = scripted_terminal(session, ["hi", "more", "last"], monkeypatch)
    assert "漢字 yes\n" in text and "fox\n" in text
    assert tokenizer.decode(model.calls[1]["ids"]).startswith("user:hi<|im_end|>assistant:漢字 yes<|im_end|>user:more")
    # The second answer was not cut as an encoder would: what the template renders no longer begins with its ids.
    assert [call["cache"] for call in model.calls] == [None, "cache of call 1", None]
    with pytest.raises(ChatError, match="images"):
        session.turn([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], lambda deltas: None)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return parser.parse_args([str(argument) for argument in arguments])


def scripted_terminal(session, lines, monkeypatch, color=False):
    remaining = iter(lines)

    def read(prompt=""):
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    chat.Terminal(session, out, color).loop()
    return out.getvalue()


def test_terminal_shows_thinking_calls_and_answers(tokenizer, monkeypatch):
    call = {"function": {"name": "weather", "arguments": {"city": "Zürich"}}}
    script = [
        {"content": "", "reasoning_content": "need it", "tool_calls": [call]},
        {"content": "12 degrees", "reasoning_content": "good"},
        {"content": "bye"},
    ]
    model = ScriptedModel(tokenizer, script)
    session = ChatSession(model, tokenizer)
    lines = [
        "",
        "/help",
        "/effort low",
        "weather?\\",
        "in Z",
        "12C",
        "/reset",
        "/system S",
        "/think on",
        "bye",
        "/quit",
        "no",
    ]
    text = scripted_terminal(session, lines, monkeypatch)
    assert '[thinking] need it [/thinking]\n-> weather({"city": "Zürich"})' in text
    assert "[thinking] good [/thinking]\n12 degrees\n" in text and "/image PATH" in text
    second = tokenizer.decode(model.calls[1]["ids"])
    assert "weather?\nin Z" in second and 'role="tool" tool="weather" index="1"<|sep|>12C<' in second
    assert "thinking_effort=low" in second and model.calls[1]["cache"] == "cache of call 1"
    third = tokenizer.decode(model.calls[2]["ids"])
    assert 'role="system"<|sep|>S<' in third and "weather" not in third
    model.script = [{"content": "x", "reasoning_content": "y"}]
    session.reset()
    assert "\033[2my\033[0m\nx\n" in scripted_terminal(session, ["hi", "/nonsense"], monkeypatch, color=True)


def test_terminal_survives_errors(tokenizer, monkeypatch, tmp_path):
    session = ChatSession(ScriptedModel(tokenizer, [{"content": "fine"}]), tokenizer)
    (tmp_path / "x.png").write_bytes(b"")
    lines = [f"/image {tmp_path / 'none.png'}", f"/image {tmp_path / 'x.png'}", "look", "without"]
    text = scripted_terminal(session, lines, monkeypatch)
    assert "no such file" in text and "error: images: the checkpoint has no preprocessor_config.json" in text
    assert "fine" in text


@pytest.fixture
def checkpoint(tokenizer_folder, text_model, tmp_path):
    for path in tokenizer_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text_model.save_pretrained(tmp_path)
    return tmp_path


def test_command_talks_with_a_checkpoint(checkpoint, monkeypatch, capsys):
    lines = iter(["hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    tools = checkpoint / "tools.json"
    tools.write_text(json.dumps([{"type": "function", "function": {"name": "f"}}]))
    options = (
        "--max-new-tokens",
        4,
        "--temperature",
        0.7,
        "--top-p",
        0.9,
        "--seed",
        1,
        "--tools",
        tools,
        "--device",
        "cpu",
    )
    assert chat.run(parse(checkpoint, *options)) == 0
    assert "[thinking]" in capsys.readouterr().out
    tools.write_text("{}")
    assert chat.run(parse(checkpoint, "--tools", tools)) == 1
    assert "expected a list of tools" in capsys.readouterr().err
    assert chat.run(parse(checkpoint / "nowhere")) == 1


def test_generation_options():
    assert chat.generation_options(parse("x")) == {"max_new_tokens": 4096}
    assert chat.generation_options(parse("x", "--temperature", 0)) == {"max_new_tokens": 4096, "do_sample": False}
    assert chat.generation_options(parse("x", "--top-p", 0.5, "--max-new-tokens", 3)) == {
        "max_new_tokens": 3,
        "do_sample": True,
        "top_p": 0.5,
    }


def test_images_are_shown_and_the_conversation_goes_on_in_text(tokenizer, tmp_path):
    image = pytest.importorskip("PIL.Image")
    from kimi_hf.processing import KimiK3Processor, KimiK3VisionProcessor

    vision = KimiK3VisionConfig(
        vt_hidden_size=32, vt_num_hidden_layers=1, vt_num_attention_heads=2, qkv_hidden_size=32, vt_intermediate_size=32,
        mm_hidden_size=32, text_hidden_size=32, init_pos_emb_height=8, init_pos_emb_width=8,
    )  # fmt: skip
    config = KimiK3Config(
        text_config=dict(vocab_size=len(tokenizer), pad_token_id=711, **TEXT),
        vision_config=vision.to_dict(),
        media_placeholder_token_id=477,
        pad_token_id=711,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    processor = KimiK3Processor(KimiK3VisionProcessor(), tokenizer)
    image.new("RGB", (56, 30), "red").save(tmp_path / "red.png")
    generation = {"max_new_tokens": 3, "do_sample": False, "forced_eos_token_id": 458}
    session = ChatSession(model, tokenizer, processor, ChatSettings(thinking_effort=None), generation)
    look = {
        "role": "user",
        "content": [{"type": "image", "image": str(tmp_path / "red.png")}, {"type": "text", "text": "?"}],
    }
    session.turn([look], lambda deltas: None)
    assert session._ids.count(477) == 4 and session._cache is not None
    session.turn([user("and?")], lambda deltas: None)
    continued = list(session._ids)
    prompt = processor(messages=session.messages[:1], thinking_effort=None)
    inputs = {
        "input_ids": torch.tensor([continued[:-3]]),
        "attention_mask": torch.ones(1, len(continued) - 3, dtype=torch.long),
        "pixel_values": prompt["pixel_values"],
        "grid_thws": prompt["grid_thws"],
    }
    fresh = model.generate(**inputs, eos_token_id=[458, 457], pad_token_id=711, **generation)
    assert fresh[0].tolist() == continued
