"""The expert cache: bounded in bytes, fair between layers, least recently used within one."""

from collections import OrderedDict

import pytest
import torch

from kimi_hf.storage.cache import ExpertCache


def expert(nbytes=10):
    return torch.zeros(nbytes, dtype=torch.uint8)


def visit(cache, layer, experts):
    """One forward of a layer, as the store does it; returns the hits."""
    cache.begin(layer, experts)
    hits = 0
    for number in sorted(experts):
        if cache.get(layer, number) is not None:
            hits += 1
        elif cache.make_room(layer, 10):
            cache.put(layer, number, expert())
        assert cache.nbytes <= cache.limit
    return hits


def held(cache, layer):
    return [number for number in range(20) if cache.get(layer, number) is not None]


def test_least_recently_used_within_a_layer():
    cache = ExpertCache(30)
    for number in range(3):
        visit(cache, 0, [number])
    assert visit(cache, 0, [0]) == 1
    visit(cache, 0, [3])
    assert held(cache, 0) == [0, 2, 3]
    assert cache.nbytes == 30 and len(cache) == 3


def test_layers_share_the_limit_evenly():
    cache = ExpertCache(40)
    for layer in (0, 1):
        for number in range(4):
            visit(cache, layer, [number])
    assert held(cache, 0) == [2, 3] and held(cache, 1) == [2, 3]


def test_a_circle_larger_than_the_cache_still_hits():
    """Eight layers, three experts each and always the same, room for a third: one queue would never hit."""
    cache, queue, hits, plain = ExpertCache(80), OrderedDict(), 0, 0
    for _ in range(10):
        for layer in range(8):
            hits += visit(cache, layer, range(3))
            for number in range(3):
                plain += (layer, number) in queue
                queue.pop((layer, number), None)
                queue[layer, number] = True
                if len(queue) > 8:
                    queue.popitem(last=False)
    assert plain == 0 and hits == 9 * 8


def test_what_a_forward_does_not_want_makes_way():
    cache = ExpertCache(30)
    visit(cache, 0, [0, 1, 2])
    assert visit(cache, 0, [1, 5, 6]) == 1
    assert held(cache, 0) == [1, 5, 6]
    assert visit(cache, 0, range(10)) == 3 and held(cache, 0) == [1, 5, 6]


@pytest.mark.parametrize("limit", [0, 9])
def test_what_is_too_large_is_not_kept(limit):
    cache = ExpertCache(limit)
    assert not cache.make_room(0, 10)
    cache.put(0, 0, expert())
    assert cache.get(0, 0) is None and cache.nbytes == 0


def test_room_is_made_before_reading():
    cache = ExpertCache(25)
    visit(cache, 0, [0, 1])
    cache.begin(0, [2])
    assert cache.make_room(0, 10)
    assert cache.nbytes == 10 and held(cache, 0) == [1]


def test_the_same_expert_twice_counts_once():
    cache = ExpertCache(100)
    cache.put(0, 0, expert())
    cache.put(0, 0, expert())
    assert cache.nbytes == 10
    cache.clear()
    assert cache.nbytes == 0 and len(cache) == 0
