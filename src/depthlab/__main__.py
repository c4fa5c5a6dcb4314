"""`python -m depthlab` is `depthlab`."""

import sys

from depthlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
