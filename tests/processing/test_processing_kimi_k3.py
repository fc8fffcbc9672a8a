import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, AutoTokenizer, Trainer, TrainingArguments, pipeline
from transformers.models.auto.video_processing_auto import AutoVideoProcessor

from kimi_hf import KimiK3ForConditionalGeneration
from kimi_hf.errors import ChatError, MediaError, ShapeError
from kimi_hf.processing.chat_encoding import IMAGE_PLACEHOLDER
from kimi_hf.processing.image_processing_kimi_k3 import KimiK3VisionProcessor
from kimi_hf.processing.processing_kimi_k3 import MEDIA_BEGIN, KimiK3Processor
from kimi_hf.processing.tokenization_kimi import TikTokenTokenizer

WIDE, TINY = (60, 45), (20, 20)  # 6 feature rows and 1


def picture(size, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


@pytest.fixture
def processor(tokenizer):
    return KimiK3Processor(KimiK3VisionProcessor(), tokenizer)


def user(*content):
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in content
    ]
    return {"role": "user", "content": parts}


def prompt(size):
    return f"<|media_begin|>image {size[0]}x{size[1]}<|media_content|><|media_pad|><|media_end|>"


def test_messages_are_the_tokenizer_s_with_expanded_images(processor, tokenizer):
    chat = [user("Look:", picture(WIDE), "and", picture(TINY))]
    pad = processor.image_token_id
    released = tokenizer.apply_chat_template(chat, tokenize=True, image_prompts=[prompt(WIDE), prompt(TINY)])
    short = processor(messages=chat, expand_placeholders=False)
    assert short["input_ids"].tolist() == [released] and released.count(pad) == 2
    full = processor(messages=chat)
    wanted, counts = [], iter([6, 1])
    for token in released:
        wanted += [pad] * next(counts) if token == pad else [token]
    assert full["input_ids"].tolist() == [wanted]
    assert full["attention_mask"].tolist() == [[1] * len(wanted)]
    features = processor.image_processor([picture(WIDE), picture(TINY)])
    for out in (short, full):
        assert torch.equal(out["pixel_values"], features["pixel_values"])
        assert torch.equal(out["grid_thws"], features["grid_thws"])
    assert full["grid_thws"].prod(1).div(4).tolist() == [6, 1]
    assert set(full) == set(processor.model_input_names)


def test_the_prompt_states_the_original_size(processor):
    big = picture((200, 100))
    out = processor(messages=[user(big)], in_patch_limit=16)
    text = processor.decode(out["input_ids"][0])
    assert "image 200x100" in text
    assert text.count("<|media_pad|>") == 6 == out["grid_thws"].prod() // 4  # resized to 79 x 39, padded to 84 x 56


def test_text_with_images_equals_messages(processor):
    chat = [user("Look:", picture(WIDE), "and", picture(TINY))]
    text = processor.apply_chat_template(chat)
    assert text.count(IMAGE_PLACEHOLDER) == 2 and isinstance(text, str)
    from_text = processor(text=text, images=[picture(WIDE), picture(TINY)])
    from_medias = processor(text=text, medias=[{"type": "image", "image": picture(WIDE)}, picture(TINY)])
    from_messages = processor(messages=chat)
    for key, value in from_messages.items():
        assert torch.equal(from_text[key], value) and torch.equal(from_medias[key], value)


def test_rendered_prompts_and_expanded_ones_are_taken_as_they_are(processor):
    text = f"a {prompt(WIDE)} b"
    for asked in ({"split_special_tokens": False}, {"allow_special_tokens": True}):
        out = processor(text=text, images=picture(WIDE), **asked)
        assert out["input_ids"][0].tolist().count(processor.image_token_id) == 6
        again = processor(text=processor.decode(out["input_ids"][0]), images=picture(WIDE), **asked)
        assert torch.equal(again["input_ids"], out["input_ids"])
    assert torch.equal(processor(text=f"a {IMAGE_PLACEHOLDER} b", images=picture(WIDE))["input_ids"], out["input_ids"])


