import pytest
from transformers import AutoTokenizer

from kimi_hf.processing.registration import register_processing

from .vocabulary import write_folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A folder with a small vocabulary in the released layout."""
    return write_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder):
    register_processing()
    return AutoTokenizer.from_pretrained(tokenizer_folder)
