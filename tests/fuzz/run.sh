#!/usr/bin/env bash
# run.sh PROGRAM RUNS [option of libFuzzer ...]: runs a fuzz target from its seeds. An input that it
# fails on stays beside the program.
set -euo pipefail
folder="$(cd "$(dirname "$0")" && pwd)"
program=$1 runs=$2
shift 2
seeds=("$folder/corpus/$(basename "$program" _fuzz)"/*)
[ -f "${seeds[0]}" ] || { echo "run.sh: no seeds for $program" >&2; exit 1; }
# Small inputs need neither 256 MB of memory kept from reuse, nor the stack of every allocation
# until one is wrong.
export ASAN_OPTIONS="quarantine_size_mb=8:malloc_context_size=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}"
# What is found on the way stays in memory: a folder would get thousands of files. The timeout is by
# the clock, and a busy machine may not run it for a minute.
"$program" -runs="$runs" -seed=1 -max_len=512 -timeout=300 -dict="$folder/json.dict" \
  -artifact_prefix="$program-" -print_final_stats=1 \
  "$@" -seed_inputs="$(IFS=,; echo "${seeds[*]}")"
