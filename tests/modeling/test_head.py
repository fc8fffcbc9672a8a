"""The head: a loss that never holds the logits of all tokens, and labels that fit."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import kimi_hf
from kimi_hf.errors import ConfigError, ShapeError
from kimi_hf.modeling.head import chunked_loss


def build(**changes):
    config = kimi_hf.preset("kimi-linear-tiny", **changes) if changes else kimi_hf.preset("kimi-linear-tiny")
    torch.manual_seed(0)
    return kimi_hf.KimiLinearForCausalLM(config).train()


@pytest.mark.parametrize("tokens", [1, 5, 24, 100])
@pytest.mark.parametrize("divisor", [None, 11, torch.tensor(11)])
def test_values_and_gradients_equal_torchs(tokens, divisor):
    torch.manual_seed(1)
    hidden = torch.randn(2, 12, 6, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(6, 31, bias=False).double()
    labels = torch.randint(0, 31, (2, 12))
    labels[0, 3:6] = -100
    loss = chunked_loss(hidden, head, labels, tokens=tokens, num_items_in_batch=divisor)
    found = torch.autograd.grad(loss, [hidden, head.weight])
    logits = head(hidden)[:, :-1].flatten(0, 1)
    wanted = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum" if divisor else "mean")
    wanted = wanted / (divisor or 1)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(found, torch.autograd.grad(wanted, [hidden, head.weight]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_shifted_labels_are_taken_as_they_are():
    model, ids = build(), torch.randint(3, 60, (2, 9))
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    plain = model(ids, labels=ids).loss
    model.set_chunked_loss(4)
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, plain)


def test_no_tensor_of_all_logits_outlives_the_forward():
    model, ids = build(), torch.randint(3, 60, (2, 64))
    words, largest = model.config.vocab_size, []

    def pack(tensor):
        largest.append(tensor.numel() if tensor.shape[-1:] == (words,) else 0)
        return tensor

    model.set_chunked_loss(8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, labels=ids).loss.backward()
    assert 0 <= max(largest) <= 8 * words


def test_adapters_on_the_head_take_part():
    model, ids = build(), torch.randint(3, 60, (1, 9))
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    plain = tuned(input_ids=ids, labels=ids).loss
    model.set_chunked_loss(4)
    chunked = tuned(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(chunked, plain)
    chunked.backward()
    assert all(p.grad.abs().sum() > 0 for name, p in tuned.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("tokens", [0, -3, 2.5, "8", True])
def test_a_bad_chunk_is_refused(tokens):
    with pytest.raises(ConfigError, match="set_chunked_loss"):
        build().set_chunked_loss(tokens)


@pytest.mark.parametrize("shape", [(2, 8), (9,), (1, 9), (2, 9, 1)])
def test_labels_of_another_shape_are_refused(shape):
    model = build()
    with pytest.raises(ShapeError, match="labels have shape"):
        model(torch.randint(3, 60, (2, 9)), labels=torch.zeros(shape, dtype=torch.long))
