# SPDX-License-Identifier: BSD-3-Clause
"""`python -m executorch_qnn.cli` is the same as `executorch-qnn`."""

import sys

from . import main

sys.exit(main())
