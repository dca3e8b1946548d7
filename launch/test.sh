#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up .venv on first use and runs the tests: ./launch/test.sh [pytest arguments, paths from the checkout's top]
# Without arguments: everything that is not marked slow. `-m slow` runs the others, `-m ""` all.

set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/launch/setup.sh"
cd -- "$root"
exec .venv/bin/python -m pytest "$@"
