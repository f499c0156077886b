"""`python -m phasetrain` is the console script."""

from phasetrain.run import console

if __name__ == "__main__":
    console()
