"""The parts of MoonViT3d, Kimi K3's vision tower: patches, positions, attention within an image, the encoder.

Letters: N patches of all images, M images, D width (`vt_hidden_size`), A heads of size d (`qkv_hidden_size` / A).
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from ...configuration.configuration_kimi_k3_vision import KimiK3VisionConfig
from .layout import MediaLayout
from .norm import VisionRMSNorm

ROTARY_BASE = 10000.0
TIME_BASE = 10000.0
# Neighbouring images of equal size share an attention call up to this many patches: small images then fill the
# machine, and large ones, which fill it alone, never multiply the memory of their scores.
MAX_PATCHES_PER_CALL = 8192


def rotary_angles(layout: MediaLayout, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (N, head_dim / 2) float32, of the 2-D rotary embedding.

    A head is head_dim / 2 pairs (2j, 2j + 1). With phi_i = 10000^(-4 i / head_dim), pair 2i turns by column * phi_i
    and pair 2i + 1 by row * phi_i, the same in every frame of a clip. Source: K3 specification 6.3.
    """
    exponent = torch.arange(0, head_dim, 4, dtype=torch.float32, device=device) / head_dim
    phi = 1.0 / (ROTARY_BASE**exponent)  # [d/4]
    angles: dict[tuple[int, int], torch.Tensor] = {}
    for _, h, w in layout.grids:
        if (h, w) not in angles:
            columns = torch.arange(w, dtype=torch.float32, device=device)[None, :, None] * phi
            rows = torch.arange(h, dtype=torch.float32, device=device)[:, None, None] * phi
            pairs = torch.stack((columns.expand(h, w, -1), rows.expand(h, w, -1)), -1)  # [h, w, d/4, 2]
            angles[h, w] = pairs.reshape(h * w, -1)
    per_item = [angles[h, w].repeat(t, 1) for t, h, w in layout.grids]
    flat = torch.cat(per_item) if per_item else torch.zeros(0, head_dim // 2, device=device)
    return flat.cos(), flat.sin()


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the consecutive pairs of x (N, A, d) by the given angles (N, d / 2), in float32, cast back to x.dtype."""
    even, odd = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return turned.flatten(-2).to(x.dtype)


def time_embedding(frames: int, size: int, device: torch.device) -> torch.Tensor:
    """Fixed time table (frames, size) float32: row tau = [sin(tau w_i) | cos(tau w_i)], w_i = 10000^(-i / (size/2)).

    Row 0 is (0 ... 0, 1 ... 1), so a still image, which has no time, must not get it.
    """
    half = size // 2
    omega = 1.0 / (TIME_BASE ** (torch.arange(half, dtype=torch.float32, device=device) / half))
    angle = torch.arange(frames, dtype=torch.float32, device=device)[:, None] * omega
    return torch.cat((angle.sin(), angle.cos()), -1)


class LearnedPositions(nn.Module):
    """The learned (rows, columns, D) position grid, resized to each image, plus the fixed time table for clips."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        self.mode = config.pos_emb_interpolation_mode
        shape = (config.init_pos_emb_height, config.init_pos_emb_width, config.vt_hidden_size)
        self.weight = nn.Parameter(torch.empty(shape))
        nn.init.normal_(self.weight, std=config.initializer_range)

    def resized(self, h: int, w: int) -> torch.Tensor:
        """Positions of an (h, w) image, (h * w, D) row by row: half-pixel centres, no antialiasing."""
        weight = self.weight
        if (h, w) != weight.shape[:2]:
            planes = F.interpolate(weight.permute(2, 0, 1)[None], size=(h, w), mode=self.mode, align_corners=False)
            weight = planes[0].permute(1, 2, 0)
        return weight.flatten(0, 1)

    def forward(self, layout: MediaLayout) -> torch.Tensor:
        """Position embeddings of all patches, (N, D) in the parameter's dtype."""
        dtype, device, size = self.weight.dtype, self.weight.device, self.weight.shape[-1]
        resized: dict[tuple[int, int], torch.Tensor] = {}
        items = []
        for t, h, w in layout.grids:
            if (h, w) not in resized:
                resized[h, w] = self.resized(h, w)
            place = resized[h, w]
            if t > 1:
                time = time_embedding(t, size, device).to(dtype)
                place = (place[None] + time[:, None]).flatten(0, 1)  # [t, h*w, D] -> [t*h*w, D]
            items.append(place)
        return torch.cat(items) if items else self.weight.new_zeros(0, size)


class MoonViTPatchEmbed(nn.Module):
    """Linear embedding of the patches, plus where they are."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        side = config.patch_size
        self.proj = nn.Conv2d(
            3, config.vt_hidden_size, kernel_size=side, stride=side, bias=config.patch_embed_proj_bias
        )
        self.pos_emb = LearnedPositions(config)

    def forward(self, pixel_values: torch.Tensor, layout: MediaLayout) -> torch.Tensor:
        """pixel_values (N, 3, P, P) -> (N, D)."""
        return self.proj(pixel_values).flatten(1) + self.pos_emb(layout)


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,
    scaling: float = 1.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention written out: (B, A, L, d) -> context (B, L, A, d) and weights (B, A, L, L).

    Softmax in float32, weights cast to the input dtype. No mask: everything in the call belongs to one image each.
    """
    scores = query @ key.transpose(2, 3) * scaling
    compute = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=compute).to(query.dtype)
    return (weights @ value).transpose(1, 2), weights


