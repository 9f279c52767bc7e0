"""`python -m ostler.daemon`: what `ostler up` runs."""

from ostler.daemon.run import main

if __name__ == "__main__":
    main()
