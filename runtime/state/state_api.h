/* SPDX-License-Identifier: BSD-3-Clause
 *
 * The C interface of libexecutorch_qnn_delegate.so: running programs (.pte files) whose mutable
 * buffers are owned by the delegate, and reaching into those buffers.
 *
 *   etqnn_session   a program with everything loaded: run its methods, use its state.
 *   etqnn_store     the state alone, for programs that load methods with ExecuTorch's own Program,
 *                   Method or Module.
 *
 * Errors. A function that returns int returns an etqnn_status: ETQNN_OK (0) or the kind of the
 * failure. etqnn_last_error() has the words. A call that fails has changed nothing, unless its
 * description says otherwise; what it was to fill in holds nothing of use, a handle is NULL.
 *
 * Ownership. Memory that is passed in is used during the call only. Strings that come back belong
 * to the handle they came from and go with it; do not free them. Handles end with their close
 * function, in any order, NULL is allowed; nothing else may be using a handle then.
 *
 * Threads. Every function may be called from every thread. Calls on one handle wait for each other,
 * different handles work in parallel.
 *
 * Units. Sizes are bytes. Tensors are dense, row-major, in the machine's byte order.
 *
 * Growth. A struct begins with its own size, which the caller sets to sizeof: members are only ever
 * added at the end, so that a caller and a library of different age understand each other. Begin
 * with zeros: an unused member is 0. Elements of an array of structs have one size.
 */
#ifndef EXECUTORCH_QNN_STATE_API_H
#define EXECUTORCH_QNN_STATE_API_H

#include <stddef.h>
#include <stdint.h>

#define ETQNN_C_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------ the library */

/* What this header describes. The library's own number is the same or higher. */
#define ETQNN_API_VERSION 1
ETQNN_C_API int etqnn_api_version(void);

enum etqnn_status {
  ETQNN_OK = 0,
  ETQNN_LIBRARY_NOT_FOUND = 1, /* the QNN libraries are not where they were looked for */
  ETQNN_INCOMPATIBLE = 2,      /* a program that is damaged, or made for other libraries or a SoC */
  ETQNN_INVALID = 3,           /* an argument that makes no sense */
  ETQNN_QNN = 4,               /* QNN failed; its own text is in the words */
  ETQNN_STATE = 5,             /* an input, a buffer or a state file that does not fit */
  ETQNN_IO = 6,                /* a file cannot be read or written */
  ETQNN_RUNTIME = 7            /* ExecuTorch's runtime failed, or there is no memory */
};

/* The words for the last failure on this thread, of this interface or of the delegate under
 * ExecuTorch's own; "" if there was none. Good until the next failure on this thread. */
ETQNN_C_API const char* etqnn_last_error(void);

/* Loading the library registers the backend "QnnDelegate" with ExecuTorch. ExecuTorch's error
 * number of that; 0 is success. A call also keeps linkers from dropping the library as unused. */
ETQNN_C_API int etqnn_registration_error(void);

/* ------------------------------------------------------------------------------ sessions */

typedef struct etqnn_session etqnn_session;

typedef struct etqnn_session_options {
  size_t struct_size;
  /* Folder of the QNN libraries. NULL: QNN_SDK_ROOT, then the system's library path. */
  const char* qnn_libraries;
  /* Not 0: keep the program's pages in memory. */
  int32_t lock_memory;
} etqnn_session_options;

/* Loads all methods of a program; mutable buffers have their initial values. `options` may be NULL.
 * The file is mapped: it may be removed or replaced by another, but not written to. Sessions of one
 * file share its weights and QNN contexts and have a state each. */
ETQNN_C_API int etqnn_session_open(const char* program_path, const etqnn_session_options* options,
                                   etqnn_session** session);

/* A second session of the same program that starts from a copy of this one's state. */
ETQNN_C_API int etqnn_session_fork(etqnn_session* session, etqnn_session** twin);

ETQNN_C_API void etqnn_session_close(etqnn_session* session);

