# SPDX-License-Identifier: BSD-3-Clause
"""LLaMA-class decoders: from a checkpoint to a program, and from a prompt to text."""
