"""The console script, which is `python -m phasetrain` too."""

import signal
import sys


def console() -> None:
    """Run the command line; what may come before torch is imported and a run can answer does not
    kill it."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.SIG_IGN)
    try:
        from phasetrain.commands.cli import console as run  # imports torch, which takes a second
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    console()
