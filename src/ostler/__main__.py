"""`python -m ostler` is the console script, where that is not on the path."""

from ostler.cli import main

if __name__ == "__main__":
    main()
