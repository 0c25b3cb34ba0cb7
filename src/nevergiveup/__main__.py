"""`python -m nevergiveup` is `ngu`. Layer 4."""

import sys

from nevergiveup.cli import main

sys.exit(main())