def test_batches_are_padded_on_the_tokenizer_s_side(processor):
    chats = [[user("Hi")], [user("Hello there", picture(WIDE))]]
    out = processor(messages=chats)
    alone = [processor(messages=chat)["input_ids"][0] for chat in chats]
    lengths = [len(ids) for ids in alone]
    assert out["input_ids"].shape == (2, max(lengths))
    assert torch.equal(out["input_ids"][0, -lengths[0] :], alone[0])
    assert out["attention_mask"].sum(1).tolist() == lengths
    assert (out["input_ids"][0, : -lengths[0]] == processor.tokenizer.pad_token_id).all()
    right = processor(messages=chats, padding_side="right", pad_to_multiple_of=16)
    assert torch.equal(right["input_ids"][0, : lengths[0]], alone[0]) and right["input_ids"].shape[1] % 16 == 0
    rows = processor(messages=chats, return_tensors=None)
    assert [len(row) for row in rows["input_ids"]] == [len(row) for row in rows["attention_mask"]] == lengths
    with pytest.raises(ShapeError, match="do not fit into one tensor"):
        processor(messages=chats, padding=False)
    assert processor(messages=chats, padding="max_length", max_length=400)["input_ids"].shape == (2, 400)


def test_images_of_a_batch_of_texts_flat_or_per_text(processor):
    texts = [f"one {IMAGE_PLACEHOLDER}", "none", f"two {IMAGE_PLACEHOLDER}{IMAGE_PLACEHOLDER}"]
    images = [picture(WIDE, 1), picture(TINY, 2), picture(WIDE, 3)]
    flat = processor(text=texts, images=images)
    nested = processor(text=texts, images=[images[:1], [], images[1:]])
    for key, value in flat.items():
        assert torch.equal(nested[key], value)
    assert (flat["input_ids"] == processor.image_token_id).sum(1).tolist() == [6, 0, 7]
    with pytest.raises(MediaError, match="text 0 holds 1 times .* comes with 2 images"):
        processor(text=texts, images=[images[:2], [], images[2:]])


def test_assistant_mask_follows_the_expansion(processor):
    chat = [user(picture(WIDE), "What?"), {"role": "assistant", "content": "A wall."}]
    out = processor(
        messages=[chat, [user("Hi"), {"role": "assistant", "content": "Yes."}]], return_assistant_tokens_mask=True
    )
    assert out["assistant_masks"].shape == out["input_ids"].shape
    said = processor.decode(out["input_ids"][0][out["assistant_masks"][0].bool()])
    assert said.endswith("<|open|>response<|sep|>A wall.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>")
    assert "media" not in said and "What" not in said
    assert not processor.decode(out["input_ids"][0]).endswith("<|open|>think<|sep|>")


def test_chat_options_reach_the_encoder(processor, tokenizer):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    chat = [user("Hi")]
    options = {"tools": tools, "thinking": False, "tool_choice": "required", "add_generation_prompt": False}
    wanted = tokenizer.apply_chat_template(chat, tokenize=True, **options)
    assert processor(messages=chat, **options)["input_ids"].tolist() == [wanted]
    assert processor.apply_chat_template(chat, tokenize=True, **options) == [wanted]
    with pytest.raises(ChatError, match="no option 'thinkin'"):
        processor(messages=chat, thinkin=True)


def test_apply_chat_template_as_pipelines_and_trainers_call_it(processor):
    chat = [{"role": "user", "content": [{"type": "image", "url": "data:,"}, {"type": "text", "text": "Hi"}]}]
    chat[0]["content"][0] = {"type": "image", "image": picture(WIDE)}
    out = processor.apply_chat_template(
        chat,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        continue_final_message=False,
        processor_kwargs={},
    ).to(dtype=torch.bfloat16)
    assert out["pixel_values"].dtype == torch.bfloat16 and out["input_ids"].dtype == torch.int64
    trainer = {"padding": True, "padding_side": "right", "pad_to_multiple_of": None, "truncation": False}
    batch = processor.apply_chat_template(
        [chat + [{"role": "assistant", "content": [{"type": "text", "text": "Yes"}]}]] * 2,
        chat_template=None,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=False,
        processor_kwargs={**trainer, "max_length": None, "add_special_tokens": False},
    )
    assert batch["input_ids"].shape[0] == 2 and "assistant_masks" not in batch
    assert processor.decode(batch["input_ids"][0]).endswith("<|end_of_msg|>")
    texts = processor(
        text=[f"{IMAGE_PLACEHOLDER} a", "b"], images=[[picture(WIDE)], []], return_tensors="pt", **trainer
    )
    assert texts["attention_mask"][1].tolist() == [1] + [0] * (texts["input_ids"].shape[1] - 1)
    decoded = processor.post_process_image_text_to_text(batch["input_ids"], skip_special_tokens=False)
    assert len(decoded) == 2 and "<|media_pad|>" in decoded[0]


