"""No kernel's door, and no step of a model on the kernels, asks the device for a value.

Everything runs on tensors without storage, with launches recorded instead of run: reading one value raises, and the
choice of backends is a GPU's.
"""

import pytest
import torch
from transformers import StaticCache

from kimi_hf.ops import dispatch
from kimi_hf.ops.dispatch import importable
from tests.contract.tiny import TINY

if not importable("triton"):
    pytest.skip("needs triton", allow_module_level=True)

from benchmarks.kernel_cases import CASES
from kimi_hf.errors import ShapeError
from kimi_hf.ops.gated_norm.kernels import gated_norm_triton
from kimi_hf.ops.kda.kernels import kda_triton
from kimi_hf.ops.kernels_common import record_launches


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Tensors on "meta" choose backends as those on a GPU do; yields the launches."""
    lacks = dispatch._machine_lacks
    monkeypatch.setitem(dispatch.AUTOMATIC, "meta", dispatch.AUTOMATIC["cuda"])
    monkeypatch.setattr(
        dispatch, "_machine_lacks", lambda name, device: None if name == "triton" else lacks(name, "cpu")
    )
    with record_launches() as launches, torch.device("meta"):
        yield launches


def names(launches) -> set[str]:
    return {launch.name.removesuffix("_kernel") for launch in launches}


@pytest.mark.parametrize("name", CASES)
def test_doors(name):
    with record_launches() as launches, torch.device("meta"):
        CASES[name]()
    assert launches


def test_grids_have_one_axis_and_hold_a_million_tokens():
    """A first axis holds 2^31 - 1 programs, the others 65535."""
    tokens = 1 << 20

    def rows(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    heads = (1, tokens, 96, 128)
    with record_launches() as launches, torch.device("meta"):
        for name in CASES:
            CASES[name]()
        gates = {"A_log": torch.empty(96), "dt_bias": torch.empty(96 * 128), "lower_bound": -5.0}
        states = {"initial_state": None, "output_final_state": True, "cu_seqlens": None, "inplace_state": False}
        kda_triton(*(rows(*heads) for _ in range(4)), rows(*heads[:3]), **gates, **states)
        gated_norm_triton(rows(*heads), torch.empty(128), rows(*heads), eps=1e-5, activation="sigmoid")
    assert all(len(launch.grid) == 1 for launch in launches)
    with pytest.raises(ShapeError, match="a grid holds 2147483647"), torch.device("meta"):
        gated_norm_triton(rows(1 << 37, 128), torch.empty(128), None, eps=1e-5, activation="sigmoid")


def k3_model():
    tiny = next(tiny for tiny in TINY if tiny.name == "kimi-k3-text")
    return tiny.build(attention="sdpa", first_k_dense_replace=1)


def test_training_of_a_model(as_on_a_gpu):
    ids = torch.zeros(2, 20, dtype=torch.long)
    k3_model()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert names(as_on_a_gpu) >= {
        "chunk_intra", "chunk_state", "chunk_output", "chunk_state_grad", "chunk_value_grad", "chunk_key_grad",
        "chunk_score_grad", "chunk_input_grad", "short_conv_forward", "short_conv_backward", "gated_norm_forward",
        "gated_norm_backward", "situ_forward", "situ_backward", "depth_attention_forward", "depth_attention_backward",
    }  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_decoding_of_a_model(as_on_a_gpu, padded):
    """What `generate` passes in each step: positions, and a mask over everything so far. Every kernel runs once a layer."""
    model = k3_model()
    cache = model(input_ids=torch.zeros(2, 20, dtype=torch.long)).past_key_values
    for length in (21, 22):
        as_on_a_gpu.clear()
        mask = torch.ones(2, length, dtype=torch.long) if padded else None
        positions = torch.zeros(2, 1, dtype=torch.long)
        ids = torch.zeros(2, 1, dtype=torch.long)
        model(input_ids=ids, past_key_values=cache, attention_mask=mask, position_ids=positions)
        count = [launch.name for launch in as_on_a_gpu]
        assert count.count("kda_decode_kernel") == model.config.layer_types.count("linear_attention")
        assert count.count("latent_split_kernel") == model.config.layer_types.count("full_attention")
        assert not any(name.startswith(("chunk_", "recurrent_", "short_conv")) for name in count)


@torch.no_grad()
def test_steps_over_a_static_cache_differ_in_nothing_a_graph_would_freeze(as_on_a_gpu):
    """Grids, shapes and numbers of all launches are the same in every step, so one captured step serves for all."""
    model = k3_model()
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(input_ids=torch.zeros(2, 20, dtype=torch.long), past_key_values=cache)
    steps = []
    for _ in range(2):
        as_on_a_gpu.clear()
        model(input_ids=torch.zeros(2, 1, dtype=torch.long), past_key_values=cache)
        steps.append([(launch.name, launch.grid, _frozen(launch.arguments)) for launch in as_on_a_gpu])
    assert steps[0] == steps[1]
    assert {"kda_decode_kernel", "latent_split_kernel"} <= {name for name, _, _ in steps[0]}


def _frozen(arguments) -> dict:
    return {name: _shape(value) for name, value in arguments.items()}


def _shape(value):
    if isinstance(value, tuple):
        return tuple(_shape(part) for part in value)
    return (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else value
