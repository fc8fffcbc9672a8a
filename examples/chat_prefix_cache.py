"""A chat that reads its system prompt once: the prompt's cache is kept on disk, and every conversation forks it.

Run `python examples/chat_prefix_cache.py` for a small random model that speaks bytes, or give `--model PATH` for a
checkpoint with a chat format. A second run finds the saved cache and does not read the system prompt at all.

Recurrent layers cannot be cut back to an earlier point, so what is worth reusing is kept as a fork at that point: one
after the system prompt, one after each answer. A turn goes on from the longest one that its prompt begins with.
"""

import argparse
import time
from pathlib import Path

import torch

import kimi_hf

SYSTEM = "You are a patient assistant who answers in one sentence. " * 8
QUESTIONS = (("What is a delta rule?", "And a gate?"), ("Who are you?", "Why?"))
FIRST_BYTE = 4  # ids 0 to 3 are pad, begin, end and the image placeholder


class PrefixCaches:
    """Caches by the tokens they hold; `longest` gives a fork, so that what is kept never changes.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config):
        self.config = config
        self.kept: list[tuple[list[int], kimi_hf.KimiCache]] = []

    def keep(self, ids: list[int], cache: kimi_hf.KimiCache) -> None:
        """Remember `cache`, which holds the first `cache.get_seq_length()` tokens of `ids`."""
        self.kept.append((ids[: cache.get_seq_length()], cache.fork()))

    def longest(self, ids: list[int]) -> kimi_hf.KimiCache:
        """A cache of the longest kept beginning of `ids` that leaves at least one token to read; empty if none is."""
        fitting = [
            (len(known), cache) for known, cache in self.kept if known == ids[: len(known)] and len(known) < len(ids)
        ]
        return max(fitting, key=lambda pair: pair[0])[1].fork() if fitting else kimi_hf.KimiCache(self.config)


class ByteChat:
    """What the example needs of a tokenizer, for a model without one: role, colon, text, one byte a token."""

    def encode(self, messages: list[dict], answer: bool) -> list[int]:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return [byte + FIRST_BYTE for byte in (text + ("assistant: " if answer else "")).encode()]

    def decode(self, ids: list[int]) -> str:
        return bytes(i - FIRST_BYTE for i in ids if FIRST_BYTE <= i < FIRST_BYTE + 256).decode(errors="replace")


class TokenizerChat:
    """The same of a checkpoint's own tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def encode(self, messages: list[dict], answer: bool) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=answer))

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def load(path: str | None):
    """The model and its chat."""
    if path is None:
        torch.manual_seed(0)
        model = kimi_hf.KimiLinearForCausalLM(kimi_hf.preset("kimi-linear-tiny"))
        model.generation_config.eos_token_id = None
        # Letters and signs only, so that its answers are text.
        letters = range(FIRST_BYTE + 32, FIRST_BYTE + 127)
        model.generation_config.suppress_tokens = [i for i in range(model.config.vocab_size) if i not in letters]
        return model.eval(), ByteChat()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path).eval(), TokenizerChat(AutoTokenizer.from_pretrained(path))


@torch.no_grad()
def system_cache(model, ids: list[int], path: Path) -> kimi_hf.KimiCache:
    """The cache of the system prompt: from disk, or read now and written there."""
    start = time.perf_counter()
    if path.exists():
        cache = kimi_hf.KimiCache.from_safetensors(path, model.config, device=model.device)
        if cache.get_seq_length() == len(ids):
            print(f"system prompt: {len(ids)} tokens from {path} in {time.perf_counter() - start:.2f} s")
            return cache
    cache = kimi_hf.KimiCache(model.config)
    model(torch.tensor([ids], device=model.device), past_key_values=cache, logits_to_keep=1)
    cache.to_safetensors(path)
    print(f"system prompt: {len(ids)} tokens read in {time.perf_counter() - start:.2f} s and kept in {path}")
    return cache


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub name of a checkpoint with a chat format")
    parser.add_argument("--cache", type=Path, default=Path("system-prompt.safetensors"), help="where the cache is kept")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    args = parser.parse_args()
    model, chat = load(args.model)
    system = {"role": "system", "content": SYSTEM}
    caches, ids = PrefixCaches(model.config), chat.encode([system], answer=False)
    caches.keep(ids, system_cache(model, ids, args.cache))
    exact = True
    for number, questions in enumerate(QUESTIONS, start=1):
        messages = [system]
        for question in questions:
            messages.append({"role": "user", "content": question})
            ids = chat.encode(messages, answer=True)
            cache = caches.longest(ids)
            reused, prompt = cache.get_seq_length(), torch.tensor([ids], device=model.device)
            options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
            mask = torch.ones_like(prompt)
            out = model.generate(prompt, attention_mask=mask, past_key_values=cache, **options)
            exact &= torch.equal(out, model.generate(prompt, attention_mask=mask, **options))
            answer = chat.decode(out[0, len(ids) :].tolist())
            caches.keep(out[0].tolist(), cache)
            messages.append({"role": "assistant", "content": answer})
            print(
                f"conversation {number}: {len(ids)} prompt tokens, {reused} of them cached: {question!r} -> {answer!r}"
            )
    print(f"every answer equals the one computed without a kept cache: {exact}")
    return 0 if exact else 1


if __name__ == "__main__":
    raise SystemExit(main())
