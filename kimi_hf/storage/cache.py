"""A cache of experts with a limit in bytes: least recently used, by forwards of a layer, shared evenly between layers.

A decoder visits its layers in a circle, and a layer's experts in rising order. One queue that is smaller than such a
circle drops everything just before it is asked for again, and never hits. So

- the layer that holds most gives up its oldest expert: layers get equal shares, and a layer that is alone everything;
- within a layer, what the running forward has asked for or will ask for is not dropped for what it asks for now: if all
  that is held is wanted, the newcomer is used and not kept.

With room for all this is the plain rule.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from threading import Lock

import torch


class ExpertCache:
    """Tensors by (layer, expert). May be used from several threads.

    `limit` bounds the bytes of what is kept; a single tensor above it is not kept at all.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.nbytes = 0
        self._layers: OrderedDict[int, OrderedDict[int, torch.Tensor]] = OrderedDict()  # last used last, both
        self._wanted: dict[int, frozenset[int]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return sum(len(layer) for layer in self._layers.values())

    def begin(self, layer: int, experts: Iterable[int]) -> None:
        """Say which experts the next forward of a layer will ask for."""
        with self._lock:
            self._wanted[layer] = frozenset(experts)
            held = self._layers.setdefault(layer, OrderedDict())
            self._layers.move_to_end(layer)
            for expert in [expert for expert in held if expert in self._wanted[layer]]:
                held.move_to_end(expert)

    def get(self, layer: int, expert: int) -> torch.Tensor | None:
        """The expert's tensor if it is kept."""
        with self._lock:
            return self._layers.get(layer, {}).get(expert)

    def make_room(self, layer: int, nbytes: int) -> bool:
        """Drop until `nbytes` more fit; called before reading, so that old and new never add up.

        Returns: False if nothing may be dropped for an expert of this layer; it should be used and let go.
        """
        with self._lock:
            return self._drop(layer, nbytes)

    def put(self, layer: int, expert: int, tensor: torch.Tensor) -> None:
        """Keep a tensor if there is room, or can be made."""
        with self._lock:
            held = self._layers.setdefault(layer, OrderedDict())
            if expert not in held and self._drop(layer, tensor.nbytes):
                held[expert] = tensor
                self.nbytes += tensor.nbytes

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._layers.clear()
            self.nbytes = 0

    def _drop(self, layer: int, nbytes: int) -> bool:
        """Make room for a newcomer of `layer`, which counts as held already; between equals the layer used last gives."""
        if nbytes > self.limit:
            return False
        while self.nbytes + nbytes > self.limit:
            most, victim = 0, layer
            for candidate, held in self._layers.items():
                count = len(held) + (candidate == layer)
                if held and count >= most:
                    most, victim = count, candidate
            held = self._layers[victim]
            oldest = next(iter(held))
            if victim == layer and oldest in self._wanted.get(layer, ()):
                return False  # wanted ones stand last, so all are
            self.nbytes -= held.pop(oldest).nbytes
        return True
