"""What training needs: gradients everywhere, both kinds of gradient checkpointing, adapters, a falling loss."""

import pytest
import torch

from .tiny import VOCAB

# Parts that by definition take no gradient from the loss: the router's bias only selects (and is moved by its own
# rule), and the first layer's depth query has nothing sealed to choose from.
WITHOUT_GRADIENT = ("e_score_correction_bias", "layers.0.self_attention_res_")


def _gradients(model, ids, **inputs):
    model.zero_grad()
    loss = model(ids, labels=ids, **inputs).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _assert_same_gradients(ours, theirs, tolerance=1e-3):
    """Equal up to the order in which gradients of a tensor with several readers are added."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        off = (ours[name] - theirs[name]).abs().max()
        assert off <= tolerance * theirs[name].abs().max() + 1e-7, f"{name}: off by {off:.2e}"


def _texts(tiny):
    """Inputs that reach every expert."""
    return tiny.ids(8, 12)


def test_every_parameter_gets_a_finite_gradient(tiny):
    model = tiny.build().train()
    if tiny.vision:
        inputs = tiny.images(8, 12)
        ids = inputs.pop("input_ids")
        found = _gradients(model, ids, **inputs)
    else:
        found = _gradients(model, _texts(tiny))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not any(part in name for part in WITHOUT_GRADIENT):
            assert name in found, f"{name} has no gradient"
            assert torch.isfinite(found[name]).all() and found[name].abs().sum() > 0, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(tiny, reentrant):
    model, ids = tiny.build().train(), _texts(tiny)
    plain = _gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    _assert_same_gradients(_gradients(model, ids), plain)


def test_chunked_loss_is_the_same_loss(tiny):
    model, ids = tiny.build().train(), _texts(tiny)
    plain, loss = _gradients(model, ids, num_items_in_batch=50), model(ids, labels=ids).loss
    model.set_chunked_loss(7)
    out = model(ids, labels=ids)
    assert out.logits is None
    torch.testing.assert_close(out.loss, loss, rtol=1e-6, atol=1e-6)
    _assert_same_gradients(_gradients(model, ids, num_items_in_batch=50), plain)
    assert model.eval()(ids, labels=ids).logits is not None
    model.train().set_chunked_loss(None)
    assert model(ids, labels=ids).logits is not None


def test_gradient_checkpointing_recomputes_layers_and_can_be_switched_off(tiny):
    model, ids = tiny.build().train(), tiny.ids()
    calls = []
    mixer = next(module for name, module in model.named_modules() if name.endswith("layers.1.self_attn"))
    mixer.register_forward_hook(lambda *args: calls.append(1))
    for enable, expected in ((False, 1), (True, 2), (False, 1)):
        if enable:
            model.gradient_checkpointing_enable()
        else:
            model.gradient_checkpointing_disable()
        assert model.is_gradient_checkpointing is enable
        calls.clear()
        _gradients(model, ids)
        assert len(calls) == expected


def test_input_embeddings_can_be_made_to_require_gradients(tiny):
    model = tiny.build().train()
    model.requires_grad_(False)
    model.enable_input_require_grads()
    out = model(tiny.ids(), output_hidden_states=True)
    assert out.hidden_states[0].requires_grad and out.logits.requires_grad
    model.disable_input_require_grads()
    assert not model(tiny.ids()).logits.requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_lora_trains_under_gradient_checkpointing(tiny, reentrant):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["q_proj", "o_proj", "kv_b_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        r=2,
        init_lora_weights=False,
    )
    model = peft.get_peft_model(tiny.build(), config).train()
    plain = _gradients(model, _texts(tiny))
    assert plain and all("lora_" in name for name in plain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    kept = _gradients(model, _texts(tiny))
    assert all(gradient.abs().sum() > 0 for gradient in kept.values())
    _assert_same_gradients(kept, plain)


def test_lora_merges_into_the_model(tiny):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "kv_b_proj"], r=2, init_lora_weights=False)
    ids = tiny.ids()
    model = peft.get_peft_model(tiny.build(), config).eval()
    adapted = model(ids).logits
    assert not torch.allclose(adapted, tiny.build()(ids).logits, atol=1e-3)
    torch.testing.assert_close(model.merge_and_unload()(ids).logits, adapted, rtol=1e-4, atol=1e-4)


def test_loss_falls_on_a_fixed_batch(tiny):
    torch.manual_seed(0)
    model = tiny.model_class(tiny.config(initializer_range=0.1)).train()
    ids = (torch.arange(24) % 6 + 10)[None].expand(2, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.8 * torch.tensor(float(VOCAB)).log()
    assert losses[-1] < 0.1 * losses[0]
    generated = model.eval().generate(ids[:1, :6], max_new_tokens=6, do_sample=False)
    assert generated[0, 6:].tolist() == ids[0, 6:12].tolist()


def test_dropout_free_training_forward_equals_the_eval_forward(tiny):
    model, ids = tiny.build(), tiny.ids()
    assert torch.equal(model.eval()(ids, use_cache=False).logits, model.train()(ids, use_cache=False).logits)


def test_bf16_training_step_stays_finite(tiny):
    model, ids = tiny.build().train(), _texts(tiny)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = _gradients(model, ids)
    assert all(torch.isfinite(gradient).all() for gradient in found.values())
