#!/usr/bin/env bash
# Measures the groups: ranks that are threads against memcpy, then worlds of MPI processes against
# MPI's own collectives, then all of them next to each other.
#   BIN=build/bin   the folder of the programs
#   RUNS=1          how often everything is run; the last table has the best times, so that more
#                   runs mean less noise
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${BIN:-build/bin}
record=$(mktemp)
trap 'rm -f "$record"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1

echo "$(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg)"
for _ in $(seq "${RUNS:-1}"); do
  echo
  "$bin/bench_comm" --record "$record"
  command -v mpirun >/dev/null || continue
  for n in 2 4 8; do
    echo
    mpirun -n "$n" "$bin/bench_comm" --record "$record"
  done
done

echo
echo "Times of one call in microseconds, the best of ${RUNS:-1} runs."
awk '
  { key = $2 SUBSEP $3 SUBSEP $4
    if (!((key, $1) in best) || $5 < best[key, $1]) best[key, $1] = $5
    if ($1 == "threads" && !(key in seen)) { seen[key]; order[++n] = key } }
  function ratio(a, b) { return a && b ? sprintf("%.2f", a / b) : "-" }
  END {
    printf "%-11s %5s %12s %10s %10s %10s %10s %16s %13s\n", "collective", "ranks",
           "a rank", "threads", "memcpy", "MPI",
           "moesh mpi", "memcpy / threads", "MPI / threads"
    for (i = 1; i <= n; ++i) {
      k = order[i]; split(k, part, SUBSEP)
      printf "%-11s %5d %8d KiB %10.1f %10.1f %10.1f %10.1f %16s %13s\n", part[1], part[2],
             part[3] / 1024, best[k, "threads"],
             best[k, "memcpy"], best[k, "MPI"], best[k, "moesh-mpi"],
             ratio(best[k, "memcpy"], best[k, "threads"]),
             ratio(best[k, "MPI"], best[k, "threads"])
    }
  }' "$record"
