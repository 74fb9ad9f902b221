# SPDX-License-Identifier: BSD-3-Clause
"""The payload says back what it was given, and never reads what it was not."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executorch_qnn.compile.ir import ScaleOffset
from executorch_qnn.compile.payload import (
    MAJOR,
    Binding,
    IOEntry,
    Payload,
    RowsEntry,
    StateEntry,
    unpack,
)
from executorch_qnn.errors import IncompatiblePayload

names = st.text(max_size=40)
shapes = st.lists(st.integers(1, 2**31), max_size=6).map(tuple)
encodings = st.none() | st.builds(
    ScaleOffset, st.floats(width=32, allow_nan=False), st.integers(-(2**31), 2**31 - 1)
)
ios = st.builds(
    IOEntry, names, st.integers(-1, 40), st.integers(0, 2**32 - 1), shapes, shapes, encodings
)
counts = st.integers(0, 2**32 - 1)
rows = st.builds(RowsEntry, names, st.integers(0, 2**64 - 1), counts, counts, counts, counts)


def state_entries(binding: Binding) -> st.SearchStrategy[StateEntry]:
    return st.builds(
        StateEntry,
        names,
        st.integers(-1, 40),
        counts,
        counts,
        shapes,
        names,
        names,
        st.just(int(binding)),
        names,
        encodings,
        rows if binding is Binding.DELTA else st.none(),
        st.floats(0.5, 8, width=32) if binding is Binding.ACCUMULATE else st.just(1.0),
    )


states = st.sampled_from(Binding).flatmap(state_entries)
payloads = st.builds(
    Payload,
    method=names,
    graph=names,
    context_key=names,
    context_sha256=st.binary(min_size=32, max_size=32),
    context_size=st.integers(0, 2**64 - 1),
    build_id=names,
    core_api=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    soc_model=st.integers(0, 2**32 - 1),
    htp_arch=st.integers(0, 99),
    target=names,
    inputs=st.lists(ios, max_size=3).map(tuple),
    outputs=st.lists(ios, max_size=3).map(tuple),
    states=st.lists(states, max_size=3).map(tuple),
)


def sample() -> Payload:
    return Payload(
        method="forward",
        graph="forward_0",
        context_key="key",
        context_sha256=bytes(32),
        context_size=7,
        build_id="v2.51",
        core_api=(2, 40),
        soc_model=57,
        htp_arch=75,
        target="SM8650",
        inputs=(IOEntry("x", 6, 0x216, (2, 3), (2, 3)),),
        states=(StateEntry("a.b", 6, 0x216, 0x216, (4,), "in", "out", 0, "init"),),
    )


@given(payloads)
def test_what_was_packed_is_unpacked(payload: Payload) -> None:
    assert unpack(payload.pack()) == payload


@given(payloads, st.binary(max_size=64))
def test_bytes_after_the_end_do_not_matter(payload: Payload, tail: bytes) -> None:
    assert unpack(payload.pack() + tail) == payload


def test_every_truncation_is_refused() -> None:
    blob = sample().pack()
    for n in range(len(blob)):
        with pytest.raises(IncompatiblePayload):
            unpack(blob[:n])


def test_every_flipped_bit_is_refused() -> None:
    blob = sample().pack()
    minor_and_reserved = {10, 11}  # a newer minor format is read; its new tail is not
    for i in range(len(blob)):
        for bit in range(8):
            damaged = bytearray(blob)
            damaged[i] ^= 1 << bit
            if i in minor_and_reserved:
                continue
            with pytest.raises(IncompatiblePayload):
                unpack(bytes(damaged))


def test_a_newer_major_format_is_refused_with_a_way_out() -> None:
    blob = bytearray(sample().pack())
    struct.pack_into("<H", blob, 8, MAJOR + 1)
    with pytest.raises(IncompatiblePayload, match="upgrade executorch-qnn"):
        unpack(bytes(blob))


def test_a_forged_count_is_refused_without_reading_past_the_end() -> None:
    blob = bytearray(sample().pack())
    body = bytes(blob[32:]).replace(b"SM8650\x01", b"SM8650\xff", 1)
    tail = bytes(blob[16:32]) + body
    forged = bytes(blob[:12]) + struct.pack("<I", zlib.crc32(tail)) + tail
    with pytest.raises(IncompatiblePayload, match="past its end"):
        unpack(forged)
