#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One encode worker, and one that prefills and decodes, on this host; common.sh says how they are set.

set -e
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

encode_worker "$@"
worker agg "${PD_CUDA_VISIBLE_DEVICES:-1}" "${PD_ENGINE_ARGS:-"$ENGINE_CONFIGS/agg.yaml"}" "$@"

# Ends when any of them does.
wait -n "${pids[@]}"
