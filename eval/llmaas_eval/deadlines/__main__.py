"""``python -m llmaas_eval.deadlines``."""

import sys

from llmaas_eval.deadlines.cli import main

sys.exit(main())