def test_released_call_with_the_conversation_first(processor):
    chat = [user("Hi", picture(TINY))]
    assert torch.equal(processor(chat)["input_ids"], processor(messages=chat)["input_ids"])


def test_images_alone(processor):
    out = processor(images=[picture(WIDE), picture(TINY)])
    assert set(out) == {"pixel_values", "grid_thws"} and len(out["grid_thws"]) == 2


def test_users_cannot_forge_tokens_or_images(processor):
    bad = "<|media_pad|><|open|>" + IMAGE_PLACEHOLDER
    control = processor.tokenizer.added_tokens_encoder
    count = {name: processor(messages=[user("x")])["input_ids"][0].tolist().count(control[name]) for name in control}
    ids = processor(messages=[user(bad)])["input_ids"][0].tolist()
    assert all(ids.count(control[name]) == n for name, n in count.items())
    assert bad in processor.decode(ids)
    for asked in ({}, {"allow_special_tokens": False}, {"split_special_tokens": True}):
        text = processor(text=f"{IMAGE_PLACEHOLDER}<|media_pad|>", images=picture(TINY), **asked)
        assert text["input_ids"][0].tolist().count(control["<|media_pad|>"]) == 1
    with pytest.raises(MediaError, match="holds 2"):
        processor(text=f"{IMAGE_PLACEHOLDER}<|media_pad|>", images=picture(TINY), split_special_tokens=False)


def test_spelled_placeholders_take_no_images(processor):
    """Beside a real image they are text: they neither move it nor stop the call, rendered at once or in two steps."""
    chat = [user(f"a {IMAGE_PLACEHOLDER} ", picture(WIDE), IMAGE_PLACEHOLDER)]
    out = processor(messages=chat)
    ids = out["input_ids"][0].tolist()
    assert ids.count(processor.image_token_id) == 6
    said = processor.decode(ids).replace("<|media_pad|>" * 6, "@")
    assert (
        f"a {IMAGE_PLACEHOLDER} <|media_begin|>image 60x45<|media_content|>@<|media_end|>{IMAGE_PLACEHOLDER}<" in said
    )
    text = processor.apply_chat_template(chat)
    again = processor(text=[text, "x"], images=[picture(WIDE)])
    assert again["input_ids"][0].tolist() == ids and torch.equal(again["pixel_values"], out["pixel_values"])
    with pytest.raises(MediaError, match="placeholder 2 of 3 has no image"):
        processor(text=str(text), images=[picture(WIDE)])  # as a bare string it no longer says which is which
    with pytest.raises(MediaError, match="placeholder 1 of 1 has no image"):
        processor(text=text)


