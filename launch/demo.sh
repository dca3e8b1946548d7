#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Sets up .venv on first use and runs the demo: ./launch/demo.sh [--topology e-p-d|e-pd] [--json FILE]

set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
"$root/launch/setup.sh"
exec "$root/.venv/bin/python" -m dynamo_epd demo "$@"
