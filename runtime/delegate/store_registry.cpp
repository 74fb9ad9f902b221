// SPDX-License-Identifier: BSD-3-Clause
#include "delegate/store_registry.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace executorch_qnn {
namespace {

struct Token {
  std::weak_ptr<StateStore> store;
  std::string libraries;
  bool verified;
};

// A live delegate and its store, which its registration keeps alive.
struct Load {
  MethodLoad load;
  std::weak_ptr<StateStore> store;
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, Token> tokens;
  uint64_t next_token = 1;
  std::vector<Load> loads;  // in the order they came
};

Registry& registry() {
  static auto* instance = new Registry();  // outlives delegates destroyed at exit
  return *instance;
}

bool same_load(const MethodLoad& a, const MethodLoad& b) {
  return a.program == b.program && a.allocator == b.allocator && a.method == b.method;
}

}  // namespace

StoreToken::StoreToken(std::shared_ptr<StateStore> store, std::string libraries, bool verified) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  text_ = "store " + std::to_string(r.next_token++);
  r.tokens[text_] = {store, std::move(libraries), verified};
}

StoreToken::~StoreToken() {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.tokens.erase(text_);
}

Result<TokenTarget> find_token(const std::string& token) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.tokens.find(token);
  std::shared_ptr<StateStore> store;
  if (found != r.tokens.end()) store = found->second.store.lock();
  if (store == nullptr) {
    return Status(ErrorKind::kState, "there is no state store with the token '" + token + "'");
  }
  return TokenTarget{std::move(store), found->second.libraries, found->second.verified};
}

LoadRegistration::LoadRegistration(std::shared_ptr<StateStore> store, MethodLoad load)
    : store_(std::move(store)), load_(std::move(load)) {}

LoadRegistration::~LoadRegistration() {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  const auto mine = std::find_if(r.loads.begin(), r.loads.end(), [this](const Load& entry) {
    return entry.store.lock() == store_ && same_load(entry.load, load_);
  });
  if (mine != r.loads.end()) r.loads.erase(mine);
}

std::unique_ptr<LoadRegistration> store_for(const MethodLoad& load) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  std::shared_ptr<StateStore> own;                   // of another partition of this load
  std::vector<std::shared_ptr<StateStore>> taken;    // by other loads of this method
  std::vector<std::shared_ptr<StateStore>> offered;  // by other methods of this program
  for (const Load& entry : r.loads) {
    if (entry.load.program != load.program) continue;
    if (same_load(entry.load, load)) {
      own = entry.store.lock();
    } else {
      (entry.load.method == load.method ? taken : offered).push_back(entry.store.lock());
    }
  }
  for (auto it = offered.rbegin(); it != offered.rend() && own == nullptr; ++it) {
    if (std::find(taken.begin(), taken.end(), *it) == taken.end()) own = *it;
  }
  if (own == nullptr) own = std::make_shared<StateStore>();
  r.loads.push_back({load, own});
  return std::make_unique<LoadRegistration>(std::move(own), load);
}

}  // namespace executorch_qnn
