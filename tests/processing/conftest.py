import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kimi_hf import KimiK3Config, KimiK3ForConditionalGeneration, KimiLinearConfig
from kimi_hf.processing.image_plan import RELEASED_MEDIA_PROC_CFG
from kimi_hf.processing.registration import register_processing

from ..conftest import fixture_path
from .scripted import TEXT
from .vocabulary import write_folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A folder with a small vocabulary in the released layout."""
    return write_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    register_processing()
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="module")
def text_model(tokenizer):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(KimiLinearConfig(vocab_size=len(tokenizer), **TEXT)).eval()


@pytest.fixture(scope="session")
def multimodal_repository(tmp_path_factory, tokenizer):
    """A tiny model with the files of a released repository, its vocabulary that of the test tokenizer."""
    folder = write_folder(tmp_path_factory.mktemp("repository"))
    config = json.loads(fixture_path("k3_multimodal_tiny/config.json").read_text())
    control = tokenizer.added_tokens_encoder
    special = {"bos_token_id": "[BOS]", "eos_token_id": "<|end_of_msg|>", "pad_token_id": "[PAD]"}
    config["media_placeholder_token_id"] = control["<|media_pad|>"]
    config["text_config"]["vocab_size"] = len(tokenizer)
    for part in (config, config["text_config"]):
        part.update({name: control[token] for name, token in special.items()}, dtype="float32")
    torch.manual_seed(0)
    KimiK3ForConditionalGeneration(KimiK3Config(**config)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    file = {
        "auto_map": {
            "AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor",
            "AutoProcessor": "kimi_k3_processor.KimiK3Processor",
        },
        "media_proc_cfg": RELEASED_MEDIA_PROC_CFG,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(file))
    return folder
