// SPDX-License-Identifier: BSD-3-Clause
// Sessions and stores of real programs on the null provider, whose graphs add one to the first byte
// of every buffer: what they share, in which order they may end, and what threads may do with them.
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/runtime/backend/backend_options_map.h>
#include <executorch/runtime/executor/method.h>
#include <executorch/runtime/executor/program.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string>
#include <thread>

#include "check.h"
#include "runtime/support.h"
#include "session/session.h"
#include "state/state_api.h"

using namespace support;

namespace {

std::string program_path(const char* name) {
  const std::string path = std::string(ETQNN_PROGRAMS) + "/" + name;
  if (access(path.c_str(), R_OK) != 0) SKIP_ALL(("there is no " + path).c_str());
  return path;
}

std::shared_ptr<const ProgramFile> open_program(const char* name = "api.pte") {
  CHECK_VALUE(program, ProgramFile::open(program_path(name), {ETQNN_NULL_QNN, false}));
  return program;
}

std::shared_ptr<Session> open_session(const std::shared_ptr<const ProgramFile>& program) {
  CHECK_VALUE(session, Session::create(program));
  return session;
}

Status step(Session& session, const std::string& method = "decode") {
  const int32_t x[4] = {1, 2, 3, 4};
  int32_t y[4] = {};
  std::vector<OutputValue> outputs{{y, sizeof y, 0, {}, {}}};
  ETQNN_TRY(session.run(method, {TensorView{x, sizeof x, 3, {1, 4}}}, outputs));
  return y[0] == 2 && y[3] == 4 ? Status() : Status(ErrorKind::kRuntime, "wrong values");
}

int64_t value(const Session& session, const char* name = "n") {
  int64_t values[4];
  CHECK_OK(session.read_state(name, values, sizeof values));
  return values[0];
}

// Each of the three buffers has seen as many calls as the others.
bool consistent(const Session& session) {
  const int64_t calls = value(session);
  return value(session, "d") == calls && value(session, "k") == (9 + calls) % 256;
}

// A method of a program in the hands of ExecuTorch alone.
class StockMethod {
 public:
  StockMethod(const et::Program& program, const char* name, const char* token) {
    const auto meta = program.method_meta(name);
    CHECK(meta.ok());
    for (size_t i = 0; i < meta->num_memory_planned_buffers(); ++i) {
      memory_.emplace_back(static_cast<size_t>(meta->memory_planned_buffer_size(i).get()));
    }
    for (Bytes& bytes : memory_) spans_.emplace_back(bytes.data(), bytes.size());
    planned_.emplace(et::Span<et::Span<uint8_t>>(spans_.data(), spans_.size()));
    manager_.emplace(&allocator_, &*planned_);
    et::BackendOptions<2> options;
    et::LoadBackendOptionsMap map;
    CHECK(options.set_option("qnn_libraries", ETQNN_NULL_QNN) == et::Error::Ok);
    CHECK(options.set_option("state_store", token) == et::Error::Ok);
    CHECK(map.set_options("QnnDelegate", options.view()) == et::Error::Ok);
    auto method = program.load_method(name, &*manager_, nullptr, nullptr, &map);
    CHECK(method.ok());
    method_.emplace(std::move(method.get()));
  }

  void step() {
    CHECK(method_->set_input(x_.value, 0) == et::Error::Ok);
    CHECK(method_->execute() == et::Error::Ok);
  }

