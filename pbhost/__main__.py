"""`python -m pbhost`: the same as the command `pbhost`."""

from __future__ import annotations

from host.__main__ import main

if __name__ == "__main__":
    main()
