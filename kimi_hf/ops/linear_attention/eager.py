"""Linear attention in plain PyTorch: chunks as batched matrix products, with a hand-written backward.

The normaliser rides along as one more value column: with v' = [v, 1] and S' = [S, z], S'^T f(q) holds the numerator and
the divisor, so the recurrence is S' <- S' + f(k) v'^T whether or not the result is divided.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import elu

from kimi_hf.ops import checks
from kimi_hf.ops.autocast import no_autocast
from kimi_hf.ops.delta_rule.chunked import forward_outputs
from kimi_hf.ops.delta_rule.pairs import Work
from kimi_hf.ops.delta_rule.steps import steps_serve
from kimi_hf.ops.delta_rule.tiles import Group, Tile, chunk_length, plan, spans_of
from kimi_hf.ops.registered import registered


def linear_attention_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool,
    initial_state: tuple[Tensor, Tensor] | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    inplace_state: bool,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """See `kimi_hf.ops.linear_attention.linear_attention`."""
    state = () if initial_state is None else initial_state
    if steps_serve(q.shape[1], cu_seqlens, q, k, v, *state):
        o, final = _steps(q, k, v, normalize, initial_state, inplace_state)
        return o, final if output_final_state or inplace_state else None
    joined = None if initial_state is None else torch.cat([state[0], state[1].unsqueeze(-1)], -1)
    keep = checks.needs_gradient(q, k, v, joined)
    o, final, _ = _chunked(q, k, v, joined, cu_seqlens, normalize, keep)
    if not (output_final_state or inplace_state):
        return o, None
    final = (final[..., :-1], final[..., -1])
    if inplace_state:
        final = tuple(old.copy_(new) for old, new in zip(state, final, strict=True))
    return o, final


def _steps(q, k, v, normalize, initial_state, inplace):
    """Token by token, without gradients; the state is copied at most once."""
    dtype = checks.compute_dtype(q.dtype)
    queries, keys, values = _feature(q, dtype), _feature(k, dtype), v.to(dtype)
    B, T, H, K = q.shape
    if initial_state is None:
        S, z = values.new_zeros(B, H, K, v.shape[-1]), values.new_zeros(B, H, K)
    else:
        S, z = initial_state if inplace else (x.clone() for x in initial_state)
    outputs = []
    for t in range(T):
        S.addcmul_(keys[:, t, ..., None], values[:, t, :, None])
        z.add_(keys[:, t])
        o = (queries[:, t, :, None] @ S).squeeze(2)
        outputs.append(o / (queries[:, t] * z).sum(-1, keepdim=True) if normalize else o)
    return torch.stack(outputs, 1).to(v.dtype), (S, z)


def _feature(x: Tensor, dtype: torch.dtype) -> Tensor:
    return elu(x.to(dtype)).add_(1)


def _forward(q, k, v, initial_state, cu_seqlens, normalize, keep):
    groups, work = _plan(q, v, cu_seqlens)
    o, final, kept = _outputs(q, v, cu_seqlens, keep)
    if initial_state is None:
        final.zero_()
    else:
        final.copy_(initial_state)
    row = 0
    with no_autocast(q):
        for group in groups:
            S = final[group.sequences, group.heads].flatten(0, 1)
            for tile in group.tiles:
                active = S[: tile.lanes]
                if keep:
                    kept[row : row + tile.lanes] = active
                    row += tile.lanes
                queries, keys, values = _load(tile, q, k, v, work)
                out = _scan(queries, keys, values, active, work)
                out = out[..., :-1] / out[..., -1:] if normalize else out[..., :-1]
                tile.put(o, out.unflatten(1, (tile.sequences, tile.num_heads)))
            final[group.sequences, group.heads] = S.unflatten(0, (len(group.sequences), -1))
    return o, final, kept


def _backward(q, k, v, cu_seqlens, normalize, kept, grad_o, grad_final):
    groups, work = _plan(q, v, cu_seqlens)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    grad_state = grad_final.clone(memory_format=torch.contiguous_format)
    row = 0
    with no_autocast(q):
        for group in groups:
            starts = []
            for tile in group.tiles:
                starts.append(kept[row : row + tile.lanes])
                row += tile.lanes
            Z = grad_state[group.sequences, group.heads].flatten(0, 1)
            for tile, S in zip(reversed(group.tiles), reversed(starts), strict=True):
                queries, keys, values = _load(tile, q, k, v, work)
                grad_out = _grad_out(tile, grad_o, queries, keys, values, S, normalize, work)
                tile_grads = _scan_backward(queries, keys, values, S, grad_out, Z[: tile.lanes], work)
                # f'(x) is f(x) where x < 0 and 1 elsewhere: the smaller of f(x) and 1.
                tile_grads[0].mul_(queries.clamp(max=1))
                tile_grads[1].mul_(keys.clamp(max=1))
                for target, grad in zip(grads, tile_grads, strict=True):
                    grad = grad[..., : target.shape[-1]]
                    tile.put(target, grad.unflatten(1, (tile.sequences, tile.num_heads)))
            grad_state[group.sequences, group.heads] = Z.unflatten(0, (len(group.sequences), -1))
    return *grads, grad_state


def _fake(q, k, v, initial_state, cu_seqlens, normalize, keep):
    return _outputs(q, v, cu_seqlens, keep)


def _backward_fake(q, k, v, cu_seqlens, normalize, kept, grad_o, grad_final):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, grad_final))


def _remember(ctx, inputs, output):
    q, k, v, initial_state, cu_seqlens, normalize, _ = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, output[2])
    ctx.normalize, ctx.has_state = normalize, initial_state is not None
    ctx.mark_non_differentiable(output[2])


def _differentiate(ctx, backward, grad_o, grad_final, _):
    q, k, v, cu_seqlens, kept = ctx.saved_tensors
    *grads, grad_state = backward(q, k, v, cu_seqlens, ctx.normalize, kept, grad_o, grad_final)
    return *grads, grad_state if ctx.has_state else None, None, None, None


# The states at the start of each tile are kept for the backward pass, which recomputes the tiles from them.
_chunked = registered(
    "kimi_hf::linear_attention_chunked",
    schema="(Tensor q, Tensor k, Tensor v, Tensor? initial_state, Tensor? cu_seqlens, bool normalize, bool keep)"
    " -> (Tensor, Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    backward_schema="(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, bool normalize, Tensor kept, Tensor grad_o,"
    " Tensor grad_final) -> (Tensor, Tensor, Tensor, Tensor)",
    backward=_backward,
    backward_fake=_backward_fake,
    remember=_remember,
    differentiate=_differentiate,
)


def _plan(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> tuple[list[Group], Work]:
    """The tiles and scratch memory."""
    bounds = None if cu_seqlens is None else checks.sequence_bounds("linear_attention", cu_seqlens, q.shape[1])
    spans = spans_of(q.shape[0], q.shape[1], bounds)
    groups = plan(spans, q.shape[2], max(q.shape[3], v.shape[3] + 1), chunk_length(spans), q.device)
    return list(groups), Work(q, checks.compute_dtype(q.dtype))


def _outputs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised o, final state [N, H, K, V + 1] and kept states."""
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return forward_outputs(q, v, checks.compute_dtype(q.dtype), sequences, keep, extra=1)


