#!/usr/bin/env bash
# The results of many random collectives have the same bits on threads and on MPI processes.
#   compare_digest.sh MPIRUN PROGRAM NUM_PROCESSES NUM_RANKS
set -euo pipefail
threads=$("$2" --digest --ranks "$4")
mpi=$("$1" -n "$3" "$2" --digest --ranks "$4")
echo "threads: $threads"
echo "mpi:     $mpi"
[[ "$threads" == "digest of $4 ranks: "* && "$threads" == "$mpi" ]]
