# SPDX-License-Identifier: BSD-3-Clause
"""ExecuTorch's own test suite of backends, run with flows of this project; see `__main__`."""
