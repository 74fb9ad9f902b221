// SPDX-License-Identifier: BSD-3-Clause
// Which state store a delegate belongs to.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/api.h"
#include "core/status.h"
#include "state/store.h"

namespace executorch_qnn {

// A store that delegates find by a token: a session hands the token to every method it loads. Ends
// with the object; delegates that found the store keep it.
class ETQNN_API StoreToken {
 public:
  // `libraries`: the folder that the session's delegates load QNN from; empty: search. `verified`:
  // the program's bytes have been compared with a digest, contexts need not be.
  StoreToken(std::shared_ptr<StateStore> store, std::string libraries, bool verified = false);
  ~StoreToken();
  StoreToken(const StoreToken&) = delete;
  StoreToken& operator=(const StoreToken&) = delete;

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

struct TokenTarget {
  std::shared_ptr<StateStore> store;
  std::string libraries;
  bool verified = false;
};

Result<TokenTarget> find_token(const std::string& token);

// One load of one method, as ExecuTorch's runtime lets us see it.
struct MethodLoad {
  const void* program = nullptr;    // its named data map: one per loaded program
  const void* allocator = nullptr;  // the method's: one per load
  std::string method;
};

// Keeps a load counted as one that uses its store; the delegate holds it.
class LoadRegistration {
 public:
  LoadRegistration(std::shared_ptr<StateStore> store, MethodLoad load);
  ~LoadRegistration();
  LoadRegistration(const LoadRegistration&) = delete;
  LoadRegistration& operator=(const LoadRegistration&) = delete;

  const std::shared_ptr<StateStore>& store() const { return store_; }

 private:
  std::shared_ptr<StateStore> store_;
  MethodLoad load_;
};

// Without a token: all partitions of one load share a store, and so do the methods of one program
// (prefill and decode); a method that is loaded a second time gets a new one.
std::unique_ptr<LoadRegistration> store_for(const MethodLoad& load);

}  // namespace executorch_qnn
