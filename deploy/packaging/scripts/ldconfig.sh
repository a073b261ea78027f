#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e
ldconfig
