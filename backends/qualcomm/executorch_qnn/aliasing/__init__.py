# SPDX-License-Identifier: BSD-3-Clause
"""What may share memory: buffer updates as one parallel assignment."""

from .slots import buffer, mutated_buffers, state_slots

__all__ = ["buffer", "mutated_buffers", "state_slots"]
