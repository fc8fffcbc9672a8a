"""One token through a KDA mixer's core: the doors agree, and what is kept is written in place."""

import pytest
import torch

import kimi_hf
from kimi_hf.ops.kda_decode import kda_decode


def inputs(rows, heads, key, value, width, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    channels = 2 * heads * key + heads * value
    tensors = [draw(rows, heads * key), draw(rows, heads * key), draw(rows, heads * value), draw(rows, heads * key)]
    tensors += [draw(rows, heads), draw(rows, heads * value), draw(rows, channels, width)]
    tensors.append(draw(rows, heads, key, value, dtype=torch.float64 if dtype == torch.float64 else torch.float32))
    options = {
        "conv_weights": tuple(draw(heads * size, 1, width, dtype=torch.float32) for size in (key, key, value)),
        "A_log": draw(heads, dtype=torch.float32),
        "dt_bias": draw(heads * key, dtype=torch.float32),
        "norm_weight": draw(value, dtype=torch.float32),
        "eps": 1e-5,
    }
    return tensors, options


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows, heads, key, value, width", [(1, 2, 16, 16, 4), (3, 1, 24, 60, 3), (2, 2, 8, 8, 1)])
def test_eager_equals_the_definition(rows, heads, key, value, width, dtype, bound):
    tensors, options = inputs(rows, heads, key, value, width, dtype)
    ours, theirs = [[x.clone() for x in tensors] for _ in range(2)]
    y = kda_decode(*ours, **options, lower_bound=bound, backend="eager")
    wanted = kda_decode(*theirs, **options, lower_bound=bound, backend="reference")
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(y, wanted, rtol=tolerance, atol=tolerance)
    assert torch.equal(ours[6], theirs[6])
    torch.testing.assert_close(ours[7], theirs[7], rtol=1e-3 if dtype == torch.bfloat16 else 1e-5, atol=tolerance)


@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_padding_keeps_its_memory(backend):
    tensors, options = inputs(3, 2, 8, 8, 4, torch.float32)
    padded, whole = [[x.clone() for x in tensors] for _ in range(2)]
    real = torch.tensor([True, False, True])
    y = kda_decode(*padded, **options, real=real, backend=backend)
    expected = kda_decode(*whole, **options, backend=backend)
    assert torch.equal(y[real], expected[real]) and not y[1].any()
    for actual, stepped, before in zip(padded[6:], whole[6:], tensors[6:], strict=True):
        assert torch.equal(actual[real], stepped[real]) and torch.equal(actual[1], before[1])


@torch.no_grad()
def test_a_step_in_place_equals_the_general_way_and_hooks_are_not_bypassed():
    torch.manual_seed(0)
    model = kimi_hf.KimiLinearForCausalLM(kimi_hf.preset("kimi-linear-tiny")).eval()
    ids = torch.randint(3, 200, (2, 12))
    cache = model(ids[:, :9]).past_key_values
    hooked = cache.fork()
    addresses = [cache.layers[0].conv_states[0].data_ptr(), cache.layers[0].recurrent_states[0].data_ptr()]
    first = model(ids[:, 9:10], past_key_values=cache).logits
    steps = [first] + [model(ids[:, t : t + 1], past_key_values=cache).logits for t in (10, 11)]
    # a fork looks at the first state, so the first step wrote a new one, and the others wrote over that
    kept = [cache.layers[0].conv_states[0].data_ptr(), cache.layers[0].recurrent_states[0].data_ptr()]
    assert kept != addresses
    model(ids[:, 11:], past_key_values=cache)
    assert kept == [cache.layers[0].conv_states[0].data_ptr(), cache.layers[0].recurrent_states[0].data_ptr()]

    seen = []
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "o_norm"):
            layer.self_attn.o_norm.register_forward_hook(lambda *_: seen.append(1))
    for t, step in zip((9, 10, 11), steps, strict=True):
        torch.testing.assert_close(model(ids[:, t : t + 1], past_key_values=hooked).logits, step, rtol=1e-5, atol=1e-5)
    assert seen
