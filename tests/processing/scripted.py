"""Scripted models and terminals for tests of the chat, and the sizes of a small real model."""

import argparse
import io

import torch
from transformers.modeling_outputs import ModelOutput

from kimi_hf import chat
from kimi_hf.processing.chat_encoding import render

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
