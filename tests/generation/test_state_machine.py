"""Random sequences of everything a cache can do, checked against recomputation from scratch."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kimi_hf import KimiCache
from kimi_hf.errors import CacheError

from .models import build, ids

WINDOW, LONGEST = 6, 40
_built = functools.cache(build)


class Tracked:
    """A cache beside the tokens and the mask that it stands for.

    `droppable` is how many tokens may be taken back; once some were (`final`), the rest becomes final at the next append.
    """

    def __init__(self, cache, tokens, mask, droppable=0, final=False):
        self.cache, self.tokens, self.mask, self.droppable, self.final = cache, tokens, mask, droppable, final


class CacheMachine(RuleBasedStateMachine):
    """Up to three caches of one model at a time; every append compares its logits with a forward without a cache."""

    name = "kimi-k3-text"

    def __init__(self):
        super().__init__()
        self.model = _built(self.name)
        self.seed = 0
        none = torch.zeros(2, 0, dtype=torch.long)
        self.tracked = [Tracked(KimiCache(self.model.config, rollback_tokens=WINDOW), none, none)]

    def _pick(self, which: int) -> Tracked:
        return self.tracked[which % len(self.tracked)]

    @torch.no_grad()
    @rule(which=st.integers(0, 2), length=st.integers(1, 9), pads=st.sets(st.integers(0, 8)), told=st.booleans())
    def append(self, which, length, pads, told):
        it = self._pick(which)
        if it.tokens.shape[1] + length > LONGEST:
            return
        self.seed += 1
        rows = it.tokens.shape[0]
        new, mask = ids(rows, length, self.seed), torch.ones(rows, length, dtype=torch.long)
        for place in pads:
            if told and place < length:
                mask[place % rows, place] = 0
        it.tokens, it.mask = torch.cat([it.tokens, new], dim=1), torch.cat([it.mask, mask], dim=1)
        # Masks may cover everything, the new tokens, or be left out where nothing is padding.
        given = it.mask if self.seed % 2 else mask
        out = self.model(new, attention_mask=given if told else None, past_key_values=it.cache).logits
        whole = self.model(it.tokens, attention_mask=it.mask, use_cache=False).logits[:, -length:]
        real = mask.bool()
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out[real], whole[real], rtol=2e-4, atol=5e-5)
        if "linear_attention" not in self.model.config.layer_types:
            it.droppable = it.tokens.shape[1]
        elif any(it.cache.is_recording_past(i) for i in range(len(it.cache))):
            it.droppable = min((0 if it.final else it.droppable) + length, WINDOW)
        it.final = False

    @rule(which=st.integers(0, 2))
    def record(self, which):
        self._pick(which).cache.activate_past_recording()

    @rule(which=st.integers(0, 2), count=st.integers(0, LONGEST))
    def crop(self, which, count):
        it = self._pick(which)
        count = min(count, it.droppable)
        it.cache.crop(-count)
        left = it.tokens.shape[1] - count
        it.tokens, it.mask = it.tokens[:, :left], it.mask[:, :left]
        it.droppable -= count
        it.final = True

    @rule(which=st.integers(0, 2))
    def crop_too_far(self, which):
        it = self._pick(which)
        for count in {it.droppable + 1, it.tokens.shape[1] + 1}:
            with pytest.raises(CacheError):
                it.cache.crop(-count)

    @precondition(lambda self: len(self.tracked) < 3)
    @rule(which=st.integers(0, 2))
    def fork(self, which):
        it = self._pick(which)
        self.tracked.append(Tracked(it.cache.fork(), it.tokens, it.mask, it.droppable, it.final))

    @precondition(lambda self: len(self.tracked) > 1)
    @rule(which=st.integers(0, 2))
    def forget(self, which):
        self.tracked.pop(which % len(self.tracked))

    @rule(which=st.integers(0, 2), order=st.permutations(range(2)))
    def reorder(self, which, order):
        it = self._pick(which)
        rows = torch.tensor([i % it.tokens.shape[0] for i in order])
        it.cache.reorder_cache(rows)
        it.tokens, it.mask = it.tokens[rows], it.mask[rows]

    @rule(which=st.integers(0, 2), row=st.integers(0, 1))
    def select_and_repeat(self, which, row):
        it = self._pick(which)
        it.cache.batch_select_indices(torch.tensor([row]))
        it.cache.batch_repeat_interleave(2)
        it.tokens, it.mask = it.tokens[[row, row]], it.mask[[row, row]]

    @rule(which=st.integers(0, 2))
    def save_and_load(self, which):
        it = self._pick(which)
        with tempfile.TemporaryDirectory() as folder:
            path = it.cache.to_safetensors(Path(folder) / "cache")
            it.cache = KimiCache.from_safetensors(path, self.model.config)

    @rule(which=st.integers(0, 2))
    def reset(self, which):
        it = self._pick(which)
        it.cache.reset()
        none = torch.zeros(2, 0, dtype=torch.long)
        it.tokens, it.mask, it.droppable, it.final = none, none, 0, False

    @invariant()
    def lengths_and_bytes_agree(self):
        for it in self.tracked:
            assert it.cache.get_seq_length() == it.tokens.shape[1]
            assert {layer.tokens for layer in it.cache.layers} == {it.tokens.shape[1]}
            held = [x for layer in it.cache.layers for x in layer.stored().values()]
            held += [] if it.cache.padding_mask is None else [it.cache.padding_mask]
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
            assert it.cache.memory_report()["total"] == sum(storages.values())


@pytest.mark.parametrize("name", ["kimi-k3-text", "gpt2", "linear-transformer", "gated-delta-net"])
def test_any_order_of_operations(name):
    machine = type(name, (CacheMachine,), {"name": name})
    case = machine.TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=16, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    case().runTest()
