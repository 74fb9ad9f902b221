// SPDX-License-Identifier: BSD-3-Clause
// Contexts that are loaded in this process, each once, however many sessions use them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "core/digest.h"
#include "core/status.h"
#include "graph/context.h"

namespace executorch_qnn {

struct ContextKey {
  std::string libraries;
  Digest digest{};
  uint32_t soc_model = 0;

  bool operator<(const ContextKey& other) const;
};

// The bytes of a context binary; valid while the object that lends them lives.
struct ContextBytes {
  std::shared_ptr<const void> owner;
  const void* data = nullptr;
  size_t size = 0;
  bool verified = false;  // somebody has compared them with their digest already
};

// The loaded context of that key. Where there is none, `bytes` is asked for the binary, which must
// have the key's digest. The cache does not keep contexts alive.
Result<std::shared_ptr<const ExecutableContext>> cached_context(
    const std::shared_ptr<const Library>& library, const ContextKey& key,
    const std::function<Result<ContextBytes>()>& bytes);

}  // namespace executorch_qnn
