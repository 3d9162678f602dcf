#!/usr/bin/env bash
# Fails when a tracked source is not as clang-format-19 would write it; `make format` fixes that.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v clang-format-19 >/dev/null; then
  echo "check_format: nothing was checked: no clang-format-19 (scripts/setup.sh installs it)"
  exit 0
fi
# A checkout may belong to another user than the one who tests it.
git -c safe.directory='*' ls-files -z '*.h' '*.cpp' '*.cu' '*.cuh' |
  xargs -0 -r clang-format-19 --dry-run -Werror
echo "check_format: every source is formatted"