/* -------------------------------------------------------------- methods */

#define ETQNN_MAX_RANK 16

enum etqnn_kind {
  ETQNN_TENSOR = 0,
  ETQNN_INT = 1,
  ETQNN_DOUBLE = 2,
  ETQNN_BOOL = 3,
  ETQNN_NONE = 4,
  ETQNN_OTHER = 5 /* of a kind that cannot be passed through this interface */
};

/* ExecuTorch's numbers. */
enum etqnn_scalar_type {
  ETQNN_UINT8 = 0,
  ETQNN_INT8 = 1,
  ETQNN_INT16 = 2,
  ETQNN_INT32 = 3,
  ETQNN_INT64 = 4,
  ETQNN_FLOAT16 = 5,
  ETQNN_FLOAT32 = 6,
  ETQNN_FLOAT64 = 7,
  ETQNN_BOOL8 = 11, /* one byte, 0 or 1 */
  ETQNN_UINT16 = 27
};

/* An argument or a result. */
typedef struct etqnn_value {
  size_t struct_size;
  int32_t kind;        /* etqnn_kind */
  int32_t scalar_type; /* etqnn_scalar_type; this and the next four are for tensors */
  uint32_t rank;
  int32_t dims[ETQNN_MAX_RANK];
  void* data; /* only read if it is an input */
  size_t bytes;
  int64_t int_value; /* of an int; of a bool 0 or 1 */
  double double_value;
} etqnn_value;

ETQNN_C_API size_t etqnn_session_method_count(const etqnn_session* session);
/* NULL from the count on. */
ETQNN_C_API const char* etqnn_session_method_name(const etqnn_session* session, size_t index);

/* How many inputs and outputs a method has. */
ETQNN_C_API int etqnn_session_method(const etqnn_session* session, const char* method,
                                     size_t* n_inputs, size_t* n_outputs);

/* Describes one of them in `about`, whose struct_size is set: kind and, for a tensor, type, shape
 * and bytes; `data` becomes NULL. Dynamic dimensions have their upper bound. */
ETQNN_C_API int etqnn_session_input(const etqnn_session* session, const char* method, size_t index,
                                    etqnn_value* about);
ETQNN_C_API int etqnn_session_output(const etqnn_session* session, const char* method, size_t index,
                                     etqnn_value* about);

/* Runs a method once.
 *
 * Inputs are complete values of the very kind, type and shape that the method has. In `outputs`,
 * one per result, the caller sets `data` and, as the room there, `bytes`: at least what
 * etqnn_session_output() says. With `data` NULL the result is not copied. The call fills in the
 * rest, and in `bytes` the size of the result.
 *
 * What does not fit is ETQNN_STATE (an input) or ETQNN_INVALID, and nothing has run. When a method
 * fails on its way, buffers may have been changed; the words say so, and the state has to be reset,
 * loaded or written before the next call. */
ETQNN_C_API int etqnn_session_run(etqnn_session* session, const char* method,
                                  const etqnn_value* inputs, size_t n_inputs, etqnn_value* outputs,
                                  size_t n_outputs);

/* -------------------------------------------------------------- state */

/* One mutable buffer. */
typedef struct etqnn_state_info {
  size_t struct_size;
  const char* name;    /* fully qualified */
  int32_t scalar_type; /* etqnn_scalar_type, as the model declares it: what is read and written */
  uint32_t rank;
  int32_t dims[ETQNN_MAX_RANK];
  size_t bytes;         /* of the values that are read and written */
  uint32_t stored_type; /* QNN's number of the type in memory, for example 0x216 for fp16 */
  size_t stored_bytes;  /* of the buffer in memory */
  const char* binding;  /* how graphs use it: "in_place", ...; "host" if ExecuTorch keeps it */
  /* Where it is, and what QNN was given to read it and to write it, NULL if nothing; for reports
   * and tests, not for access. */
  const void* address;
  const void* input_address;
  const void* output_address;
  int32_t quantized; /* not 0: real = (stored + offset) * scale */
  float scale;
  int32_t offset;
} etqnn_state_info;

