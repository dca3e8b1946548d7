#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One encode, one prefill and one decode worker on this host; common.sh says how they are set.

set -e
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

encode_worker "$@"
worker prefill "${PREFILL_CUDA_VISIBLE_DEVICES:-1}" "${PREFILL_ENGINE_ARGS:-"$ENGINE_CONFIGS/prefill.yaml"}" "$@"
worker decode "${DECODE_CUDA_VISIBLE_DEVICES:-2}" "${DECODE_ENGINE_ARGS:-"$ENGINE_CONFIGS/decode.yaml"}" "$@"

# Ends when any of them does.
wait -n "${pids[@]}"
