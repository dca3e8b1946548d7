#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Encode, prefill and decode workers on nodes of their own, by Slurm. The first node also runs etcd, NATS and the
# frontend. Every node runs its part with `dynamo-epd serve --service-name`, from one graph and one YAML file.
#
#   DRY_RUN=1 ENCODE_NODES=1 PREFILL_NODES=2 DECODE_NODES=4 launch/slurm/epd.sh     prints every command, runs nothing
#   IMAGE=/images/dynamo-epd.sqsh MOUNTS=/models:/models MODEL=/models/x CONFIG=/models/x.yaml launch/slurm/epd.sh
#
# Outside of a job it submits itself; SBATCH_ARGS are passed on ("-A project -p batch --time 4:00:00"; on GB200 racks
# "--segment N" keeps the nodes within one NVLink domain). Run from the checkout, on a file system that all nodes see.

#SBATCH --job-name=dynamo-epd
#SBATCH --exclusive
#SBATCH --signal=B:TERM@120

set -euo pipefail

ENCODE_NODES=${ENCODE_NODES:-1}
PREFILL_NODES=${PREFILL_NODES:-1}
DECODE_NODES=${DECODE_NODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-4}
# GPUs of one worker, of which a node then runs as many as fit; empty leaves both to the YAML file.
ENCODE_GPUS=${ENCODE_GPUS:-}
PREFILL_GPUS=${PREFILL_GPUS:-}
DECODE_GPUS=${DECODE_GPUS:-}

GRAPH=${GRAPH:-graphs.epd:Frontend}
CONFIG=${CONFIG:-configs/serve/gb200.yaml}
# Model directory; empty leaves it to the YAML file.
MODEL=${MODEL:-}
SERVED_MODEL_NAME=${SERVED_MODEL_NAME:-}
HTTP_PORT=${HTTP_PORT:-8000}
# A command with its options, as it is called inside the container.
DYNAMO_EPD=${DYNAMO_EPD:-dynamo-epd}
ETCD=${ETCD:-etcd}
ETCD_PORT=${ETCD_PORT:-2379}
NATS=${NATS:-nats-server}
NATS_PORT=${NATS_PORT:-4222}

# Container image and mounts, for pyxis; without an image everything runs on the nodes as they are.
IMAGE=${IMAGE:-}
MOUNTS=${MOUNTS:-}
WORKDIR=${WORKDIR:-$PWD}
SBATCH_ARGS=${SBATCH_ARGS:-}
SRUN_ARGS=${SRUN_ARGS:-}
DRY_RUN=${DRY_RUN:-}

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 2
}

nodes=$((ENCODE_NODES + PREFILL_NODES + DECODE_NODES))
for role in ENCODE PREFILL DECODE; do
    count=${role}_NODES gpus=${role}_GPUS
    [ "${!count}" -ge 1 ] || die "$count is ${!count}: each kind of worker needs a node"
    if [ -n "${!gpus}" ] && { [ "${!gpus}" -lt 1 ] || [ "${!gpus}" -gt "$GPUS_PER_NODE" ]; }; then
        die "$gpus is ${!gpus}: a worker has from 1 to GPUS_PER_NODE=$GPUS_PER_NODE GPUs"
    fi
done
[ -z "$MOUNTS" ] || [ -n "$IMAGE" ] || die "MOUNTS without IMAGE: there is no container to mount them in"

# Runs a command, or prints it so that it can be pasted.
run() {
    if [ -n "$DRY_RUN" ]; then
        printf '%q ' "$@"
        printf '\n'
    else
        "$@"
    fi
}

if [ -z "${SLURM_JOB_ID:-}" ]; then
    # shellcheck disable=SC2086  # SBATCH_ARGS holds several arguments
    run sbatch --nodes="$nodes" --ntasks-per-node=1 --gpus-per-node="$GPUS_PER_NODE" $SBATCH_ARGS "$0"
    [ -n "$DRY_RUN" ] || exit 0
    mapfile -t hosts < <(seq -f 'node%02g' "$nodes")
else
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    [ "${#hosts[@]}" -ge "$nodes" ] || die "the job has ${#hosts[@]} nodes, and $nodes are needed"
fi

head=${HEAD_ADDRESS:-${hosts[0]}}
export DYN_DISCOVERY_BACKEND=etcd
export ETCD_ENDPOINTS=http://$head:$ETCD_PORT
export NATS_SERVER=nats://$head:$NATS_PORT
export DYN_EVENT_PLANE=nats
export DYN_REQUEST_PLANE=tcp
# NVLink between nodes, for collectives and for the embeddings' way from encode to prefill.
export NCCL_MNNVL_ENABLE=${NCCL_MNNVL_ENABLE:-1}
export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-1}
export UCX_CUDA_IPC_ENABLE_MNNVL=${UCX_CUDA_IPC_ENABLE_MNNVL:-y}
export UCX_TLS=${UCX_TLS:-cuda_copy,cuda_ipc,tcp}
export UCX_MEMTYPE_CACHE=${UCX_MEMTYPE_CACHE:-n}
passed=DYN_DISCOVERY_BACKEND,ETCD_ENDPOINTS,NATS_SERVER,DYN_EVENT_PLANE,DYN_REQUEST_PLANE
passed+=,NCCL_MNNVL_ENABLE,NCCL_CUMEM_ENABLE,UCX_CUDA_IPC_ENABLE_MNNVL,UCX_TLS,UCX_MEMTYPE_CACHE

