#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# One worker that prefills and decodes text, on this host; common.sh says how it is set. Images, video and audio need
# e_pd.sh or epd.sh.

set -e
# shellcheck source=launch/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

worker agg "${AGG_CUDA_VISIBLE_DEVICES:-0}" "${AGG_ENGINE_ARGS:-"$ENGINE_CONFIGS/agg.yaml"}" --no-route-to-encoder "$@"

# Ends when any of them does.
wait -n "${pids[@]}"
