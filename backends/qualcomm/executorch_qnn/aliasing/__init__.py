# SPDX-License-Identifier: BSD-3-Clause
"""What may share memory: buffer updates as one parallel assignment."""

from .updates import drop_idle_guards, guard_updates

__all__ = ["drop_idle_guards", "guard_updates"]
