// SPDX-License-Identifier: BSD-3-Clause
// The seal: the last 64 bytes of a .pte that executorch-qnn wrote. ExecuTorch ignores what lies
// behind its own content, and has no checksum of its own.
//
//   char[8] "ETQNNSEA"; u32 version 1; u32 0; u64 bytes before the seal; u8[32] their SHA-256; u64
//   0
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "core/digest.h"
#include "core/status.h"

namespace executorch_qnn {

// The digest that the seal states, after comparing it; nothing if there is no seal. kIncompatible
// if the bytes are not those that were sealed.
Result<std::optional<Digest>> check_seal(const void* file, size_t size, const std::string& path);

}  // namespace executorch_qnn
