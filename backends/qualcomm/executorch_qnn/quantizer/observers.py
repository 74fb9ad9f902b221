# SPDX-License-Identifier: BSD-3-Clause
"""How ranges and scales are found.

Activations: the ends of all values seen, their moving average, all but a fraction of the values, or
the range with the least squared error.  Weights: the same of each channel, or of each block.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torchao.quantization.pt2e import FakeQuantize, FakeQuantizeBase, ObserverBase
from torchao.quantization.pt2e.observer import UniformQuantizationObserverBase
from torchao.quantization.pt2e.utils import create_getattr_from_value

from ..errors import LoweringError
from .batch_norm import fold, value_of

EPS = 2.0**-40  # far below any scale that a model needs; torchao's own is the float32 epsilon


# -- activations -------------------------------------------------------------------------------


class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
    """The least and the greatest value seen.

    Args:
        label: what is observed, for messages.
        known: what the range must have in it, whatever is seen.
        softmax: the axis of the softmax that reads the values.  What is far below the greatest of
            its row counts as nothing there: `ln 2` for each bit and `ln n` for the length of the
            row, so that a mask does not take the range that the other values need.
        fixed: the value never changes: it is looked at once.
    """

    def __init__(
        self,
        *,
        label: str = "",
        known: tuple[float, float] | None = None,
        softmax: int | None = None,
        fixed: bool = False,
        **spec: Any,
    ) -> None:
        super().__init__(eps=EPS, **spec)
        self.label, self.softmax, self.fixed = label, softmax, fixed
        low, high = known or (math.inf, -math.inf)
        for name, value in (
            ("min_val", math.inf), ("max_val", -math.inf), ("known_min", low), ("known_max", high)
        ):  # fmt: skip
            self.register_buffer(name, torch.tensor(value))
        self.joined: RangeObserver | None = None

    def become(self, other: RangeObserver) -> None:
        """Is from now on the other observer, with all that has been seen by either."""
        if other.final is not self.final:
            own, final = self.final, other.final
            own.joined = final
            final.known_min.copy_(torch.minimum(own.known_min, final.known_min))
            final.known_max.copy_(torch.maximum(own.known_max, final.known_max))
            if own.qscheme is torch.per_tensor_symmetric:
                final.qscheme = own.qscheme

    @property
    def final(self) -> RangeObserver:
        return self if self.joined is None else self.joined.final

    def include(self, x: torch.Tensor) -> None:
        """Has the range have the values of `x` in it, however often they are seen."""
        if self.joined is not None:
            self.joined.include(x)
            return
        low, high = torch.aminmax(x.detach().float())
        self.known_min.copy_(torch.minimum(self.known_min, low))
        self.known_max.copy_(torch.maximum(self.known_max, high))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0 or (self.fixed and self.seen()):
            return x
        if self.joined is not None:
            return self.joined(x)  # type: ignore[no-any-return]
        values = x.detach().float()
        if self.softmax is not None:
            top = values.amax(self.softmax, keepdim=True)
            nothing = (8 * self.dtype.itemsize + 1) * math.log(2) + math.log(x.shape[self.softmax])
            values = torch.maximum(values, top.clamp(min=torch.finfo(top.dtype).min) - nothing)
        low, high = torch.aminmax(values)
        if not math.isfinite(high - low):
            kind = "NaN" if bool(values.isnan().any()) else "infinity"
            raise LoweringError(
                f"{self.label} has {kind} in it during calibration: no range can be found for it"
            )
        self.record(values, low, high)
        return x

    def seen(self) -> bool:
        return bool(self.final.min_val <= self.final.max_val)

    def record(self, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        """Takes note of finite values and their ends."""
        self.min_val.copy_(torch.minimum(self.min_val, low))
        self.max_val.copy_(torch.maximum(self.max_val, high))

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The range that the values seen ask for."""
        return self.min_val, self.max_val

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.joined is not None:
            return self.joined.calculate_qparams()
        low, high = self.range()
        low, high = torch.minimum(low, self.known_min), torch.maximum(high, self.known_max)
        if low > high:  # nothing was seen
            low = high = torch.zeros(())
        found: tuple[torch.Tensor, torch.Tensor] = self._calculate_qparams(low, high)
        return found

    def extra_repr(self) -> str:
        return f"{self.label}: {float(self.min_val):g} to {float(self.max_val):g}"


