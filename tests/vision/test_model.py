"""`KimiK3ForConditionalGeneration`: goldens of the whole model, every way to call it with images, and what is refused."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from kimi_hf import KimiCache, KimiK3ForConditionalGeneration
from kimi_hf.errors import MediaError, ShapeError
from kimi_hf.modeling.vision import expand_placeholders

from ..conftest import fixture_path

AT, PAD = 160, 0
CASE = "k3_multimodal_tiny"


def load(case=CASE, **kwargs):
    model = AutoModelForImageTextToText.from_pretrained(
        fixture_path(f"{case}/config.json").parent, **{"dtype": torch.float32, **kwargs}
    ).eval()
    model.generation_config = type(model.generation_config)(pad_token_id=PAD)
    return model


@pytest.fixture(scope="module")
def model():
    return load()


@pytest.fixture(scope="module")
def golden():
    return load_file(fixture_path(f"{CASE}/golden.safetensors"))


@pytest.fixture(scope="module")
def batch():
    """Two left-padded rows, one image in the first, two items in the second, the last a clip of two frames."""
    detail = load_file(fixture_path(f"{CASE}/golden_detail.safetensors"))
    return {name.removeprefix("batch."): t for name, t in detail.items() if name.startswith("batch.")}


def inputs(batch, form=""):
    return {
        "input_ids": batch[f"input_ids{form}"],
        "attention_mask": batch[f"attention_mask{form}"],
        "pixel_values": batch["pixel_values"],
        "grid_thws": batch["grid_thws"],
    }


def row(batch, index):
    """One row of the batch by itself, without its padding."""
    items = slice(0, 1) if index == 0 else slice(1, 3)
    sizes = batch["grid_thws"].prod(1).tolist()
    keep = batch["attention_mask"][index].bool()
    return {
        "input_ids": batch["input_ids"][index, keep][None],
        "pixel_values": torch.cat(batch["pixel_values"].split(sizes)[items]),
        "grid_thws": batch["grid_thws"][items],
    }


def greedy(model, **kwargs):
    return model.generate(do_sample=False, **{"max_new_tokens": 5, **kwargs})


def near(found, stored, real=None, mean=1e-4, largest=5e-3):
    off = (found - stored).abs()
    off = off if real is None else off[real.bool()]
    assert off.mean() <= mean and off.max() <= largest, (off.mean(), off.max())


# ---- goldens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_of_both_forms(golden, attention):
    model = load(attn_implementation=attention)
    assert type(model) is KimiK3ForConditionalGeneration
    assert type(AutoModelForCausalLM.from_pretrained(fixture_path(CASE), dtype=torch.float32)) is type(model)
    images = {name: golden[name] for name in ("pixel_values", "grid_thws")}
    with torch.no_grad():
        for form in ("", "_expanded"):
            near(model(input_ids=golden[f"input_ids{form}"], **images).logits, golden["logits"])
        features = model.get_image_features(**images)
    for index, rows in enumerate(features.pooler_output):
        assert (rows - golden[f"projected.{index}"]).abs().max() < 1e-5
    assert features.last_hidden_state.shape == (len(images["pixel_values"]), 48)


@pytest.mark.parametrize("form", ["", "_expanded"])
def test_padded_rows_with_images_and_the_greedy_steps_after_them(model, batch, form):
    with torch.no_grad():
        out = model(**inputs(batch, form))
    near(out.logits, batch["logits"], batch["merged_mask"])
    run = greedy(model, **inputs(batch, form), output_logits=True, return_dict_in_generate=True)
    length = batch[f"input_ids{form}"].shape[1]
    assert torch.equal(run.sequences[:, :length], batch[f"input_ids{form}"])
    assert torch.equal(run.sequences[:, length:], batch["greedy_tokens"])
    # Stored are the logits after each token, so the last ones belong to a step that was not asked for.
    near(torch.stack(run.logits[1:], 1), batch["greedy_logits"][:, :4])


def test_release_layout_in_both_precisions():
    fp32, bf16 = (load_file(fixture_path(f"k3_release_tiny/golden_{kind}.safetensors")) for kind in ("fp32", "bf16"))
    images = {name: fp32[f"media.{name}"] for name in ("input_ids", "pixel_values", "grid_thws")}
    with torch.no_grad():
        wide = load("k3_release_tiny")(**images).logits
        narrow = load("k3_release_tiny", dtype=torch.bfloat16)(**images).logits
    assert narrow.dtype == torch.bfloat16
    # The stored fp32 run has a time table rounded to bfloat16 (see test_tower), which moves the two-frame clip.
    near(wide, fp32["media.logits"], mean=1e-3, largest=3e-2)
    near(narrow.float(), fp32["media.logits"], mean=0.05, largest=1.0)
    near(narrow.float(), bf16["media.logits"].float(), mean=0.05, largest=1.0)


# ---- generation -----------------------------------------------------------------------------------------------------


def test_rows_of_a_batch_say_what_each_says_alone(model, batch):
    together = greedy(model, **inputs(batch))[:, 9:]
    for index in range(2):
        alone = row(batch, index)
        assert torch.equal(greedy(model, **alone)[0, alone["input_ids"].shape[1] :], together[index])


@pytest.mark.parametrize("cached", [True, False])
def test_beams_with_images(model, batch, cached):
    """Each row's beams see that row's images: as many as were asked for, the same as of the row alone."""
    options = {"num_beams": 3, "num_return_sequences": 2, "use_cache": cached, "length_penalty": 0.0}
    together = greedy(model, **inputs(batch), **options)
    assert together.shape == (4, 9 + 5)
    for index in range(2):
        alone = row(batch, index)
        found = greedy(model, **alone, **options)
        assert torch.equal(found[:, alone["input_ids"].shape[1] :], together[2 * index : 2 * index + 2, 9:])
    assert torch.equal(greedy(model, **inputs(batch, "_expanded"), **options)[:, 12:], together[:, 9:])


def test_other_ways_of_generating_say_the_same(model, batch):
    wanted = greedy(model, **row(batch, 1))
    ids, images = row(batch, 1)["input_ids"], {name: row(batch, 1)[name] for name in ("pixel_values", "grid_thws")}
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
    assert torch.equal(greedy(model, inputs_embeds=embeds, **images), wanted[:, ids.shape[1] :])
    listed = {**images, "grid_thws": images["grid_thws"].tolist()}
    for options in (
        {**images, "cache_implementation": "static"},
        {**images, "use_cache": False},
        {**images, "assistant_model": model},
        {**images, "prompt_lookup_num_tokens": 2},
        listed,
    ):
        assert torch.equal(greedy(model, input_ids=ids, **options), wanted)
    for name in images:
        with pytest.raises(ShapeError, match="together"):
            greedy(model, input_ids=ids, **{name: images[name]})
    with pytest.raises(ValueError, match="[Cc]hunked prefill"):  # the library's own words: images are read in one piece
        greedy(model, input_ids=ids, **images, prefill_chunk_size=4)


def test_sampling_several_sequences_of_each_row(model, batch):
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 3, "top_k": 1}
    sampled = model.generate(**inputs(batch), **options)  # with top_k 1 the draw is the greedy token
    wanted = greedy(model, **inputs(batch), max_new_tokens=3)
    assert torch.equal(sampled, wanted.repeat_interleave(3, 0))


def test_a_prefix_with_images_is_read_once_and_forked(model, batch, tmp_path, monkeypatch):
    """The images of the first turn are in the cache: text after them needs no tower, also after a trip to disk."""
    prompt = row(batch, 1)
    counts = [int(h * w // 4) for _, h, w in prompt["grid_thws"].tolist()]
    cache = KimiCache(model.config)
    with torch.no_grad():
        model(**prompt, past_key_values=cache, use_cache=True)
    assert cache.image_tokens == sum(counts) and cache.fork().image_tokens == sum(counts)
    cache.to_safetensors(tmp_path / "prefix.safetensors")
    read = KimiCache.from_safetensors(tmp_path / "prefix.safetensors", model.config)
    question = torch.tensor([[21, 22, 23]])
    whole = {**prompt, "input_ids": torch.cat([prompt["input_ids"], question], 1)}
    fresh = greedy(model, **whole)[:, whole["input_ids"].shape[1] :]
    expanded = expand_placeholders(whole["input_ids"], counts, AT, PAD).input_ids
    calls = []
    forward = type(model.vision_tower).forward
    monkeypatch.setattr(
        type(model.vision_tower), "forward", lambda self, *args, **kw: calls.append(1) or forward(self, *args, **kw)
    )
    for past in (cache.fork(), read, cache.fork()):
        assert torch.equal(greedy(model, input_ids=expanded, past_key_values=past)[:, expanded.shape[1] :], fresh)
    mask = torch.ones_like(expanded)
    new = greedy(model, input_ids=question, attention_mask=mask, past_key_values=cache.fork())
    assert torch.equal(new[:, 3:], fresh)
    assert not calls
    assert torch.equal(greedy(model, **whole, past_key_values=cache.fork())[:, whole["input_ids"].shape[1] :], fresh)
    assert not calls
    with pytest.raises(MediaError, match=f"holds {sum(counts)} image tokens a row, but input_ids have 2"):
        greedy(model, input_ids=whole["input_ids"], past_key_values=read)


def test_images_of_a_later_turn_join_those_in_the_cache(model, batch):
    first, second = row(batch, 0), row(batch, 1)
    images = {name: torch.cat([first[name], second[name]]) for name in ("pixel_values", "grid_thws")}
    both = torch.cat([first["input_ids"], second["input_ids"]], 1)
    cache = KimiCache(model.config)
    with torch.no_grad():
        model(**first, past_key_values=cache, use_cache=True)
    before = cache.image_tokens
    length = both.shape[1]
    fresh = greedy(model, input_ids=both, **images)[:, length:]
    assert torch.equal(greedy(model, input_ids=both, **images, past_key_values=cache)[:, length:], fresh)
    assert cache.image_tokens > before > 0


# ---- training -------------------------------------------------------------------------------------------------------


def test_loss_counts_visible_text_only(model, batch):
    labels = batch["input_ids"].clone()
    with torch.no_grad():
        out = model(**inputs(batch), labels=labels)
    expanded, mask = batch["input_ids_expanded"], batch["merged_mask"]
    taught = expanded.masked_fill((expanded == AT) | (mask == 0), -100)[:, 1:]
    wanted = F.cross_entropy(batch["logits"][:, :-1].flatten(0, 1), taught.flatten(), ignore_index=-100)
    assert abs(out.loss - wanted) < 1e-3
    same = model(**inputs(batch, "_expanded"), labels=expanded).loss
    assert abs(same - out.loss) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_reaches_the_tower(batch, reentrant):
    model = load().train()

    def gradients():
        model.zero_grad()
        model(**inputs(batch), labels=batch["input_ids"]).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    assert any(name.startswith("vision_tower.") for name in plain)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for name, grad in gradients().items():
        assert (grad - plain[name]).abs().max() <= 1e-4 * plain[name].abs().max(), name


# ---- text, and what is refused --------------------------------------------------------------------------------------


def test_text_alone_never_touches_the_tower(model, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the tower was called")

    monkeypatch.setattr(type(model.vision_tower), "forward", refuse)
    ids = torch.arange(5, 21).view(2, 8)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        near(model.language_model(input_ids=ids).logits, logits, mean=0, largest=0)
    assert greedy(model, input_ids=ids).shape == (2, 13)


def test_placeholders_without_images_are_refused(model, batch):
    for ids, found in ((batch["input_ids"], 3), (batch["input_ids_expanded"], 9)):
        with pytest.raises(MediaError, match=rf"hold {found} placeholders.*\(id 160; .*pass pixel_values"):
            model(input_ids=ids)
        with pytest.raises(MediaError, match=f"hold {found} placeholders"):
            greedy(model, input_ids=ids)
    text = torch.arange(5, 12)[None]
    cache = KimiCache(model.config)
    with torch.no_grad():
        model(input_ids=text, past_key_values=cache, use_cache=True)
        with pytest.raises(MediaError, match="hold 1 placeholders .* in row 0 at position 1"):
            model(input_ids=torch.tensor([[5, AT, 6]]), past_key_values=cache.fork(), use_cache=True)
        with pytest.raises(MediaError, match="holds 0 image tokens a row, but input_ids have 1 placeholders"):
            greedy(model, input_ids=torch.cat([text, torch.tensor([[AT, 6]])], 1), past_key_values=cache.fork())
        # What the model wrote by itself is not a prompt: a step of one token, and steps without a cache.
        assert model(input_ids=torch.tensor([[AT]]), past_key_values=cache, use_cache=True).logits.shape == (1, 1, 176)
        forced = {"forced_eos_token_id": None, "suppress_tokens": [i for i in range(176) if i != AT]}
        for cached in (True, False):
            assert greedy(model, input_ids=text, use_cache=cached, **forced)[0, 7:].tolist() == [AT] * 5


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"grid_thws": [[1, 4, 4], [1, 2, 14]]}, MediaError, "holds 3 placeholders.*2 images.*no image"),
        ({"grid_thws": [[1, 4, 4], [1, 3, 4], [2, 2, 4]]}, MediaError, "image 2 of 3 .*cannot be merged"),
        ({"grid_thws": [[1, 4, 4], [1, 2, 4], [5, 2, 2]]}, MediaError, "image 3 of 3 .*5 frames"),
        ({"grid_thws": [[1, 4, 514], [1, 2, 4], [2, 2, 4]]}, MediaError, "image 1 of 3 .*at most 512"),
        ({"grid_thws": [[1, 4, 4], [1, 0, 4], [2, 2, 4]]}, MediaError, "image 2 of 3 .*empty"),
        ({"grid_thws": [[1, 4, 4], [1, 2, 2], [2, 2, 2]]}, ShapeError, "holds 44 patches, but grid_thws asks for 28"),
        ({"grid_thws": None}, ShapeError, "together"),
        ({"pixel_values": None}, ShapeError, "together"),
        ({"input_ids": None}, ShapeError, "exactly one of input_ids and inputs_embeds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_says_which_image(model, batch, change, error, words):
    change = {name: None if value is None else torch.tensor(value) for name, value in change.items()}
    with pytest.raises(error, match=words):
        model(**{**inputs(batch), **change})