class ItemAttention(nn.Module):
    """Full attention among the patches of one image, never across images. Holds no parameters.

    No mask is built. Flash attention gets the boundaries; every other implementation of transformers' attention
    interface is called once per run of neighbouring equal-sized images.
    """

    is_causal = False
    num_key_value_groups = 1

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        self.config = config
        self.scaling = config.head_dim**-0.5

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: MediaLayout
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
        """query, key, value (N, A, d) -> context (N, A * d), and per image the weights (A, L, L) if there are any."""
        if layout.num_patches == 0:
            return value.flatten(1), None
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        if is_flash_attention_requested(self.config):
            return self._attend_packed(attend, query, key, value, layout), None
        contexts, weights = [], []
        for first, items, length in _calls(layout):
            q, k, v = (
                x[first : first + items * length].unflatten(0, (items, length)).transpose(1, 2)  # [items, A, L, d]
                for x in (query, key, value)
            )
            context, probabilities = attend(self, q, k, v, None, scaling=self.scaling, dropout=0.0, is_causal=False)
            contexts.append(context.flatten(2).flatten(0, 1))
            weights.extend(() if probabilities is None else probabilities.unbind(0))
        return (contexts[0] if len(contexts) == 1 else torch.cat(contexts)), tuple(weights) or None

    def _attend_packed(self, attend, query, key, value, layout: MediaLayout) -> torch.Tensor:
        bounds, longest = layout.cu_seqlens(query.device), max(layout.lengths)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))  # [1, A, N, d]
        context, _ = attend(
            self,
            q,
            k,
            v,
            None,
            scaling=self.scaling,
            dropout=0.0,
            is_causal=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=longest,
            max_length_k=longest,
        )
        return context[0].flatten(1)


def _calls(layout: MediaLayout):
    """(first patch, images, patches per image) of each attention call: the layout's runs, cut where they get long."""
    for first, count, length in layout.runs:
        most = max(1, MAX_PATCHES_PER_CALL // length)
        for done in range(0, count, most):
            yield first + done * length, min(most, count - done), length


class MoonViTMLP(nn.Module):
    """fc1(gelu_tanh(fc0(x)))."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        self.fc0 = nn.Linear(config.vt_hidden_size, config.vt_intermediate_size, bias=config.linear_bias)
        self.fc1 = nn.Linear(config.vt_intermediate_size, config.vt_hidden_size, bias=config.linear_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fc1(F.gelu(self.fc0(hidden_states), approximate="tanh"))


class MoonViTBlock(GradientCheckpointingLayer):
    """x <- x + wo(attention(norm0(x))); x <- x + mlp(norm1(x))."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        self.num_heads = config.vt_num_attention_heads
        self.norm0 = VisionRMSNorm(config.vt_hidden_size)
        self.norm1 = VisionRMSNorm(config.vt_hidden_size)
        self.wqkv = nn.Linear(config.vt_hidden_size, 3 * config.qkv_hidden_size, bias=config.attn_bias)
        self.wo = nn.Linear(config.qkv_hidden_size, config.vt_hidden_size, bias=config.attn_bias)
        self.attention = ItemAttention(config)
        self.mlp = MoonViTMLP(config)

    def forward(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: MediaLayout
    ) -> torch.Tensor:
        """hidden_states (N, D), cos and sin (N, d / 2) float32 -> (N, D)."""
        qkv = self.wqkv(self.norm0(hidden_states)).unflatten(-1, (3, self.num_heads, -1))  # [N, 3, A, d]
        query, key, value = qkv.unbind(1)
        context, _ = self.attention(rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin), value, layout)
        hidden_states = hidden_states + self.wo(context)
        return hidden_states + self.mlp(self.norm1(hidden_states))


class MoonViTEncoder(nn.Module):
    """The blocks and the norm after them."""

    def __init__(self, config: KimiK3VisionConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.blocks = nn.ModuleList(MoonViTBlock(config) for _ in range(config.vt_num_hidden_layers))
        self.final_layernorm = VisionRMSNorm(config.vt_hidden_size)

    def forward(self, hidden_states: torch.Tensor, layout: MediaLayout) -> torch.Tensor:
        """(N, D) -> (N, D), normalised."""
        cos, sin = rotary_angles(layout, self.head_dim, hidden_states.device)
        for block in self.blocks:
            hidden_states = block(hidden_states, cos, sin, layout)
        return self.final_layernorm(hidden_states)


def merge_patches(
    hidden_states: torch.Tensor, layout: MediaLayout, merge_kernel_size: tuple[int, int] | list[int]
) -> list[torch.Tensor]:
    """sd2_tpool: average an image over its frames, then lay each kernel of neighbouring patches side by side.

    hidden_states (N, D) -> per image (h/kh * w/kw, kh * kw, D); tokens and the patches in one are row by row.
    """
    rows, columns = merge_kernel_size
    merged = []
    for (t, h, w), item in zip(layout.grids, hidden_states.split(layout.lengths), strict=True):
        cells = item.unflatten(0, (t, h // rows, rows, w // columns, columns)).mean(0)  # [h/kh, kh, w/kw, kw, D]
        merged.append(cells.transpose(1, 2).flatten(2, 3).flatten(0, 1))
    return merged
