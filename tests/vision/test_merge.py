import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_hf.errors import MediaError, ShapeError
from kimi_hf.modeling.vision import expand_placeholders, merge_media

AT, PAD = 160, 0  # placeholder and padding ids of the tiny checkpoint


def features(counts, size=4, dtype=torch.float32):
    return [torch.randn(n, size, dtype=dtype) for n in counts]


def by_hand(ids, embeds, mask, labels, media, left):
    """The definition, one token at a time."""
    rows, queue = [], list(media)
    for b in range(len(ids)):
        row = []
        for t, token in enumerate(ids[b].tolist()):
            if token == AT:
                row += [(f, 1, -100) for f in queue.pop(0)]
            else:
                embed = torch.zeros_like(embeds[b, t]) if token == PAD else embeds[b, t]
                row.append((embed, int(mask[b, t]), int(labels[b, t])))
        rows.append(row)
    length = max(map(len, rows))
    filler = (torch.zeros(embeds.shape[2], dtype=embeds.dtype), 0, -100)
    full = [[filler] * (length - len(r)) + r if left else r + [filler] * (length - len(r)) for r in rows]
    return (
        torch.stack([torch.stack([cell[0] for cell in row]) for row in full]),
        torch.tensor([[cell[1] for cell in row] for row in full]),
        torch.tensor([[cell[2] for cell in row] for row in full]),
    )


@pytest.mark.parametrize("form", ["", "_expanded"])
def test_single_row_golden(tiny, form):
    golden, ids = tiny.golden, tiny.golden[f"input_ids{form}"]
    media = [golden[f"projected.{i}"] for i in range(3)]
    out = merge_media(ids, tiny.embed[ids], None, None, media, AT, PAD)
    assert torch.equal(out.inputs_embeds[:, -1], tiny.embed[ids[:, -1]])
    assert (out.inputs_embeds - tiny.detail["inputs_embeds"]).abs().max() < 1e-5
    assert out.attention_mask.all() and out.labels is None


@pytest.mark.parametrize("form", ["", "_expanded"])
def test_left_padded_batch_golden(tiny, form):
    detail, ids = tiny.detail, tiny.detail[f"batch.input_ids{form}"]
    mask = detail[f"batch.attention_mask{form}"]
    with torch.no_grad():
        media = tiny.projector(tiny.tower(detail["batch.pixel_values"], detail["batch.grid_thws"]).pooler_output)
    out = merge_media(ids, tiny.embed[ids], mask, ids, media, AT, PAD)
    assert (out.inputs_embeds - detail["batch.merged_embeds"]).abs().max() < 1e-5
    assert torch.equal(out.attention_mask, detail["batch.merged_mask"])
    assert torch.equal(out.position_ids, detail["batch.merged_position_ids"])
    expanded = detail["batch.input_ids_expanded"]
    assert torch.equal(out.labels, expanded.masked_fill(expanded == AT, -100))


