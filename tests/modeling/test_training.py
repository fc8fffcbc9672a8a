"""Training: a gradient for everything a token reaches, right in float64; checkpointing changes nothing; loss falls."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import kimi_hf

from .golden import K3, K3_RELEASE, KIMI_LINEAR, fresh_model, slow_model

CASES = [KIMI_LINEAR, K3_RELEASE]
# The router's bias only selects, and the first layer's depth query reads before anything is sealed.
UNREACHED = ("layers.0.self_attention_res_",)
EXPANDED = {"quantization_config": kimi_hf.KimiMxfp4Config(dequantize=True)}


def _model(case, dtype=torch.float32):
    return fresh_model(case, **(EXPANDED if case == K3_RELEASE else {})).to(dtype).train()


def _ids(batch=2, length=10, seed=0):
    return torch.randint(5, 140, (batch, length), generator=torch.Generator().manual_seed(seed))


def _loss(model, ids, **kwargs):
    """Next-token loss in the model's own dtype (transformers' loss rounds to fp32)."""
    logits = model(ids, **kwargs).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("case", [KIMI_LINEAR, K3_RELEASE, K3])
def test_every_parameter_that_a_token_reaches_gets_a_gradient(case):
    """FR-17. Experts that no token chose get zero, those chosen do not; nothing is NaN.

    The last token of a row predicts nothing, so what it alone chose does not count.
    """
    model, chosen = _model(case), {}
    for name, module in model.named_modules():
        if name.endswith("block_sparse_moe.gate"):
            hook = lambda _, __, out, name=name: chosen.__setitem__(name.removesuffix("gate"), out[2])  # noqa: E731
            module.register_forward_hook(hook)
    _loss(model, _ids(2, 16)).backward()
    for name, parameter in model.named_parameters():
        if any(part in name for part in UNREACHED):
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        gradient = parameter.grad
        assert gradient is not None and torch.isfinite(gradient).all() and gradient.abs().sum() > 0, name
        if ".experts." in name:
            used = torch.zeros(len(gradient), dtype=torch.bool)
            used[chosen[name.split("experts.")[0]].view(2, 16, -1)[:, :-1].unique()] = True
            assert torch.equal(gradient.flatten(1).abs().sum(1) > 0, used), name
    assert not model.model.layers[1].block_sparse_moe.gate.e_score_correction_bias.requires_grad


def _kinds(model):
    """Parameters by what they are, whatever their layer."""
    kinds = {}
    for name, parameter in model.named_parameters():
        if not any(part in name for part in UNREACHED):
            kinds.setdefault(".".join(p for p in name.split(".") if not p.isdigit()), []).append(parameter)
    return kinds


@pytest.mark.parametrize("case", CASES)
def test_directional_derivatives_in_float64(case):
    """Of each kind of parameter, along its own gradient, to 1e-4; slow decay, so that gradients run through the state."""
    model, ids = copy.deepcopy(slow_model(case)).train(), _ids()
    _loss(model, ids).backward()
    for kind, parameters in _kinds(model).items():
        gradients = [p.grad.clone() for p in parameters]
        norm = torch.sqrt(sum((g * g).sum() for g in gradients))
        step = 1e-5 / norm
        values = []
        with torch.no_grad():
            for sign in (1, -2):
                for p, g in zip(parameters, gradients, strict=True):
                    p += sign * step * g
                values.append(_loss(model, ids).item())
            for p, g in zip(parameters, gradients, strict=True):
                p += step * g
        measured = (values[0] - values[1]) / (2 * step)
        assert abs(measured - norm**2) <= 1e-4 * norm**2, f"{kind}: {measured:.6e} against {norm**2:.6e}"


@pytest.mark.parametrize("case", CASES)
def test_thirty_steps_halve_the_loss(case):
    model, ids = _model(case), _ids(2, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def _gradients(model, ids):
    model.zero_grad()
    loss = _loss(model, ids)
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("adapters", [False, True], ids=["whole model", "adapters on a frozen base"])
def test_gradient_checkpointing_changes_nothing(case, reentrant, adapters):
    """FR-18, with `use_cache` left on in the configuration."""
    model, ids = _model(case, torch.float64), _ids()
    model.config.use_cache = True
    if adapters:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj", "f_b_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False).double()
    plain = _gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    checkpointed = _gradients(model, ids)
    assert abs(plain[0] - checkpointed[0]) < 1e-9
    assert plain[1].keys() == checkpointed[1].keys() and plain[1]
    for name, gradient in plain[1].items():
        assert (gradient - checkpointed[1][name]).abs().max() <= 1e-6 * max(1.0, gradient.abs().max().item()), name


def test_checkpointing_recomputes_the_depth_reads_too():
    """The softmax over depth lies inside the checkpointed region: a layer keeps its inputs and nothing else."""
    model, ids = _model(K3_RELEASE), _ids()
    kept = []

    def count(tensor):
        kept.append(tensor.numel())
        return tensor

    sizes = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            _loss(model, ids)
        sizes.append(sum(kept))
    assert sizes[1] < 0.25 * sizes[0]


def test_a_carried_state_lets_gradients_through_when_asked():
    """Truncated backpropagation: two pieces with a cache under autograd equal one forward, values and gradients."""
    model, ids = copy.deepcopy(slow_model(KIMI_LINEAR)).train(), _ids(1, 14)
    expected = _gradients(model, ids)[1]
    model.zero_grad()
    cache = kimi_hf.KimiCache(model.config)
    logits = torch.cat([model(x, past_key_values=cache).logits for x in ids.split([6, 8], dim=1)], dim=1)[:, :-1]
    cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        gradient = expected[name]
        assert (parameter.grad - gradient).abs().max() <= 1e-9 * max(1.0, gradient.abs().max().item()), name
