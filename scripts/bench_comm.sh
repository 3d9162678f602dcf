#!/usr/bin/env bash
# Measures the groups: ranks that are threads against memcpy, then worlds of MPI processes against MPI's own collectives,
# then the two next to each other. BIN names the folder of the programs (default: build/bin).
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-build/bin}
record=$(mktemp)
trap 'rm -f "$record"' EXIT

nproc | sed 's/$/ cores/'
"$bin/bench_comm" --record "$record"

if command -v mpirun >/dev/null; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  for n in 2 4 8; do
    echo
    mpirun -n "$n" "$bin/bench_comm" --record "$record"
  done
  echo
  echo "ranks as threads, times of one call in microseconds; ratio: MPI / threads"
  awk '{ t[$1, $2, $3, $4] = $5; if ($1 == "threads") { order[++n] = $2 SUBSEP $3 SUBSEP $4 } }
       END { printf "%-11s %5s %12s %12s %12s %8s\n", "collective", "ranks", "a rank", "threads", "MPI", "ratio"
             for (i = 1; i <= n; ++i) { split(order[i], k, SUBSEP); a = t["threads", order[i]]; b = t["MPI", order[i]]
               printf "%-11s %5d %8d KiB %12.1f %12.1f %8.2f\n", k[1], k[2], k[3] / 1024, a, b, b / a } }' "$record"
fi
