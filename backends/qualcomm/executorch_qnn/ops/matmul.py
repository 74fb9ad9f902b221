# SPDX-License-Identifier: BSD-3-Clause
"""Matrix products and attention.

Constant right operands take QNN's FullyConnected, whose weight is laid out as `torch.nn.Linear`'s:
a table that is also an embedding stays one static tensor.  Transposes on the way to a product cost
nothing where MatMul can read its operand transposed.
"""

from __future__ import annotations

import math

import torch

from ..compile.ir import DType
from .builder import Builder, Number, Patch, Shape, Value, b8, broadcast
from .elementwise import minus, plus, select, times
from .reduction import reduce, softmax
from .registry import lowers

aten = torch.ops.aten

# A weight that does not fit into VTCM is cut by the compiler into far more pieces than it needs: a
# head of 49,152 x 576 finalizes in 0.6 s instead of 2.1 s in pieces of 4 MiB, and its part of the
# context binary besides the weights shrinks to a quarter (QAIRT 2.51, SM8650).
_MAX_WEIGHT_BYTES = 4 << 20
_TILE = 32
# 64 queries of 8 heads over 2,048 keys write 18.7 MB as a whole and 0.2 MB head by head.  With
# longer heads the compiler takes ten times as long and gains little (QAIRT 2.51, SM8650).
_MANY_SCORES, _FEW_SCORES = 1 << 20, 1 << 18


def _floats(b: Builder, *values: Value) -> None:
    if any(v.dtype is not DType.FLOAT16 for v in values):
        b.refuse("HTP multiplies no matrices of integers")


