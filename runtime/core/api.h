// SPDX-License-Identifier: BSD-3-Clause
// Marks what `libexecutorch_qnn_delegate.so` exports; everything else in it is hidden.
#pragma once

#define ETQNN_API __attribute__((visibility("default")))