def test_token_expansion_golden(tiny):
    detail = tiny.detail
    grids = detail["batch.grid_thws"]
    counts = (grids[:, 1] * grids[:, 2] // 4).tolist()
    out = expand_placeholders(detail["batch.input_ids"], counts, AT, PAD, attention_mask=detail["batch.attention_mask"])
    assert torch.equal(out.input_ids, detail["batch.input_ids_expanded"])
    assert torch.equal(out.attention_mask, detail["batch.attention_mask_expanded"])
    again = expand_placeholders(out.input_ids, counts, AT, PAD, attention_mask=out.attention_mask)
    assert torch.equal(again.input_ids, out.input_ids)


def test_right_padded_rows_of_unequal_expansion_keep_their_features():
    """The case that the released code gets wrong."""
    ids = torch.tensor([[5, AT, 6, PAD, PAD], [7, AT, 8, AT, 9]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    embeds = torch.randn(2, 5, 4)
    media = features([2, 3, 2])
    out = merge_media(ids, embeds, mask, ids, media, AT, PAD)
    zero = torch.zeros(4)
    first = torch.stack([embeds[0, 0], *media[0], embeds[0, 2], zero, zero, zero, zero])
    second = torch.stack([embeds[1, 0], *media[1], embeds[1, 2], *media[2], embeds[1, 4]])
    assert torch.equal(out.inputs_embeds, torch.stack([first, second]))
    assert out.attention_mask.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1] * 8]
    assert out.position_ids.tolist() == [[0, 1, 2, 3, 1, 1, 1, 1], list(range(8))]
    assert out.labels.tolist()[0] == [5, -100, -100, 6, PAD, PAD, -100, -100]


@st.composite
def batches(draw):
    rows = draw(st.integers(1, 3))
    tokens = draw(st.integers(1, 7))
    left = draw(st.booleans())
    ids = torch.tensor(draw(st.lists(st.sampled_from([3, 5, AT]), min_size=rows * tokens, max_size=rows * tokens)))
    ids = ids.view(rows, tokens)
    mask = torch.ones_like(ids)
    for row in range(rows):
        pads = draw(st.integers(0, tokens - 1))
        where = slice(0, pads) if left else slice(tokens - pads, tokens)
        ids[row, where], mask[row, where] = PAD, 0
    counts = draw(st.lists(st.integers(1, 4), min_size=int((ids == AT).sum()), max_size=int((ids == AT).sum())))
    return ids, mask, counts, left


@settings(max_examples=60, deadline=None)
@given(batches())
def test_equals_the_definition_for_both_sides_and_both_forms(case):
    ids, mask, counts, left = case
    if not counts:
        return
    # A batch without padding is filled on the left, where generation wants it.
    left = left or bool(mask.all())
    embeds, labels, media = torch.randn(*ids.shape, 4), torch.randint(1, 9, ids.shape), features(counts)
    wanted, wanted_mask, wanted_labels = by_hand(ids, embeds, mask, labels, media, left)
    out = merge_media(ids, embeds, mask, labels, media, AT, PAD)
    assert torch.equal(out.inputs_embeds, wanted)
    assert torch.equal(out.attention_mask, wanted_mask)
    assert torch.equal(out.labels, wanted_labels)
    assert torch.equal(out.position_ids, (wanted_mask.cumsum(1) - 1).masked_fill(wanted_mask == 0, 1))

    tokens = expand_placeholders(ids, counts, AT, PAD, attention_mask=mask, labels=labels)
    assert torch.equal(tokens.attention_mask, wanted_mask) and torch.equal(tokens.labels, wanted_labels)
    # Embed the expanded tokens as the originals were, and merge them as they stand.
    spread = wanted.masked_fill((tokens.input_ids == AT)[..., None], 7.0)
    again = merge_media(tokens.input_ids, spread, tokens.attention_mask, None, media, AT, PAD)
    assert torch.equal(again.inputs_embeds, wanted) and torch.equal(again.attention_mask, wanted_mask)


def test_padding_side_is_read_from_the_mask_before_the_ids():
    embeds, media = torch.randn(2, 3, 4), features([2])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    ends_in_pad = torch.tensor([[PAD, 5, PAD], [5, AT, 6]])  # a real last token that happens to be the padding id
    assert merge_media(ends_in_pad, embeds, mask, None, media, AT, PAD).attention_mask.tolist()[0] == [0, 0, 1, 1]
    no_mask = merge_media(torch.tensor([[5, 6, PAD], [5, AT, 6]]), embeds, None, None, media, AT, PAD)
    assert no_mask.attention_mask.tolist()[0] == [1, 1, 1, 0]
    no_pads = merge_media(torch.tensor([[5, 6, 7], [5, AT, 6]]), embeds, None, None, media, AT, PAD)
    assert no_pads.attention_mask.tolist()[0] == [0, 1, 1, 1]
    assert merge_media(ends_in_pad, embeds, None, None, media, AT, None).inputs_embeds[0, 3].equal(embeds[0, 2])


def test_mask_of_a_continued_forward_keeps_its_past():
    ids, embeds = torch.tensor([[5, AT, 6], [AT, 7, 8]]), torch.randn(2, 3, 4)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    out = merge_media(ids, embeds, mask, None, features([2, 3]), AT, PAD)
    assert out.attention_mask.tolist() == [[0, 1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
    assert out.position_ids.tolist() == [[1, 1, 2, 3, 4], [2, 3, 4, 5, 6]]


def test_gradients_reach_text_and_features():
    ids = torch.tensor([[5, AT, 6, PAD], [AT, 7, AT, 8]])
    embeds = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    media = [f.requires_grad_() for f in features([2, 1, 3], dtype=torch.float64)]

    def merged(embeds, *media):
        return merge_media(ids, embeds, None, None, media, AT, PAD).inputs_embeds

    assert torch.autograd.gradcheck(merged, (embeds, *media))
    merged(embeds, *media).sum().backward()
    assert embeds.grad[0, 3].abs().sum() == 0 and embeds.grad[0, 1].abs().sum() == 0
    assert all(torch.equal(f.grad, torch.ones_like(f)) for f in media)


def test_no_media_passes_through():
    ids, embeds = torch.tensor([[PAD, 5, 6]]), torch.randn(1, 3, 4)
    out = merge_media(ids, embeds, torch.tensor([[0, 1, 1]]), ids, [], AT, PAD)
    assert out.inputs_embeds is embeds and out.labels is ids
    assert out.position_ids.tolist() == [[1, 0, 1]]
    assert merge_media(ids, embeds, None, None, [], AT, PAD).attention_mask.tolist() == [[1, 1, 1]]


def test_types_follow_mask_and_features():
    ids, mask = torch.tensor([[5, AT]]), torch.tensor([[True, True]])
    out = merge_media(ids, torch.randn(1, 2, 4), mask, None, features([2], dtype=torch.bfloat16), AT, PAD)
    assert out.inputs_embeds.dtype == torch.bfloat16 and out.attention_mask.dtype == torch.bool
    assert out.attention_mask.all()


@pytest.mark.parametrize(
    "ids, counts, words",
    [
        ([[5, AT, 6, 7]], [2, 3], "Image 2 of 2 has no placeholder"),
        ([[5, 6, 7, 8]], [2], "Image 1 of 1 has no placeholder"),
        ([[AT, 6, AT, 5, AT, 6]], [2, 2], "Placeholder 3, in row 0 at position 4, has no image"),
        ([[AT, 6, 5, 6]], [], "row 0 at position 0, has no image: pass pixel_values"),
        ([[AT, AT, 6, AT, AT, AT]], [2, 4], r"Image 2 of 2 has 4 feature rows.*row 0.*position 3\) are 3"),
        ([[5, AT, AT, 6], [7, AT, AT, AT]], [3, 2], "image 1 of 2 has 3 feature rows.*are 2; give the images in the"),
    ],
)
def test_mismatches_say_which_image(ids, counts, words):
    ids = torch.tensor(ids)
    with pytest.raises(MediaError, match=words):
        merge_media(ids, torch.randn(*ids.shape, 4), None, None, features(counts), AT, PAD)
    with pytest.raises(MediaError, match=words):
        expand_placeholders(ids, counts, AT, PAD)


def test_wrong_shapes():
    ids, embeds = torch.tensor([[5, AT]]), torch.randn(1, 2, 4)
    with pytest.raises(ShapeError, match="2-D mask"):
        merge_media(ids, embeds, torch.ones(1, 1, 2, 2), None, features([2]), AT, PAD)
    with pytest.raises(ShapeError, match=r"labels must have the shape of input_ids \(1, 2\)"):
        merge_media(ids, embeds, None, torch.ones(1, 3), features([2]), AT, PAD)
    with pytest.raises(ShapeError, match=r"image 1 of 1: features must have shape \(rows, 4\)"):
        merge_media(ids, embeds, None, None, features([2], size=5), AT, PAD)
    with pytest.raises(ShapeError, match="inputs_embeds must have shape"):
        merge_media(ids, embeds[:, :1], None, None, features([2]), AT, PAD)
    with pytest.raises(ShapeError, match=r"input_ids must have shape \(rows, tokens\)"):
        merge_media(ids[0], embeds, None, None, features([2]), AT, PAD)
