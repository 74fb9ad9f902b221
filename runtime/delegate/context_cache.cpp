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
  std::map<std::pair<std::string, uint32_t>, std::weak_ptr<const Backend>> backends;
};

Cache& cache() {
  static auto* instance = new Cache();  // outlives delegates destroyed at exit
  return *instance;
}

template <class Map>
void drop_expired(Map& map) {
  for (auto it = map.begin(); it != map.end();) {
    it = it->second.expired() ? map.erase(it) : std::next(it);
  }
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
  drop_expired(c.contexts);
  drop_expired(c.backends);
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
  auto& known_backend = c.backends[{key.libraries, soc_model}];
  std::shared_ptr<const Backend> backend = known_backend.lock();
  if (backend == nullptr) {
    ETQNN_ASSIGN(backend, Backend::create(library, soc_model));
    known_backend = backend;
  }
  ETQNN_ASSIGN(std::shared_ptr<const ExecutableContext> context,
               ExecutableContext::load(backend, binary.data, binary.size));
  c.contexts[key] = context;
  return context;
}

}  // namespace executorch_qnn
