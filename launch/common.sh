# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
#
# Sourced by epd.sh, e_pd.sh and agg.sh: their common settings, a frontend, and `worker` to start one worker.
#
# Without settings they serve the toy model, which runs on a CPU too. MODEL_PATH is a model directory; its engine files
# are those of configs/<its name in lower case>, unless ENGINE_CONFIGS or the single *_ENGINE_ARGS say otherwise.
# Ctrl-C stops everything; so does the end of any process, whose exit status is then the script's. Arguments are passed
# to all workers. For restarts, readiness and other hosts: dynamo-epd serve.

set -e

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
name=$(basename "${MODEL_PATH:-toy}")

export MODEL_PATH=${MODEL_PATH:-"$root/components/dynamo_epd/demo/toy_vlm"}
export SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-"$name"}
export ENGINE_CONFIGS=${ENGINE_CONFIGS:-"$root/configs/${name,,}"}
export ALLOWED_LOCAL_MEDIA_PATH=${ALLOWED_LOCAL_MEDIA_PATH:-"/tmp"}
export MAX_FILE_SIZE_MB=${MAX_FILE_SIZE_MB:-50}
export DYN_HTTP_PORT=${DYN_HTTP_PORT:-8000}

# Discovery by files: no etcd, no NATS.
export DYN_DISCOVERY_BACKEND=${DYN_DISCOVERY_BACKEND:-"file"}
folder=$(mktemp -d)
export DYN_FILE_KV=${DYN_FILE_KV:-"$folder"}
export DYN_REQUEST_PLANE=${DYN_REQUEST_PLANE:-"tcp"}
export DYN_EVENT_PLANE=${DYN_EVENT_PLANE:-"zmq"}
# The frontend ends first: nobody routes to a worker that is about to stop.
export DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS=${DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS:-0.5}

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$root/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi

pids=()

# One after the other, in the order in which requests meet them. Whoever takes longer than 30 s is killed.
cleanup() {
    trap '' EXIT INT TERM
    for pid in "${pids[@]}"; do
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 300); do
            kill -0 "$pid" 2>/dev/null || continue 2
            sleep 0.1
        done
        kill -KILL "$pid"
    done
    rm -rf -- "$folder"
    echo "all stopped"
}
trap cleanup EXIT
trap 'exit 0' INT TERM

# worker ROLE GPUS ENGINE_ARGS [ARGUMENTS]: the n-th one shows its health and metrics at DYN_SYSTEM_PORT<n> (808<n>).
worker() {
    local role=$1 gpus=$2 engine_args=$3 n=${#pids[@]}
    local port=DYN_SYSTEM_PORT$n
    CUDA_VISIBLE_DEVICES=$gpus DYN_SYSTEM_PORT=${!port:-$((8080 + n))} "$PYTHON" -m dynamo_epd \
        --model-path "$MODEL_PATH" \
        --served-model-name "$SERVED_MODEL_NAME" \
        --extra-engine-args "$engine_args" \
        --disaggregation-mode "$role" "${@:4}" &
    pids+=($!)
}

encode_worker() {
    worker encode "${ENCODE_CUDA_VISIBLE_DEVICES:-0}" "${ENCODE_ENGINE_ARGS:-"$ENGINE_CONFIGS/encode.yaml"}" \
        --allowed-local-media-path "$ALLOWED_LOCAL_MEDIA_PATH" \
        --max-file-size-mb "$MAX_FILE_SIZE_MB" "$@"
}

# Otherwise it warns of a picture that it cannot measure with the whole URL, signature and all.
DYN_LOG=${DYN_LOG:-info,mm_routing=error} "$PYTHON" -m dynamo.frontend &
pids+=($!)
