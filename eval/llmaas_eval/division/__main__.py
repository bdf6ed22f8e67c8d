"""Entry point of ``python -m llmaas_eval.division``."""

import sys

from llmaas_eval.division.cli import main

sys.exit(main())
