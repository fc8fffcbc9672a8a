"""Where each image's patches lie in the flat patch sequence: read once per forward, checked once.

All images of a batch travel through the tower as one sequence of N patches. Everything but attention and positions
treats a patch alone; those two need to know where an image begins, and how large it is.
"""

from dataclasses import dataclass

import torch

from ...errors import MediaError, ShapeError

# Column and row angles of the released rotary embedding are tabulated this far.
MAX_PATCHES_PER_SIDE = 512


@dataclass(frozen=True)
class MediaLayout:
    """Sizes and places of M images (or clips) in a flat sequence of N patches.

    grids: (t, h, w) of every image, in patches. lengths: t * h * w. runs: neighbouring images of equal length as
    (first patch, number of images, patches per image), which is how attention batches them.
    """

    grids: tuple[tuple[int, int, int], ...]
    lengths: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]

    @property
    def num_patches(self) -> int:
        return sum(self.lengths)

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """Image boundaries (M + 1,) int32, as variable-length attention kernels take them."""
        return torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    def tokens_per_image(self, merge_kernel_size: tuple[int, int] | list[int]) -> list[int]:
        """Feature rows of each image after merging: h * w / (kernel area), whatever the number of frames."""
        rows, columns = merge_kernel_size
        return [(h // rows) * (w // columns) for _, h, w in self.grids]


def image_name(index: int, total: int) -> str:
    """How messages call an image: counted from 1 for people, with the row for programmers."""
    return f"image {index + 1} of {total} (grid_thws row {index})"


def read_layout(
    grid_thws: torch.Tensor,
    *,
    num_patches: int | None = None,
    max_frames: int,
    merge_kernel_size: tuple[int, int] | list[int],
) -> MediaLayout:
    """Check `grid_thws` and turn it into a `MediaLayout`.

    Args:
        grid_thws: (M, 3) integers, rows (t, h, w) in patches. Also a list of triples.
        num_patches: rows of `pixel_values`, checked against the sum of t * h * w when given.
        max_frames: the most frames a clip may have (`init_pos_emb_time`).
        merge_kernel_size: (rows, columns) that become one token; h and w must be multiples.

    Raises:
        ShapeError: not an (M, 3) integer tensor, or the patches do not add up.
        MediaError: an image whose grid the tower cannot take; the message says which one.
    """
    grids = _triples(grid_thws)
    for index, grid in enumerate(grids):
        _check_grid(grid, image_name(index, len(grids)), max_frames, merge_kernel_size)
    lengths = tuple(t * h * w for t, h, w in grids)
    if num_patches is not None and sum(lengths) != num_patches:
        raise ShapeError(
            f"pixel_values holds {num_patches} patches, but grid_thws asks for {sum(lengths)} "
            f"({len(grids)} images of {', '.join(map(str, lengths)) or 'no'} patches); "
            "pass both as the image processor returned them"
        )
    return MediaLayout(grids, lengths, _runs(lengths))


def _triples(grid_thws: torch.Tensor | list) -> tuple[tuple[int, int, int], ...]:
    if not isinstance(grid_thws, torch.Tensor):
        grid_thws = torch.as_tensor(grid_thws)
        if grid_thws.numel() == 0:
            grid_thws = grid_thws.reshape(0, 3).long()
    if grid_thws.dim() != 2 or grid_thws.shape[1] != 3:
        raise ShapeError(
            f"grid_thws must have shape (images, 3) with rows (t, h, w), got {tuple(grid_thws.shape)}; "
            "pass it as the image processor returned it"
        )
    if grid_thws.is_floating_point() or grid_thws.is_complex() or grid_thws.dtype == torch.bool:
        raise ShapeError(f"grid_thws must be integer patch counts, got {grid_thws.dtype}; cast it to int64")
    return tuple((int(t), int(h), int(w)) for t, h, w in grid_thws.tolist())


def _check_grid(grid: tuple[int, int, int], name: str, max_frames: int, merge_kernel_size) -> None:
    t, h, w = grid
    if min(grid) < 1:
        raise MediaError(f"{name}: grid (t, h, w) = {grid} is empty; every side needs at least one patch")
    if t > max_frames:
        raise MediaError(
            f"{name}: {t} frames, but the tower knows time positions for {max_frames}; cut the clip into pieces of at "
            f"most {max_frames} frames"
        )
    if max(h, w) > MAX_PATCHES_PER_SIDE:
        raise MediaError(
            f"{name}: {h} x {w} patches, but a side may have at most {MAX_PATCHES_PER_SIDE}; let the image processor "
            "resize it"
        )
    rows, columns = merge_kernel_size
    if h % rows or w % columns:
        raise MediaError(
            f"{name}: {h} x {w} patches cannot be merged {rows} x {columns}; pad the image so that h is a multiple of "
            f"{rows} and w of {columns}, as the image processor does"
        )


def _runs(lengths: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    runs: list[tuple[int, int, int]] = []
    start = 0
    for length in lengths:
        if runs and runs[-1][2] == length:
            first, count, _ = runs[-1]
            runs[-1] = (first, count + 1, length)
        else:
            runs.append((start, 1, length))
        start += length
    return tuple(runs)