@pytest.mark.parametrize(
    "call, words",
    [
        ({"text": f"{IMAGE_PLACEHOLDER}", "images": [WIDE, TINY]}, "image 2 of 2 has no placeholder"),
        ({"text": f"{IMAGE_PLACEHOLDER}{IMAGE_PLACEHOLDER}", "images": [WIDE]}, "placeholder 2 of 2 has no image"),
        ({"text": f"{IMAGE_PLACEHOLDER}"}, "placeholder 1 of 1 has no image"),
        ({"text": "no placeholder", "images": [WIDE]}, "image 1 of 1 has none"),
        ({"text": "a", "messages": [user("b")]}, "not both"),
        ({}, "nothing to process"),
        ({"text": "a", "videos": [1]}, "images only"),
        ({"text": [1, "a"]}, r"text: found \['int', 'str'\]"),
        ({"text": b"a"}, "text: found bytes"),
        ({"text": []}, "text: found"),
        ({"text": "a", "thinking": True}, "thinking: not an option"),
        ({"images": [WIDE], "do_resize": True}, "do_resize: not an option"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\].*\[0\]: .* carries no image",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_said(processor, call, words):
    if "images" in call:
        call = {**call, "images": [picture(size) for size in call["images"]]}
    with pytest.raises(MediaError, match=words):
        processor(**call)


def test_images_outside_user_messages(processor):
    with pytest.raises(MediaError, match=r"messages\[1\]\['content'\]\[0\].*role 'assistant'"):
        processor(messages=[user("a"), {**user(picture(TINY)), "role": "assistant"}])


def test_bad_images_are_counted_over_the_conversation(processor):
    with pytest.raises(MediaError, match="image 2 of 2: .*is not a readable image"):
        processor(messages=[user(picture(TINY)), user(b"nothing")])


def test_truncation_never_cuts_an_image(processor):
    text = f"some words before {IMAGE_PLACEHOLDER}{IMAGE_PLACEHOLDER} and some words after"
    images = [picture(TINY), picture(WIDE)]
    full = processor(text=text, images=images)["input_ids"][0].tolist()
    last = len(full) - 1 - full[::-1].index(processor.image_token_id)
    cut = processor(text=text, images=images, truncation=True, max_length=last + 2)
    assert cut["input_ids"][0].tolist() == full[: last + 2]
    first, second = (
        at for at, token in enumerate(full) if token == processor.tokenizer.convert_tokens_to_ids(MEDIA_BEGIN)
    )
    for length in range(first + 1, last + 2):  # at every place inside either of the two prompts, but for between them
        if length == second:
            continue
        which = 1 if length < second else 2
        with pytest.raises(MediaError, match=f"max_length {length} cuts away tokens of image {which} of 2"):
            processor(text=text, images=images, truncation=True, max_length=length)
    with pytest.raises(MediaError, match="cuts away tokens of image 1 of 2"):
        processor(text=text, images=images, truncation=True, max_length=3, expand_placeholders=False)
    with pytest.raises(ChatError, match="max_length: found -1"):
        processor(text=text, images=images, truncation=True, max_length=-1)
    with pytest.raises(MediaError, match="cuts away tokens of image 2 of 2"):  # whole, but all of it
        processor(text=text, images=images, truncation=True, max_length=second)
    assert processor(text="many words here", truncation=True, max_length=2)["input_ids"].shape == (1, 2)


def test_truncation_on_the_left_keeps_images_whole(tokenizer_folder):
    processor = KimiK3Processor(
        KimiK3VisionProcessor(), TikTokenTokenizer.from_pretrained(tokenizer_folder, truncation_side="left")
    )
    chats = [[user("words " * 20), user("before", picture(WIDE))], [user("Hi")]]
    rows = processor(messages=chats, return_tensors=None)["input_ids"]
    begin = rows[0].index(processor.tokenizer.convert_tokens_to_ids(MEDIA_BEGIN))
    fits = len(rows[0]) - begin
    cut = processor(messages=chats, truncation=True, max_length=fits, return_tensors=None)["input_ids"]
    assert cut == [rows[0][begin:], rows[1][-fits:]]
    for lost in (1, 3, 5, fits - 1):
        with pytest.raises(MediaError, match=r"cuts away tokens of image 1 of 1 \(row 0"):
            processor(messages=chats, truncation=True, max_length=fits - lost)


def test_sizes_for_servers(processor):
    data = processor._get_num_multimodal_tokens(image_sizes=[(45, 60), (20, 20)])
    assert data.num_image_tokens == [6, 1] and data.num_image_patches == [24, 4]
    assert processor.image_token == "<|media_pad|>"


@pytest.fixture
def repository(multimodal_repository, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(multimodal_repository, tmp_path / "repository"))


@pytest.mark.parametrize("trust", [None, False, True])
def test_auto_processor_finds_everything_without_remote_code(repository, tokenizer, trust):
    processor = AutoProcessor.from_pretrained(repository, trust_remote_code=trust)
    assert type(processor) is KimiK3Processor
    assert type(processor.tokenizer) is TikTokenTokenizer
    assert type(processor.image_processor) is KimiK3VisionProcessor


@pytest.mark.parametrize("trust", [None, True])
def test_pipelines_by_path_ask_for_no_remote_code(repository, monkeypatch, trust):
    def ask(*args):
        raise AssertionError(f"asked {args}")

    monkeypatch.setattr("builtins.input", ask)
    (repository / "kimi_k3_vision_processing.py").write_text("raise RuntimeError('remote code was run')")
    with pytest.raises(MediaError, match="no video processor"):  # where pipelines look as well
        AutoVideoProcessor.from_pretrained(repository, trust_remote_code=trust)
    talk = pipeline("image-text-to-text", model=str(repository), trust_remote_code=trust)
    assert type(talk.processor) is KimiK3Processor and type(talk.model) is KimiK3ForConditionalGeneration
    greedy = {"generate_kwargs": {"do_sample": False, "max_new_tokens": 2}}
    assert talk(text=[user("What?", picture(TINY))], **greedy)[0]["generated_text"][-1]["role"] == "assistant"


def test_save_and_load(repository, tokenizer, tmp_path):
    processor = AutoProcessor.from_pretrained(repository)
    processor.expand_placeholders = False
    processor.image_processor.media_proc_cfg["in_patch_limit"] = 100
    files = processor.save_pretrained(tmp_path / "saved")
    assert all((tmp_path / "saved" / name).exists() for name in ("tiktoken.model", "tokenizer_config.json"))
    assert not list((tmp_path / "saved").glob("*.jinja")) and len(files) >= 2
    settings = json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text())
    assert settings["media_proc_cfg"]["in_patch_limit"] == 100 and "AutoProcessor" in settings["auto_map"]
    kept = json.loads((tmp_path / "saved" / "processor_config.json").read_text())
    assert kept == {"expand_placeholders": False, "processor_class": "KimiK3Processor"}
    again = AutoProcessor.from_pretrained(tmp_path / "saved")
    assert type(again) is KimiK3Processor and again.expand_placeholders is False
    assert again.image_processor.to_dict() == processor.image_processor.to_dict()
    assert AutoImageProcessor.from_pretrained(tmp_path / "saved").media_proc_cfg["in_patch_limit"] == 100
    chat = [user("Hi", picture((90, 90)))]
    for key, value in processor(messages=chat).items():
        assert torch.equal(again(messages=chat)[key], value)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode("Hi") == tokenizer.encode("Hi")


def test_transformers_trainer_teaches_what_is_said_about_images(repository, tmp_path):
    processor = AutoProcessor.from_pretrained(repository)
    model = KimiK3ForConditionalGeneration.from_pretrained(repository)
    chats = [
        [user(picture(size, seed), "What?"), {"role": "assistant", "content": said}]
        for seed, (size, said) in enumerate([(WIDE, "A wall."), (TINY, "fox")] * 2)
    ]

    def collate(rows):
        batch = processor(messages=rows, thinking_effort=None, return_assistant_tokens_mask=True, padding_side="right")
        batch["labels"] = batch["input_ids"].masked_fill(batch.pop("assistant_masks") == 0, -100)
        return batch

    options = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 3e-3, "logging_steps": 1}
    trainer = Trainer(
        model,
        TrainingArguments(
            tmp_path, **options, report_to=[], use_cpu=True, remove_unused_columns=False, disable_tqdm=True
        ),
        data_collator=collate,
        train_dataset=chats,
    )
    before = model.vision_tower.patch_embed.proj.weight.clone()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    assert not torch.equal(before, model.vision_tower.patch_embed.proj.weight)


