"""``python -m llmaas_eval.recovery``."""

import sys

from llmaas_eval.recovery.cli import main

sys.exit(main())
