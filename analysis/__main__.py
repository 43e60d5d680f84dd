"""`python -m analysis [id ...]`: draws figures from rows and prints their numbers; see `analysis.figures`."""

import sys

from analysis.figures import main

if __name__ == "__main__":
    sys.exit(main())
