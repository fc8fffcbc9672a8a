"""The models of the generation matrix: the contract's tiny models with decay so slow that leaks along time show."""

from functools import partial

import torch
from torch import Tensor

from ..contract.tiny import TinyModel, kimi_k3_text_config, kimi_linear_config, ladder_config

NEW = 6
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

MODELS = {
    model.name: model
    for model in (
        TinyModel("kimi-k3-text", kimi_k3_text_config, "KimiLinearForCausalLM", "KimiLinearModel"),
        TinyModel("kimi-linear", kimi_linear_config, "KimiLinearForCausalLM", "KimiLinearModel"),
        *(
            TinyModel(rung, partial(ladder_config, rung), "LadderForCausalLM", "LadderModel")
            for rung in ("gpt2", "linear-transformer", "delta-net", "gated-delta-net")
        ),
    )
}


def build(name: str, *, seed: int = 0, **kwargs):
    """A model with spread weights and slow decay: a state remembers the whole row."""
    model = MODELS[name].build(attention=kwargs.pop("attention", "sdpa"), seed=seed, **kwargs)
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "A_log"):
                bounded = getattr(module, "lower_bound", None) is not None
                module.A_log.fill_(0.0 if bounded else -6.0)
                module.dt_bias.fill_(-8.0 if bounded else 0.0)
    return model


def ids(batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return MODELS["gpt2"].ids(batch, length, seed)


def greedy(model, prompt: Tensor, new: int = NEW, **kwargs):
    return model.generate(input_ids=prompt, max_new_tokens=new, do_sample=False, **kwargs)


@torch.no_grad()
def by_hand(model, prompt: Tensor, new: int = NEW) -> Tensor:
    """Argmax decoding without a cache."""
    for _ in range(new):
        prompt = torch.cat([prompt, model(prompt, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return prompt
