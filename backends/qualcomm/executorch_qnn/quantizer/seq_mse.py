# SPDX-License-Identifier: BSD-3-Clause
"""Sequential MSE: scales of weights by the error of what their layers put out.

Layers are visited as they are computed, so that each sees the inputs that the quantized layers
before it make.  Of a few scales for each channel, or for each block of a channel, that one is taken
with the least squared error of the layer's result on the calibration data, which is not the one
with the least error of the weights: inputs differ in size, and depend on each other.

The method is that of Qualcomm's AIMET (`aimet_torch.seq_mse`, with its `symqt` error: the same
quantized inputs for both weights), where it comes from GPFQ (Lybrand and Saab, 2021, "A Greedy
Algorithm for Quantizing Neural Networks", JMLR 22) and MSE-based scales (Nagel et al., 2021,
arXiv 2106.08295).  The error of a channel with weights `w` and rounding errors `d` on inputs `X` is
`|X d|^2 = d' X'X d`: all that is kept of a layer's inputs is the matrix `X'X`.

For linear layers and 1x1 convolutions; other weights keep the scales of their observers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ..aliasing.slots import identity
from .families import argument, name_of
from .functional import attribute
from .observers import BlockObserver, WeightObserver, block_scales, channel_scales, rounded

aten = torch.ops.aten
Node = torch.fx.Node
Env = dict[Node, Any]

SHARES = 25
"""Scales that are tried, between 0.4 of that of the greatest value and that itself."""
LESS = 7
"""Factors of a block that are tried, from that of the greatest value downwards."""


def seq_mse(modules: Mapping[str, torch.nn.Module], batches: Mapping[str, Sequence[Any]]) -> None:
    """Sets the scales of weights of calibrated modules, where their observers have `seq_mse` set.

    A weight of several methods has the scales that the first finds.  Keeps the state at the start
    of each call in memory, and what is read later of all calls.

    Args:
        modules: method to what `prepare_pt2e` made, after calibration.
        batches: method to its calibration data.
    """
    decided: dict[object, torch.Tensor] = {}
    for method, module in modules.items():
        assert isinstance(module, torch.fx.GraphModule)
        if any(getattr(m, "seq_mse", False) for m in module.modules()):
            with torch.no_grad():
                _Walk(module, decided).run(batches[method])


class _Walk:
    """Goes through a prepared graph, node by node, with the values of many calls."""

    def __init__(self, module: torch.fx.GraphModule, decided: dict[object, torch.Tensor]) -> None:
        self.module, self.decided = module, decided
        self.nodes = list(module.graph.nodes)
        self.written = {
            n.args[0]
            for n in module.graph.find_nodes(op="call_function", target=aten.copy_.default)
        }
        self.constants: Env = {}
        self.last: dict[Node, list[Node]] = {}
        seen: set[Node] = set(self.written)
        for node in reversed(self.nodes):
            self.last[node] = [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)

    def run(self, batches: Sequence[Any]) -> None:
        inputs = [b if isinstance(b, (tuple, list)) else (b,) for b in batches]
        buffers = [n for n in self.written if n.op == "get_attr"]
        state = {n: attribute(self.module, str(n.target)).clone() for n in buffers}
        starts: list[Env] = []
        for values in inputs:
            starts.append(state)
            if state:
                (after,) = self._pass([values], [state], choose=False)
                state = {n: after[n] for n in buffers}
        self._pass(inputs, starts, choose=True)

    def _pass(self, inputs: Sequence[Any], starts: Sequence[Env], choose: bool) -> list[Env]:
        """Computes all calls; returns the values of each that are left."""
        envs: list[Env] = [{n: v.clone() for n, v in start.items()} for start in starts]
        given = [iter(pytree.tree_leaves(tuple(values))) for values in inputs]
        for node in self.nodes:
            if choose and (found := self._layer(node)) is not None:
                self._choose(node, *found, envs)
            for env, values in zip(envs, given, strict=True):
                if node.op == "placeholder":
                    value = next(values)
                    env[node] = value.clone() if node in self.written else value
                elif node not in self.written:
                    self._compute(node, env)
                for n in self.last[node]:
                    env.pop(n, None)
        return envs

    def _compute(self, node: Node, env: Env) -> None:
        if node in self.constants or node.op == "output":
            return
        sources = node.all_input_nodes
        fixed = node.op == "get_attr" or (sources and all(n in self.constants for n in sources))
        (self.constants if fixed else env)[node] = self._value(node, env)

    def _value(self, node: Node, env: Env) -> Any:
        if node.op == "get_attr":
            return attribute(self.module, str(node.target))
        args: Any
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda n: env[n] if n in env else self.constants[n]
        )
        if node.op == "call_function":
            return node.target(*args, **kwargs)  # type: ignore[operator]
        called = self.module.get_submodule(str(node.target))
        if hasattr(called, "calculate_qparams"):
            return fake_quantized(called, args[0])
        return called(*args, **kwargs)

    # -- scales ----------------------------------------------------------------------------------

    def _layer(self, node: Node) -> tuple[Node, Any, torch.Tensor] | None:
        """The observer node, the observer and the weight of a layer that scales are chosen for."""
        name, at = name_of(node), node.args[1] if len(node.args) > 1 else None
        if name not in ("linear", "conv1d", "conv2d") or not isinstance(at, Node):
            return None
        if at.op != "call_module" or at.args[0].op != "get_attr":  # type: ignore[union-attr]
            return None
        observer = self.module.get_submodule(str(at.target))
        weight = attribute(self.module, str(at.args[0].target))  # type: ignore[union-attr]
        one = all(n == 1 for n in weight.shape[2:]) and argument(node, "groups", 1) == 1
        per_row = isinstance(observer, BlockObserver) or (
            isinstance(observer, WeightObserver) and observer.ch_axis == 0
        )
        return (at, observer, weight) if one and per_row and observer.seq_mse else None

    def _choose(
        self, node: Node, at: Node, observer: Any, weight: torch.Tensor, envs: Sequence[Env]
    ) -> None:
        key = (identity(weight), type(observer), observer.quant_max, observer.scale.shape)
        if key not in self.decided:
            gram = torch.zeros(weight.shape[1], weight.shape[1])
            for env in envs:
                rows = _rows(node, env[node.args[0]].float(), weight.dim() - 2)  # type: ignore[index]
                gram.addmm_(rows.t(), rows)
            self.decided[key] = best_scales(weight, gram, observer)
        observer.scale = self.decided[key]
        self.constants[at] = fake_quantized(observer, weight)


def _rows(node: Node, x: torch.Tensor, spatial: int) -> torch.Tensor:
    """What a layer's weights are multiplied with, of shape (rows, in)."""
    if spatial:
        steps = argument(node, "stride", [1])
        steps = [*steps] * (spatial // len(steps))
        at: Any = (..., *(slice(None, None, step) for step in steps))
        x = x[at].movedim(-spatial - 1, -1)
    return x.reshape(-1, x.shape[-1])


def fake_quantized(observer: Any, x: torch.Tensor) -> torch.Tensor:
    """A value as the encoding that an observer has found can express it."""
    scale, zero_point = observer.calculate_qparams()
    low, high = observer.quant_min, observer.quant_max
    if isinstance(observer, BlockObserver):
        blocks = x.float().reshape(x.shape[0], -1, observer.block)
        grid = scale.reshape(*scale.shape[:2], 1)
        return rounded(blocks, grid, low, high).reshape(x.shape).to(x.dtype)
    if isinstance(observer, WeightObserver) and observer.ch_axis is not None:
        shape = [1] * x.dim()
        shape[observer.ch_axis] = -1
        return rounded(x.float(), scale.reshape(shape), low, high).to(x.dtype)
    return torch.fake_quantize_per_tensor_affine(
        x.float(), float(scale), int(zero_point), low, high
    ).to(x.dtype)


def best_scales(weight: torch.Tensor, gram: torch.Tensor, observer: Any) -> torch.Tensor:
    """Scales, in the shape of `observer.scale`, with the least error of the layer's result.

    Blocks are chosen one after the other, with the errors of all others as they are then.

    Args:
        weight: of shape (out, in) or (out, in, 1...).
        gram: `X'X` of the inputs, of shape (in, in).
        observer: a `WeightObserver` of channels, or a `BlockObserver`, with its own choice.
    """
    w = weight.detach().float().flatten(1)
    low, high = observer.quant_min, observer.quant_max
    scales: torch.Tensor = observer.scale
    own = scales.float().reshape(len(w), -1)
    if isinstance(observer, BlockObserver):
        scale, factor = block_scales(w.unflatten(1, (-1, observer.block)), low, high, False)
        tried = [scale * (factor - less).clamp(min=1) for less in range(LESS)]
    else:
        full = channel_scales(w, low, high, False)[:, None]
        tried = [full * share for share in torch.linspace(0.4, 1.0, SHARES).tolist()]
    chosen, size = own.clone(), w.shape[1] // own.shape[1]
    error = rounded(w, own.repeat_interleave(size, 1), low, high) - w
    for i in range(own.shape[1]):
        part = slice(i * size, (i + 1) * size)
        inside = gram[part, part]
        others = error @ gram[:, part] - error[:, part] @ inside
        least = torch.full((len(w), 1), torch.inf)
        for some in (own, *tried):
            candidate = some[:, i : i + 1]
            d = rounded(w[:, part], candidate, low, high) - w[:, part]
            loss = (d * (d @ inside + 2 * others)).sum(1, keepdim=True)
            better = loss < least
            least = torch.where(better, loss, least)
            chosen[:, i : i + 1] = torch.where(better, candidate, chosen[:, i : i + 1])
            error[:, part] = torch.where(better, d, error[:, part])
    return chosen.reshape(scales.shape)
