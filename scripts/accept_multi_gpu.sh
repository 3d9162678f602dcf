#!/usr/bin/env bash
# Tries moesh on the GPUs of this machine, and prints one page to send back: on more than one GPU it
# was never run before. About five minutes.
#   scripts/accept_multi_gpu.sh [GPUS]   default: all of them
#   BIN=build-cuda/bin   the folder of the programs (make gpu)
#   LAUNCHERS="torchrun mpirun"   those to try; default: those that are installed
#   NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=4 scripts/accept_multi_gpu.sh 4   four ranks on one GPU,
#                                            with NCCL 2.30 or later
#   DEVICE=cpu   under mpirun: tries this script itself, on a machine without GPUs
set -uo pipefail
cd "$(dirname "$0")/.."
device=${DEVICE:-cuda}
bin=${BIN:-build-cuda/bin}
page=${PAGE:-accept_multi_gpu.txt}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1
MOESH_SECRET=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export MOESH_SECRET

if [ "$device" = cuda ]; then
  num=${1:-$(nvidia-smi -L 2> /dev/null | wc -l)}
else
  num=${1:-2}
fi
if [ "$num" -lt 2 ]; then
  echo "$0: there are $num GPUs here, and this is about several; name their number, or see" \
    "nvidia-smi -L" >&2
  exit 2
fi
for program in moesh comm_conformance_main; do
  [ -x "$bin/$program" ] && continue
  echo "$0: there is no $bin/$program; run make gpu, or set BIN" >&2
  exit 2
done
launchers=${LAUNCHERS:-}
if [ -z "$launchers" ]; then
  for launcher in torchrun mpirun; do
    command -v "$launcher" > /dev/null && launchers="$launchers $launcher"
  done
fi

launched() { # launched LAUNCHER COMMAND...
  case $1 in
    torchrun) torchrun --standalone --nproc-per-node "$num" --no-python "${@:2}" ;;
    *) "$1" -n "$num" "${@:2}" ;;
  esac
}

failures=0
check() { # check WHAT COMMAND...: one line of the page
  local begun=$SECONDS result=holds
  if ! "${@:2}" > "$folder/log" 2>&1; then
    result=FAILS
    failures=$((failures + 1))
  fi
  printf '%-52s %s  %4d s  %s\n' "$1" "$result" $((SECONDS - begun)) \
    "$(grep -v '^ *$' "$folder/log" | tail -1 | cut -c1-110)"
  [ $result = holds ] || sed 's/^/    /' "$folder/log" | tail -40
}

{
  echo "moesh on $num devices ($device), $(date -u +%Y-%m-%d)"
  "$bin/moesh" --version
  git describe --always --dirty 2> /dev/null
  uname -sr
  if [ "$device" = cuda ]; then
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    nvidia-smi topo -m 2> /dev/null
  fi
  env | grep '^NCCL_'
  echo
  run="--device=$device --model=deepseek_v3:tiny --data.sequence_length=32 --metrics.folder="
  nccl=; [ "$device" = cpu ] || nccl=--nccl
  for launcher in $launchers; do
    saved="$folder/$(basename "$launcher")"
    # shellcheck disable=SC2086 # words on purpose
    {
      check "$launcher: collectives" launched "$launcher" "$bin/comm_conformance_main" $nccl
      check "$launcher: collectives, checked" launched "$launcher" "$bin/comm_conformance_main" \
        $nccl --checked
      check "$launcher: meshes of $num ranks against one rank" launched "$launcher" \
        "$bin/moesh" verify $run --sweep "$num-$num" --sample "${SAMPLE:-40}"
      check "$launcher: 20 steps of training" launched "$launcher" "$bin/moesh" train $run \
        --mesh "dp_shard=$num" --steps 20 --checkpoint.enable --checkpoint.async \
        --checkpoint.folder "$saved"
      check "$launcher: 20 more from its checkpoint" launched "$launcher" "$bin/moesh" train $run \
        --mesh "dp_shard=$num" --steps 40 --checkpoint.enable --checkpoint.folder "$saved"
      check "$launcher: the checkpoint is whole" "$bin/moesh" inspect --check \
        "$saved/step-00000040"
    }
  done
  echo
  echo "$failures failures"
  echo "$failures" > "$folder/failures"
} 2>&1 | tee "$page"
echo "Please send $page to the authors, whatever it says."
[ "$(cat "$folder/failures")" = 0 ]
