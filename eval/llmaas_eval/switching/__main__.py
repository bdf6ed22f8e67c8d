"""``python -m llmaas_eval.switching``."""

import sys

from llmaas_eval.switching.cli import main

sys.exit(main())