class MovingAverageObserver(RangeObserver):
    """The moving averages of the least and the greatest value of each call."""

    def __init__(self, *, averaging_constant: float = 0.05, **spec: Any) -> None:
        super().__init__(**spec)
        self.averaging_constant = averaging_constant

    def record(self, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        if self.seen():
            low = self.min_val + self.averaging_constant * (low - self.min_val)
            high = self.max_val + self.averaging_constant * (high - self.max_val)
        self.min_val.copy_(low)
        self.max_val.copy_(high)


class _Histogram(RangeObserver):
    """Counts over `[-A, A]`; `A` is a power of two, so that bins of a smaller one are halves."""

    bins = 4096

    def __init__(self, **spec: Any) -> None:
        super().__init__(**spec)
        self.register_buffer("bound", torch.tensor(0.0))
        self.register_buffer("counts", torch.zeros(self.bins))

    def record(self, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
        super().record(x, low, high)
        largest = max(abs(float(low)), abs(float(high)))
        if largest == 0:
            self.counts[self.bins // 2] += x.numel()
            return
        bound = 2.0 ** math.ceil(math.log2(largest))
        while 0 < float(self.bound) < bound:
            quarter = self.bins // 4
            pairs = self.counts.reshape(-1, 2).sum(1)
            self.counts.zero_()
            self.counts[quarter : 3 * quarter] = pairs
            self.bound.mul_(2)
        if float(self.bound) == 0:
            self.bound.fill_(bound)
        bound = float(self.bound)
        self.counts += torch.histc(x.reshape(-1), self.bins, -bound, bound)

    def centers(self) -> torch.Tensor:
        width = 2 * float(self.bound) / self.bins
        return (torch.arange(self.bins, dtype=torch.float64) + 0.5) * width - float(self.bound)


class PercentileObserver(_Histogram):
    """The range of all values but a fraction at either end.

    Args:
        percentile: how much of all values lies below the upper end, and above the lower one.
    """

    def __init__(self, *, percentile: float = 99.99, **spec: Any) -> None:
        super().__init__(**spec)
        self.percentile = percentile

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        total = float(self.counts.sum())
        if not total or not float(self.bound):
            return self.min_val, self.max_val
        below = self.counts.double().cumsum(0)
        cut = total * (1 - self.percentile / 100)
        first = int(torch.searchsorted(below, torch.tensor(cut, dtype=torch.float64), right=True))
        last = int(torch.searchsorted(below, torch.tensor(total - cut, dtype=torch.float64)))
        width = 2 * float(self.bound) / self.bins
        low = torch.tensor(first * width - float(self.bound))
        high = torch.tensor((min(last, self.bins - 1) + 1) * width - float(self.bound))
        return torch.maximum(low, self.min_val), torch.minimum(high, self.max_val)


class MseObserver(_Histogram):
    """The range with the least squared error: of rounding within it and of clipping outside."""

    def range(self) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = float(min(self.min_val, torch.zeros(()))), float(max(self.max_val, 0.0))
        if not float(self.bound) or not low < high:
            return self.min_val, self.max_val
        x, n = self.centers(), self.counts.double()
        steps = self.quant_max - self.quant_min
        shares = torch.linspace(1.0, 0.05, 96, dtype=torch.float64)

        def best(lows: torch.Tensor, highs: torch.Tensor) -> int:
            clipped = torch.minimum(torch.maximum(x, lows[:, None]), highs[:, None])
            rounding = ((highs - lows) / steps).square() / 12
            inside = ((x >= lows[:, None]) & (x <= highs[:, None])) * rounding[:, None]
            return int((((x - clipped).square() + inside) * n).sum(1).argmin())

        for _ in range(2):  # one end, the other, and once more
            lows = low * shares
            low = float(lows[best(lows, torch.full_like(lows, high))])
            highs = high * shares
            high = float(highs[best(torch.full_like(highs, low), highs)])
        return torch.tensor(low), torch.tensor(high)


class Follower(ObserverBase):  # type: ignore[misc]
    """Has the encoding of another observer, and shows it nothing.

    For values that another's range is made for: the read of a buffer, whose range is that of what
    is written to it; what an activation clips, whose range is that of the clipped values.
    """

    def __init__(self, leader: RangeObserver) -> None:
        super().__init__(dtype=leader.dtype)
        self.leader = leader
        self.qscheme = leader.qscheme
        self.quant_min, self.quant_max = leader.quant_min, leader.quant_max

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.leader.calculate_qparams()


class FakeFollower(FakeQuantizeBase):  # type: ignore[misc]
    """`Follower` of a fake-quantizer, for QAT: rounds as that one does."""

    def __init__(self, leader: Any) -> None:
        super().__init__()
        self.leader = leader
        self.dtype, self.qscheme = leader.dtype, leader.qscheme
        self.quant_min, self.quant_max = leader.quant_min, leader.quant_max

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.leader.fake_quant_enabled[0] != 1 or not self.leader.activation_post_process.seen():
            return x
        return torch.fake_quantize_per_tensor_affine(
            x, self.leader.scale, self.leader.zero_point, self.quant_min, self.quant_max
        )

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self.leader.calculate_qparams()
        return found


OBSERVERS: dict[str, type[RangeObserver]] = {
    "minmax": RangeObserver,
    "moving_average": MovingAverageObserver,
    "percentile": PercentileObserver,
    "mse": MseObserver,
}


# -- weights -----------------------------------------------------------------------------------


def rounded(w: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """The nearest multiples of `scale`, from `low` to `high` times it."""
    return (w / scale).round_().clamp_(low, high).mul_(scale)


def channel_scales(
    rows: torch.Tensor, low: int, high: int, least_squares: bool, candidates: int = 24
) -> torch.Tensor:
    """A scale for each row of a matrix.

    Args:
        least_squares: the scale with the least squared error, not that of the greatest value.
    """
    largest = rows.abs().amax(1, keepdim=True)
    full = (largest / ((high - low) / 2)).clamp_(min=EPS)
    if not least_squares:
        return full.squeeze(1)
    best, least = full, torch.full_like(full, math.inf)
    for share in torch.linspace(0.5, 1.0, candidates).tolist():
        scale = full * share
        error = (rounded(rows, scale, low, high) - rows).square_().sum(1, keepdim=True)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best.squeeze(1)


def block_scales(
    blocks: torch.Tensor, low: int, high: int, least_squares: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """LPBQ: a scale for each channel, and a factor of 1 to 16 for each of its blocks.

    Args:
        blocks: of shape (channels, blocks, size).

    Returns:
        Shapes (channels, 1) and (channels, blocks).
    """
    full = blocks.abs().amax(2) / ((high - low) / 2)
    scale = (full.amax(1, keepdim=True) / 16).clamp_(min=EPS)
    nearest = (full / scale).ceil_().clamp_(1, 16)
    if not least_squares:
        return scale, nearest
    best, least = nearest, torch.full_like(nearest, math.inf)
    for less in range(7):
        factor = (nearest - less).clamp_(min=1)
        grid = (scale * factor)[..., None]
        error = (rounded(blocks, grid, low, high) - blocks).square_().sum(2)
        best = torch.where(error < least, factor, best)
        least = torch.minimum(error, least)
    return scale, best


class WeightObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
    """Symmetric scales of a weight, one for each channel along `ch_axis`, or one for all.

    Args:
        fixed: the weight never changes: it is looked at once.
        seq_mse: calibration chooses the scales again; see `seq_mse`.
    """

    def __init__(
        self,
        *,
        ch_axis: int | None = None,
        least_squares: bool = False,
        fixed: bool = True,
        seq_mse: bool = False,
        **spec: Any,
    ) -> None:
        super().__init__(eps=EPS, **spec)
        self.ch_axis, self.least_squares, self.fixed = ch_axis, least_squares, fixed
        self.seq_mse = seq_mse
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.zeros(0))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        if not (self.fixed and self.scale.numel()):
            data = w.detach().float()
            rows = data.reshape(1, -1) if self.ch_axis is None else data.movedim(self.ch_axis, 0)
            self.scale = channel_scales(
                rows.flatten(1), self.quant_min, self.quant_max, self.least_squares
            )
        return w

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scale, torch.zeros_like(self.scale, dtype=torch.int64)


class WeightFakeQuantize(FakeQuantize):  # type: ignore[misc]
    """`WeightObserver` for QAT, which folds the batch norm that comes after the weight's layer."""

    def observe(self, w: torch.Tensor) -> None:
        self.activation_post_process(w)

    def convert(self, model: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        """What torchao calls to put `quantize` and `dequantize` for the fake-quantizer."""
        weight = _trained(self, model, node)
        scale, zero_point = self.calculate_qparams()
        rest = (self.quant_min, self.quant_max, self.dtype)
        graph, ops = model.graph, torch.ops.quantized_decomposed
        with graph.inserting_before(node):
            if self.is_per_channel:
                kept = [
                    create_getattr_from_value(model, graph, f"{weight.name}_{name}", value, None)
                    for name, value in (("scale", scale), ("zero_point", zero_point))
                ]
                given = (*kept, self.ch_axis, *rest)
                pair = ops.quantize_per_channel.default, ops.dequantize_per_channel.default
            else:
                given = (float(scale), int(zero_point), *rest)
                pair = ops.quantize_per_tensor.default, ops.dequantize_per_tensor.default
            q = graph.call_function(pair[0], (weight, *given))
            dq = graph.call_function(pair[1], (q, *given))
        node.replace_all_uses_with(dq)
        graph.erase_node(node)


def _trained(
    module: WeightFakeQuantize | BlockFakeQuantize, model: torch.fx.GraphModule, node: torch.fx.Node
) -> torch.fx.Node:
    """A weight as training has left it, which its observer is shown, too."""
    scaled = node.args[0]
    assert isinstance(scaled, torch.fx.Node)
    fold(model, scaled)
    weight = node.args[0]
    assert isinstance(weight, torch.fx.Node)
    if module.observer_enabled[0] == 1:
        module.observe(value_of(model, weight))
    return weight


class _Blocks:
    """Blocks of a weight along the axis behind its channels, as `quantize_affine` writes them."""

    dtype: torch.dtype
    quant_min: int
    quant_max: int
    block: int
    least_squares: bool
    ch_axis = 0

    def scales(self, w: torch.Tensor) -> torch.Tensor:
        """Of shape (channels, blocks, 1...)."""
        blocks = w.detach().float().reshape(w.shape[0], -1, self.block)
        scale, factor = block_scales(blocks, self.quant_min, self.quant_max, self.least_squares)
        return (scale * factor).reshape(*factor.shape, *[1] * (w.dim() - 2))

    def nodes(self, model: torch.fx.GraphModule, node: torch.fx.Node, scale: torch.Tensor) -> None:
        graph, weight = model.graph, node.args[0]
        assert isinstance(weight, torch.fx.Node)
        size = (1, self.block, *[1] * (scale.dim() - 2))
        zeros = torch.zeros_like(scale, dtype=torch.int32)
        with graph.inserting_before(node):
            kept = [
                create_getattr_from_value(model, graph, f"{weight.name}_{name}", value, None)
                for name, value in (("scale", scale), ("zero_point", zeros))
            ]
            rest = (size, *kept, torch.int8, self.quant_min, self.quant_max)
            q = graph.call_function(torch.ops.torchao.quantize_affine, (weight, *rest))
            value = weight.meta["val"]
            dq = graph.call_function(
                torch.ops.torchao.dequantize_affine, (q, *rest), {"output_dtype": value.dtype}
            )
        node.replace_all_uses_with(dq)
        graph.erase_node(node)


class BlockObserver(_Blocks, ObserverBase):  # type: ignore[misc]
    """Low-power blockwise quantization (LPBQ): 4 bits, a scale for each block of a row.

    The scale of a block is that of its channel times 1 to 16, which is what HTP multiplies by.
    """

    def __init__(
        self, *, dtype: torch.dtype, quant_min: int, quant_max: int, block: int,
        least_squares: bool = False, seq_mse: bool = False, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(dtype=dtype)
        self.quant_min, self.quant_max, self.block = quant_min, quant_max, block
        self.least_squares, self.seq_mse = least_squares, seq_mse
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.zeros(0))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        if not self.scale.numel():
            self.scale = self.scales(w)
        return w

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scale, torch.zeros_like(self.scale, dtype=torch.int32)

    def convert(self, model: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        """What torchao calls to put `quantize_affine` and `dequantize_affine` for the observer."""
        self.nodes(model, node, self.scale)


class BlockFakeQuantize(_Blocks, FakeQuantizeBase):  # type: ignore[misc]
    """`BlockObserver` for QAT: rounds the weight as it is, and lets gradients through."""

    def __init__(
        self, *, dtype: torch.dtype, quant_min: int, quant_max: int, block: int, **_: Any
    ) -> None:
        super().__init__()
        self.dtype, self.quant_min, self.quant_max, self.block = dtype, quant_min, quant_max, block
        self.least_squares = False
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.zeros(0))

    def observe(self, w: torch.Tensor) -> None:
        self.scale = self.scales(w)

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        if self.observer_enabled[0] == 1 or not self.scale.numel():
            self.observe(w)
        if self.fake_quant_enabled[0] != 1:
            return w
        blocks = w.detach().reshape(w.shape[0], -1, self.block)
        grid = self.scale.reshape(*self.scale.shape[:2], 1)
        nearest = rounded(blocks, grid, self.quant_min, self.quant_max).reshape(w.shape)
        return w + (nearest - w).detach()

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scale, torch.zeros_like(self.scale, dtype=torch.int32)

    def convert(self, model: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        """What torchao calls to put `quantize_affine` and `dequantize_affine` for the observer."""
        _trained(self, model, node)
        self.nodes(model, node, self.scale)
