/* SPDX-License-Identifier: BSD-3-Clause
 *
 * The C interface, used from C. Arguments: the folder with the programs of
 * tests/runtime/programs.py and that of the null provider, whose graphs add one to the first byte
 * of every buffer.
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "state_api.h"

static char programs[1024], qnn[1024], scratch[1024];

static const char* file(const char* folder, const char* name) {
  static _Thread_local char paths[4][2100];
  static _Thread_local int next;
  char* path = paths[next++ % 4];
  snprintf(path, sizeof paths[0], "%s/%s", folder, name);
  return path;
}

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      fprintf(stderr, "%s:%d: not true: %s (%s)\n", __FILE__, __LINE__, #condition, \
              etqnn_last_error());                                                  \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

#define CHECK_OK(call) CHECK((call) == ETQNN_OK)

#define CHECK_FAILS(call, status, words)                \
  do {                                                  \
    CHECK((call) == (status));                          \
    CHECK(strstr(etqnn_last_error(), (words)) != NULL); \
  } while (0)

static etqnn_session* opened(const char* name) {
  etqnn_session_options options = {0};
  etqnn_session* session = NULL;
  options.struct_size = sizeof options;
  options.qnn_libraries = qnn;
  CHECK_OK(etqnn_session_open(file(programs, name), &options, &session));
  CHECK(session != NULL);
  return session;
}

static etqnn_value int32_tensor(int32_t* values) {
  etqnn_value value = {0};
  value.struct_size = sizeof value;
  value.kind = ETQNN_TENSOR;
  value.scalar_type = ETQNN_INT32;
  value.rank = 2;
  value.dims[0] = 1;
  value.dims[1] = 4;
  value.data = values;
  value.bytes = 4 * sizeof *values;
  return value;
}

static int step(etqnn_session* session, const char* method) {
  int32_t x[4] = {7, 8, 9, 10}, y[4] = {0};
  etqnn_value input = int32_tensor(x), output = {0};
  int status;
  output.struct_size = sizeof output;
  output.data = y;
  output.bytes = sizeof y;
  status = etqnn_session_run(session, method, &input, 1, &output, 1);
  if (status == ETQNN_OK) {
    CHECK(output.kind == ETQNN_TENSOR && output.scalar_type == ETQNN_INT32);
    CHECK(output.rank == 2 && output.dims[0] == 1 && output.dims[1] == 4);
    CHECK(output.bytes == sizeof y && y[0] == 8 && y[1] == 8 && y[3] == 10);
  }
  return status;
}

static int64_t first(etqnn_session* session, const char* name) {
  int64_t values[4];
  CHECK_OK(etqnn_session_read_state(session, name, values, sizeof values));
  return values[0];
}

static void methods_are_described(void) {
  etqnn_session* session = opened("api.pte");
  size_t inputs = 0, outputs = 0;
  etqnn_value about = {0};
  CHECK(etqnn_session_method_count(session) == 2);
  CHECK(strcmp(etqnn_session_method_name(session, 0), "decode") == 0 ||
        strcmp(etqnn_session_method_name(session, 1), "decode") == 0);
  CHECK(etqnn_session_method_name(session, 2) == NULL);
  CHECK_OK(etqnn_session_method(session, "decode", &inputs, &outputs));
  CHECK(inputs == 1 && outputs == 1);
  CHECK_FAILS(etqnn_session_method(session, "nothing", &inputs, &outputs), ETQNN_STATE,
              "has no method nothing; it has");
  CHECK_FAILS(etqnn_session_input(session, "decode", 0, &about), ETQNN_INVALID, "struct_size is 0");
  about.struct_size = sizeof about;
  about.data = &about;
  CHECK_OK(etqnn_session_input(session, "decode", 0, &about));
  CHECK(about.kind == ETQNN_TENSOR && about.scalar_type == ETQNN_INT32 && about.rank == 2);
  CHECK(about.dims[1] == 4 && about.bytes == 16 && about.data == NULL);
  CHECK_OK(etqnn_session_output(session, "prefill", 0, &about));
  CHECK_FAILS(etqnn_session_output(session, "prefill", 1, &about), ETQNN_INVALID, "no value 1");
  etqnn_session_close(session);
}

static void buffers_are_described(void) {
  etqnn_session* session = opened("api.pte");
  etqnn_state_info info = {0};
  size_t i;
  const char* names[] = {"d", "k", "n"};
  info.struct_size = sizeof info;
  CHECK(etqnn_session_state_count(session) == 3);
  CHECK_OK(step(session, "decode"));
  for (i = 0; i < 3; ++i) {
    CHECK_OK(etqnn_session_state_info(session, i, &info));
    CHECK(strcmp(info.name, names[i]) == 0);
    CHECK(info.scalar_type == ETQNN_INT64 && info.rank == 1 && info.dims[0] == 4);
    CHECK(info.bytes == 32 && info.stored_bytes == 16 && info.stored_type == 0x032);
    CHECK(info.quantized == 0 && info.address != NULL);
    CHECK((info.input_address == info.output_address) == (strcmp(info.binding, "in_place") == 0));
    CHECK(strcmp(info.binding, i == 0 ? "double_buffer" : "in_place") == 0);
  }
  CHECK_FAILS(etqnn_session_state_info(session, 3, &info), ETQNN_INVALID, "no buffer 3");
  etqnn_session_close(session);
}

/* A program that was compiled when the structs were shorter or longer. */
static void structs_may_be_of_another_size(void) {
  etqnn_session* session = opened("api.pte");
  struct {
    etqnn_state_info info;
    char unknown[64];
  } longer;
  struct {
    etqnn_value value;
    void* unknown;
  } inputs[1], outputs[1];
  int32_t x[4] = {1, 2, 3, 4};
  memset(&longer, 0x5A, sizeof longer);
  longer.info.struct_size = sizeof longer;
  CHECK_OK(etqnn_session_state_info(session, 1, &longer.info));
  CHECK(longer.info.struct_size == sizeof longer && strcmp(longer.info.name, "k") == 0);
  CHECK(longer.unknown[0] == 0x5A && longer.unknown[63] == 0x5A);
  longer.info.struct_size = 8;
  CHECK_FAILS(etqnn_session_state_info(session, 1, &longer.info), ETQNN_INVALID, "sizeof");
  memset(inputs, 0, sizeof inputs);
  memset(outputs, 0, sizeof outputs);
  inputs[0].value = int32_tensor(x);
  inputs[0].value.struct_size = outputs[0].value.struct_size = sizeof inputs[0];
  /* Nobody wants the values. */
  CHECK_OK(etqnn_session_run(session, "decode", &inputs[0].value, 1, &outputs[0].value, 1));
  CHECK(outputs[0].value.bytes == 16 && outputs[0].value.data == NULL);
  etqnn_session_close(session);
}

