// SPDX-License-Identifier: BSD-3-Clause
// Conversion between the host's floats and the NPU's fp16.
#pragma once

#include <cstddef>
#include <cstdint>

namespace executorch_qnn {

// Towards fp16: rounds to nearest even. A finite value beyond +-65504 becomes +-65504, so that a
// mask of -1e9 stays finite; infinities and NaN are kept.
void to_half(const float* from, uint16_t* to, size_t count) noexcept;
void to_half(const double* from, uint16_t* to, size_t count) noexcept;

// From fp16: exact.
void from_half(const uint16_t* from, float* to, size_t count) noexcept;
void from_half(const uint16_t* from, double* to, size_t count) noexcept;

namespace internal {
// What is used where the processor has no instructions for it. Exposed for tests.
void to_half_portable(const float* from, uint16_t* to, size_t count) noexcept;
void from_half_portable(const uint16_t* from, float* to, size_t count) noexcept;
}  // namespace internal

}  // namespace executorch_qnn
