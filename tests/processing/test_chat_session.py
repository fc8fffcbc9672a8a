"""Turns of a chat and the cache between them, with scripted models and a small real one."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from kimi_hf import KimiK3Config, KimiK3VisionConfig
from kimi_hf.errors import ChatError
from kimi_hf.processing import KimiK3Processor, KimiK3VisionProcessor, TikTokenTokenizer, build_segments
from kimi_hf.processing.chat_session import ChatSession, ChatSettings, TemplateSession, open_chat

from .scripted import TEXT, ScriptedModel, scripted_terminal, user
from .vocabulary import write_folder


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
    for kind in ("image", "image_url"):
        with pytest.raises(ChatError, match="images"):
            session.turn([{"role": "user", "content": [{"type": kind, kind: "x.png"}]}], lambda deltas: None)


def test_images_are_shown_and_the_conversation_goes_on_in_text(tokenizer, tmp_path):
    image = pytest.importorskip("PIL.Image")
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
