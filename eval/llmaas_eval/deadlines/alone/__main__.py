"""``python -m llmaas_eval.deadlines.alone``."""

import sys

from llmaas_eval.deadlines.alone.cli import main

sys.exit(main())
