// SPDX-License-Identifier: BSD-3-Clause
// The seal: the last 64 bytes of a .pte that executorch-qnn wrote. ExecuTorch ignores what lies
// behind its own content, and has no checksum of its own.
//
//   char[8] "ETQNNSEA"; u32 version 1; u32 CRC-32 of the content; u64 bytes of the content;
//   u8[32] SHA-256 of the content; u32 CRC-32 of the 56 bytes before; u32 0
//
// The CRC is what is compared, at some GB/s. The SHA-256 is the content's name.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "core/digest.h"
#include "core/status.h"

namespace executorch_qnn {

// The digest of an intact file that is sealed; nothing if there is no seal. kIncompatible if the
// bytes are not those that were sealed.
Result<std::optional<Digest>> check_seal(const void* file, size_t size, const std::string& path);

// The name of the program in a file: from its seal, else computed.
Result<Digest> program_digest(const std::string& path);

}  // namespace executorch_qnn