def _load(tile: Tile, q: Tensor, k: Tensor, v: Tensor, work: Work) -> tuple[Tensor, Tensor, Tensor]:
    """f(q), f(k) [rounds, lanes, C, K] and [v, 1] [rounds, lanes, C, V + 1]; keys are zero at padding."""
    shape = (tile.rounds, tile.lanes, tile.chunk)
    dtype = checks.compute_dtype(q.dtype)
    queries, keys = _feature(tile.take(q), dtype), _feature(tile.take(k), dtype)
    if tile.padding is not None:
        keys.masked_fill_(tile.padding[..., None], 0)
    values = work.get("values", *shape, v.shape[-1] + 1)
    values[..., :-1] = tile.take(v).reshape(*shape, -1)
    values[..., -1] = 1
    return queries.reshape(*shape, -1), keys.reshape(*shape, -1), values


def _scan(q: Tensor, k: Tensor, v: Tensor, S: Tensor, work: Work) -> Tensor:
    """[rounds, lanes, C, V + 1] = S^T f(q) per token; S [lanes, K, V + 1] advances in place."""
    out = work.get("out", *v.shape)
    for c in range(q.shape[0]):
        products = torch.bmm(q[c], k[c].transpose(1, 2)).tril_()
        torch.bmm(products, v[c], out=out[c])
        out[c].baddbmm_(q[c], S)
        S.baddbmm_(k[c].transpose(1, 2), v[c])
    return out


def _grad_out(tile, grad_o, q, k, v, S, normalize, work) -> Tensor:
    """Gradient of [numerator, divisor] from the gradient of their quotient (or of the numerator alone)."""
    grad = tile.take(grad_o).reshape(*v.shape[:3], -1).to(v.dtype)
    if not normalize:
        return torch.cat([grad, torch.zeros_like(grad[..., :1])], -1)
    out = _scan(q, k, v, S.clone(), work)
    numerator, divisor = out[..., :-1], out[..., -1:]
    grad = grad / divisor
    return torch.cat([grad, -(grad * numerator).sum(-1, keepdim=True) / divisor], -1)


def _scan_backward(q, k, v, S, grad, Z, work) -> list[Tensor]:
    """Gradients of q, k, v of `_scan`; Z, the gradient of the state, goes back in place to before the tile."""
    n = q.shape[0]
    states = work.get("states", n, *S.shape)
    states[0] = S
    for c in range(n - 1):
        torch.baddbmm(states[c], k[c].transpose(1, 2), v[c], out=states[c + 1])
    grads = [work.get(f"grad_{name}", *x.shape) for name, x in (("q", q), ("k", k), ("v", v))]
    for c in reversed(range(n)):
        products = torch.bmm(q[c], k[c].transpose(1, 2)).tril_()
        grad_products = torch.bmm(grad[c], v[c].transpose(1, 2)).tril_()
        torch.bmm(grad_products, k[c], out=grads[0][c]).baddbmm_(grad[c], states[c].transpose(1, 2))
        torch.bmm(grad_products.transpose(1, 2), q[c], out=grads[1][c]).baddbmm_(v[c], Z.transpose(1, 2))
        torch.bmm(products.transpose(1, 2), grad[c], out=grads[2][c]).baddbmm_(k[c], Z)
        Z.baddbmm_(q[c].transpose(1, 2), grad[c])
    return grads
