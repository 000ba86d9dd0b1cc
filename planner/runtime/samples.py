"""A few samples to run a model on when nobody gave any: random values that its forward accepts.

Integers are drawn below the sizes that they index, which the graph tells: the rows of an embedding, the classes of a
loss. Those that index nothing are masks.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from planner.graph import Graph, Ref
from planner.runtime.blocks import dtype_of, shape_of
from planner.trace.batch import leaves, map_leaves

_SEED = 20_260_317


def sample_batches(
    graph: Graph, batch: object, samples: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Any]:
    """Batches to try: the user's, or random ones of the traced shapes, plainer ones last."""

    def cut(value: torch.Tensor, is_batched: bool) -> torch.Tensor:
        value = value[:samples] if is_batched else value
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    if batch is not None:
        given = leaves(batch)
        enough = all(not leaf.is_batched or leaf.tensor.shape[0] >= samples for leaf in given)
        if enough and not any(leaf.tensor.is_meta for leaf in given):
            yield map_leaves(batch, lambda leaf: cut(leaf.tensor, leaf.is_batched))
    generator = torch.Generator().manual_seed(_SEED)
    limits = index_limits(graph)
    for plain in (False, True):
        made = {
            graph.tensors[t].name: _drawn(graph, t, samples, limits.get(t), generator, plain=plain).to(device)
            for t in graph.inputs
        }
        if batch is not None:
            yield map_leaves(batch, lambda leaf, made=made: made[leaf.name])  # type: ignore[misc]
        else:
            yield nested({**made, **{name: ast.literal_eval(value) for name, value in graph.settings}})


def nested(named: Mapping[str, Any]) -> Any:
    """A batch from its leaves by name: `images.left` lies in a dict, keys that count from 0 are a tuple.

    >>> nested({"x": 1, "pair.0": 2, "pair.1": 3})
    {'x': 1, 'pair': (2, 3)}
    """
    result: dict[str, Any] = {}
    for name, value in named.items():
        *path, leaf = name.split(".")
        place = result
        for key in path:
            place = place.setdefault(key, {})
        place[leaf] = value
    return _sequences(result)


def _sequences(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {key: _sequences(item) for key, item in value.items()}
    if list(items) == [str(i) for i in range(len(items))]:
        return tuple(items.values())
    return items


def _drawn(
    graph: Graph, tensor: int, samples: int, limit: int | None, generator: torch.Generator, *, plain: bool
) -> torch.Tensor:
    """Random values of an input: indices below their limit, masks that end in zeros, normal floats."""
    shape, dtype = shape_of(graph, tensor, samples), dtype_of(graph, tensor)
    if dtype.is_floating_point or dtype.is_complex:
        value = torch.rand(shape, generator=generator) if plain else torch.randn(shape, generator=generator)
        return value.to(dtype)
    if limit is not None:
        # The smallest index is often padding.
        low = min(1, limit - 1)
        return torch.randint(low, limit, shape, generator=generator).to(dtype)
    if plain or not shape:
        return torch.ones(shape, dtype=dtype)
    length = shape[-1]
    ends = torch.randint(length // 2, length + 1, shape[:-1], generator=generator)
    return (torch.arange(length) < ends[..., None]).to(dtype)


# Operators that hand integer values on: positions of the operands that they take them from.
_HANDS_ON: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            "view", "reshape", "unsqueeze", "squeeze", "slice", "select", "expand", "transpose", "permute", "t",
            "flatten", "unflatten", "contiguous", "clone", "to", "_to_copy", "detach", "alias", "_unsafe_view",
            "narrow", "roll", "flip", "repeat", "constant_pad_nd", "pad", "masked_fill", "clamp", "clamp_min", "split",
            "chunk", "unbind", "cat", "gather", "index_select", "index",
        ),
        (0,),
    ),
    "where": (1, 2),
    "copy_": (0, 1),
}  # fmt: skip
# Operators that use values as indices: operand of the indices, that with the size, and its dim (or where it is given).
_INDEXES = {
    "embedding": (1, 0, 0),
    "cross_entropy_loss": (1, 0, 1),
    "nll_loss_nd": (1, 0, 1),
    "nll_loss": (1, 0, 1),
    "nll_loss2d": (1, 0, 1),
}
_INDEXES_ALONG = {"gather": (2, 0, 1), "index_select": (2, 0, 1), "scatter": (2, 0, 1), "index_add": (2, 0, 1)}


def index_limits(graph: Graph) -> dict[int, int]:
    """Integer input or buffer -> the number that its values must stay below, by what they index."""
    sources = {t: {t} for t, described in enumerate(graph.tensors) if described.kind in ("input", "buffer")}
    limits: dict[int, int] = {}

    def limit(tensors: Sequence[int], size: object) -> None:
        for tensor in tensors:
            for source in sources.get(tensor, ()):
                if isinstance(size, int) and not isinstance(size, bool):
                    limits[source] = min(size, limits.get(source, size))

    for node in graph.nodes:
        name = node.op.split(".")[1]
        args = node.args
        if name in _INDEXES or name in _INDEXES_ALONG:
            index, table, along = _INDEXES.get(name) or _INDEXES_ALONG[name]
            dim = args[along] if name in _INDEXES_ALONG else along
            if isinstance(args[table], Ref) and isinstance(dim, int):
                shape = graph.tensors[cast("Ref", args[table]).tensor].shape
                limit(_refs(args[index]), shape[dim if len(shape) > dim else 0])
        elif name == "one_hot":
            limit(_refs(args[0]), args[1])
        elif name == "index" and isinstance(args[0], Ref) and isinstance(args[1], tuple):
            for dim, item in enumerate(args[1]):
                if item is not None and graph.tensors[args[0].tensor].shape:
                    limit(_refs(item), graph.tensors[args[0].tensor].shape[dim])
        if name in _HANDS_ON:
            found = {s for p in _HANDS_ON[name] if p < len(args) for t in _refs(args[p]) for s in sources.get(t, ())}
            for made in (*node.outputs, *node.mutates, *node.aliases):
                if made is not None and found:
                    sources.setdefault(made, set()).update(found)
    return {t: size for t, size in limits.items() if size > 0}


def _refs(arg: object) -> list[int]:
    if isinstance(arg, Ref):
        return [arg.tensor]
    return [t for item in arg for t in _refs(item)] if isinstance(arg, tuple) else []