 private:
  std::vector<Bytes> memory_;
  std::vector<et::Span<uint8_t>> spans_;
  executorch::extension::MallocMemoryAllocator allocator_;
  std::optional<et::HierarchicalAllocator> planned_;
  std::optional<et::MemoryManager> manager_;
  std::optional<et::Method> method_;
  Arg x_{ScalarType::kInt32, {1, 4}};
};

int64_t value(etqnn_store* store, const char* name = "n") {
  int64_t values[4];
  CHECK_EQ(etqnn_store_read_state(store, name, values, sizeof values), 0);
  return values[0];
}

template <class Work>
void in_threads(int count, const Work& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&work, i] { work(i); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

// ------------------------------------------------------------------------------------- sharing

TEST(sessions_share_a_context_and_no_buffer) {
  const int loads = null_count(kLoads);
  const auto program = open_program();
  std::vector<std::shared_ptr<Session>> sessions;
  std::set<const void*> addresses;
  for (int i = 0; i < 10; ++i) {
    sessions.push_back(open_session(i % 2 ? program : open_program()));
    CHECK_VALUE(twin, sessions.back()->fork());
    sessions.push_back(twin);
  }
  for (size_t i = 0; i < sessions.size(); ++i) {
    for (size_t calls = 0; calls < i; ++calls) CHECK_OK(step(*sessions[i]));
  }
  for (size_t i = 0; i < sessions.size(); ++i) {
    CHECK_EQ(value(*sessions[i]), static_cast<int64_t>(i));
    CHECK(consistent(*sessions[i]));
    for (const StateInfo& info : sessions[i]->state()) addresses.insert(info.address);
  }
  CHECK_EQ(addresses.size(), 3 * sessions.size());
  CHECK_EQ(null_count(kLoads), loads + 1);
  CHECK_EQ(null_count(kContexts), 1);
  sessions.clear();
  CHECK_EQ(null_count(kContexts), 0);
}

TEST(sessions_and_their_program_end_in_any_order) {
  std::vector<int> order{0, 1, 2, 3};  // the program, a session, its fork, the fork's fork
  do {
    auto program = open_program();
    std::shared_ptr<Session> sessions[3];
    sessions[0] = open_session(program);
    CHECK_OK(step(*sessions[0]));
    for (int i = 1; i < 3; ++i) {
      CHECK_VALUE(twin, sessions[i - 1]->fork());
      sessions[i] = twin;
    }
    int64_t calls = 1;
    for (int gone : order) {
      if (gone == 0) program.reset();
      if (gone > 0) sessions[gone - 1].reset();
      ++calls;
      for (const auto& session : sessions) {
        if (session == nullptr) continue;
        CHECK_OK(step(*session));
        CHECK_EQ(value(*session), calls);
      }
    }
    CHECK_EQ(null_count(kContexts), 0);
  } while (std::next_permutation(order.begin(), order.end()));
}

// ------------------------------------------------------------------------------------- stores

TEST(a_store_reaches_into_methods_that_executorch_runs) {
  const auto file = open_program();
  etqnn_store *store = nullptr, *twin = nullptr;
  CHECK_EQ(etqnn_store_create(file->path().c_str(), &store), 0);
  StockMethod prefill(file->program(), "prefill", etqnn_store_token(store));
  StockMethod decode(file->program(), "decode", etqnn_store_token(store));
  CHECK_EQ(etqnn_store_state_count(store), 3u);
  prefill.step();
  decode.step();
  CHECK_EQ(value(store), 2);
  CHECK_EQ(value(store, "k"), 11);
  const int64_t written[4] = {50, 0, 0, 0};
  CHECK_EQ(etqnn_store_write_state(store, "d", written, sizeof written), 0);
  CHECK_EQ(etqnn_store_fork(store, &twin), 0);
  decode.step();
  CHECK_EQ(value(store, "d"), 51);

  // A method of the fork goes on from where it was made.
  StockMethod other(file->program(), "decode", etqnn_store_token(twin));
  other.step();
  other.step();
  CHECK_EQ(value(twin, "d"), 52);
  CHECK_EQ(value(store, "d"), 51);
  CHECK_EQ(etqnn_store_reset_state(store), 0);
  CHECK_EQ(value(store, "k"), 9);

  // Closed in the wrong order: the methods keep what they work on.
  etqnn_store_close(store);
  prefill.step();
  other.step();
  CHECK_EQ(value(twin, "d"), 53);
  etqnn_store_close(twin);
  other.step();
}

TEST(stores_and_sessions_of_a_program_understand_each_other_s_files) {
  const auto file = open_program();
  const std::string path = "/tmp/etqnn-store-" + std::to_string(getpid());
  const auto session = open_session(file);
  for (int i = 0; i < 3; ++i) CHECK_OK(step(*session));
  CHECK_OK(session->save_state(path));
  etqnn_store* store = nullptr;
  CHECK_EQ(etqnn_store_create(file->path().c_str(), &store), 0);
  // Before the methods are loaded there is nothing to load into.
  CHECK_EQ(etqnn_store_load_state(store, path.c_str()), ETQNN_STATE);
  StockMethod decode(file->program(), "decode", etqnn_store_token(store));
  CHECK_EQ(etqnn_store_load_state(store, path.c_str()), 0);
  decode.step();
  CHECK_EQ(value(store), 4);
  CHECK_EQ(value(store, "k"), 13);
  CHECK_EQ(etqnn_store_save_state(store, path.c_str()), 0);
  CHECK_OK(session->load_state(path));
  CHECK_EQ(value(*session), 4);

  etqnn_store* foreign = nullptr;
  CHECK_EQ(etqnn_store_create(program_path("other.pte").c_str(), &foreign), 0);
  CHECK_EQ(etqnn_store_load_state(foreign, path.c_str()), ETQNN_STATE);
  CHECK_CONTAINS(etqnn_last_error(), "another program file");
  etqnn_store_close(foreign);
  etqnn_store_close(store);
  unlink(path.c_str());
}

TEST(a_token_ends_with_its_store) {
  const auto file = open_program();
  etqnn_store* store = nullptr;
  CHECK_EQ(etqnn_store_create(file->path().c_str(), &store), 0);
  const std::string token = etqnn_store_token(store);
  etqnn_store_close(store);
  Program program({payload("f", {}, {}, {})});
  Load load;
  Delegate delegate(program, 0, load, token);
  CHECK(delegate.error == et::Error::InvalidState);
  CHECK_CONTAINS(etqnn_last_error(), "no state store with the token '" + token + "'");
}

// ------------------------------------------------------------------------------------- threads

TEST(a_fork_never_sees_half_of_a_call) {
  const auto session = open_session(open_program());
  std::atomic<bool> done{false};
  std::atomic<int> wrong{0};
  std::thread runner([&] {
    while (!done) wrong += !step(*session, "prefill").ok();
  });
  in_threads(3, [&](int) {
    for (int i = 0; i < 30; ++i) {
      auto twin = session->fork();
      wrong += !twin.ok() || !consistent(*twin.value()) || !step(*twin.value()).ok() ||
               !consistent(*twin.value());
    }
  });
  done = true;
  runner.join();
  CHECK_EQ(wrong.load(), 0);
  CHECK(consistent(*session));
}

TEST(calls_on_one_session_wait_for_each_other) {
  const auto session = open_session(open_program());
  const std::string path = "/tmp/etqnn-shared-" + std::to_string(getpid());
  CHECK_OK(session->save_state(path));
  std::atomic<int> wrong{0};
  in_threads(4, [&](int thread) {
    for (int i = 0; i < 50; ++i) {
      wrong += !step(*session).ok();
      wrong += session->state().size() != 3;
      // Whoever reads the file sees a whole state.
      if (thread == 0) wrong += !session->save_state(path).ok();
      if (thread == 1) wrong += !session->load_state(path).ok();
      if (thread == 2) wrong += !session->reset_state().ok();
    }
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK(consistent(*session));
  unlink(path.c_str());
}

// Eight threads with sessions of their own; ETQNN_STRESS_SECONDS makes it longer.
TEST(threads_with_a_session_each_get_right_values) {
  const char* text = std::getenv("ETQNN_STRESS_SECONDS");
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::duration<double>(text != nullptr ? std::atof(text) : 1.0);
  const auto shared = open_program();
  const int collisions = null_count(kCollisions);
  std::atomic<long> calls{0};
  std::atomic<int> wrong{0};
  in_threads(8, [&](int thread) {
    const std::string path =
        "/tmp/etqnn-thread-" + std::to_string(getpid()) + "-" + std::to_string(thread);
    while (std::chrono::steady_clock::now() < end) {
      auto session = open_session(thread % 2 ? shared : open_program());
      for (int64_t i = 1; i <= 40; ++i) {
        wrong += !step(*session, i % 3 ? "decode" : "prefill").ok() || value(*session) != i ||
                 !consistent(*session);
        if (i == 10) wrong += !session->save_state(path).ok();
        if (i == 30) {
          // A fork takes over, the original is gone.
          CHECK_VALUE(twin, session->fork());
          session = twin;
        }
        ++calls;
      }
      wrong += !session->load_state(path).ok() || value(*session) != 10 || !consistent(*session);
      wrong += !session->reset_state().ok() || value(*session) != 0 || !consistent(*session);
    }
    unlink(path.c_str());
  });
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(null_count(kCollisions), collisions);
  std::fprintf(stderr, "       %ld calls\n", calls.load());
}

TEST_MAIN()
