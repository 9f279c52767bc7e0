"""`python -m ostler.isolation.inside` is a template; the keeper starts it with its socket as descriptor 3."""

from __future__ import annotations

from ostler.isolation.inside.template import main

if __name__ == "__main__":
    main()
