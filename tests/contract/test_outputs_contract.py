"""What a forward returns: shapes, optional outputs, and which inputs must not change the numbers."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from .tiny import HIDDEN, VOCAB, WITH_VISION, clone, only

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def test_shapes_of_base_and_head(tiny):
    ids = tiny.ids(3, 6)
    assert tiny.build(base=True)(ids).last_hidden_state.shape == (3, 6, HIDDEN)
    out = tiny.build()(ids)
    assert out.logits.shape == (3, 6, VOCAB)
    assert out.loss is None and out.hidden_states is None and out.attentions is None


def test_head_is_its_base_plus_a_projection(tiny):
    model, ids = tiny.build(), tiny.ids()
    assert model.main_input_name == "input_ids"
    if not tiny.vision:  # the released composite has no submodule that is its base model
        assert type(model.base_model) is tiny.base_class
    hidden = model(ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(model.get_output_embeddings()(hidden), model(ids).logits, **CLOSE)


def test_two_forwards_are_bit_equal_and_leave_inputs_alone(tiny):
    model, ids = tiny.build(), tiny.ids()
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    kept = clone((ids, mask))
    first = model(ids, attention_mask=mask).logits
    assert torch.equal(first, model(ids, attention_mask=mask).logits)
    assert torch.equal(ids, kept[0]) and torch.equal(mask, kept[1])


def test_tuple_output_holds_what_the_named_one_holds(tiny):
    model, ids = tiny.build(), tiny.ids()
    wanted = {"output_hidden_states": True, "output_attentions": True, "use_cache": False, "labels": ids}
    named = model(ids, **wanted)
    plain = model(ids, return_dict=False, **wanted)
    assert isinstance(plain, tuple) and len(plain) == len(named)
    assert torch.equal(plain[0], named.loss) and torch.equal(plain[1], named.logits)
    for ours, theirs in zip(plain, named.to_tuple(), strict=True):
        assert type(ours) is type(theirs)


def test_hidden_states_run_from_the_embedding_to_the_final_norm(tiny):
    model, ids = tiny.build(base=True), tiny.ids()
    out = model(ids, output_hidden_states=True)
    layers = model.config.get_text_config().num_hidden_layers
    assert len(out.hidden_states) == layers + 1
    assert all(state.shape == (*ids.shape, HIDDEN) for state in out.hidden_states)
    first = model.get_input_embeddings()(ids)
    if tiny.has_positions:
        first = first + model.embed_positions.weight[: ids.shape[1]]
    assert torch.equal(out.hidden_states[0], first)
    assert torch.equal(out.hidden_states[-1], out.last_hidden_state)


def test_some_hidden_states_can_be_asked_for(tiny):
    model, ids = tiny.build(), tiny.ids()
    every = model(ids, output_hidden_states=True).hidden_states
    some = model(ids, output_hidden_states=[0, -1]).hidden_states
    assert len(some) == len(every)
    assert torch.equal(some[0], every[0]) and torch.equal(some[-1], every[-1])
    assert all(state is None for state in some[1:-1])


def test_one_causal_attention_map_per_softmax_layer(tiny):
    model, ids = tiny.build(), tiny.ids()
    maps = model(ids, output_attentions=True).attentions
    heads = model.config.get_text_config().num_attention_heads
    assert len(maps) == tiny.layers_of("full_attention")
    for weights in maps:
        assert weights.shape == (ids.shape[0], heads, ids.shape[1], ids.shape[1])
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        assert weights.triu(1).abs().max() == 0


def test_config_switches_optional_outputs_on(tiny):
    model, ids = tiny.build(), tiny.ids()
    for config in (model.config, model.config.get_text_config()):
        config.output_attentions = config.output_hidden_states = True
    out = model(ids)
    assert len(out.attentions) == tiny.layers_of("full_attention")
    assert len(out.hidden_states) == model.config.get_text_config().num_hidden_layers + 1


def test_router_logits_are_recorded_per_sparse_layer(tiny):
    model, ids = tiny.build(), tiny.ids()
    text = model.config.get_text_config()
    assert not model(ids).router_logits
    logits = model(ids, output_router_logits=True).router_logits
    assert len(logits) == text.mlp_layer_types.count("sparse")
    assert all(each.reshape(-1, each.shape[-1]).shape == (ids.numel(), text.num_experts) for each in logits)
    text.output_router_logits = True
    assert len(model(ids).router_logits) == len(logits)
    assert not model(ids, output_router_logits=False).router_logits


def test_gradients_reach_recorded_states_and_maps(tiny):
    model, ids = tiny.build(), tiny.ids()
    out = model(ids, output_hidden_states=True, output_attentions=True)
    kept = [out.hidden_states[0], *out.attentions[:1]]
    for tensor in kept:
        tensor.retain_grad()
    out.logits.square().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in kept)


def test_embeddings_may_be_given_instead_of_ids(tiny):
    model, ids = tiny.build(), tiny.ids()
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embeds}):
        with pytest.raises(ValueError, match="inputs_embeds"):
            model(**wrong)


@pytest.mark.parametrize("keep", [0, 1, 3, torch.tensor([0, 4])], ids=str)
def test_logits_to_keep_selects_positions(tiny, keep):
    model, ids = tiny.build(), tiny.ids()
    every = model(ids).logits
    wanted = every[:, keep] if isinstance(keep, torch.Tensor) else every[:, -keep:]
    torch.testing.assert_close(model(ids, logits_to_keep=keep).logits, wanted, **CLOSE)


def test_a_row_does_not_depend_on_its_batch(tiny):
    model, ids = tiny.build(attention="sdpa"), tiny.ids(4)
    batched = model(ids).logits
    for row in range(4):
        torch.testing.assert_close(model(ids[row : row + 1]).logits[0], batched[row], **CLOSE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["left", "right", "both", "inside"])
def test_padding_changes_no_real_token(tiny, side, attention):
    model, ids = tiny.build(attention=attention), tiny.ids(2, 6)
    where = {"left": range(3, 9), "right": range(6), "both": range(2, 8), "inside": [0, 1, 2, 6, 7, 8]}[side]
    padded, mask = torch.full((2, 9), 7), torch.zeros(2, 9, dtype=torch.long)
    padded[:, list(where)] = ids
    mask[:, list(where)] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    alone = model(ids).logits
    for extra in ({}, {"position_ids": positions}):
        together = model(padded, attention_mask=mask, **extra).logits[:, list(where)]
        torch.testing.assert_close(together, alone, **CLOSE)


def test_a_ready_made_causal_mask_is_honoured(tiny):
    model, ids = tiny.build(), tiny.ids()
    length = ids.shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None].expand(2, 1, -1, -1)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, model(ids).logits, **CLOSE)
    # Whoever brings a 4-D mask decides who sees whom, so repeated positions are no mistake then.
    positions = torch.tensor([[0, 1, 2, 3, 3, 3, 3]]).expand(2, -1)
    if not tiny.has_positions:
        out = model(ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(out, model(ids).logits, **CLOSE)


def test_attention_implementations_agree_and_can_be_switched(tiny):
    model, ids = tiny.build(attention="eager"), tiny.ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    eager = model(ids, attention_mask=mask).logits
    model.set_attn_implementation("sdpa")
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], eager[mask.bool()], **CLOSE)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_expert_implementations_agree(tiny, implementation):
    model, ids = tiny.build(), tiny.ids()
    default = model(ids).logits
    model.set_experts_implementation(implementation)
    torch.testing.assert_close(model(ids).logits, default, **CLOSE)


@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens", "all"])
def test_packed_documents_do_not_see_each_other(tiny, told_by):
    model = tiny.build(attention="sdpa")
    documents = [tiny.ids(1, length, seed=length)[0] for length in (5, 1, 7)]
    rows = [{"input_ids": document.tolist()} for document in documents]
    whole = told_by == "all"
    collate = DataCollatorWithFlattening(
        return_tensors="pt",
        return_position_ids=told_by != "cu_seq_lens",
        return_flash_attn_kwargs=told_by != "position_ids",
        return_seq_idx=whole,
    )
    packed = {name: value for name, value in collate(rows).items() if name != "labels"}
    logits = model(**packed, use_cache=False).logits[0].split([len(document) for document in documents])
    for document, ours in zip(documents, logits, strict=True):
        torch.testing.assert_close(ours, model(document[None]).logits[0], **CLOSE)


def test_loss_is_the_shifted_cross_entropy(tiny):
    model, ids = tiny.build(), tiny.ids()
    labels = ids.clone()
    labels[0, :3] = -100
    out = model(ids, labels=labels)
    targets = labels[:, 1:].reshape(-1)
    by_token = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].reshape(-1, VOCAB), targets, ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(out.loss, by_token / (targets != -100).sum(), **CLOSE)
    many = model(ids, labels=labels, num_items_in_batch=torch.tensor(50)).loss
    torch.testing.assert_close(many, by_token / 50, **CLOSE)


def test_loss_takes_labels_that_are_shifted_already(tiny):
    model, ids = tiny.build(), tiny.ids()
    shifted = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:]
    ours = model(ids, labels=torch.zeros_like(ids), shift_labels=shifted.contiguous()).loss
    torch.testing.assert_close(ours, model(ids, labels=ids).loss, **CLOSE)


def test_embeddings_can_be_read_and_replaced(tiny):
    for base in (True, False):
        model = tiny.build(base=base)
        table = torch.nn.Embedding(10, HIDDEN)
        model.set_input_embeddings(table)
        assert model.get_input_embeddings() is table
    head = torch.nn.Linear(HIDDEN, 10, bias=False)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head
    assert model(torch.tensor([[1, 2, 4]])).logits.shape == (1, 3, 10)


def test_every_tensor_of_a_module_is_a_parameter_or_buffer(tiny):
    model = tiny.build()
    model(tiny.ids())
    known = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            assert not isinstance(value, torch.Tensor) or id(value) in known, f"{name}.{attribute}"


@only(*WITH_VISION)
def test_image_features_take_the_placeholders_place(tiny):
    model, inputs = tiny.build(), tiny.images()
    logits = model(**inputs).logits
    assert logits.shape == (*inputs["input_ids"].shape, VOCAB)
    other = {**inputs, "pixel_values": inputs["pixel_values"].roll(1, 0)}
    assert not torch.allclose(model(**other).logits[:, -1], logits[:, -1], atol=1e-3)
    one = {**inputs, "input_ids": inputs["input_ids"][:1], "attention_mask": inputs["attention_mask"][:1]}
    with pytest.raises(ValueError):
        model(**one)