static void state_is_read_written_reset_and_forked(void) {
  etqnn_session *session = opened("api.pte"), *twin = NULL, *grandchild = NULL;
  int64_t values[4] = {100, 2, 3, 4};
  CHECK(first(session, "k") == 9 && first(session, "n") == 0);
  CHECK_OK(step(session, "prefill"));
  CHECK_OK(step(session, "decode"));
  CHECK(first(session, "d") == 2 && first(session, "k") == 11 && first(session, "n") == 2);
  CHECK_OK(etqnn_session_write_state(session, "n", values, sizeof values));
  CHECK_OK(etqnn_session_fork(session, &twin));
  CHECK_OK(step(twin, "decode"));
  CHECK_OK(etqnn_session_fork(twin, &grandchild));
  CHECK_OK(etqnn_session_reset_state(session));
  CHECK(first(session, "k") == 9 && first(session, "n") == 0 && first(session, "d") == 0);
  etqnn_session_close(session);
  CHECK(first(twin, "n") == 101 && first(twin, "d") == 3);
  etqnn_session_close(twin);
  CHECK_OK(step(grandchild, "prefill"));
  CHECK(first(grandchild, "n") == 102 && first(grandchild, "k") == 13);
  CHECK_OK(etqnn_session_reset_state(grandchild));
  CHECK(first(grandchild, "k") == 9);
  etqnn_session_close(grandchild);
}

static void state_goes_through_files(void) {
  etqnn_session *a = opened("api.pte"), *b = opened("api.pte"), *other = opened("other.pte");
  const char* path = file(scratch, "state");
  CHECK_OK(step(a, "decode"));
  CHECK_OK(etqnn_session_save_state(a, path));
  CHECK_OK(step(b, "decode"));
  CHECK_OK(step(b, "decode"));
  CHECK_OK(etqnn_session_load_state(b, path));
  CHECK(first(b, "n") == 1 && first(b, "k") == 10);
  CHECK_FAILS(etqnn_session_load_state(other, path), ETQNN_STATE, "another program file");
  CHECK_FAILS(etqnn_session_load_state(b, file(scratch, "none")), ETQNN_IO, "No such file");
  CHECK_FAILS(etqnn_session_save_state(b, file(scratch, "no/folder")), ETQNN_IO, "no/folder");
  CHECK_OK(truncate(path, 60));
  CHECK_FAILS(etqnn_session_load_state(b, path), ETQNN_STATE, "should have");
  CHECK(first(b, "n") == 1);
  CHECK_OK(unlink(path));
  etqnn_session_close(a);
  etqnn_session_close(b);
  etqnn_session_close(other);
}

