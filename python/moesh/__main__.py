"""python -m moesh: the command moesh, with its arguments, output and exit codes."""

import signal
import sys

from . import _moesh


def main():
    # Python would keep the signal until the command returns. (train sets its own.)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    return _moesh.run_program(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
