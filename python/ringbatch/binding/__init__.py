# SPDX-License-Identifier: Apache-2.0
"""The C library as Python sees it: its functions, its tensors, and arrays over its memory."""
