"""`python -m etap_backend` is `etap`."""

import sys

from etap_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())
