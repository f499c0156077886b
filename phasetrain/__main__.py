"""The console script, which is `python -m phasetrain` too."""

import signal
import sys


def console() -> None:
    """Run the command line of this process and exit."""
    # The default action of SIGUSR1 and SIGUSR2 kills the process. A scheduler may send them while
    # torch is still being imported, before the run has installed its handlers.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    try:
        from phasetrain.cli import console as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    console()
