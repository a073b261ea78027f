# SPDX-License-Identifier: Apache-2.0
"""Producers: connect, models, requests."""
