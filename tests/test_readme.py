"""The README's Python block runs as it stands, on a small checkpoint in the released layout."""

import re
from pathlib import Path

import kimi_hf
from kimi_hf.quantization import quantize

README = Path(__file__).parent.parent / "README.md"


def test_python_block_runs(tmp_path):
    config = kimi_hf.preset("kimi-k3-tiny")
    config.text_config.num_hidden_layers = 4
    text = config.text_config.to_dict()
    text["linear_attn_config"].update(kda_layers=[1, 2, 3], full_attn_layers=[4])
    config = kimi_hf.KimiK3Config(**{**config.to_dict(), "text_config": text})
    quantize(kimi_hf.KimiK3ForConditionalGeneration(config)).save_pretrained(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    scope = {"folder": tmp_path}
    exec(compile(code, str(README), "exec"), scope)
    assert scope["loss"].isfinite()
    reloaded = kimi_hf.KimiK3ForConditionalGeneration.from_pretrained(tmp_path / "tuned")
    assert type(reloaded.language_model.model.layers[1].block_sparse_moe.experts).__name__ == "KimiExperts"
