import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kimi_hf import KimiLinearConfig
from kimi_hf.processing.registration import register_processing

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
