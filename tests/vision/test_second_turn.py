"""A second turn on a kept cache: images again, expanded ids, or a clear refusal; never other tokens."""

import pytest
import torch
from safetensors.torch import load_file

import kimi_hf
from kimi_hf.errors import MediaError


def test_second_turn_is_exact_or_refused(goldens):
    folder = goldens("k3_multimodal_tiny")
    model = kimi_hf.KimiK3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    golden = load_file(goldens("k3_multimodal_tiny/golden.safetensors"))
    images = {"pixel_values": golden["pixel_values"], "grid_thws": golden["grid_thws"]}
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(input_ids=golden["input_ids"], **images, **settings)
    following = torch.cat([first.sequences, torch.arange(10, 50)[None]], dim=1)
    fresh = model.generate(input_ids=following, **images, **settings).sequences
    with pytest.raises(MediaError, match="pass pixel_values and"):
        model.generate(input_ids=following, past_key_values=first.past_key_values, **settings)
    again = model.generate(input_ids=following, past_key_values=first.past_key_values, **images, **settings).sequences
    assert torch.equal(again, fresh)
