# SPDX-License-Identifier: BSD-3-Clause
"""Bits of integers, by arithmetic: HTP has logic of bools only.

A shift is a product or a quotient with a power of two, a mask of the lowest bits is a remainder.
Anything else takes the numbers apart into bits, along an axis of their own, and puts the result
together again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..compile.ir import DType
from .builder import Arg, Builder, Value
from .elementwise import floor_quotient, known, logical, minus, plus, times
from .reduction import fold
from .registry import lowers

aten = torch.ops.aten

_BITS = 32


def _integers(b: Builder, x: Arg) -> Value:
    return b.value(x, DType.INT32)


def _apart(b: Builder, x: Arg) -> Value:
    """The bits of integers in two's complement along a new last axis, the lowest one first.

    The uppermost one is the sign: what is left of a negative number, rounded down, is -1.
    """
    x = _integers(b, x)
    x = b.reshape(x, (*x.shape, 1))
    powers = b.const(2 ** torch.arange(_BITS - 1))
    bits = b.binary("ElementWiseMod", floor_quotient(b, x, powers), b.value(2))
    sign = b.cast(b.binary("ElementWiseLess", x, b.value(0), DType.BOOL8), DType.INT32)
    return b.concat([bits, sign], bits.rank - 1)


def _together(b: Builder, bits: Value) -> Value:
    weights = 2 ** torch.arange(_BITS)
    weights[-1] = -weights[-1]  # the sign
    terms = times(b, bits, b.const(weights))
    return fold(b, terms, [bits.rank - 1], plus, False)


def _logic(name: str, op: str) -> Callable[[Builder, Arg, Arg], Value]:
    def rule(b: Builder, x: Arg, y: Arg) -> Value:
        if b.result.dtype is DType.BOOL8:
            return logical(b, name, x, y)
        if name == "And":
            for value, mask in ((x, y), (y, x)):
                low = int(known(b, mask) or 0)
                if 0 < low < 2**30 and (low + 1) & low == 0:
                    return b.binary("ElementWiseMod", _integers(b, value), b.value(low + 1))
        bits = b.binary(op, _apart(b, x), _apart(b, y))
        return _together(b, b.elementwise("ElementWiseAbs", [bits]) if name == "Xor" else bits)

    return rule


for _name, _op in {
    "And": "ElementWiseMinimum",
    "Or": "ElementWiseMaximum",
    "Xor": "ElementWiseSubtract",
}.items():
    _packet = getattr(aten, f"bitwise_{_name.lower()}")
    lowers(_packet.Tensor, _packet.Scalar, _packet.Scalar_Tensor)(_logic(_name, _op))


@lowers(aten.bitwise_not.default)
def bitwise_not(b: Builder, x: Value) -> Value:
    return logical(b, "Not", x) if x.dtype is DType.BOOL8 else minus(b, -1, x)


# -- shifts ------------------------------------------------------------------------------------


def _power(b: Builder, exponent: Arg) -> Arg:
    """`2 ** exponent`, up to int32's largest power."""
    if (n := known(b, exponent)) is not None:
        return 1 << min(int(n), _BITS - 2)
    places = _integers(b, exponent)
    return b.gather(b.const(2 ** torch.arange(_BITS - 1)), 0, places)


def _left(b: Builder, x: Arg, n: Arg) -> Value:
    return times(b, x, _power(b, n))


def _right(b: Builder, x: Arg, n: Arg) -> Value:
    return floor_quotient(b, _integers(b, x), _power(b, n))


for _rule, _old, _new in (
    (_left, aten.__lshift__, aten.bitwise_left_shift),
    (_right, aten.__rshift__, aten.bitwise_right_shift),
):
    lowers(_old.Scalar, _old.Tensor, _new.Tensor, _new.Tensor_Scalar, _new.Scalar_Tensor)(_rule)
