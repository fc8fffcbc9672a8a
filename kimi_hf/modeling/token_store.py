"""Tensors that grow along time without being copied for every token, and that several caches may share."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import CacheError

FIRST_CAPACITY = 64
GROUP = 64
# Stored codes: dtype of the bytes, dtype they are read as, largest code.
CODES = {
    "int8": (torch.int8, torch.int8, 127.0),
    "float8_e4m3fn": (torch.uint8, torch.float8_e4m3fn, 448.0),
}


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once, spare room included."""
    storages = {}
    for x in tensors:
        storage = x.untyped_storage()
        storages[x.device, storage.data_ptr() or id(x)] = storage.nbytes()
    return sum(storages.values())


def out_of_inference_mode(x: Tensor) -> Tensor:
    """`x`, or a copy if it was made under `torch.inference_mode` and that has ended: it could not be written or saved."""
    return x.clone() if x.is_inference() and not torch.is_inference_mode_enabled() else x


class TokenStore:
    """Tensors (B, heads, S, width_i) that grow together along S.

    Each is a view into a buffer that doubles when it is full, so an append copies the new tokens only. While gradients
    are recorded it concatenates instead. A fork looks at the same buffers; nothing that a fork sees is written again.

    Args:
        tensors: what is held at first, (B, heads, S, width_i) each; S may be 0.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self.views = list(tensors)
        self._buffers: list[Tensor] | None = None
        self._protected = 0
        self.shared = False

    @property
    def length(self) -> int:
        return self.views[0].shape[2]

    @property
    def rows(self) -> int:
        return self.views[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.views[0].device

    def append(self, new: Sequence[Tensor]) -> None:
        """Add (B, heads, T, width_i) behind what is held."""
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*new, *self.views)):
            self._own([torch.cat(pair, dim=2) for pair in zip(self.views, new, strict=True)])
            return
        length = self.length
        total = length + new[0].shape[2]
        if not self._writable() or self._buffers[0].shape[2] < total or length < self._protected:
            self._grow(total)
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, length:total] = x
        self.views = [buffer[:, :, :total] for buffer in self._buffers]

    def _writable(self) -> bool:
        """Whether there are buffers, and none that only `torch.inference_mode` may write."""
        return self._buffers is not None and (torch.is_inference_mode_enabled() or not self._buffers[0].is_inference())

    def _grow(self, total: int) -> None:
        """Move to buffers of our own with room for `total` tokens at least."""
        length, buffers = self.length, []
        for x in self.views:
            buffer = x.new_empty(*x.shape[:2], capacity(total), x.shape[3])
            buffer[:, :, :length] = x.detach()
            buffers.append(buffer)
        self._buffers, self._protected, self.shared = buffers, 0, False

    def _own(self, tensors: list[Tensor]) -> None:
        self.views, self._buffers, self._protected, self.shared = tensors, None, 0, False

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.views = [x[:, :, :length] for x in self.views]

    def map(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `function` of it, which makes a copy and leaves S alone. Room to grow stays."""
        if self._buffers is None:
            self._own([function(x) for x in self.views])
            return
        length, buffers = self.length, [function(x) for x in self._buffers]
        self._own([x[:, :, :length] for x in buffers])
        self._buffers = buffers

    def move(self, device: torch.device | str) -> None:
        """Take what is held, without spare room, to another device."""
        self._own([x.to(device, non_blocking=True) for x in self.views])

    def fork(self) -> "TokenStore":
        """A store that looks at the same tokens; both may go on independently."""
        other = TokenStore(self.views)
        self._protected = max(self._protected, self.length)
        self.shared = other.shared = True
        return other

    def nbytes(self) -> int:
        """Bytes allocated, spare room included."""
        return held_bytes(self._buffers or self.views)


def capacity(length: int) -> int:
    """How many tokens a buffer has room for when it holds `length`: the next power of two, 64 at least."""
    return max(FIRST_CAPACITY, 1 << max(length - 1, 0).bit_length())


def group_size(width: int) -> int:
    """How many channels share one scale."""
    return GROUP if width % GROUP == 0 else width


def encode(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Round to 8 bits with one fp32 scale per token and group of channels: code = round(x / s), s = max|x| / largest.

    Error per entry: int8 at most s / 2 = max|x| / 254 over its group; float8_e4m3fn at most |x| / 16 (s / 1024 near 0).

    Args:
        x: (..., width). kind: a key of `CODES`.
    Returns:
        codes (..., width) int8 or uint8; scales (..., width / group) fp32.
    """
    stored, read, largest = CODES[kind]
    groups = x.detach().float().unflatten(-1, (-1, group_size(x.shape[-1])))
    peak = groups.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(peak > 0, peak / largest, 1.0)
    ratio = (groups / scale).clamp(-largest, largest)
    codes = ratio.round().to(stored) if kind == "int8" else ratio.to(read).view(stored)
    return codes.flatten(-2), scale[..., 0]


def decode(codes: Tensor, scales: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """What `encode` gave, back as (..., width) of `dtype`."""
    wide = codes.view(CODES[kind][1]).float().unflatten(-1, (scales.shape[-1], -1))
    return (wide * scales[..., None]).flatten(-2).to(dtype)


def check_kind(kind: str | None) -> str | None:
    """`kind` if it names a way to store latents.

    Raises:
        CacheError: it does not.
    """
    if kind is not None and kind not in CODES:
        raise CacheError(f"latent_dtype is {kind!r}, expected None (as computed) or one of {sorted(CODES)}")
    return kind
