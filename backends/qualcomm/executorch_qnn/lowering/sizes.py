# SPDX-License-Identifier: BSD-3-Clause
"""Sizes that are not fixed: of inputs, and of what the model computes.

QNN graphs are static.  An input may have one of several listed sizes (`Sizes`): then there is one
method for each, and a session picks it.  Any other dynamic dimension of an input is refused.  Sizes
that depend on values stay on the CPU.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import bound_sympy

from ..errors import LoweringError, QnnError
from ..ops.registry import aten_op
from ..source import called_in

Methods: TypeAlias = Mapping[str, tuple[torch.nn.Module, tuple[Any, ...]]]


class Sizes:
    """The sizes that a dimension may have, in `dynamic_shapes`: `{"x": {0: Sizes(1, 4, 16)}}`.

    Dimensions with one `Sizes` have one size; those with different ones have all combinations.
    """

    def __init__(self, *sizes: int) -> None:
        if not sizes or any(not isinstance(n, int) or n < 1 for n in sizes):
            raise ValueError(f"Sizes takes positive numbers, not {sizes}")
        self.sizes = tuple(dict.fromkeys(sizes))

    def __repr__(self) -> str:
        return f"Sizes({', '.join(map(str, self.sizes))})"


@dataclass(frozen=True)
class _Dims:
    """What `dynamic_shapes` says of one tensor."""

    of: Mapping[int, Any]


def per_size(
    methods: Methods, shapes: Mapping[str, Any]
) -> tuple[Methods, dict[str, Any], dict[str, list[str]]]:
    """A method for each combination of the sizes that are listed.

    Args:
        shapes: method to what `torch.export` takes for it as `dynamic_shapes`, with `Sizes` in it.

    Returns:
        The methods: that of the sizes that the example inputs have keeps its name, the others have
        their sizes behind it (`forward_4`, `forward_4x128`); what is left of `shapes`; and, of each
        method that has sizes, the names of the others.

    Raises:
        ValueError: the example inputs have a size that is not listed, or two where there is one.
    """
    made: dict[str, tuple[torch.nn.Module, tuple[Any, ...]]] = {}
    left: dict[str, Any] = {}
    others: dict[str, list[str]] = {}
    for name, (module, inputs) in methods.items():
        given = _named(module, inputs, shapes.get(name))
        own = _own_sizes(name, given)
        if not own:
            made[name], left[name] = (module, inputs), shapes.get(name)
            continue
        made[name], left[name], others[name] = (module, inputs), _without_sizes(given), []
        for sizes in itertools.product(*(s.sizes for s in own)):
            chosen = dict(zip(own, sizes, strict=True))
            if chosen == own:
                continue
            variant = f"{name}_{'x'.join(map(str, sizes))}"
            if variant in made or variant in methods:
                raise ValueError(f"two methods are called {variant!r}")
            made[variant] = module, _resized(module, inputs, given, chosen)
            left[variant] = left[name]
            others[name].append(variant)
    return made, left, others


def _own_sizes(method: str, given: Mapping[str, tuple[Any, Any]]) -> dict[Sizes, int]:
    """The `Sizes` of a method, and what its example inputs have there."""
    own: dict[Sizes, int] = {}

    def look(tensor: Any, dims: _Dims) -> None:
        for dim, sizes in dims.of.items():
            if not isinstance(sizes, Sizes) or not isinstance(tensor, torch.Tensor):
                continue
            n = tensor.shape[dim] if dim in range(tensor.dim()) else None
            if n not in sizes.sizes or own.setdefault(sizes, n) != n:
                raise ValueError(
                    f"an example input of method {method!r} is {list(tensor.shape)}: its dimension "
                    f"{dim} must be one of {sizes}, and the same wherever these are given"
                )

    for value, spec in given.values():
        _over(value, spec, look)
    return own


def _named(
    module: torch.nn.Module, inputs: tuple[Any, ...], shapes: Any
) -> dict[str, tuple[Any, Any]]:
    """Argument to its value and to what `shapes` says of it; nothing if it says nothing at all."""
    if shapes is None:
        return {}
    if hasattr(shapes, "dynamic_shapes"):  # ShapesCollection and AdditionalInputs of torch.export
        shapes = shapes.dynamic_shapes(module, inputs)
    arguments = inspect.signature(module.forward).bind(*inputs).arguments
    if isinstance(shapes, Mapping):
        return {name: (value, shapes.get(name)) for name, value in arguments.items()}
    specs = itertools.chain(shapes, itertools.repeat(None))
    return {name: (value, next(specs)) for name, value in arguments.items()}


def _over(value: Any, spec: Any, fn: Callable[[Any, _Dims], Any]) -> Any:
    """`value` with `fn` of each leaf and of what `spec` says of it in its place.

    Where `spec` is not built like `value`, it says nothing here; torch.export says what is wrong.
    """
    if isinstance(value, dict):
        of = spec if isinstance(spec, Mapping) else {}
        return {k: _over(v, of.get(k), fn) for k, v in value.items()}
    listed = spec if isinstance(spec, (list, tuple)) else ()
    if type(value) in (list, tuple):
        specs = itertools.chain(listed, itertools.repeat(None))
        return type(value)(_over(v, next(specs), fn) for v in value)
    dims = spec if isinstance(spec, Mapping) else dict(enumerate(listed))
    return fn(value, _Dims(dict(dims)))


def _resized(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    given: Mapping[str, tuple[Any, Any]],
    chosen: Mapping[Sizes, int],
) -> tuple[Any, ...]:
    """The example inputs, repeated or cut to the sizes that are chosen."""

    def resize(tensor: Any, dims: _Dims) -> Any:
        for dim, sizes in dims.of.items():
            if isinstance(sizes, Sizes) and isinstance(tensor, torch.Tensor):
                index = torch.arange(chosen[sizes]) % tensor.shape[dim]
                tensor = tensor.index_select(dim, index)
        return tensor

    bound = inspect.signature(module.forward).bind(*inputs)
    for name, (value, spec) in given.items():
        bound.arguments[name] = _over(value, spec, resize)
    return bound.args


def _without_sizes(given: Mapping[str, tuple[Any, Any]]) -> dict[str, Any] | None:
    """What is left for `torch.export`; `None` if nothing is dynamic any more."""

    def rest(_: Any, dims: _Dims) -> Any:
        return {d: s for d, s in dims.of.items() if not isinstance(s, Sizes)} or None

    left = {name: _over(value, spec, rest) for name, (value, spec) in given.items()}
    return left if any(s is not None for s in pytree.tree_leaves(left)) else None


# -- what cannot be ----------------------------------------------------------------------------


def is_fixed(size: Any) -> bool:
    """Whether a size is a number, be it one that torch.export calls a symbol."""
    return not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None


def has_symbols(ep: ExportedProgram) -> bool:
    """Whether torch.export left a symbol in the shape of an input, be it one of a fixed value."""
    values = [n.meta.get("val") for n in ep.graph.find_nodes(op="placeholder")]
    return any(isinstance(s, torch.SymInt) for v in values for s in getattr(v, "shape", [v]))


def refuse_dynamic(exported: Mapping[str, ExportedProgram], methods: Methods, shapes: Any) -> None:
    """Raises LoweringError if an input has a dynamic dimension; it names all of them."""
    found = [
        f"method {name!r}, {text}"
        for name, ep in exported.items()
        for text in _dynamic(ep, _named(*methods[name], shapes.get(name)))
    ]
    if found:
        raise LoweringError(
            f"QNN graphs are static, but there are dynamic sizes: {'; '.join(found)}. List the "
            "sizes that are needed, as in dynamic_shapes={'x': {0: qnn.Sizes(1, 4)}}, for one "
            "graph of each size; or lower without dynamic_shapes, and pad the inputs"
        )


def _dynamic(ep: ExportedProgram, given: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """The dynamic dimensions of a program's inputs, in words."""
    said = pytree.tree_leaves([_over(v, s, lambda _, dims: dims) for v, s in given.values()])
    specs = [s for s in ep.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    values = {n.name: n.meta.get("val") for n in ep.graph.find_nodes(op="placeholder")}
    for spec, dims in itertools.zip_longest(specs, said):
        value = values.get(getattr(spec.arg, "name", ""))
        of = dims.of if isinstance(dims, _Dims) else {}
        if isinstance(value, torch.SymInt) and not is_fixed(value):
            yield f"input {spec.arg.name}: a number{_bounds(ep, value)}"
        for i, size in enumerate(getattr(value, "shape", ())):
            if not is_fixed(size):
                named = f"{_name(of.get(i))}{_bounds(ep, size)}"
                yield f"input {spec.arg.name}, dimension {i}: {named}"


def _name(dim: Any) -> str:
    """A `Dim` by its name, a hint as it is written."""
    hint = getattr(dim, "type", None)
    return getattr(dim, "__name__", "dynamic") if hint is None else f"Dim.{hint.name}"


def _bounds(ep: ExportedProgram, size: torch.SymInt) -> str:
    bounds = bound_sympy(size.node.expr, ep.range_constraints)
    return f", {bounds.lower} " + ("or more" if bounds.upper == int_oo else f"to {bounds.upper}")


@contextmanager
def explained(programs: Mapping[str, ExportedProgram]) -> Iterator[None]:
    """While this is active, what goes wrong because sizes depend on values is a LoweringError."""
    try:
        yield
    except QnnError:
        raise
    except Exception as e:
        sources = [
            f"node {n.name} ({op}) of method {name!r}{called_in(n)}"
            for name, ep in programs.items()
            for n in ep.graph.nodes
            if (op := aten_op(n.target)) is not None and _depends_on_values(op.tags)
        ]
        if not sources:
            raise
        raise LoweringError(
            "ExecuTorch cannot lower a program of which sizes depend on values as these do: "
            f"{'; '.join(sources)}: {str(e).strip().splitlines()[0]}. Say with torch._check how "
            "large they get, or keep the sizes fixed and use a mask, as in torch.where(mask, x, 0)"
        ) from e


def _depends_on_values(tags: Sequence[torch.Tag]) -> bool:
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
