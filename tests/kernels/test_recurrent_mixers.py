"""The chunked and recurrent kernels of KDA, the delta rules and linear attention against their definitions."""

import pytest
import torch
from safetensors.torch import load_file

from kimi_hf.errors import BackendError
from kimi_hf.ops import set_backend
from kimi_hf.ops.delta_rule import delta_rule
from kimi_hf.ops.kda import kda
from kimi_hf.ops.linear_attention import linear_attention
from tests.contract.tiny import TINY
from tests.kernels.guards import agree, close, guarded, poisoned_outputs

pytestmark = pytest.mark.interpreted

EXACT = {"values": 3e-6, "gradients": 1e-5}
PACKED = [0, 3, 3, 20, 37]  # an empty sequence, and lengths around a chunk of 16


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of 16 tokens: many chunks, and every boundary, from few tokens."""
    for name in ("CHUNK", "FP32_CHUNK"):
        monkeypatch.setattr(f"kimi_hf.ops.kda.kernels.{name}", 16)


@pytest.fixture
def segments(monkeypatch):
    """The scheme that bf16 takes for a bounded gate, in fp32, where its errors show."""
    monkeypatch.setattr("kimi_hf.ops.kda.kernels_forward.SEGMENT_DTYPES", (torch.float32,))


def kda_tensors(B, T, H, K, V, sequences=None, slow=False):
    """Random inputs; `slow` decays slowly enough that the state matters over the whole sequence."""
    tensors = {
        "q": torch.randn(B, T, H, K),
        "k": torch.randn(B, T, H, K),
        "v": torch.randn(B, T, H, V),
        "g": torch.randn(B, T, H, K),
        "beta": torch.randn(B, T, H),
        "A_log": torch.rand(H),
        "dt_bias": torch.randn(H * K) - (5 if slow else 0),
    }
    if sequences is not None:
        tensors["initial_state"] = torch.randn(sequences, H, K, V)
    return tensors


def both(operation, **options):
    return (
        lambda **t: operation(**t, **options, backend="triton"),
        lambda **t: operation(**t, **options, backend="reference"),
    )


def test_kda_bounded_gate_over_two_chunks_of_64(segments, monkeypatch):
    monkeypatch.setattr("kimi_hf.ops.kda.kernels.FP32_CHUNK", 64)  # the length for 16 bits, where errors show
    tensors = kda_tensors(1, 70, 1, 24, 20, sequences=1, slow=True)
    agree(*both(kda, lower_bound=-5.0, output_final_state=True), tensors, **EXACT)


def test_kda_softplus_gate(short_chunks):
    tensors = kda_tensors(1, 19, 1, 20, 36, sequences=1, slow=True)
    agree(*both(kda, output_final_state=True), tensors, **EXACT)


@pytest.mark.parametrize("T, K, V", [(1, 24, 60), (2, 60, 24), (15, 17, 16), (16, 16, 100), (32, 24, 7)])
def test_kda_lengths_around_a_chunk(short_chunks, T, K, V):
    agree(*both(kda, output_final_state=True), kda_tensors(1, T, 1, K, V, sequences=1, slow=True), **EXACT)


def test_kda_packed(short_chunks):
    tensors = kda_tensors(1, 37, 1, 20, 12, sequences=4, slow=True)
    options = {"lower_bound": -5.0, "output_final_state": True, "cu_seqlens": torch.tensor(PACKED)}
    agree(*both(kda, **options), tensors, **EXACT)


def test_kda_without_state_and_wider_than_any_block(short_chunks):
    agree(*both(kda, lower_bound=-4.0), kda_tensors(1, 17, 1, 70, 70), **EXACT)


@pytest.mark.parametrize("tag, lower_bound", [("steep", None), ("pinned", -5.0)])
def test_kda_goldens_of_strong_decay(goldens, segments, tag, lower_bound):
    data = load_file(goldens("kda_op/golden_more.safetensors"))
    names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    tensors = {n: data[f"{tag}.{n}"][..., :1, :].contiguous() if n in ("q", "k", "v", "g") else data[f"{tag}.{n}"]
               for n in names}  # fmt: skip
    tensors["beta"], tensors["A_log"] = tensors["beta"][..., :1].contiguous(), tensors["A_log"][:1]
    tensors["dt_bias"], tensors["initial_state"] = tensors["dt_bias"][:8], tensors["initial_state"][:, :1].contiguous()
    agree(*both(kda, lower_bound=lower_bound, output_final_state=True), tensors, values=1e-5, gradients=1e-4)


def test_kda_outputs_do_not_depend_on_later_tokens(segments):
    tensors = kda_tensors(1, 40, 1, 16, 16)
    o = kda(**tensors, lower_bound=-5.0, backend="triton")[0]
    changed = {n: t.clone() for n, t in tensors.items()}
    for name in ("q", "k", "v", "g", "beta"):
        changed[name][:, 21:] = 3.0
    assert torch.equal(kda(**changed, lower_bound=-5.0, backend="triton")[0][:, :21], o[:, :21])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 4e-3), (torch.bfloat16, 4e-2)])
def test_kda_low_precision(short_chunks, dtype, tolerance):
    tensors = kda_tensors(1, 33, 1, 16, 16, sequences=1, slow=True)
    tensors |= {n: tensors[n].to(dtype) for n in ("q", "k", "v", "g", "beta")}
    options = {"lower_bound": -5.0, "output_final_state": True}
    agree(*both(kda, **options), tensors, values=tolerance, gradients=2 * tolerance)


@pytest.mark.parametrize("gated, packed", [(True, True), (True, False), (False, False)])
def test_delta_rules(short_chunks, gated, packed):
    B, T, H, K, V = (1, 37, 1, 20, 12) if packed else (1, 19, 2, 16, 36)
    tensors = {
        "q": torch.randn(B, T, H, K),
        "k": torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1),
        "v": torch.randn(B, T, H, V),
        "beta": torch.rand(B, T, H),
        "initial_state": torch.randn(len(PACKED) - 1 if packed else B, H, K, V),
    }
    if gated:
        tensors["g"] = -torch.rand(B, T, H) * 3
    options = {"output_final_state": True, "cu_seqlens": torch.tensor(PACKED) if packed else None}
    agree(*both(delta_rule, **options), tensors, **EXACT)


@pytest.mark.parametrize("normalize, packed", [(True, True), (False, False)])
def test_linear_attention(short_chunks, normalize, packed):
    B, T, H, K, V = (1, 37, 1, 20, 12) if packed else (2, 17, 1, 16, 36)
    sequences = len(PACKED) - 1 if packed else B
    tensors = {"q": torch.randn(B, T, H, K), "k": torch.randn(B, T, H, K), "v": torch.randn(B, T, H, V)}
    tensors |= {"S": torch.rand(sequences, H, K, V), "z": torch.rand(sequences, H, K)}
    cu_seqlens = torch.tensor(PACKED) if packed else None

    def call(backend):
        def run(q, k, v, S, z):
            options = {"initial_state": (S, z), "output_final_state": True, "cu_seqlens": cu_seqlens}
            o, (S, z) = linear_attention(q, k, v, normalize=normalize, backend=backend, **options)
            return o, S, z

        return run

    agree(call("triton"), call("reference"), tensors, **EXACT)


def decode_cases():
    cu_seqlens = torch.tensor([0, 1, 1, 3, 4])
    yield "kda", kda, kda_tensors(2, 1, 2, 24, 40, sequences=2), {"lower_bound": -5.0}
    yield "kda, no state", kda, kda_tensors(1, 3, 1, 100, 16), {}
    yield "kda, packed", kda, kda_tensors(1, 4, 2, 16, 40, sequences=4), {"cu_seqlens": cu_seqlens}
    rule = {n: t for n, t in kda_tensors(2, 2, 1, 16, 12, sequences=2).items() if n in "qkv" or n == "initial_state"}
    rule["beta"] = torch.rand(2, 2, 1)
    yield "delta", delta_rule, rule, {}
    yield "gated delta", delta_rule, rule | {"g": -torch.rand(2, 2, 1)}, {}


@pytest.mark.parametrize("case", range(5))
def test_few_tokens_run_the_recurrence(case):
    _, operation, tensors, options = list(decode_cases())[case]
    with poisoned_outputs(), torch.no_grad():
        guards = {n: guarded(t) for n, t in tensors.items()}
        o, state = operation(**guards, **options, output_final_state=True, backend="triton")
        o, state = o.clone(), state.clone()
    expected, expected_state = operation(**tensors, **options, output_final_state=True, backend="reference")
    close(o, expected, 3e-6, "o")
    close(state, expected_state, 3e-6, "state")


@pytest.mark.parametrize("tokens", [1, 20])
def test_state_in_place(tokens, short_chunks):
    tensors = kda_tensors(2, tokens, 1, 16, 20, sequences=2)
    expected, expected_state = kda(**tensors, output_final_state=True, backend="reference")
    state = tensors["initial_state"]
    with torch.no_grad():
        o, final = kda(**tensors, inplace_state=True, backend="triton")
    assert final is state
    close(o, expected, 3e-6, "o")
    close(state, expected_state, 3e-6, "state")


def test_linear_attention_decodes_in_place():
    q, k, v = torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 12)
    state = torch.rand(2, 1, 8, 12), torch.rand(2, 1, 8)
    expected, final = linear_attention(q, k, v, initial_state=state, output_final_state=True, backend="reference")
    with torch.no_grad():
        o, (S, z) = linear_attention(q, k, v, initial_state=state, inplace_state=True, backend="triton")
    assert S is state[0] and z is state[1]
    for actual, wanted in ((o, expected), (S, final[0]), (z, final[1])):
        close(actual, wanted, 3e-6, "result")


def test_what_the_kernels_decline():
    q = torch.randn(1, 1, 1, 300)
    with pytest.raises(BackendError, match="300 x 300"):
        delta_rule(q, q, q, torch.rand(1, 1, 1), backend="triton")


def logits_and_gradients(model, ids, mask):
    model.zero_grad()
    out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False)
    out.loss.backward()
    return out.logits.detach() * mask[..., None], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_whole_model_on_the_kernels(short_chunks, segments):
    """Left-padded rows: logits, every gradient and greedy decoding with the cache equal plain PyTorch's."""
    tiny = next(tiny for tiny in TINY if tiny.name == "kimi-k3-text")
    model = tiny.build(first_k_dense_replace=3)
    ids, mask = tiny.ids(2, 5), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    expected, expected_grads = logits_and_gradients(model, ids, mask)
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    tokens = model.generate(ids, **options)
    set_backend("triton")
    try:
        logits, grads = logits_and_gradients(model, ids, mask)
        assert torch.equal(model.generate(ids, **options), tokens)
    finally:
        set_backend(None)
    close(logits, expected, 1e-5, "logits")
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        close(grads[name], grad, 1e-4, name)
