"""`python -m mcvae.cli`."""

import sys

from mcvae.cli import main

if __name__ == "__main__":
    sys.exit(main())