/* Buffers are numbered: the delegates' by name, then those that the host keeps. */
ETQNN_C_API size_t etqnn_session_state_count(etqnn_session* session);
/* `info` with its struct_size set. ETQNN_INVALID from the count on. */
ETQNN_C_API int etqnn_session_state_info(etqnn_session* session, size_t index,
                                         etqnn_state_info* info);

/* Copies a buffer's values out or in: exactly etqnn_state_info.bytes of them. Writing rounds to the
 * stored type; an int64 that needs more than the 32 bits of it is ETQNN_STATE. */
ETQNN_C_API int etqnn_session_read_state(etqnn_session* session, const char* name, void* values,
                                         size_t bytes);
ETQNN_C_API int etqnn_session_write_state(etqnn_session* session, const char* name,
                                          const void* values, size_t bytes);

/* Every buffer back to its initial value. */
ETQNN_C_API int etqnn_session_reset_state(etqnn_session* session);

/* One file with all buffers. It is complete under its name or not there; where saving fails, or the
 * process ends while it saves, a file that was there before is untouched. */
ETQNN_C_API int etqnn_session_save_state(etqnn_session* session, const char* path);
/* ETQNN_STATE: the file is damaged, or of another version, program or set of buffers. */
ETQNN_C_API int etqnn_session_load_state(etqnn_session* session, const char* path);

/* ------------------------------------------------------------------------------ stores
 *
 * The buffers that the delegates of a program own, made by the caller and handed to the methods:
 *
 *   etqnn_store_create("model.pte", &store);
 *   executorch::runtime::BackendOptions<1> options;
 *   options.set_option("state_store", etqnn_store_token(store));
 *   executorch::runtime::LoadBackendOptionsMap map;
 *   map.set_options("QnnDelegate", options.view());
 *   module.load_method("forward", nullptr, nullptr, &map);  // or Program::load_method
 *
 * All methods that are loaded with the token share the buffers. A buffer appears in the store when
 * the first method that uses it is loaded, so load them before anything else. Buffers that the host
 * keeps are in ExecuTorch's memory and not in the store: a program that has some needs a session
 * for saving, and files of such a program's sessions do not load here.
 *
 * The functions wait for the delegate that is executing. A method may consist of several: between
 * two of them a state would be half of a step, so call them when no method runs. */

typedef struct etqnn_store etqnn_store;

/* `program_path` says which program the state belongs to; the file is read and not kept. Files are
 * exchangeable with those of sessions of the same program. */
ETQNN_C_API int etqnn_store_create(const char* program_path, etqnn_store** store);

/* A second store with a copy of the buffers, for methods that are loaded with its token. */
ETQNN_C_API int etqnn_store_fork(etqnn_store* store, etqnn_store** twin);

/* Methods that were loaded with its token keep the buffers; no further ones can be loaded. */
ETQNN_C_API void etqnn_store_close(etqnn_store* store);

/* The value of the runtime spec "state_store". */
ETQNN_C_API const char* etqnn_store_token(const etqnn_store* store);

/* As for sessions. The numbers of buffers hold until another method is loaded. */
ETQNN_C_API size_t etqnn_store_state_count(etqnn_store* store);
ETQNN_C_API int etqnn_store_state_info(etqnn_store* store, size_t index, etqnn_state_info* info);
ETQNN_C_API int etqnn_store_read_state(etqnn_store* store, const char* name, void* values,
                                       size_t bytes);
ETQNN_C_API int etqnn_store_write_state(etqnn_store* store, const char* name, const void* values,
                                        size_t bytes);
ETQNN_C_API int etqnn_store_reset_state(etqnn_store* store);
ETQNN_C_API int etqnn_store_save_state(etqnn_store* store, const char* path);
ETQNN_C_API int etqnn_store_load_state(etqnn_store* store, const char* path);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* EXECUTORCH_QNN_STATE_API_H */