static void what_does_not_fit_is_refused_and_changes_nothing(void) {
  etqnn_session* session = opened("api.pte");
  int32_t x[8] = {0}, y[4];
  int64_t values[4] = {5, 6, 7, INT64_C(1) << 40};
  etqnn_value input = int32_tensor(x), output = int32_tensor(y), wrong;
  CHECK_FAILS(etqnn_session_run(session, "decode", NULL, 0, &output, 1), ETQNN_STATE,
              "takes 1 inputs, got 0");
  CHECK_FAILS(etqnn_session_run(session, "decode", NULL, 1, &output, 1), ETQNN_INVALID,
              "inputs is NULL");
  CHECK_FAILS(etqnn_session_run(session, "decode", &input, 1, NULL, 0), ETQNN_INVALID,
              "has 1 outputs");
  CHECK_FAILS(etqnn_session_run(session, "none", &input, 1, &output, 1), ETQNN_STATE, "no method");
  wrong = input;
  wrong.dims[1] = 5;
  CHECK_FAILS(etqnn_session_run(session, "decode", &wrong, 1, &output, 1), ETQNN_STATE,
              "must be int32[1, 4], got int32[1, 5]");
  wrong = input;
  wrong.scalar_type = ETQNN_FLOAT32;
  CHECK_FAILS(etqnn_session_run(session, "decode", &wrong, 1, &output, 1), ETQNN_STATE,
              "got float32[1, 4]");
  wrong.scalar_type = 4711;
  CHECK_FAILS(etqnn_session_run(session, "decode", &wrong, 1, &output, 1), ETQNN_INVALID, "input");
  wrong = input;
  wrong.rank = 17;
  CHECK_FAILS(etqnn_session_run(session, "decode", &wrong, 1, &output, 1), ETQNN_INVALID, "input");
  wrong = input;
  wrong.bytes = 12;
  CHECK_FAILS(etqnn_session_run(session, "decode", &wrong, 1, &output, 1), ETQNN_STATE,
              "takes 16 bytes, got 12");
  wrong = input;
  wrong.data = NULL;
  CHECK_FAILS(etqnn_session_run(session, "decode", &wrong, 1, &output, 1), ETQNN_STATE,
              "has no memory");
  wrong = input;
  wrong.kind = ETQNN_INT;
  CHECK_FAILS(etqnn_session_run(session, "decode", &wrong, 1, &output, 1), ETQNN_STATE,
              "got an int");
  wrong.kind = 77;
  CHECK_FAILS(etqnn_session_run(session, "decode", &wrong, 1, &output, 1), ETQNN_INVALID,
              "kind 77");
  wrong = output;
  wrong.bytes = 15;
  CHECK_FAILS(etqnn_session_run(session, "decode", &input, 1, &wrong, 1), ETQNN_INVALID,
              "output 0 of method decode is int32[1, 4] and takes up to 16 bytes");

  CHECK_FAILS(etqnn_session_write_state(session, "n", values, sizeof values), ETQNN_STATE,
              "cannot hold 1099511627776");
  CHECK_FAILS(etqnn_session_write_state(session, "n", values, 24), ETQNN_STATE, "has 32 bytes");
  CHECK_FAILS(etqnn_session_read_state(session, "n", values, 31), ETQNN_STATE, "got 31");
  CHECK_FAILS(etqnn_session_read_state(session, "m", values, 32), ETQNN_STATE,
              "no mutable buffer m");
  CHECK_FAILS(etqnn_session_read_state(session, "n", NULL, 32), ETQNN_INVALID, "values is NULL");
  CHECK_FAILS(etqnn_session_read_state(NULL, "n", values, 32), ETQNN_INVALID, "session is NULL");
  CHECK_FAILS(etqnn_session_load_state(session, NULL), ETQNN_INVALID, "path is NULL");
  CHECK(first(session, "n") == 0 && first(session, "k") == 9);
  CHECK_OK(step(session, "decode"));
  etqnn_session_close(session);
  etqnn_session_close(NULL);
}

