// SPDX-License-Identifier: BSD-3-Clause
// What a program that links `libexecutorch_qnn_delegate.so` may call. Linking alone registers the
// backend "QnnDelegate" with ExecuTorch's runtime; calling any of these keeps a linker from
// dropping the library as unused.
#pragma once

extern "C" {
// ExecuTorch's error number of the registration, 0 on success.
__attribute__((visibility("default"))) int etqnn_registration_error();
// Why the last load or execution on this thread failed, in words; "" if none has.
__attribute__((visibility("default"))) const char* etqnn_last_error();
}
