"""`python -m mcvae.cli`."""

import sys

from mcvae.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