def test_the_model_takes_both_forms_and_the_pipeline_works(repository):
    processor = AutoProcessor.from_pretrained(repository)
    model = KimiK3ForConditionalGeneration.from_pretrained(repository).eval()
    chats = [[user("What?", picture(WIDE), picture(TINY))], [user("And?")]]
    expanded, single = (processor(messages=chats, expand_placeholders=flag) for flag in (True, False))
    with torch.no_grad():
        full, short = model(**expanded).logits, model(**single).logits
        assert (full[:, -1] - short[:, -1]).abs().max() < 1e-4
        tokens = [
            model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, inputs["input_ids"].shape[1] :]
            for inputs in (expanded, single)
        ]
    assert torch.equal(*tokens)
    talk = pipeline("image-text-to-text", model=model, processor=processor)
    greedy = {"generate_kwargs": {"do_sample": False, "max_new_tokens": 4}, "return_full_text": False}
    told = talk(text=[chats[0], chats[0]], batch_size=2, **greedy)  # images inside of the chats
    picture(WIDE).save(repository / "a.png")
    for image in (picture(WIDE), str(repository / "a.png")):  # or beside texts
        (said,) = talk(images=image, text=f"{IMAGE_PLACEHOLDER} What?", **greedy)
        inputs = processor(text=f"{IMAGE_PLACEHOLDER} What?", images=picture(WIDE))
        wanted = model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert said["generated_text"] == processor.decode(wanted, skip_special_tokens=True)
    assert [answer["generated_text"] for (answer,) in told] == [talk(text=chats[0], **greedy)[0]["generated_text"]] * 2
    (answer,) = talk(text=chats[0], max_new_tokens=4, generate_kwargs={"do_sample": False}, return_full_text=False)
    assert isinstance(answer["generated_text"], str)
    chat = [{"role": "user", "content": "hi"}]
    writer = pipeline("text-generation", model=model, tokenizer=processor.tokenizer)
    ids = [
        writer(given, max_new_tokens=3, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
        for given in (chat, processor.tokenizer.apply_chat_template(chat))
    ]
    assert ids[0] == ids[1]  # a chat, or the prompt rendered from it
    (answer,) = talk(text=chats[0], max_new_tokens=4, generate_kwargs={"do_sample": False})
    assert answer["generated_text"][-1]["role"] == "assistant"
