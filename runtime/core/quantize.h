// SPDX-License-Identifier: BSD-3-Clause
// Between the host's floats and the integers that stand for them on the NPU:
// real = (q + offset) * scale.
#pragma once

#include <cstddef>
#include <cstdint>

namespace executorch_qnn {

// Offsets up to here, either way, can be computed with: every zero point (minus the offset) that
// lies in the range of its type, and many more.
constexpr int32_t kMaxOffset = 1 << 20;

// What is defined for Integer = uint8_t, int8_t, uint16_t, int16_t, a normal scale > 0 and an
// offset up to kMaxOffset, bit for bit as PyTorch does it on the CPU
// (torch/ao/quantization/fx/_decomposed.py).

// quantize_per_tensor with the whole range of Integer: x * (1 / scale), in float32, is rounded to
// nearest even, the zero point is added, and what is out of range becomes the end of it. NaN
// becomes the integer 0: the reference does not define it, on x86-64 and AArch64 that is what it
// gives.
template <class Integer>
void quantize(const float* from, Integer* to, size_t count, float scale, int32_t offset) noexcept;

// dequantize_per_tensor: (q - zero point) * scale in float32.
template <class Integer>
void dequantize(const Integer* from, float* to, size_t count, float scale, int32_t offset) noexcept;

}  // namespace executorch_qnn
