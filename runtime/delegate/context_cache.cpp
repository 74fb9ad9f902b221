// SPDX-License-Identifier: BSD-3-Clause
#include "delegate/context_cache.h"

#include <map>
#include <mutex>
#include <tuple>

namespace executorch_qnn {
namespace {

struct Cache {
  std::mutex mutex;  // also held while a context is loaded, so that nobody loads it twice
  std::map<ContextKey, std::weak_ptr<const ExecutableContext>> contexts;
  // Kept for the life of the process: one for each library and SoC, cheap to have, 16 ms to make,
  // and older QNN libraries do not give back all the memory of one that is freed.
  std::map<std::pair<std::string, uint32_t>, std::shared_ptr<const Backend>> backends;
};

Cache& cache() {
  static auto* instance = new Cache();  // outlives delegates destroyed at exit
  return *instance;
}

// The simulator has to be told which SoC it stands for; a device knows what it is.
constexpr bool kSimulator =
#if defined(__x86_64__)
    true;
#else
    false;
#endif

}  // namespace

bool ContextKey::operator<(const ContextKey& other) const {
  return std::tie(soc_model, digest, libraries) <
         std::tie(other.soc_model, other.digest, other.libraries);
}

Result<std::shared_ptr<const ExecutableContext>> cached_context(
    const std::shared_ptr<const Library>& library, const ContextKey& key,
    const std::function<Result<ContextBytes>()>& bytes) {
  Cache& c = cache();
  std::lock_guard<std::mutex> lock(c.mutex);
  for (auto it = c.contexts.begin(); it != c.contexts.end();) {
    it = it->second.expired() ? c.contexts.erase(it) : std::next(it);
  }
  if (const auto found = c.contexts.find(key); found != c.contexts.end()) {
    if (auto context = found->second.lock()) return context;
  }

  ETQNN_ASSIGN(const ContextBytes binary, bytes());
  if (!binary.verified && Sha256::of(binary.data, binary.size) != key.digest) {
    // QNN itself would not notice, or would crash.
    return Status(ErrorKind::kInvalid,
                  "the context binary is damaged: its SHA-256 is not the one "
                  "that the delegate payload states");
  }
  const uint32_t soc_model = kSimulator ? key.soc_model : 0;
  std::shared_ptr<const Backend>& backend = c.backends[{key.libraries, soc_model}];
  if (backend == nullptr) {
    ETQNN_ASSIGN(backend, Backend::create(library, soc_model));
  }
  ETQNN_ASSIGN(std::shared_ptr<const ExecutableContext> context,
               ExecutableContext::load(backend, binary.data, binary.size));
  c.contexts[key] = context;
  return context;
}

}  // namespace executorch_qnn