state=/tmp/dynamo-epd-${SLURM_JOB_ID:-JOB}
pids=()

# start NODES GPUS_PER_NODE COMMAND...: one task on each of NODES (comma-separated), in the background.
start() {
    local list=$1 gpus=$2
    shift 2
    local count
    count=$(($(tr -cd , <<<"$list" | wc -c) + 1))
    local options=(--overlap --label --kill-on-bad-exit=1 --nodes="$count" --ntasks="$count" --ntasks-per-node=1
        --nodelist="$list" --cpu-bind=none --chdir="$WORKDIR")
    if [ "$gpus" -gt 0 ]; then options+=(--gpus-per-node="$gpus"); else options+=(--gres=none); fi
    if [ -n "$IMAGE" ]; then
        options+=(--container-image="$IMAGE" --container-workdir="$WORKDIR" --container-env="$passed")
        [ -z "$MOUNTS" ] || options+=(--container-mounts="$MOUNTS")
    fi
    # shellcheck disable=SC2206  # SRUN_ARGS holds several arguments
    options+=($SRUN_ARGS)
    if [ -n "$DRY_RUN" ]; then
        run srun "${options[@]}" "$@"
    else
        srun "${options[@]}" "$@" &
        pids+=($!)
    fi
}

# wait_for PORT: until somebody listens on the head node.
wait_for() {
    [ -z "$DRY_RUN" ] || return 0
    for _ in $(seq 600); do
        if (: <"/dev/tcp/$head/$1") 2>/dev/null; then return 0; fi
        for pid in "${pids[@]}"; do
            kill -0 "$pid" 2>/dev/null || die "etcd or NATS ended before $head:$1 was open"
        done
        sleep 0.5
    done
    die "nobody listens on $head:$1 after 300 s"
}

# One after the other: the frontend, the workers in the order in which requests meet them, NATS and etcd last.
# shellcheck disable=SC2329  # called by the trap
cleanup() {
    trap '' EXIT INT TERM
    local order=("${pids[@]:2}" "${pids[@]:0:2}")
    for pid in "${order[@]}"; do
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 200); do
            kill -0 "$pid" 2>/dev/null || continue 2
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf -- "$state-etcd" "$state-nats"
}
[ -n "$DRY_RUN" ] || trap cleanup EXIT
trap 'exit 0' INT TERM

# part SERVICE FIRST_NODE NODES GPUS_OF_THE_NODE [GPUS_OF_A_WORKER]
part() {
    local list
    list=$(IFS=,; echo "${hosts[*]:$2:$3}")
    local command=("${serve[@]}" --service-name "$1")
    if [ -n "${5:-}" ]; then
        command+=("--$1.ServiceArgs.workers=$(($4 / $5))" "--$1.ServiceArgs.resources.gpu=$5")
    fi
    start "$list" "$4" "${command[@]}"
}

read -ra serve <<<"$DYNAMO_EPD"
serve+=(serve "$GRAPH" -f "$CONFIG" "--Frontend.http-port=$HTTP_PORT")
[ -z "$MODEL" ] || serve+=("--Common.model=$MODEL")
[ -z "$SERVED_MODEL_NAME" ] || serve+=("--Common.served-model-name=$SERVED_MODEL_NAME")

read -ra etcd <<<"$ETCD"
read -ra nats <<<"$NATS"
start "${hosts[0]}" 0 "${etcd[@]}" --listen-client-urls "http://0.0.0.0:$ETCD_PORT" \
    --advertise-client-urls "$ETCD_ENDPOINTS" --data-dir "$state-etcd"
start "${hosts[0]}" 0 "${nats[@]}" --port "$NATS_PORT" --jetstream --store_dir "$state-nats"
wait_for "$ETCD_PORT"
wait_for "$NATS_PORT"
part Frontend 0 1 0
part EncodeWorker 0 "$ENCODE_NODES" "$GPUS_PER_NODE" "$ENCODE_GPUS"
part PrefillWorker "$ENCODE_NODES" "$PREFILL_NODES" "$GPUS_PER_NODE" "$PREFILL_GPUS"
part DecodeWorker "$((ENCODE_NODES + PREFILL_NODES))" "$DECODE_NODES" "$GPUS_PER_NODE" "$DECODE_GPUS"

if [ -n "$DRY_RUN" ]; then exit 0; fi
echo "requests go to http://$head:$HTTP_PORT/v1/chat/completions"
# The end of any part is the end of all: its exit status is the job's.
wait -n "${pids[@]}"
