"""``python -m llmaas_eval.deadlines.loaded``."""

import sys

from llmaas_eval.deadlines.loaded.cli import main

sys.exit(main())