static void loads_that_fail_say_why(void) {
  etqnn_session_options options = {0};
  etqnn_session* session = (etqnn_session*)&options;
  const char* damaged = file(scratch, "damaged.pte");
  FILE* out = fopen(damaged, "wb");
  fputs("this is no program", out);
  fclose(out);
  CHECK_FAILS(etqnn_session_open(file(programs, "none.pte"), NULL, &session), ETQNN_IO,
              "none.pte: No such file");
  CHECK(session == NULL);
  CHECK_FAILS(etqnn_session_open(damaged, NULL, &session), ETQNN_INCOMPATIBLE, "damaged.pte");
  CHECK_FAILS(etqnn_session_open(file(programs, "api.pte"), &options, &session), ETQNN_INVALID,
              "options.struct_size is 0");
  options.struct_size = sizeof options;
  options.qnn_libraries = scratch;
  CHECK_FAILS(etqnn_session_open(file(programs, "api.pte"), &options, &session),
              ETQNN_LIBRARY_NOT_FOUND, scratch);
  CHECK_FAILS(etqnn_session_open(NULL, NULL, &session), ETQNN_INVALID, "program_path is NULL");
  CHECK_FAILS(etqnn_session_open(damaged, NULL, NULL), ETQNN_INVALID, "session is NULL");
  CHECK_OK(unlink(damaged));
}

static void a_failure_of_qnn_has_its_words_and_a_warning(void) {
  etqnn_session* session = opened("failing.pte");
  CHECK(step(session, "forward") == ETQNN_QNN);
  CHECK(strstr(etqnn_last_error(), "the null graph fails as asked") != NULL);
  CHECK(strstr(etqnn_last_error(), "reset, load or write the state") != NULL);
  CHECK_OK(etqnn_session_reset_state(session));
  CHECK(first(session, "k") == 9);
  etqnn_session_close(session);
}

static void an_empty_store_is_one(void) {
  etqnn_store *store = NULL, *twin = NULL;
  const char* path = file(scratch, "empty");
  etqnn_state_info info = {0};
  info.struct_size = sizeof info;
  CHECK_OK(etqnn_store_create(file(programs, "api.pte"), &store));
  CHECK(etqnn_store_state_count(store) == 0);
  CHECK_FAILS(etqnn_store_state_info(store, 0, &info), ETQNN_INVALID, "no buffer 0");
  CHECK_OK(etqnn_store_fork(store, &twin));
  CHECK(strcmp(etqnn_store_token(store), etqnn_store_token(twin)) != 0);
  CHECK_OK(etqnn_store_save_state(store, path));
  etqnn_store_close(store);
  CHECK_OK(etqnn_store_load_state(twin, path));
  CHECK_OK(etqnn_store_reset_state(twin));
  etqnn_store_close(twin);
  CHECK_FAILS(etqnn_store_create(file(programs, "none.pte"), &store), ETQNN_IO, "none.pte");
  CHECK(store == NULL);
  CHECK_OK(unlink(path));
}

static void* use_alone(void* unused) {
  etqnn_session *session = opened("api.pte"), *twin = NULL;
  int i;
  (void)unused;
  for (i = 1; i <= 50; ++i) {
    CHECK_OK(step(session, i % 2 ? "decode" : "prefill"));
    CHECK(first(session, "n") == i && first(session, "d") == i && first(session, "k") == 9 + i);
    CHECK_FAILS(etqnn_session_read_state(session, "x", &i, 4), ETQNN_STATE, "no mutable buffer x");
    if (i == 25) {
      CHECK_OK(etqnn_session_fork(session, &twin));
    } else {
      /* The words are this thread's own. */
      CHECK(strstr(etqnn_last_error(), "no mutable buffer x") != NULL);
    }
  }
  etqnn_session_close(session);
  CHECK(first(twin, "n") == 25);
  etqnn_session_close(twin);
  return NULL;
}

static void threads_have_sessions_and_words_of_their_own(void) {
  pthread_t threads[8];
  size_t i;
  for (i = 0; i < 8; ++i) CHECK(pthread_create(&threads[i], NULL, use_alone, NULL) == 0);
  for (i = 0; i < 8; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  snprintf(programs, sizeof programs, "%s", argv[1]);
  snprintf(qnn, sizeof qnn, "%s", argv[2]);
  if (access(file(programs, "failing.pte"), R_OK) != 0) {
    fprintf(stderr, "skipped: no programs in %s\n", programs);
    return 77;
  }
  strcpy(scratch, "/tmp/etqnn-c-XXXXXX");
  CHECK(mkdtemp(scratch) != NULL);
  CHECK(etqnn_api_version() >= ETQNN_API_VERSION);
  CHECK(etqnn_registration_error() == 0);
  methods_are_described();
  buffers_are_described();
  structs_may_be_of_another_size();
  state_is_read_written_reset_and_forked();
  state_goes_through_files();
  what_does_not_fit_is_refused_and_changes_nothing();
  loads_that_fail_say_why();
  a_failure_of_qnn_has_its_words_and_a_warning();
  an_empty_store_is_one();
  threads_have_sessions_and_words_of_their_own();
  CHECK(rmdir(scratch) == 0); /* nothing was left there */
  puts("ok");
  return 0;
}
