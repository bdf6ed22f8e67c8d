"""``python -m llmaas_eval.tolerance``."""

import sys

from llmaas_eval.tolerance.cli import main

sys.exit(main())