def dense(b: Builder, x: Value, weight: Value, bias: Value | None) -> Value:
    """`x @ weight.T + bias` with a weight of shape (out, in)."""
    _floats(b, x, weight)
    n, k = weight.shape
    rows = x if x.rank <= 4 else b.reshape(x, (x.numel // k, k))
    step = n
    if weight.is_const and 2 * n * k > _MAX_WEIGHT_BYTES:
        step = max(_TILE, _MAX_WEIGHT_BYTES // (2 * k) // _TILE * _TILE)
    parts = []
    for start in range(0, n, step):
        stop = min(start + step, n)
        inputs = [rows, b.slice(weight, 0, start, stop)]
        if bias is not None:
            inputs.append(b.slice(bias, 0, start, stop))
        parts.append(b.op("FullyConnected", inputs, (x.numel // k, stop - start)))
    return b.reshape(b.concat(parts, 1), (*x.shape[:-1], n))


def _swapped(rank: int) -> Shape:
    return (*range(rank - 2), rank - 1, rank - 2)


def product(b: Builder, x: Value, y: Value) -> Value:
    """`x @ y` of at least two axes each, the leading ones broadcast."""
    _floats(b, x, y)
    floats = b.wanted is None  # in integers, sums of products would need encodings of their own
    if floats and y.patch is not None and y.patch.dim >= y.rank - 2:
        return _patched_product(b, x, y, y.patch)
    if floats and x.patch is not None and x.patch.dim >= x.rank - 2:
        y, x = b.transpose(x, _swapped(x.rank)), b.transpose(y, _swapped(y.rank))
        z = product(b, x, y)
        return b.transpose(z, _swapped(z.rank))
    if y.rank == 2 and y.is_const and not x.is_const:
        return dense(b, x, b.transpose(y, (1, 0)), None)
    lead = broadcast(x.shape[:-2], y.shape[:-2])
    shape = (*lead, x.shape[-2], y.shape[-1])
    if len(lead) > 2:  # QNN's MatMul fails to compile with three
        x, y = _flat(b, x, lead), _flat(b, y, lead)
        flat = (math.prod(lead), *shape[-2:])
    else:
        x, y = b.align([x, y])
        flat = shape
    x, across = _read(b, x)
    y, along = _read(b, y)
    params = {"transpose_in0": b8(across), "transpose_in1": b8(along)}
    return b.reshape(b.op("MatMul", [x, y], flat, params=params), shape)


def _patched_product(b: Builder, x: Value, y: Value, patch: Patch) -> Value:
    """`x @ y` from the products with the buffer and with the rows that replace some of it.

    The rows are columns of `y`: so are their products columns of the result, which replace those
    that the buffer gives.  Or they are what the sum runs over: then `x` is zero where the buffer is
    replaced, and what it had there multiplies the rows.  Either way each number is made of the very
    products that PyTorch adds up, whatever the positions are and whatever a mask hides.
    """
    place, hit = _placement(b, patch.index, y.shape[patch.dim])
    if patch.dim == y.rank - 1:
        new = product(b, x, patch.rows)
        if place.shape[0] > 1:  # a single column broadcasts
            new = product(b, new, place)
        return select(b, hit, new, product(b, x, patch.base))
    kept = product(b, select(b, hit, 0.0, x), patch.base)
    taken = product(b, x, b.transpose(place, (1, 0)))
    return plus(b, kept, product(b, taken, patch.rows))


def _placement(b: Builder, index: Value, length: int) -> tuple[Value, Value]:
    """FLOAT16 `[T, length]`, one where row `t` comes to lie; and BOOL8 `[1, length]`, if any does.

    Of equal positions the last one counts.  All caches of one length share these few ops.
    """
    n = index.numel
    at = b.reshape(index, (n, 1))
    here = b.binary("ElementWiseEqual", at, b.const(torch.arange(length)), DType.BOOL8)
    if n == 1:
        return b.cast(here, DType.FLOAT16), here
    again = b.binary("ElementWiseEqual", at, b.reshape(index, (1, n)), DType.BOOL8)
    later = times(b, b.cast(again, DType.FLOAT16), b.const(torch.ones(n, n).triu(1)))
    last = minus(b, 1.0, reduce(b, "ReduceMax", later, [1]))
    place = times(b, b.cast(here, DType.FLOAT16), last)
    return place, b.cast(reduce(b, "ReduceMax", place, [0]), DType.BOOL8)


def _read(b: Builder, x: Value) -> tuple[Value, bool]:
    """`x`, or what it is the transpose of."""
    source = None if x.is_const else b.transposed_free(x, _swapped(x.rank))
    return (x, False) if source is None else (source, True)


def _flat(b: Builder, x: Value, lead: Shape) -> Value:
    """`x` with one leading axis, of the length of all in `lead` or one."""
    if math.prod(x.shape[:-2]) > 1:
        x = b.expand(x, (*lead, *x.shape[-2:]))
    return b.reshape(x, (math.prod(x.shape[:-2]), *x.shape[-2:]))


@lowers(aten.linear.default, keep=True)
def linear(b: Builder, x: Value, weight: Value, bias: Value | None = None) -> Value:
    if weight.rank == 1:
        y = b.reshape(dense(b, x, b.reshape(weight, (1, *weight.shape)), None), x.shape[:-1])
        return y if bias is None else plus(b, y, bias)
    if x.is_const:
        y = product(b, b.reshape(x, (1, *x.shape) if x.rank == 1 else x.shape),
                    b.transpose(weight, (1, 0)))  # fmt: skip
        y = b.reshape(y, b.result.shape)
        return y if bias is None else plus(b, y, bias)
    return dense(b, x, weight, bias)


@lowers(aten.mm.default, aten.bmm.default)
@lowers(aten.matmul.default, aten.dot.default, aten.mv.default, keep=True)
def matmul(b: Builder, x: Value, y: Value) -> Value:
    if x.rank == 1:
        x = b.reshape(x, (1, *x.shape))
    if y.rank == 1:
        y = b.reshape(y, (*y.shape, 1))
    return b.reshape(product(b, x, y), b.result.shape)


@lowers(aten.addmm.default, aten.addmv.default)
@lowers(aten.baddbmm.default, keep=True)
def addmm(
    b: Builder, bias: Value, x: Value, y: Value, beta: Number = 1, alpha: Number = 1
) -> Value:
    n = y.shape[-1]
    if y.rank == 2 and y.is_const and beta == alpha == 1 and bias.shape in ((n,), (1, n)):
        return dense(b, x, b.transpose(y, (1, 0)), b.reshape(bias, (n,)))
    z = matmul(b, x, y)
    z = z if alpha == 1 else times(b, z, alpha)
    if beta == 0:
        return z
    return plus(b, bias if beta == 1 else times(b, bias, beta), z)


@lowers(aten.addbmm.default)
def addbmm(
    b: Builder, bias: Value, x: Value, y: Value, beta: Number = 1, alpha: Number = 1
) -> Value:
    """The sum of a batch of products is one product of what is side by side."""
    batch, n, k = x.shape
    wide = b.reshape(b.transpose(x, (1, 0, 2)), (n, batch * k))
    tall = b.reshape(y, (batch * k, y.shape[2]))
    return addmm(b, bias, wide, tall, beta, alpha)


@lowers(aten.bilinear.default, keep=True)
def bilinear(b: Builder, x: Value, y: Value, weight: Value, bias: Value | None = None) -> Value:
    """`x @ weight[o] @ y` for each output: all products with `x` first."""
    out, k, m = weight.shape
    rows = x.numel // k
    table = b.reshape(b.transpose(weight, (0, 2, 1)), (out * m, k))
    first = b.reshape(dense(b, b.reshape(x, (rows, k)), table, None), (rows, out, m))
    z = product(b, first, b.reshape(y, (rows, m, 1)))
    z = b.reshape(z, (*x.shape[:-1], out))
    return z if bias is None else plus(b, z, bias)


# -- attention ---------------------------------------------------------------------------------


@lowers(aten.scaled_dot_product_attention.default, keep=True)
def attention(
    b: Builder,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """Masked scores are -inf, which `softmax` knows; a row that sees nothing gives zeros."""
    if dropout:
        b.refuse("dropout has no place in inference")
    rows, columns = q.shape[-2], k.shape[-2]
    # Scaled before the product: scores that fit into fp16 must not leave it on the way.
    q = times(b, q, 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        seen = torch.ones(rows, columns, dtype=torch.bool).tril()
        mask = b.const(torch.where(seen, 0.0, -math.inf))
    return _attend(b, q, k, v, mask, enable_gqa)


def _attend(
    b: Builder, q: Value, k: Value, v: Value, mask: Value | None, enable_gqa: bool
) -> Value:
    """Attention of scaled queries; head by head, if the scores then stay in VTCM.

    Scores, and what softmax makes of them on the way, otherwise go to memory and back.
    """
    rows, columns = q.shape[-2], k.shape[-2]
    lead = broadcast(q.shape[:-2], q.shape[:-2] if enable_gqa else k.shape[:-2])
    heads = k.shape[-3] if k.rank > 2 and k.shape[:-2] == v.shape[:-2] else 1
    scores_bytes = 2 * math.prod(lead) * rows * columns
    a_head = max(scores_bytes // heads, 2 * columns * k.shape[-1])
    if heads > 1 and scores_bytes > _MANY_SCORES and a_head <= _FEW_SCORES:
        parts = []
        for i in range(heads):
            q1, k1, v1 = (_head(b, x, i, heads) for x in (q, k, v))
            seen = None if mask is None else _head(b, mask, i, heads)
            parts.append(_attend(b, q1, k1, v1, seen, enable_gqa))
        return b.concat(parts, len(lead) - 1)
    k_t = b.transpose(k, _swapped(k.rank))
    scores = b.reshape(product(b, _grouped(b, q, k, enable_gqa), k_t), (*lead, rows, columns))
    if mask is not None:
        masked = mask.dtype is DType.BOOL8
        scores = select(b, mask, scores, -math.inf) if masked else plus(b, scores, mask)
    weights = _grouped(b, softmax(b, scores, -1), v, enable_gqa)
    return b.reshape(product(b, weights, v), (*lead, rows, v.shape[-1]))


def _head(b: Builder, x: Value, head: int, heads: int) -> Value:
    """What goes with one of `heads` heads of keys: its queries, or all of a mask for all heads."""
    if x.rank < 3 or x.shape[-3] == 1:
        return x
    each = x.shape[-3] // heads
    return b.slice(x, x.rank - 3, head * each, (head + 1) * each)


def _grouped(b: Builder, x: Value, of: Value, enable_gqa: bool) -> Value:
    """The query heads that share one head of `of` as rows of one matrix: nothing is repeated."""
    if not enable_gqa or x.shape[-3] == of.shape[-3]:
        return x
    heads = of.shape[-3]
    rows = x.shape[-3] // heads * x.shape[-2]
    return b.reshape(x, (*x.shape[:-3], heads, rows, x.shape[-1]))
