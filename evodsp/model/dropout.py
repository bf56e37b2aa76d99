"""Dropout of the model: which random numbers each layer uses, and how they reach the device.

A layer's mask is a function of its address: seed, sample, recycling iteration, stack, block, layer. On the host a module
names the streams of its layers (`dropout_streams`). `DropoutKeys.of` sends the keys of all layers of a pass to the device in
one copy. No draw depends on a number in the program: a captured graph draws anew when its keys are overwritten. A stack draws
the masks of all its blocks together and gives each block its masks by the name of the layer.

Shape legend: B batch (in the template stack: samples x templates), n1 n2 the axes of a representation, one of them perhaps a
shard, c channels, e elements of a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from evodsp.model.kernels import chunked
from evodsp.model.kernels.chunked import draw_masks
from evodsp.model.kernels.operators import Kernels
from evodsp.model.primitives import Computed
from evodsp.model.sharded import Dropped, Update
from evodsp.parallel.collectives import DIMENSION, Axis
from evodsp.rng import Draws

Path = tuple[str | int, ...]
"""Names that lead from a module to one of its dropout layers, e.g. ("block", 3, "row_attention")."""

Streams = dict[Path, list[Draws]]
"""The random streams of a module's dropout layers, one per entry of the batch."""

Masks = Mapping[str, Tensor]
"""The masks of a block's layers by name, each [B, e], or the keys [B] to draw them from; empty: no dropout."""

NO_MASKS: Masks = MappingProxyType({})


class DropoutKeys:
    """Keys of the random streams of a module's dropout layers, on the device. Without keys there is no dropout."""

    def __init__(self, flat: Int64[Tensor, " n"] | None, places: Mapping[Path, slice]) -> None:
        """`flat`: the keys of all layers of a pass; None: no dropout. `places`: position of each layer's keys in `flat`."""
        self.flat, self._places = flat, places

    @classmethod
    def of(cls, streams: Streams, device: torch.device | None = None) -> DropoutKeys:
        """Send the keys of `streams` to the device in one copy, without waiting for it."""
        keys: list[int] = []
        places: dict[Path, slice] = {}
        for path, own in streams.items():
            places[path] = slice(len(keys), len(keys) + len(own))
            keys += [stream.signed_key() for stream in own]
        if not keys:
            return NO_DROPOUT
        host = torch.tensor(keys, dtype=torch.int64)
        if device is not None and device.type == "cuda":
            host = host.pin_memory()
        return cls(host.to(device, non_blocking=True), places)

    def at(self, *path: str | int) -> DropoutKeys:
        """The keys of the layers below `path`."""
        length = len(path)
        return DropoutKeys(self.flat, {p[length:]: place for p, place in self._places.items() if p[:length] == path})

    @property
    def places(self) -> tuple[tuple[Path, int, int], ...]:
        """Position of each layer's keys; equal for objects that differ only in the values of the keys."""
        return tuple((path, place.start, place.stop) for path, place in self._places.items())

    def moved(self, flat: Int64[Tensor, " n"]) -> DropoutKeys:
        """The same layers with the keys in another tensor."""
        return DropoutKeys(flat, self._places)

    def stack(self, paths: Sequence[Path]) -> Int64[Tensor, "L B"]:
        """The keys of the layers at `paths`. Raises KeyError if there is no such layer."""
        assert self.flat is not None, "without dropout there are no keys"
        return torch.stack([self.flat[self._places[path]] for path in paths])


NO_DROPOUT = DropoutKeys(None, {})


def below(path: Path, streams: Streams) -> Streams:
    """The streams of a submodule, with `path`, the submodule's name in its parent, in front of their paths."""
    return {(*path, *inner): own for inner, own in streams.items()}


class Dropout(Computed):
    """Dropout of an update, with a mask shared along one axis (supplement 1.11.6).

    The mask is a function of the sample's random stream, of `layer` and of positions in the WHOLE representation. It is
    therefore the same on every mesh, and when activations are recomputed. One operator applies the mask and adds the update
    (`Sharded.__iadd__`).
    """

    def __init__(self, channels: int, rate: float, layer: str, shared_axis: Axis) -> None:
        """`layer`: name of the sub-layer whose update is dropped, which is part of the random numbers' address."""
        super().__init__()
        self.channels, self.rate, self.layer, self.shared_axis = channels, rate, layer, shared_axis

    def forward(self, update: Update, masks: Masks) -> Update | Dropped:
        """The update with its mask. `masks`: dropout masks of this block."""
        if (
            len(masks) == 0 or self.rate == 0.0
        ):  # `not masks` would have torch.compile make a graph for each size of any mask
            return update
        shared_dim = DIMENSION[self.shared_axis]
        return Dropped(update, masks[self.layer], self.rate, shared_dim, self.kernels.dropout_add)


@runtime_checkable
class BlockWithDropout(Protocol):
    """A block of a stack."""

    @property
    def dropouts(self) -> Sequence[Dropout]:
        """The dropout layers of the block, in any order. Their names differ."""


def block_streams(blocks: Iterable[BlockWithDropout], draws: Sequence[Draws]) -> Streams:
    """The dropout streams of all layers of a stack's `blocks`. `draws`: the stack's stream for each entry of the batch."""
    streams: Streams = {}
    for number, block in enumerate(blocks):
        own = [d.at("block", number) for d in draws]
        streams |= {("block", number, dropout.layer): [d.at(dropout.layer) for d in own] for dropout in block.dropouts}
    return streams


def draw_blocks(blocks: Iterable[BlockWithDropout], keys: DropoutKeys, residues: int, kernels: Kernels) -> list[Masks]:
    """The masks of each block of a stack, drawn together; or their keys, if operators of `kernels` draw masks themselves.

    `residues`: number of residues. Every mask has one entry for each residue and channel; it is constant along sequences, or
    along the other axis of the pair representation.
    """
    blocks = list(blocks)
    if keys.flat is None:
        return [NO_MASKS] * len(blocks)
    masks: list[dict[str, Tensor]] = [{} for _ in blocks]
    operators = "dropout_add", "triangle_multiplication", "gated_output"  # other implementations of them take keys
    takes_masks = all(getattr(kernels, name) is getattr(chunked, name) for name in operators)
    alike: dict[tuple[int, float], list[tuple[int, str]]] = {}
    for number, block in enumerate(blocks):
        for dropout in block.dropouts:
            if dropout.rate > 0.0:
                alike.setdefault((dropout.channels, dropout.rate), []).append((number, dropout.layer))
    for (channels, rate), places in alike.items():
        drawn = keys.stack([("block", *place) for place in places])
        if takes_masks:
            drawn = draw_masks(drawn, residues * channels, rate)
        for (number, layer), mask in zip(places, drawn.unbind(), strict=True):
            masks[number][layer] = mask
    return list(masks)
